"""The parts of mining that need no pods: reading a history, classification, requests, interfaces, mutations, splits."""

import json
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.syntax import parse_tree
from etude.tasks.generators.executor import ExecutionResult, TestOutcome
from etude.tasks.mining.build import MinedChange, select_tasks
from etude.tasks.mining.classify import (
    MiningLimits,
    category_of,
    is_source_path,
    is_test_path,
    reason_of_files,
    reason_of_message,
    split_parts,
)
from etude.tasks.mining.duplicates import fingerprint
from etude.tasks.mining.evidence import compare_runs
from etude.tasks.mining.history import FileDifference, HistoryCommit, changes_of, open_history
from etude.tasks.mining.interface import HiddenName, find_interface
from etude.tasks.mining.mess import make_log, service_log
from etude.tasks.mining.mutations import mutations_of
from etude.tasks.mining.options import read_issues
from etude.tasks.mining.requests import (
    MAX_TERSE,
    behaviours_of,
    choose_request,
    clean_subject,
    full_request,
    is_vague,
    issue_numbers,
    terse_request,
)
from etude.tasks.mining.session_logs import read_session_logs, session_log, session_of_change
from etude.tasks.mining.time_split import TimeSplit, split_names
from tests.tasks.mined_history import GitHistory, shop_history


def commit(subject: str, body: str = "", **more: object) -> HistoryCommit:
    given = {
        "id": "c" * 40,
        "parents": ("p" * 40,),
        "author": "Ada",
        "email": "a@b",
        "date": "2025-01-01T00:00:00+00:00",
    }
    return HistoryCommit(**{**given, **more}, subject=subject, body=body)  # type: ignore[arg-type]


def changed(path: str, before: str | None, after: str | None) -> FileDifference:
    texts = [None if each is None else textwrap.dedent(each).encode() for each in (before, after)]
    return FileDifference(path, *texts)


# ------------------------------------------------------------------------------------------------- history


def test_history_is_read_newest_first_from_trees_bare_clones_and_revisions(tmp_path: Path) -> None:
    made = shop_history(tmp_path / "shop")
    subprocess.run(["git", "clone", "-q", "--bare", tmp_path / "shop", tmp_path / "shop.git"], check=True)
    for given in (tmp_path / "shop", tmp_path / "shop.git", f"{tmp_path / 'shop'}@{made['docs']}"):
        history = open_history(str(given))
        found = [each.id for each in history.commits()]
        assert history.name == "shop"
        assert found[-1] == made["first"]
        assert found.index(made["feature"]) < found.index(made["fix"])
    tree = open_history(str(tmp_path / "shop")).commits()
    reasons = {each.id: reason_of_message(each) for each in tree}
    expected = {"merge": "merge", "release": "release", "bot": "bot", "first": "first-commit", "merged": "", "fix": ""}
    assert {kind: reasons[made[kind]] for kind in expected} == expected
    assert len(tree) == len({each.id for each in tree}) == len(made)


def test_reasons_of_files_in_a_real_history(tmp_path: Path) -> None:
    made = shop_history(tmp_path / "shop")
    history = open_history(str(tmp_path / "shop"))
    by_id = {each.id: each for each in history.commits()}
    limits = MiningLimits(min_lines=1)
    found = {
        kind: reason_of_files(history.differences(by_id[id]), limits) for kind, id in made.items() if kind != "merge"
    }
    expected = {"fix": "", "formatting": "formatting", "feature": "", "untested": "no-tests", "docs": "no-source"}
    assert {kind: found[kind] for kind in expected} == expected


def test_the_merge_of_a_pull_request_is_one_change_and_other_merges_are_none() -> None:
    def one(id: str, parents: str, subject: str = "work", body: str = "") -> HistoryCommit:
        return commit(subject, body, id=id, parents=tuple(parents.split()))

    commits = [
        one("a", ""),
        one("b", "a", "in a pull request"),
        one("c", "a"),
        one("m", "c b", "Merge pull request #7 from x/y", "Add colours\n\nThey were missing."),
        one("d", "c", "in a branch"),
        one("n", "m d", "Merge branch 'stable'"),
    ]
    found = changes_of({each.id: each for each in commits}, "n")
    assert [each.id for each in found] == ["n", "d", "m", "c", "a"]
    merge = found[2]
    assert merge.message == ("Add colours", "They were missing.")
    assert merge.merged == ("in a pull request",)
    assert reason_of_message(merge) == ""
    assert reason_of_message(found[0]) == "merge"


def test_bad_repositories_are_one_clear_line(tmp_path: Path) -> None:
    shop_history(tmp_path / "shop")
    (tmp_path / "plain").mkdir()
    GitHistory(tmp_path / "single").commit("only", {"a.py": "x = 1"})
    GitHistory(tmp_path / "empty")
    shallow = ["git", "clone", "-q", "--depth", "2", f"file://{tmp_path / 'shop'}", str(tmp_path / "shallow")]
    subprocess.run(shallow, check=True)
    damaged = GitHistory(tmp_path / "damaged")
    for number in range(2):
        damaged.commit(str(number), {"a.py": f"x = {number}"})
    tree = damaged.git("rev-parse", "HEAD^{tree}").strip()
    (tmp_path / "damaged/.git/objects" / tree[:2] / tree[2:]).unlink()
    shutil.copytree(tmp_path / "single", tmp_path / "settings")
    (tmp_path / "settings/.git/config").write_text("[core\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/.git").write_text("gitdir: /nowhere\n")
    outer = GitHistory(tmp_path / "outer")
    outer.commit("one", {"a.py": "x = 1"})
    outer.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "shop"), "inner")
    outer.commit("two", {"a.py": "x = 2"})
    expected = {
        "plain": "no git history",
        "single": "single commit",
        "empty": "has no commit",
        "damaged": "not a tree",
        "elsewhere": "not a git repository",
        "settings": "bad config line",
        "shallow": "unshallow",
        "outer": "submodules",
        "nowhere": "no such repository",
        "shop@nothing": "not a commit",
        "shop@--all": "no such repository",
    }
    for name, words in expected.items():
        with pytest.raises(InputError, match=words) as error:
            open_history(str(tmp_path / name))
        assert "\n" not in str(error.value)


def test_a_hostile_git_directory_runs_nothing(tmp_path: Path) -> None:
    made = shop_history(tmp_path / "shop")
    trap, marker = tmp_path / "trap.sh", tmp_path / "ran"
    trap.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    trap.chmod(0o755)
    (tmp_path / "shop/.git/info").mkdir(exist_ok=True)
    (tmp_path / "shop/.git/info/attributes").write_text("*.py diff=trap filter=trap\n")
    with (tmp_path / "shop/.git/config").open("a") as config:
        config.write(
            f"[core]\n\tfsmonitor = {trap}\n\thooksPath = {tmp_path}\n\tpager = {trap}\n"
            f'[diff "trap"]\n\ttextconv = {trap}\n\tcommand = {trap}\n'
            f'[filter "trap"]\n\tsmudge = {trap}\n\tclean = {trap}\n'
        )
    history = open_history(str(tmp_path / "shop"))
    by_id = {each.id: each for each in history.commits()}
    assert history.differences(by_id[made["fix"]])
    assert not marker.exists()


@pytest.mark.slow
def test_a_blob_of_two_gigabytes_is_never_read(tmp_path: Path) -> None:
    """The process may not even have memory for it."""
    history = GitHistory(tmp_path / "shop")
    history.commit("one", {"a.py": "x = 1", "tests/test_a.py": "def test_a(): pass"})
    zeros = subprocess.Popen(["head", "-c", str(2 << 30), "/dev/zero"], stdout=subprocess.PIPE)
    write = ["git", "-c", "core.bigFileThreshold=1m", "hash-object", "-w", "--stdin"]
    blob = subprocess.run(write, stdin=zeros.stdout, cwd=history.top, capture_output=True, text=True, check=True).stdout
    history.git("update-index", "--add", "--cacheinfo", f"100644,{blob.strip()},big.bin")
    history.git("commit", "-qm", "Add data")
    code = """if True:
        import resource, sys
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
        from pathlib import Path
        from etude.errors import InputError
        from etude.tasks.mining.history import open_history
        from etude.tasks.mining.options import MiningOptions
        from etude.tasks.mining.report import check_usable
        from etude.tasks.mining.screening import Screening
        history, drops = open_history(sys.argv[1]), []
        on_drop = lambda commit, reason, detail, seconds: drops.append([commit.subject, reason, detail])
        assert Screening(history, history.commits(), MiningOptions(Path("out")), on_drop).next_change() is None
        print(drops[0])
        try:
            check_usable(history)
        except InputError as error:
            print(error)
        """
    done = subprocess.run(
        [sys.executable, "-c", code, str(history.top)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert done[0] == "['Add data', 'too-large', 'a file of 2,147,483,648 bytes, more than 67,108,864']"
    assert "big.bin has 2,147,483,648 bytes" in done[1]
    assert len(done) == 2


# ------------------------------------------------------------------------------------------------- classification


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("Revert 'Add colours'", "revert"),
        ("Release v1.2.", "release"),
        ("v1.2.3", "release"),
        ("9.3.1", "release"),
        ("Bump version to 2.0", "release"),
        ("Prepare v7.0.4.", "release"),
        ("Bump codecov/codecov-action from 5.5.2 to 6.0.0 (#392)", ""),
        ("Version numbers are compared by value", ""),
        ("Add release notes parser", ""),
        ("Fix revert() of an empty list", ""),
    ],
)
def test_reasons_of_messages(subject: str, reason: str) -> None:
    assert reason_of_message(commit(subject)) == reason


def test_bots_are_known_by_name_and_address() -> None:
    assert reason_of_message(commit("Update x", author="renovate[bot]")) == "bot"
    assert reason_of_message(commit("Update x", email="49699333+dependabot[bot]@users.noreply.github.com")) == "bot"
    assert reason_of_message(commit("Update x", author="Abbott")) == ""


def test_reasons_of_changed_files() -> None:
    test = changed("tests/test_a.py", "def test(): assert 1\n", "def test(): assert 2\n")
    code = changed("a.py", "x = 1\ny = 2\n", "x = 2\ny = 3\nz = 4\n")
    limits = MiningLimits()
    cases = {
        "": [code, test],
        "formatting": [changed("a.py", "x = 1\n", "x   =  1  # one\n"), test],
        "vendored": [changed("pkg/_vendor/a.py", "x = 1\n", "x = 2\n"), test],
        "generated": [changed("pkg/a_pb2.py", "x = 1\n", "x = 2\n"), test],
        "no-source": [changed("docs/conf.py", "x = 1\n", "x = 2\n"), test],
        "no-tests": [code],
        "tests-formatting": [code, changed("tests/test_a.py", "x=1\n", "x = 1\n")],
        "too-small": [changed("a.py", "x = 1\n", "x = 2\n"), test],
        "too-large": [changed("a.py", "", "".join(f"x{n} = {n}\n" for n in range(2000))), test],
        "submodule": [code, test, FileDifference("inner", None, None, "160000")],
    }
    assert {name: reason_of_files(files, limits) for name, files in cases.items()} == {name: name for name in cases}
    docstring = changed(
        "a.py", 'def f():\n    """Old."""\n    return 1\n', 'def f():\n    """New\n    text."""\n    return 1\n'
    )
    assert reason_of_files([docstring, test], limits) == "formatting"
    assert reason_of_files([code, test], MiningLimits(min_files=2)) == "few-files"


def test_parts_and_paths() -> None:
    paths = {"src/a.py": "source", "tests/data/a.json": "test", "docs/a.rst": "other", "uv.lock": "", "test.ts": "test"}
    parts = split_parts([changed(path, "x = 1\n", "x = 2\n") for path in paths])
    assert [each.path for each in parts.source] == ["src/a.py"]
    assert {each.path for each in parts.tests} == {"tests/data/a.json", "test.ts"}
    assert parts.solution.keys() == {"src/a.py", "docs/a.rst"}
    assert is_test_path("pkg/a.test.ts")
    assert is_test_path("pkg/a_test.go")
    assert not is_test_path("src/testify.py")
    assert not is_source_path("tests/helpers.py")


@pytest.mark.parametrize(
    ("subject", "category"),
    [
        ("fix: handle None", "debugging"),
        ("feat(api): colours", "feature"),
        ("Add support for colours", "feature"),
        ("Drop support for Python 3.8", "migration"),
        ("Rename colour to color", "refactor"),
        ("Prevent a crash on empty input", "debugging"),
    ],
)
def test_categories(subject: str, category: str) -> None:
    assert category_of(subject, split_parts([])) == category


# ------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("subject", "cleaned"),
    [
        ("Fix #387: Handle obj=None case for inspection.", "Handle obj=None case for inspection"),
        ("feat(cli)!: add colours (#12)", "add colours"),
        ("Add cache_info() to @cached (fixes #3, #4)", "Add cache_info() to @cached"),
        ("Stop crashing, see GH-17", "Stop crashing"),
        ("[org/repo#12] Sort keys", "Sort keys"),
        ("Undo the work of 1a2b3c4d5e in parse()", "Undo the work of in parse()"),
    ],
)
def test_subjects_lose_numbers_and_prefixes(subject: str, cleaned: str) -> None:
    assert clean_subject(subject) == cleaned


def test_vague_subjects() -> None:
    vague = (
        "Minor cleanups",
        "oops",
        "Fix typo",
        "Address PR review comments",
        "wip",
        "Update tests",
        "Cleanup",
        "Fix CI",
    )
    assert [each for each in vague if not is_vague(each)] == []
    clear = ("Add natural_list", "Drop MRUCache", "Handle empty input", "Fix `naturalsize()` rounding")
    assert [each for each in clear if is_vague(each)] == []


def test_terse_requests_have_subject_and_prose_but_no_lists_trailers_or_code() -> None:
    body = (
        "Closes #9\n\nThe parser lost the last line.\nIt is kept now.\n\n* Add test\n* Fix lint\n\n"
        "Co-authored-by: Bob <b@example.org>\nSigned-off-by: Ada <a@example.org>"
    )
    text = terse_request(commit("Keep the last line (#10)", body))
    assert text == "Keep the last line\n\nThe parser lost the last line. It is kept now."
    assert terse_request(commit("Fix tests", "* a\n* b")) == ""
    long = terse_request(commit("Keep the last line", "word " * 200))
    assert len(long) <= MAX_TERSE
    shown = "Use `return total(items) / max(1, len(items))` and `result = compute_everything(items)` there."
    solution = ["return total(items) / max(1, len(items))", "result = compute_everything(items)"]
    assert terse_request(commit("Keep the last line", shown), solution) == "Keep the last line"


def test_requests_prefer_the_session_then_the_issue(tmp_path: Path) -> None:
    (tmp_path / "9.md").write_text("Last line is missing when I parse a file (#9)")
    issues = read_issues(tmp_path)
    change = commit("Keep the last line", "Fixes #9")
    assert issue_numbers(commit("Fix #9: x (#10)")) == ["9", "10"]
    assert choose_request(change, [], issues).source == "issue"  # type: ignore[union-attr]
    found = choose_request(change, [], issues, "please look at the last line")
    assert found is not None
    assert (found.text, found.source) == ("please look at the last line", "session")
    assert choose_request(commit("wip"), [], {}) is None


def test_full_requests_have_files_names_and_behaviour() -> None:
    tests = ["tests/test_a.py::test_empty_list", "tests/test_a.py::T::test_none[1]"]
    text = full_request(commit("Keep it", "Because."), ["a.py"], ["keep(x)"], behaviours_of(tests), "Keep it")
    assert "- a.py" in text
    assert "- keep(x)" in text
    assert "- empty list" in text
    assert "- none" in text


# ------------------------------------------------------------------------------------------------- interface


def test_names_that_only_tests_and_solution_have_are_described() -> None:
    source = changed(
        "pkg/a.py",
        "def old(x):\n    return x\n",
        """
        LIMIT = 3

        class Colour(str):
            def mix(self, other, *, share=0.5):
                self.parts = other
                raise ValueError(f"cannot mix {other}")

        def old(x):
            helper(x)
            return x

        def helper(x):
            return x
        """,
    )
    test = changed(
        "tests/test_a.py",
        "",
        """
        import functools
        from pkg.a import Colour, LIMIT, old

        def test_mix():
            own_name = functools.cache(old)
            assert Colour("red").mix("blue", share=LIMIT).parts
            assert "cannot mix blue" in str(own_name)
        """,
    )
    parts = split_parts([source, test])
    notes = find_interface(parts, {"pkg/a.py": source.before or b""}, "Mix colours")
    assert notes.names == ("Colour(str)", "Colour.mix(self, other, *, share=0.5)", "LIMIT", "Colour.parts")
    assert notes.texts == ("cannot mix {other}",)
    assert "helper" not in notes.section
    assert "own_name" not in notes.section
    asked = find_interface(parts, {"pkg/a.py": source.before or b""}, "Add Colour with parts and LIMIT")
    assert "LIMIT" not in asked.names


def test_a_name_without_a_declaration_drops_a_change() -> None:
    source = changed("src/a.ts", "export {}\n", "export {}\nObject.assign(target, {[key]: glow});\n")
    test = changed("test/a.ts", "", "import * as a from '../src/a.js';\nassert(a.glow());\n")
    with pytest.raises(HiddenName, match="glow"):
        find_interface(split_parts([source, test]), {"src/a.ts": b"export {}\n"}, "Make it shine")
    declared = changed("src/a.ts", "export {}\n", "export {}\nexport function glow(by: number) {\n")
    notes = find_interface(split_parts([declared, test]), {"src/a.ts": b"export {}\n"}, "Make it shine")
    assert notes.names == ("export function glow(by: number)",)


# ------------------------------------------------------------------------------------------------- mutations


def test_mutations_drop_hunks_and_stub_new_functions() -> None:
    filler = "".join(f"x{number} = {number}\n" for number in range(20))
    before = f"import a\n{filler}def f(x):\n    return x\n"
    after = f"import a, b\n{filler}def f(x):\n    return x + b.y\n\n\ndef g():\n    '''Doc.'''\n    return f(1)\n"
    found = mutations_of(split_parts([changed("m.py", before, after)]))
    assert [each.name for each in found] == ["m.py:1 without its hunk", "m.py:23 without its hunk", "m.py: g stubbed"]
    assert b"import a\n" in (found[0].data or b"")
    assert b"b.y" in (found[0].data or b"")
    assert b"def g" not in (found[1].data or b"")
    assert (found[2].data or b"").endswith(b"    '''Doc.'''\n    return None\n")
    for each in found:
        parse_tree(each.data or b"")


def test_hunks_of_comments_and_documents_are_no_mutations() -> None:
    parts = split_parts([changed("m.py", "x = 1\n", "# one\nx = 1\n"), changed("README.md", "a\n", "b\n")])
    assert mutations_of(parts) == []
    new = split_parts([changed("pkg/new.py", None, "def f():\n    return 1\n"), changed("pkg/__init__.py", None, "")])
    first = mutations_of(new)[0]
    assert (first.path, first.data) == ("pkg/new.py", None)


TYPED = """from __future__ import annotations

from typing import TYPE_CHECKING, Any
{imports}

class Box:
    size: int{fields}

    def __init__(self, items{items}):
        self.items{attribute} = items

    def get(self):
        return iter(self.items)
"""
PLAIN = {"imports": "", "fields": "", "items": ": Any", "attribute": ""}


@pytest.mark.parametrize(
    ("change", "mutations"),
    [
        ({"imports": "from typing import Iterable\n", "items": ": Iterable[Any]"}, 0),
        ({"attribute": ": list[Any]"}, 0),
        ({"imports": "from typing import Iterable\n"}, 1),  # which others may import from here
        ({"imports": "from typing import Iterable\n", "items": "=Iterable"}, 2),
        ({"fields": "\n    name: str"}, 1),  # of a dataclass, perhaps
    ],
)
def test_hunks_that_serve_types_alone_are_no_mutations(change: dict[str, str], mutations: int) -> None:
    filler = "".join(f"x{number} = {number}\n" for number in range(9))
    text = TYPED.replace("\n\nclass", f"\n{filler}\nclass")  # imports and code are hunks of their own
    before, after = text.format(**PLAIN), text.format(**{**PLAIN, **change})
    assert len(mutations_of(split_parts([changed("m.py", before, after)]))) == mutations
    evaluated = [each.replace("from __future__ import annotations\n", "") for each in (before, after)]
    needed = mutations + (change.get("items") == ": Iterable[Any]")  # its import fails if it is left out
    assert len(mutations_of(split_parts([changed("m.py", *evaluated)]))) == needed


# ------------------------------------------------------------------------------------------------- evidence, logs


def run(output: str = "", **statuses: str) -> ExecutionResult:
    tests = {f"tests/test_a.py::{name}": TestOutcome(status, 0.1) for name, status in statuses.items()}
    return ExecutionResult(tests, output, 1.0)


def test_evidence_needs_constant_statuses() -> None:
    before = [run(a="failed", b="passed", c="passed", d="failed"), run(a="failed", b="passed", c="failed", d="failed")]
    after = [
        run(a="passed", b="passed", c="passed", d="passed", e="passed"),
        run(a="passed", b="passed", c="passed", e="passed"),
    ]
    found = compare_runs(before, after)
    names = [tuple(test.rpartition("::")[2] for test in tests) for tests in (found.fail_to_pass, found.pass_to_pass)]
    assert names == [("a", "e"), ("b",)]
    assert [test.rpartition("::")[2] for test in found.flaky] == ["c", "d"]
    assert not found.import_only


def test_tests_named_by_the_address_of_an_object_are_no_evidence() -> None:
    before = run(a="failed", **{"d[<FakeDate object at 0x7f16b4686310>]": "passed"})
    after = run(a="passed", **{"d[<FakeDate object at 0x7f16b479ead0>]": "passed"})
    found = compare_runs([before], [after])
    assert found.fail_to_pass == ("tests/test_a.py::a",)
    assert found.pass_to_pass == found.flaky == ()


def test_tests_that_only_fail_to_import_are_known() -> None:
    broken = {"tests/test_a.py::b": TestOutcome("failed", message="ImportError: cannot import name 'x'")}
    before = [ExecutionResult(broken, "", 1.0)] * 2
    assert compare_runs(before, [run(a="passed", b="passed")] * 2).import_only
    assert not compare_runs([run(a="failed")] * 2, [run(a="passed")] * 2).import_only


def test_logs_show_the_failure_of_the_product_and_not_the_test() -> None:
    files = {"pkg/a.py": b"def f(x):\n    return x.lower()\n", "tests/test_a.py": b"from pkg.a import f\nf(SECRET)\n"}
    frames = (("/work/tests/test_a.py", 2, "test_f"), ("/work/pkg/a.py", 2, "f"))
    outcome = TestOutcome("failed", message="AttributeError: 'int' object has no attribute 'lower'", frames=frames)
    asserted = TestOutcome("failed", message="AssertionError: assert 41 == 42", frames=frames[:1])
    before = ExecutionResult({"tests/test_a.py::test_f": outcome, "tests/test_a.py::test_g": asserted}, "", 1.0)
    evidence = compare_runs([before], [run(test_f="passed", test_g="passed")])
    kinds = set()
    for seed in range(30):
        log = make_log(evidence, before, str(seed), files)
        assert log is not None
        kinds.add(log.kind)
        shown = log.note + b"".join(log.files.values()).decode()
        assert "SECRET" not in shown
        assert "41 == 42" not in shown
        if log.kind != "ci":
            assert 'File "pkg/a.py", line 2, in f' in shown
    assert kinds == {"traceback", "ci", "service"}


def test_a_service_log_has_a_thousand_lines_and_one_cause() -> None:
    log = service_log("Traceback (most recent call last):\nValueError: no", random.Random(1))
    assert 950 <= len(log.splitlines()) <= 1050
    assert 2 <= log.count("ValueError: no") <= 4
    assert log.count("Traceback") == log.count("ValueError")
    assert log == service_log("Traceback (most recent call last):\nValueError: no", random.Random(1))


# ------------------------------------------------------------------------------------------------- sessions


def trajectory(request: str, written: str) -> dict[str, object]:
    call = {"tool_call_id": "1", "function_name": "edit", "arguments": {"path": "a.py", "new_text": written}}
    return {
        "schema_version": "ATIF-v1.8",
        "agent": {"name": "x", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "You are an agent."},
            {"step_id": 2, "source": "user", "message": request},
            {"step_id": 3, "source": "agent", "message": "", "tool_calls": [call]},
        ],
    }


def test_sessions_are_matched_to_the_changes_that_kept_their_lines(tmp_path: Path) -> None:
    after = "def f(value):\n    if not value:\n        return None\n    return value * 2\n"
    (tmp_path / "a.json").write_text(json.dumps(trajectory("double it, but not nothing", after)))
    (tmp_path / "b.json").write_text(json.dumps(trajectory("something else", "print('hello, world')\nfoo = 12345\n")))
    (tmp_path / "c.json").write_text("no log")
    sessions = read_session_logs(tmp_path)
    assert len(sessions) == 2
    parts = split_parts([changed("a.py", "", after)])
    assert session_of_change(parts, sessions) == "double it, but not nothing"
    rewritten = split_parts([changed("a.py", "", after.replace("value", "number"))])
    assert session_of_change(rewritten, sessions) == ""
    patch = session_log(trajectory("x", "".join(f"+{line}\n" for line in after.splitlines())))
    assert session_of_change(parts, [patch]) == "x"
    for directory in (tmp_path / "nowhere", tmp_path):
        for file in tmp_path.glob("*.json"):
            file.unlink()
        with pytest.raises(InputError):
            read_session_logs(directory)


# ------------------------------------------------------------------------------------------------- split


def test_split_by_date_and_fraction_drops_near_duplicates() -> None:
    lines = "".join(f"value_{number} = compute({number})\n" for number in range(6))
    prints = {
        name: fingerprint(split_parts([changed("a.py", "", f"{name}_one = 1\n{name}_two = 2\n{name}_three = 3\n")]))
        for name in "abcd"
    }
    prints["a"] = prints["d"] = fingerprint(split_parts([changed("a.py", "", lines)]))
    dates = {"a": "2025-01-01T00", "b": "2025-02-01T00", "c": "2025-03-01T00", "d": "2025-04-01T00"}
    half = split_names(dates, TimeSplit.parse("0.5"), prints)
    assert (half.bench, half.train, half.dropped) == (("d", "c"), ("b",), {"a": "d"})
    dated = split_names(dates, TimeSplit.parse("2025-02"), prints)
    assert (dated.bench, dated.train) == (("d", "c", "b"), ())
    assert split_names(dates, None, prints).bench == ("d", "c", "b", "a")
    for wrong in ("1.5", "0", "soon", "2025-13-01", "2025-1-1"):
        with pytest.raises(InputError, match="--split"):
            TimeSplit.parse(wrong)


def test_tasks_with_unnoticed_mutations_are_at_most_a_share_and_the_choice_is_that_of_a_beginning() -> None:
    rng = random.Random(3)
    for _ in range(200):
        found = [MinedChange(str(number), None, rng.random() < 0.6) for number in range(rng.randrange(1, 30))]  # type: ignore[arg-type]
        count, share = rng.randrange(1, 20), rng.choice([0.0, 0.5, 0.8, 1.0])
        chosen = select_tasks(found, count, share)
        full = sum(each.fully_noticed for each in chosen)
        assert full >= share * len(chosen)
        assert len(chosen) <= count
        assert [int(each.task) for each in chosen] == sorted({int(each.task) for each in chosen})
        if len(chosen) == count:  # more found later changes nothing
            assert select_tasks([*found, *found], count, share) == chosen
        else:  # one more that goes unnoticed would be too many, and all others are there
            assert full == sum(each.fully_noticed for each in found)
            assert len(chosen) == len(found) or full < share * (len(chosen) + 1)
