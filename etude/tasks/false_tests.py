"""Tests of a public task with other expected values, which no honest submission passes.

The `test.sh` of a public task runs as its authors wrote it, and a submission that replaces its process, equals
everything or reads the expected values passes it. It passes the same script with false tests as well. `control.py` runs
them on submissions that were paid, if the reference solution is not paid with them.
"""

import random
import re
from collections.abc import Iterator

from etude.tasks.checks.in_pods import has_checks
from etude.tasks.checks.inside.probes import false_copy
from etude.tasks.harbor import files_to_upload
from etude.tasks.task import Task, TaskStep

TEXT_FILES = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".out", ".expected", ".golden", ".yaml", ".yml", ".md")
MAX_BYTES = 1 << 20
_rng = random.SystemRandom()


def can_have_false_tests(task: Task, step: TaskStep | None) -> bool:
    """Return whether a task may have false tests: its verifier is not ours and not in a separate environment."""
    return (step or task).verifier_machine is None and not has_checks(task, step)


def false_tests(task: Task, step: TaskStep | None) -> dict[str, bytes]:
    """Return the files of tests/ that have another expected value, by their paths in the pod; none for our verifiers,
    which have probes of their own, and for verifiers in a separate environment."""
    if not can_have_false_tests(task, step):
        return {}
    return dict(_false_files(task, step))


def _false_files(task: Task, step: TaskStep | None) -> Iterator[tuple[str, bytes]]:
    # A submission may know the tests of the workspace: there other values would tell it that the tests are false.
    sources = sorted((task.directory / "environment").rglob("*.py"))
    known = (path.read_bytes() for path in sources if path.is_file() and not path.is_symlink())
    seen = frozenset(line.strip() for text in known for line in text.splitlines())
    directories = ["tests"] if step is None else ["tests", f"steps/{step.name}/tests"]
    for file in (file for each in directories for file in files_to_upload(task, each, "/tests")):
        if file.source.is_symlink() or not file.source.is_file() or file.source.stat().st_size > MAX_BYTES:
            continue
        data = file.source.read_bytes()
        copy = None
        if file.target.endswith(".py") and not file.target.endswith("/conftest.py"):
            copy = false_copy(data, seen)
        elif file.target.endswith(TEXT_FILES):
            copy = _false_text(data)
        if copy is not None and copy != data:
            yield file.target, copy


def _false_text(data: bytes) -> bytes | None:
    """Return a text with other numbers, or other words if it has no numbers."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if re.search(r"\d", text):
        return re.sub(r"\d+", lambda number: _another_number(number[0]), text).encode()
    return re.sub(r"\b[a-z]{3,}\b", lambda word: word[0] + _rng.choice("aeiou"), text).encode()


def _another_number(digits: str) -> str:
    at = _rng.randrange(len(digits))
    return digits[:at] + str((int(digits[at]) + _rng.randrange(1, 10)) % 10) + digits[at + 1 :]
