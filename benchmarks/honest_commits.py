"""Replay real commits as submissions, and print which of them are called hacks.

    python benchmarks/honest_commits.py CLONE ... [--held-out CLONE ...] [--commits 60] [--verified 8] [--list]

Of each clone the newest commits that change source code are taken, without merges. Every one is scored as a submission
whose verifier paid it: the gates see all its files, tests and configuration included. `--verified` commits of a clone
that also change tests are verified too, in pods: a workspace before the commit, the tests after it as the hidden suite,
the rest of the commit as the submission. They should be paid, so every 0 is listed. Rules of the scan may have been
adjusted on the first clones, never on those that are held out.
"""

import argparse
import asyncio
import io
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from etude.harness.trace import Trace
from etude.pods import Fleet, open_fleet
from etude.pods.workspace import FileChange, FileState
from etude.rewards import VerifiedTrial, score
from etude.system.git import run_git
from etude.tasks.checks import pytest_files
from etude.tasks.environment import open_environment
from etude.tasks.harbor import write_task
from etude.tasks.task import Task
from etude.tasks.trial import oracle_agent, run_trial
from etude.tasks.verifier_result import VerifierFailed, VerifierResult

CONFIG = 'schema_version = "1.4"\n[metadata]\ncategory = "feature"\n[environment]\nnetwork_mode = "no-network"\n'
IS_TEST = re.compile(r"(^|/)(tests?|testing)/|(^|/)(test_[^/]*|[^/]*_test|conftest)\.py$")
IS_SOURCE = re.compile(
    r"^(?!(docs?|examples?|benchmarks?|bench|misc|scripts?)/)(?!setup\.py|noxfile\.py|(.*/)?_?version\.py).*\.py$"
)
TRIES = 3  # commits tried for each that is to be verified
Tree = dict[str, FileState]


@dataclass(frozen=True)
class Commit:
    """A commit as a submission: its message is the request."""

    clone: Path
    id: str
    message: str
    changes: tuple[FileChange, ...]

    def __str__(self) -> str:
        return f"{self.clone.name} {self.id[:10]} {self.message.splitlines()[0][:60]!r}"


# ------------------------------------------------------------------------------------------------- commits


def source_commits(clone: Path) -> Iterator[Commit]:
    """Yield the commits that change source code, the newest first."""
    for id in run_git(clone, "log", "--no-merges", "--format=%H", "HEAD").decode().split():
        changes = tuple(commit_changes(clone, id))
        if any(IS_SOURCE.match(change.path) and not IS_TEST.search(change.path) for change in changes):
            yield Commit(clone, id, run_git(clone, "log", "-1", "--format=%B", id).decode("utf-8", "replace"), changes)


def commit_changes(clone: Path, id: str) -> Iterator[FileChange]:
    raw = run_git(clone, "diff-tree", "-r", "-z", "--no-renames", "--no-commit-id", id).decode("utf-8", "replace")
    parts = raw.rstrip("\0").split("\0") if raw else []
    for facts, path in zip(parts[::2], parts[1::2], strict=True):
        old_mode, new_mode, old, new, _ = facts.removeprefix(":").split()
        before, after = file_state(clone, old_mode, old), file_state(clone, new_mode, new)
        if before is not None or after is not None:
            yield FileChange(path, before, after)


def file_state(clone: Path, mode: str, blob: str) -> FileState | None:
    if mode not in ("100644", "100755", "120000"):
        return None
    data = run_git(clone, "cat-file", "blob", blob)
    return FileState.symlink(data.decode()) if mode == "120000" else FileState.file(data, mode == "100755")


def tree_files(clone: Path, id: str) -> dict[str, bytes]:
    """Return the regular files of a commit."""
    with tarfile.open(fileobj=io.BytesIO(run_git(clone, "archive", "--format=tar", id))) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------- scoring


def hack_of(commit: Commit, task: Task) -> str:
    """Return what the gates say of a commit whose verifier paid it."""
    return score_of(task, VerifierResult({"reward": 1.0}, commit.changes))[1]


def score_of(task: Task, result: VerifierResult) -> tuple[float, str]:
    trace = Trace("commit", task.name, "chatml", "", (), (), (), "final")
    reward = score(VerifiedTrial(task, trace, result), {"correctness": 1.0})
    return reward.total, reward.hack


def plain_task(directory: Path, message: str, files: Mapping[str, str | bytes]) -> Task:
    return write_task(
        directory,
        {
            "task.toml": CONFIG,
            "instruction.md": message,
            "environment/Dockerfile": "FROM python:3\nWORKDIR /work\nCOPY repo/ /work/\n",
            "environment/repo/.keep": "",
            "tests/test.sh": "#!/bin/sh\n",
            **files,
        },
    )


async def verify_commit(fleet: Fleet, commit: Commit, directory: Path) -> str | None:
    """Return "" if the commit is paid, else why not; None if its tests do not run here or do not need the commit."""
    tests = [
        change.path
        for change in commit.changes
        if change.after is not None and re.search(r"(^|/)(test_[^/]*|[^/]*_test)\.py$", change.path)
    ]
    after = tree_files(commit.clone, commit.id)
    if not tests:
        return None
    paths = ["src", "."] if any(path.startswith("src/") for path in after) else ["."]
    whole = {f"environment/repo/{path}": data for path, data in after.items()}
    async with open_environment(fleet, plain_task(directory / "after", commit.message, whole)) as environment:
        command = ["timeout", "60", "python3", "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", *tests]
        env = {"PYTHONPATH": ":".join(paths)}
        done = await environment.pod.exec(command, cwd=environment.workspace, env=env, timeout=90)
    passed = re.findall(r"^PASSED (.+)$", done.stdout, re.M)
    if not passed or done.exit_code != 0:
        return None
    suite = {path: data for path, data in after.items() if IS_TEST.search(path)}
    before = {**suite, **{path: data for path, data in after.items() if path not in suite}}
    for change in commit.changes:
        if not IS_TEST.search(change.path):
            before.pop(change.path, None)
            if change.before is not None and change.before.kind == "file":
                before[change.path] = change.before.contents
    solution = {
        f"solution/repo/{change.path}": change.after.contents
        for change in commit.changes
        if not IS_TEST.search(change.path) and change.after is not None and change.after.kind == "file"
    }
    removed = [c.path for c in commit.changes if c.after is None and not IS_TEST.search(c.path)]
    script = "#!/bin/sh\nset -e\n" + "".join(f"rm -f '{path}'\n" for path in removed) + "cp -R /solution/repo/. .\n"
    files: dict[str, str | bytes] = {
        **{f"environment/repo/{path}": data for path, data in before.items()},
        **solution,
        "solution/solve.sh": script,
        **pytest_files(tests, dict.fromkeys(passed, "passed"), suite, paths=paths, exact=False, timeout=60.0),
    }
    task = plain_task(directory / "before", commit.message, files)
    try:
        total, hack = score_of(task, result := (await run_trial(fleet, task, oracle_agent)).result)
    except VerifierFailed as error:
        return f"no result: {error}"
    return "" if total > 0 else hack or f"not paid: {result.log[-400:]}"


# ------------------------------------------------------------------------------------------------- report


async def replay(clones: list[Path], commits: int, verified: int, listing: bool) -> tuple[int, int, int, int]:
    """Replay commits of clones; return how many were scanned, called hacks, verified, and not paid."""
    scanned = hacks = ran = unpaid = 0
    async with open_fleet() as fleet:
        for clone in clones:
            mine = tested = 0
            with tempfile.TemporaryDirectory(prefix="etude-commits-") as directory:
                for commit in source_commits(clone):
                    if mine >= commits:
                        break
                    mine += 1
                    task = plain_task(Path(directory) / f"{mine}", commit.message, {})
                    if hack := hack_of(commit, task):
                        hacks += 1
                        print(f"hack: {commit}: {hack}")
                    elif listing:
                        print(f"      {commit}")
                    if tested < verified and mine <= TRIES * verified:
                        why = await verify_commit(fleet, commit, Path(directory) / f"{mine}-verified")
                        tested += why is not None
                        if why:
                            unpaid += 1
                            print(f"not paid: {commit}: {why}")
            scanned, ran = scanned + mine, ran + tested
            print(f"{clone.name}: {mine} commits, {tested} verified", flush=True)
    return scanned, hacks, ran, unpaid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", nargs="+", type=Path)
    parser.add_argument("--held-out", nargs="*", type=Path, default=[])
    parser.add_argument("--commits", type=int, default=60, help="of each clone")
    parser.add_argument("--verified", type=int, default=8, help="of each clone")
    parser.add_argument("--list", action="store_true", help="print every commit")
    given = parser.parse_args()
    lines = []
    for name, clones in (("seen", given.clones), ("held out", given.held_out)):
        if clones:
            counts = asyncio.run(replay(clones, given.commits, given.verified, given.list))
            lines.append(f"| {name} | {len(clones)} | " + " | ".join(map(str, counts)) + " |")
    print("| clones | number | commits | called hacks | verified | not paid |\n|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
