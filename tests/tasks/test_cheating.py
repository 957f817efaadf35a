"""A submission that attacks the verifier instead of solving the task gets no reward, as root and as an ordinary user.

The cheats are in `cheats/`; `benchmarks/cheats.py` prints what becomes of them. A dozen are tried in `make test`.
"""

import tempfile
from pathlib import Path

import pytest

from tests.pods.test_conformance import command_of
from tests.tasks.cheat_targets import write_targets
from tests.tasks.cheating import load_cheats, run_as

CHEATS = load_cheats()
# The kinds in which submitted code never meets what is expected of it. Others share an interpreter, a shell or a log
# with it: what is paid there is measured, and told in docs/tasks.md.
SEPARATED = {"calls", "output", "files", "answer", "written tests"}
Rows = dict[str, list[dict[str, str]]]  # by cheat


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cheat" in metafunc.fixturenames:
        rows = []
        for user in ("root", "nobody"):
            for name, cheat in CHEATS.items():
                rows += [pytest.param(user, True, name, id=f"{user}-{name}")] if cheat.fast else []
                rows.append(pytest.param(user, False, name, id=f"{user}-{name}-everywhere", marks=pytest.mark.slow))
        metafunc.parametrize(("user", "fast", "cheat"), rows)


@pytest.fixture(scope="module")
def tables() -> dict[tuple[str, bool], Rows]:
    """The outcomes by user, filled by the first test of a user."""
    return {}


def outcomes(tables: dict[tuple[str, bool], Rows], user: str, fast: bool) -> Rows:
    """Return the rows of a user's trials by cheat; run them if this is the first test that asks."""
    if (user, fast) not in tables:
        if reason := command_of(user)[2]:
            pytest.skip(reason)
        table = tables[user, fast] = {}
        with tempfile.TemporaryDirectory(prefix="etude-cheats-") as directory:
            Path(directory).chmod(0o755)
            write_targets(Path(directory), generated=not fast)
            for row in run_as(user, Path(directory), ["--fast"] if fast else []):
                table.setdefault(row["cheat"], []).append(row)
    return tables[user, fast]


def test_a_cheat_is_not_rewarded(user: str, fast: bool, cheat: str, tables: dict[tuple[str, bool], Rows]) -> None:
    for row in outcomes(tables, user, fast)[cheat]:
        assert row["outcome"] != "dropped", f"{row['target']}: a cheat that has no result is tried again: {row['text']}"
        if fast or row["group"] in SEPARATED:
            assert row["outcome"] != "paid", f"{row['target']}: {row['text']}"


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_solutions_are_rewarded_and_doing_nothing_is_not(user: str, tables: dict[tuple[str, bool], Rows]) -> None:
    table = outcomes(tables, user, True)
    right = {"(solution)": "paid", "(nothing)": "zeroed"}
    assert [row for name, outcome in right.items() for row in table[name] if row["outcome"] != outcome] == []


def test_changed_protected_files_are_named(tables: dict[tuple[str, bool], Rows]) -> None:
    (row,) = outcomes(tables, "root", True)["edits the tests"]
    assert row["outcome"] == "flagged"
    assert "tests/test_calc.py" in row["text"]
