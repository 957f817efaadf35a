"""Replay a set-up script in a fresh pod, and run the tests of the resulting image in further pods without a network.

What is believed is what the runner reports test by test, not an exit code or a printed line. In the last run two tests
with random names run beside the others: one of them must be reported as failed.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.globs import Globs
from etude.pods.images.records import Image, Layer
from etude.pods.images.store import Store
from etude.pods.pod import DiffTooLarge, FileInfo, Pod
from etude.pods.workspace import FileState, changed_files, parents, read_files, touched_paths
from etude.tasks.installation.repairs import is_network_failure, missing_modules
from etude.tasks.installation.result import FLAKY, WORKSPACE
from etude.tasks.installation.script import DIRECTORY, MOCKS, masked_failure, masked_test_command
from etude.tasks.installation.setup_pod import InstallContext, open_setup_pod
from etude.tasks.installation.snapshot import MAX_FILE_BYTES, MAX_TOTAL_BYTES, RepositorySnapshot
from etude.tasks.installation.test_run import TestCommand, TestRun, run_tests
from etude.tasks.installation.workspace import with_files

SCRIPT_PATH = f"{DIRECTORY}/setup.sh"
# Files whose presence changes how tests run; a set-up may not add them outside of what it builds.
STEERING = frozenset(
    {"conftest.py", "pytest.ini", "pytest.toml", ".pytest.ini", "tox.ini", "setup.cfg", "sitecustomize.py"}
    | {"usercustomize.py", "pytest.py", "unittest.py", "_pytest", "pluggy.py", "pytest", "unittest", "pluggy"}
)
BUILT = frozenset(
    {
        "build",
        "dist",
        "node_modules",
        ".venv",
        "target",
        ".tox",
        ".nox",
        ".eggs",
        "__pycache__",
        ".pytest_cache",
        ".git",
    }
)
COMPILED = (".so", ".pyc", ".pyd", ".o", ".a", ".mo", "_version.py", "version.py", ".c", ".cpp", ".lock", "-lock.json")
MAX_SCANNED = 64 << 20  # bytes of a file in which secrets are looked for


@dataclass(frozen=True)
class Replay:
    """The image that a script made, and the files of the repository that it changed, which were put back."""

    image: Image
    restored: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Verification:
    """Statuses of the tests over all runs, and the tests whose status differs."""

    tests: Mapping[str, str]
    flaky: tuple[str, ...] = ()
    seconds: tuple[float, ...] = field(default_factory=tuple)


async def replay_script(context: InstallContext, script: str, *, strict: bool = False) -> Replay:
    """Run a script in a fresh pod of the base image with the repository's files; return the resulting image.

    With `strict`, changed and new files in the workspace fail the replay; otherwise changed ones are put back.
    """
    if masked := masked_failure(script):
        raise context.failed("masked-failure", f"the set-up script hides failures: {masked}")
    started, snapshot, fleet = time.monotonic(), context.snapshot, context.fleet
    async with open_setup_pod(context) as setup:
        await setup.pod.write(SCRIPT_PATH, script, mode=0o755)
        done = await setup.run(f"bash {SCRIPT_PATH}", timeout=context.options.timeout_s)
        if not done.ok:
            why = "took too long" if done.timed_out else f"failed with exit code {done.exit_code}"
            last = " ".join((done.stdout + done.stderr).strip().splitlines()[-1:])[:300]
            reason = "timeout" if done.timed_out else "script-fails"
            raise context.failed(reason, f"the set-up script {why} in a fresh pod: {last}")
        changed = await changed_tracked_files(setup.pod, snapshot)
        if added := await steering_files(setup.pod, snapshot):
            raise context.failed("edited-files", f"the set-up adds {', '.join(added[:5])}, which change how tests run")
        if strict and changed:
            raise context.failed("edited-files", f"the set-up changes {', '.join(changed[:5])} of the repository")
        if strict and (added := await foreign_files(setup.pod, snapshot)):
            raise context.failed("edited-files", f"the set-up writes {', '.join(added[:5])}; mocks belong in {MOCKS}")
        sealed = await setup.pod.snapshot("fs")
    try:
        made = await fleet.fetch_snapshot(sealed.id, above=context.start.layers)
        find_secrets(context.store, made[len(context.start.layers) :], context)
        result = context.start.with_(layers=made)
        if changed:
            result = with_files(context.store, result, {path: snapshot.files[path] for path in changed})
        result = await fleet.keep_image(result.named(f"installed-{snapshot.name}-{result.id[:12]}".lower()))
    finally:
        await fleet.remove_snapshot(sealed.id)
    return Replay(result, tuple(changed), time.monotonic() - started)


async def changed_tracked_files(pod: Pod, snapshot: RepositorySnapshot) -> list[str]:
    """Return the files of the repository whose contents in the pod differ, or that are gone."""
    try:
        touched = await touched_paths(pod, WORKSPACE)
        known = changed_files(touched, snapshot.files)
    except DiffTooLarge:
        known = {path: await pod.stat(f"{WORKSPACE}/{path}") for path in snapshot.files}
    files = {path: info for path, info in known.items() if path in snapshot.files}
    states, left_out = await read_files(pod, WORKSPACE, files, MAX_FILE_BYTES, MAX_TOTAL_BYTES)
    differ = [path for path, state in states.items() if not _same(state, snapshot.files[path])]
    return sorted({*differ, *left_out})


def _same(state: FileState | None, expected: FileState) -> bool:
    return state is not None and (state.kind, state.digest) == (expected.kind, expected.digest)


async def steering_files(pod: Pod, snapshot: RepositorySnapshot) -> list[str]:
    """Return new files of the workspace that would change how tests run."""
    new = await _new_paths(pod, snapshot)
    return sorted(path for path in new if path.split("/")[-1] in STEERING and not _is_built(path))


async def foreign_files(pod: Pod, snapshot: RepositorySnapshot) -> list[str]:
    """Return new files of the workspace that no build makes: not ignored by git, and no link to a mock."""
    ignored = Globs(snapshot.text(".gitignore").splitlines())
    found = []
    for path, info in (await _new_paths(pod, snapshot)).items():
        is_mock = info.kind == "symlink" and info.target.startswith(f"{MOCKS}/")
        if info.kind == "directory" or is_mock or _is_built(path) or path.endswith(COMPILED):
            continue
        if not any(ignored.matches(each) for each in (path, *parents(path))):
            found.append(path)
    return sorted(found)


def _is_built(path: str) -> bool:
    parts = path.split("/")
    return bool(BUILT & {*parts}) or any(each.endswith((".egg-info", ".dist-info")) for each in parts)


async def _new_paths(pod: Pod, snapshot: RepositorySnapshot) -> dict[str, FileInfo]:
    """Return what is in the workspace and not in the repository."""
    try:
        touched = await touched_paths(pod, WORKSPACE)
    except DiffTooLarge:
        return {}
    known = {*snapshot.files, *(parent for path in snapshot.files for parent in parents(path)), ""}
    return {path: info for path, info in touched.items() if info is not None and path not in known}


def find_secrets(store: Store, layers: Sequence[Layer], context: InstallContext) -> None:
    """Raise InstallationFailed if the value of a secret is in a file of these layers."""
    values = {name: value.encode() for name, value in context.options.secrets.items() if value}
    for layer in layers if values else ():
        top = str(store.layer_path(layer))
        for directory, _, names in os.walk(top):
            for name in names:
                path = f"{directory}/{name}"
                info = os.lstat(path)
                if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_SCANNED:
                    continue
                with open(path, "rb") as file:
                    data = file.read()
                for secret in (secret for secret, value in values.items() if value in data):
                    raise context.failed("secret", f"the set-up writes the secret {secret} to {path.removeprefix(top)}")


# ------------------------------------------------------------------------------------------------- tests


async def verify_tests(context: InstallContext, image: Image, command: TestCommand) -> Verification:
    """Run the tests of an image several times, each in a fresh pod without network; raise InstallationFailed."""
    if masked := masked_test_command(command.command):
        raise context.failed("masked-failure", f"the test command `{command.command}` has {masked}")
    options, log = context.options, context.log
    runs: list[TestRun] = []
    for number in range(options.reruns):
        last = command.framework == "pytest" and number == options.reruns - 1
        async with await context.fleet.create(image) as pod:
            run = await run_tests(
                pod, command, timeout=options.test_timeout_s, probes=probe_directory(runs) if last else None
            )
        runs.append(run)
        log.note(f"test run {number + 1}: {summarize(run.statuses)}, exit code {run.exit_code}, {run.seconds:.1f} s")
        if not number:
            check_run(context, run)
    check_probes(context, runs[-1], command)
    return merge_runs(runs)


def probe_directory(runs: Sequence[TestRun]) -> str:
    """Return the directory with most of the tests that ran, so that its conftest.py applies to probes, too."""
    tops = Counter(test.partition("::")[0].rpartition("/")[0] for run in runs for test in run.statuses)
    return next((top for top, _ in tops.most_common() if not top.startswith(("..", "/"))), "")


def check_run(context: InstallContext, run: TestRun) -> None:
    """Raise InstallationFailed unless enough of the tests of a run pass."""
    if reason := why_unacceptable(run, context.options.min_passing):
        context.log.note(run.output[-6000:])
        raise context.failed(*reason)


def why_unacceptable(run: TestRun, min_passing: float) -> tuple[str, str] | None:
    """Return the reason and a sentence why a run does not show that a repository is installed; None if it does."""
    text = run.output + "\n".join(run.texts.values())
    counts = Counter(run.statuses.values())
    passed = counts["passed"] + counts["xfailed"] + counts["xpassed"]
    ran = len(run.statuses) - counts["skipped"]
    missing = missing_modules(text)
    if run.timed_out and not run.statuses:
        return "timeout", "the tests did not end within their time limit"
    if not run.complete and not run.statuses:
        if missing:
            return "missing-module", f"the tests do not start: no module {missing[0]}"
        return "no-report", f"the test command reports no test (exit code {run.exit_code})"
    if passed and ran and passed >= min_passing * ran and run.complete:
        return None
    if run.timed_out:
        return "timeout", f"the tests did not end within their time limit; {summarize(run.statuses)} until then"
    if not run.complete:
        return "no-report", f"the runner broke off with exit code {run.exit_code}; {summarize(run.statuses)} until then"
    if not ran:
        return "no-tests", f"no test ran: {summarize(run.statuses)}"
    shown = f"{passed} of {ran} tests pass ({summarize(run.statuses)})"
    if run.collection_errors and counts["error"] + counts["failed"] <= 2 * len(run.collection_errors):
        return ("missing-module", f"{shown}: no module {missing[0]}") if missing else ("collection", shown)
    return ("network" if is_network_failure(text) else "tests-fail"), shown


def check_probes(context: InstallContext, run: TestRun, command: TestCommand) -> None:
    """Raise InstallationFailed if the runner reports success for a test that must fail."""
    if command.framework != "pytest" or (run.probes.get("failing") in ("failed", "error") and run.exit_code != 0):
        return
    why = f"a test that must fail is reported as {run.probes.get('failing')}, with exit code {run.exit_code}"
    raise context.failed("stubbed-runner", f"the test runner cannot be trusted: {why}")


def merge_runs(runs: Sequence[TestRun]) -> Verification:
    """Return the statuses over several runs; a test whose status differs, or that is missing in one, is flaky."""
    names = list(dict.fromkeys(name for run in runs for name in run.statuses))
    merged: dict[str, str] = {}
    for name in names:
        seen = {run.statuses.get(name, "missing") for run in runs}
        merged[name] = seen.pop() if len(seen) == 1 else FLAKY
    flaky = tuple(sorted(name for name, status in merged.items() if status == FLAKY))
    return Verification(merged, flaky, tuple(run.seconds for run in runs))


def summarize(statuses: Mapping[str, str]) -> str:
    """Return the counts of statuses as text."""
    counts = Counter(statuses.values())
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "no tests"
