"""Validation admits only sound tasks, and reports evidence for the others."""

import asyncio
import io
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.pods import open_fleet
from etude.tasks.harbor import write_task
from etude.tasks.validate import REASONS, ValidationCache, ValidationReport, validate_all

WRONG = "def total(items):\n    result = 0\n    for item in items:\n        result -= item\n    return result\n"
RIGHT = WRONG.replace("result -= item", "result += item")
CONFIG = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'
TEST = """#!/bin/sh
cd /work && python3 -c 'import sums; assert sums.total([1, 2]) == 3'
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FILES: dict[str, str | bytes] = {
    "task.toml": CONFIG,
    "instruction.md": "total([1, 2]) should be 3.\n",
    "environment/Dockerfile": "FROM host\nWORKDIR /work\nCOPY repo/ .\n",
    "environment/repo/sums.py": WRONG,
    "tests/test.sh": TEST,
    "solution/solve.sh": "#!/bin/sh\nsed -i 's/result -= item/result += item/' sums.py\n",
}


def with_history(directory: Path, clean: bool) -> dict[str, str | bytes]:
    """Return the workspace's repository; unless `clean`, the solution was committed and amended away."""
    top = directory / "repository"
    top.mkdir(parents=True)

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=top, check=True)

    git("init", "-q", "-b", "main")
    (top / "sums.py").write_text(WRONG if clean else RIGHT)
    git("add", "-A")
    git("commit", "-q", "-m", "start")
    if not clean:
        (top / "sums.py").write_text(WRONG)
        git("commit", "-q", "-a", "--amend", "-m", "start")  # the solution is reachable from the reflog only
    return {f"environment/repo/{path.relative_to(top)}": path.read_bytes() for path in top.rglob("*") if path.is_file()}


def wheel(text: str) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("sums.py", text)
    return held.getvalue()


def stale_bytecode() -> str:
    """Return a Dockerfile that compiles the right source and then copies the wrong one over it."""
    return (
        "FROM host\nWORKDIR /work\nCOPY right/ .\nRUN python3 -m compileall -q .\nCOPY repo/ .\n"
        "COPY repo/sums.py /work/sums.py\n"
    )


def files_with(changes: dict[str, str | bytes | None]) -> Callable[[Path], dict[str, str | bytes]]:
    def make(directory: Path) -> dict[str, str | bytes]:
        both = {**FILES, **changes}
        return {name: data for name, data in both.items() if data is not None}

    return make


RANDOM = "$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')"
ALLOW = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example.org"]\n'


def elsewhere(place: str) -> dict[str, str | bytes | None]:
    """Return changes that put the solution into another directory of the image."""
    dockerfile = f"FROM host\nWORKDIR /work\nCOPY repo/ .\nCOPY right/sums.py {place}/sums.py\n"
    return {"environment/right/sums.py": RIGHT, "environment/Dockerfile": dockerfile}


def namesake() -> dict[str, str | bytes | None]:
    """Return changes that install an unrelated module of the same name, which defines a name of the solution, too."""
    dockerfile = (
        "FROM host\nWORKDIR /work\nCOPY repo/ .\nCOPY lib/sums.py /srv/lib/site-packages/sums.py\n"
        "RUN python3 -m compileall -q /srv/lib/site-packages\n"
    )
    helper = "\n\ndef wrapper(value):\n    return value\n"
    return {
        "environment/lib/sums.py": "def wrapper(function: object) -> object:\n    return repr(function)\n",
        "environment/Dockerfile": dockerfile,
        "solution/sums.py": RIGHT + helper,
        "solution/solve.sh": "#!/bin/sh\ncp /solution/sums.py /work/sums.py\n",
    }


TASKS: dict[str, tuple[Callable[[Path], dict[str, str | bytes]], str]] = {
    "good": (files_with({}), ""),
    "clean-history": (lambda directory: {**FILES, **with_history(directory, clean=True)}, ""),
    "namesake": (files_with(namesake()), ""),
    "noop": (files_with({"environment/repo/sums.py": RIGHT}), "noop-passes"),
    "unsolved": (files_with({"solution/solve.sh": "#!/bin/sh\ntrue\n"}), "solution-fails"),
    "no-solution": (files_with({"solution/solve.sh": None}), "no-solution"),
    "broken-solution": (files_with({"solution/solve.sh": "#!/bin/sh\nexit 4\n"}), "solution-broken"),
    "broken-verifier": (files_with({"tests/test.sh": "#!/bin/sh\n"}), "verifier-broken"),
    "unbuildable": (files_with({"environment/Dockerfile": "FROM host\nWORKDIR /work\nRUN false\n"}), "build-failed"),
    "unmapped": (files_with({"environment/Dockerfile": "FROM unknown/image:1\n"}), "build-failed"),
    "flaky": (
        files_with({"tests/test.sh": f"#!/bin/sh\necho 0.{RANDOM} > /logs/verifier/reward.txt"}),
        "flaky",
    ),
    "outside": (
        files_with(
            {
                "tests/test.sh": "#!/bin/sh\n[ -e /srv/x ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n",
                "solution/solve.sh": "#!/bin/sh\ntouch /srv/x\n",
            }
        ),
        "outside-workspace",
    ),
    "history": (lambda directory: {**FILES, **with_history(directory, clean=False)}, "answer-in-history"),
    "bytecode": (
        files_with({"environment/right/sums.py": RIGHT, "environment/Dockerfile": stale_bytecode()}),
        "answer-in-bytecode",
    ),
    "installed": (files_with(elsewhere("/srv/lib/site-packages")), "answer-installed"),
    "cached": (files_with(elsewhere("/root/.cache/uv/x")), "answer-in-cache"),
    "build": (files_with({"environment/repo/build/lib/sums.py": RIGHT}), "answer-in-build"),
    "backup": (files_with({"environment/repo/sums.py.orig": RIGHT}), "answer-in-workspace"),
    "archive": (files_with({"environment/repo/vendor/sums-1.0-py3-none-any.whl": wheel(RIGHT)}), "answer-in-archive"),
    "allowlist": (files_with({"task.toml": ALLOW}), "network"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ValidationReport]:
    """The reports of all tasks, from real pods."""
    directory = tmp_path_factory.mktemp("validate")
    for name, (files, _) in TASKS.items():
        write_task(directory / "tasks" / name, files(directory / "scratch" / name))
    (directory / "tasks/invalid").mkdir()
    (directory / "tasks/invalid/task.toml").write_text("x =")
    paths = sorted((directory / "tasks").iterdir())

    async def go() -> list[ValidationReport]:
        async with open_fleet() as fleet:
            return await validate_all(fleet, paths, at_once=4)

    return {Path(report.directory).name: report for report in asyncio.run(go())}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_admitted_or_has_a_reason(name: str, reports: dict[str, ValidationReport]) -> None:
    report, expected = reports[name], TASKS[name][1]
    assert [reason.code for reason in report.reasons] == ([expected] if expected else []), report
    assert all(reason.code in REASONS and reason.evidence for reason in report.reasons)


def test_an_admitted_task_was_verified_three_times_each_way(reports: dict[str, ValidationReport]) -> None:
    assert reports["good"].scores == {"noop": [0.0, 0.0, 0.0], "solution": [1.0, 1.0, 1.0]}
    assert reports["good"].changed == ("sums.py",)
    assert reports["good"].admitted


def test_a_directory_that_is_not_a_task_is_invalid(reports: dict[str, ValidationReport]) -> None:
    assert [reason.code for reason in reports["invalid"].reasons] == ["invalid"]


def test_evidence_names_the_location(reports: dict[str, ValidationReport]) -> None:
    assert "sums.py.orig" in reports["backup"].reasons[0].evidence
    assert "object" in reports["history"].reasons[0].evidence
    assert "exit code 4" in reports["broken-solution"].reasons[0].evidence


def test_cached_reports_are_reused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_task(tmp_path / "tasks" / name, FILES)
    cache = ValidationCache(tmp_path / "cache")
    paths = sorted((tmp_path / "tasks").iterdir())

    async def go(**options: int) -> list[ValidationReport]:
        async with open_fleet() as fleet:
            return await validate_all(fleet, paths[: options.pop("count", 2)], cache=cache, **options)

    (first,) = asyncio.run(go(count=1, reruns=1))
    both = asyncio.run(go(reruns=1))
    assert [report.cached for report in (first, *both)] == [False, True, True], "the two tasks are the same"
    assert [Path(report.directory).name for report in both] == ["a", "b"]
    (paths[1] / "instruction.md").write_text("Something else.\n")
    assert [report.cached for report in asyncio.run(go(reruns=1))] == [True, False]
    assert [report.cached for report in asyncio.run(go(reruns=2))] == [False, False], "other settings"
