"""The tasks that cheats are tried at: every kind of verifier, imported sets, nano tasks and generated tasks."""

import asyncio
import json
import re
import subprocess
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.pods import open_fleet
from etude.tasks.checks import cases_files, pytest_files
from etude.tasks.generators.generator_run import GenerationOptions, generate
from etude.tasks.generators.registry import GENERATORS
from etude.tasks.harbor import find_tasks, read_task, write_task
from etude.tasks.importers import import_tasks
from etude_nano import nano_task
from etude_nano.sides import Split
from tests.tasks.cheating import Target

WRONG = '"""Sums."""\n\n\ndef add(a, b):\n    """Sum of a and b."""\n    return a - b\n'
APP = "import sys\n\nimport calc\n\nprint(calc.add(*map(int, sys.stdin.read().split())))\n"
TESTS = """import calc


def test_add():
    value = calc.add(1, 2)
    assert value == 3


def test_nothing():
    assert calc.add(5, 0) == 5
"""
HIDDEN_TESTS = TESTS + (
    "\n\ndef test_more():\n    assert calc.add(2, 7) == 9\n\n\ndef test_negative():\n    assert calc.add(-4, 1) == -3\n"
)
CONFIG = """schema_version = "1.4"

[metadata]
category = "debugging"
protected = ["tests/**"]

[verifier]
timeout_sec = 12.0

[environment]
network_mode = "no-network"
"""
REWARD = "mkdir -p /logs/verifier; echo $reward > /logs/verifier/reward.txt\n"
TEST_SH = {  # as authors of public tasks write them
    "pytest": f"#!/bin/bash\ncp /tests/*.py tests/\npython3 -m pytest -q tests && reward=1 || reward=0\n{REWARD}",
    "script": "#!/bin/bash\nreward=0\n"
    f"python3 /tests/check.py && diff <(echo '2 3' | python3 app.py) /tests/shown.txt && reward=1\n{REWARD}",
}
CHECK = """import sys
sys.path.insert(0, "/work")
import calc
for a, b, end in ((1, 2, 3), (5, 0, 5), (2, 7, 9), (-4, 1, -3)):
    assert calc.add(a, b) == end, (a, b)
"""
CALLS = {"(1, 2)": "3", "(5, 0)": "5", "(0.5, 0.25)": "0.75", "(-4, 9)": "5", "(-2, -3)": "-5", "(30, 12)": "42"}
NANO: dict[str, tuple[Split, int, int, str, str]] = {  # split, seed and difficulty, group and kinds of cheats by family
    "debugging": ("train", 0, 2, "calls", "calls hang"),
    "readme": ("unseen", 0, 3, "files", "text"),
    "docstring": ("train", 0, 1, "files", "text docstring"),
    "rename": ("train", 0, 3, "files", "rename"),
    "migrate-fstring": ("unseen", 2, 1, "files", "migration"),
    "config": ("unseen", 9, 1, "calls", "config"),
    "where": ("unseen", 0, 3, "answer", "answer"),
    "value": ("train", 0, 2, "answer", "answer number"),
    "review": ("train", 0, 3, "answer", "answer"),
    "all-well": ("train", 0, 2, "answer", "doubt"),
    "testing": ("train", 0, 3, "written tests", "nano-testing"),
}
GENERATED = {  # group and kinds by generator
    "debugging": ("pytest", "pytest generated"),
    "docs": ("files", "text generated-text"),
    "testing": ("written tests", "testing"),
    "question": ("answer", "answer number"),
    "refactor": ("pytest", "refactor"),
    "devops": ("files", "devops"),
}


def write_targets(directory: Path, *, generated: bool = True) -> list[Target]:
    """Write all tasks below a directory, and their description in targets.json."""
    targets = [
        *own_targets(directory / "own"),
        *imported_targets(directory / "imported"),
        *nano_targets(directory / "nano"),
    ]
    if generated:
        targets += generated_targets(directory / "generated")
    (directory / "targets.json").write_text(json.dumps([asdict(target) for target in targets], indent=1))
    return targets


def git(top: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=top, check=True, capture_output=True, text=True).stdout


def repository(top: Path) -> Path:
    """Write the workspace with a git history of a single commit."""
    (top / "tests").mkdir(parents=True)
    (top / "calc.py").write_text(WRONG)
    (top / "app.py").write_text(APP)
    (top / "tests/test_calc.py").write_text(TESTS)
    git(top, "init", "-q", "-b", "main")
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "start")
    return top


def own_targets(directory: Path) -> list[Target]:
    top = repository(directory / "repository")
    workspace = {
        f"environment/repo/{file.relative_to(top)}": file.read_bytes() for file in top.rglob("*") if file.is_file()
    }
    ids = [f"tests/test_calc.py::{name}" for name in ("test_add", "test_nothing", "test_more", "test_negative")]
    calls = [
        {"id": f"add{arguments}", "call": "calc:add", "args": arguments, "returns": end}
        for arguments, end in CALLS.items()
    ]
    output = [
        {"id": "sum", "run": ["python3", "app.py"], "stdin": "1 2", "prints": "3\n"},
        {"id": "other", "run": ["python3", "app.py"], "stdin": "4 7", "prints": "11\n"},
        # the request is about the function
        {"id": "add", "call": "calc:add", "args": "(8, 5)", "returns": "13"},
        {"id": "negative", "call": "calc:add", "args": "(-8, 5)", "returns": "-3"},
    ]
    tests: dict[str, tuple[str, str, dict[str, str | bytes]]] = {
        "calls": ("calls", "host", cases_files(calls, timeout=8.0)),
        "output": ("output", "host", cases_files(output, timeout=8.0)),
        "pytest": (
            "pytest",
            "python:3",
            pytest_files(
                ["tests/test_calc.py"], dict.fromkeys(ids, "passed"), {"tests/test_calc.py": HIDDEN_TESTS}, timeout=10.0
            ),
        ),
        "test.sh-pytest": (
            "test.sh",
            "python:3",
            {"tests/test.sh": TEST_SH["pytest"], "tests/test_calc.py": HIDDEN_TESTS},
        ),
        "test.sh-script": (
            "test.sh",
            "host",
            {"tests/test.sh": TEST_SH["script"], "tests/check.py": CHECK, "tests/shown.txt": "5\n"},
        ),
    }
    found = []
    for name, (group, image, files) in tests.items():
        task: dict[str, str | bytes] = {
            "task.toml": CONFIG,
            "instruction.md": "add(1, 2) should be 3.\n",
            "environment/Dockerfile": f"FROM {image}\nWORKDIR /work\nCOPY repo/ /work/\n",
            "solution/solve.sh": "#!/bin/sh\nsed -i 's/return a - b/return a + b/' calc.py\n",
            **workspace,
            **files,
        }
        write_task(directory / name, task)
        kinds = {"test.sh-pytest": "test.sh", "test.sh-script": "test.sh hang"}.get(name, f"{name} hang")
        found.append(Target(name, group, kinds, str(directory / name), "calc.py", "calc", "tests/test_calc.py"))
    return found


def imported_targets(directory: Path) -> list[Target]:
    """Import one row in the form of SWE-smith and one of SWE-Gym."""
    top = repository(directory / "clones/org__calc")
    base = git(top, "rev-parse", "HEAD").strip()
    (top / "calc.py").write_text(WRONG.replace("a - b\n", "a + b\n"))
    gold = git(top, "diff")
    git(top, "commit", "-q", "-a", "-m", "code")
    (top / "tests/test_calc.py").write_text(HIDDEN_TESTS)
    test = git(top, "diff")
    git(top, "commit", "-q", "-a", "-m", "tests")
    bug = git(top, "diff", "HEAD", base, "--", "calc.py")
    row: dict[str, Any] = {
        "instance_id": "org__calc-1",
        "repo": "org/calc",
        "problem_statement": "add(1, 2) is -1.",
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["tests/test_calc.py::test_nothing"]),
    }
    hidden = {
        "FAIL_TO_PASS": json.dumps(
            [f"tests/test_calc.py::{name}" for name in ("test_add", "test_more", "test_negative")]
        )
    }
    rows = {
        "swe-smith": {**row, "patch": bug, "base_commit": ""},
        "swe-gym": {**row, **hidden, "patch": gold, "test_patch": test, "base_commit": base},
    }
    found = []
    for name, each in rows.items():
        (directory / f"{name}.jsonl").write_text(json.dumps(each) + "\n")
        (made,), failed = import_tasks(name, directory / f"{name}.jsonl", directory / name, repositories=top.parent)
        assert not failed, failed
        _shorten(made, 12)
        found.append(
            Target(
                name,
                "imported",
                "imported hang" if name == "swe-smith" else "imported",
                str(made),
                "calc.py",
                "calc",
                "tests/test_calc.py",
            )
        )
    return found


def nano_targets(directory: Path) -> list[Target]:
    found = []
    for family, (split, seed, difficulty, group, kinds) in NANO.items():
        files = nano_task(seed, split, difficulty, family.partition("-")[0] if "migrate" in family else family)
        assert f'family = "{family}"' in files["task.toml"], family
        write_task(directory / family, files)
        solved = [path.removeprefix("solution/repo/") for path in files if path.startswith("solution/repo/")]
        found.append(_target(f"nano-{family}", group, kinds, directory / family, solved))
    return found


def generated_targets(directory: Path) -> list[Target]:
    """Generate a task of each generator from a small repository."""
    from tests.tasks.test_generate import FILES, wheels_of

    source, wheels = directory / "ledger", directory / "wheels"
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(textwrap.dedent(text).lstrip("\n"))
    wheels.mkdir()
    wheels_of(("pytest", "pluggy", "iniconfig", "packaging", "pygments", "setuptools"), wheels)

    async def work() -> None:
        async with open_fleet() as fleet:
            options = GenerationOptions(
                directory / "out", count=len(GENERATORS), seed=3, reruns=1, cache=directory / "cache"
            )
            await generate(fleet, [source], options, wheels=wheels)

    asyncio.run(work())
    found = []
    for path in find_tasks(directory / "out"):
        generator = read_task(path).metadata["source"]
        if generator in GENERATED:
            _shorten(path, 60)
            solved = [str(file.relative_to(path / "solution/repo")) for file in (path / "solution/repo").rglob("*.py")]
            found.append(_target(f"generated-{generator}", *GENERATED[generator], path, solved))
    return found


def _shorten(directory: Path, seconds: int) -> None:
    """Give a task's verifier little time: some cheats use all of it."""
    config = directory / "task.toml"
    text = re.sub(r"(\[verifier\]\ntimeout_sec = )\S+", rf"\g<1>{seconds}.0", config.read_text())
    assert f"timeout_sec = {seconds}.0" in text, text
    config.write_text(text)


def _target(name: str, group: str, kinds: str, directory: Path, solved: list[str]) -> Target:
    top = directory / "environment/repo"
    sources = [
        str(file.relative_to(top)) for file in sorted(top.rglob("*")) if file.is_file() and ".git/" not in str(file)
    ]
    tests = [path for path in sources if re.search(r"(^|/)(test_\w+|check|selftest|test_all)\.py$", path)]
    chosen = (solved or [path for path in sources if path.endswith(".py") and path not in tests])[0]
    module = re.sub(r"^src/|\.py$", "", chosen).replace("/", ".")
    request = (directory / "instruction.md").read_text()
    words = sorted({*re.findall(r"\w+", request), *sources, *(Path(path).stem for path in sources)})
    return Target(name, group, kinds, str(directory), chosen, module, tests[0] if tests else "", " ".join(words))
