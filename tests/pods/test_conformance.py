"""Run the conformance suite on every backend that works here, as root and as an ordinary user.

Each variant runs once, in its own process (`conformance.py`), with the selected checks; each check is a test here.
Every check runs on the default backend; on the others the long ones are slow tests.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.pods import conformance
from tests.pods.conformance import CHECKS, NOTHING_LEFT, UNAVAILABLE

ROOT = Path(__file__).resolve().parents[2]
OVERFLOW_ID = 65534
SUITE_S = 600
TRY = "import subprocess, sys, etude.pods.fleet; subprocess.run([sys.executable, '-I', '-S', '-c', ''], check=True)"

LENGTHY = {  # more than about a quarter of a second
    "a_chain_of_seventy_forks_keeps_all_files",
    "a_pod_that_forks_often_keeps_few_layers_and_its_diff",
    "a_sparse_file_of_a_terabyte_is_harmless",
    "a_job_without_a_reader_runs_to_its_end",
    "a_job_streams_its_output_in_order",
    "a_jobs_timeout_ends_it",
    "a_large_file_goes_in_and_out_unchanged",
    "a_pod_ends_when_its_ttl_expires",
    "a_cpu_limit_is_enforced",
    "a_slow_reader_slows_its_job_and_memory_stays_bounded",
    "a_terminal_handles_large_input_and_output",
    "a_terminal_handles_the_interrupt_and_end_of_input_keys",
    "unread_input_is_not_buffered_without_limit",
    "ttl_applies_to_a_frozen_pod",
    "a_wait_timeout_does_not_affect_the_job",
    "a_command_does_not_wait_for_its_background_processes",
    "a_diff_of_too_much_fails_and_does_not_stall_the_event_loop",
    "a_directory_of_too_many_files_is_not_listed",
    "what_the_kernel_counts_by_user_cannot_be_taken_from_others",
    "a_diff_of_paths_neither_lists_nor_counts_the_rest",
}


class Variant(NamedTuple):
    """One way to run the suite."""

    backend: str
    user: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.user}"


VARIANTS = [
    Variant(backend, user) for user in ("root", "nobody") for backend in ("namespace", "landlock", "subprocess")
]


# covered nearly as well by another fast variant or by the tests of one backend
LATE = {Variant("landlock", "nobody"), Variant("subprocess", "nobody")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    conformance.load()
    rows = []
    for variant in VARIANTS:
        for name in (*CHECKS, NOTHING_LEFT):
            late = variant in LATE or (name in LENGTHY and variant != VARIANTS[0])
            marks = [pytest.mark.slow] if late else []
            rows.append(pytest.param(variant, name, id=f"{variant}-{name}", marks=marks))
    metafunc.parametrize(("variant", "name"), rows)


@pytest.fixture(scope="session")
def tables() -> dict[Variant, dict[str, dict[str, str]]]:
    """The results of each variant by check, filled by the first test of a variant."""
    return {}


def test_backend(
    variant: Variant, name: str, tables: dict[Variant, dict[str, dict[str, str]]], request: pytest.FixtureRequest
) -> None:
    if variant not in tables:
        selected = [item.callspec.params for item in request.session.items if getattr(item, "callspec", None)]
        names = [params["name"] for params in selected if params.get("variant") == variant]
        tables[variant] = run_suite(variant, [name for name in names if name != NOTHING_LEFT])
    table = tables[variant]
    row = table.get(UNAVAILABLE) or table.get(name)
    assert row is not None, f"the suite ended before this check:\n{table['output']['text']}"
    if row["outcome"] == "skipped":
        pytest.skip(row["text"])
    assert row["outcome"] == "passed", row["text"]


def run_suite(variant: Variant, names: list[str]) -> dict[str, dict[str, str]]:
    """Run the checks of a variant; return rows by name."""
    prefix, environment, reason = command_of(variant.user)
    if variant.backend == "subprocess" and variant.user == "root":
        reason = "nothing is isolated on this backend, so its checks run as an ordinary user only"
    if reason:
        return {UNAVAILABLE: {"outcome": "skipped", "text": reason}}
    with tempfile.TemporaryDirectory(prefix="etude-conformance-") as directory:
        if variant.user == "nobody":
            os.chown(directory, OVERFLOW_ID, OVERFLOW_ID)
        script = str(ROOT / "tests/pods/conformance.py")
        command = [*prefix, script, variant.backend, f"{directory}/state", *names]
        done = subprocess.run(
            command,
            env={**environment, "HOME": directory, "TMPDIR": directory},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=SUITE_S,
        )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    tail = done.stdout[-1000:] + done.stderr[-3000:]
    return {**{row["name"]: row for row in rows}, "output": {"outcome": "failed", "text": tail}}


@cache
def command_of(user: str) -> tuple[list[str], dict[str, str], str]:
    """Return interpreter, environment, and the reason why checks cannot run as `user`, or ""."""
    # Our interpreter may be in a home directory closed to other users; a system interpreter can use our packages.
    packages = [str(ROOT), *(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": ":".join(packages)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if os.geteuid() != 0:
        reason = "" if user == "nobody" else "needs root"
        return [sys.executable], environment, reason
    if user == "root":
        return [sys.executable], environment, ""
    if shutil.which("setpriv") is None:
        return [], {}, "needs setpriv (util-linux) to run as another user"
    become = ["setpriv", f"--reuid={OVERFLOW_ID}", f"--regid={OVERFLOW_ID}", "--clear-groups", "--inh-caps=-all"]
    environment = {**environment, "PATH": "/usr/bin:/bin"}
    reason = "no interpreter found"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for program in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        tried = [*become, program, "-c", TRY]
        try:
            done = subprocess.run(tried, env=environment, cwd="/", capture_output=True, text=True, timeout=60)
        except OSError as error:
            reason = str(error)
            continue
        if done.returncode == 0:
            return [*become, program], environment, ""
        reason = (done.stderr.strip().splitlines() or ["no error output"])[-1]
    return [], {}, f"another user cannot run an interpreter with Etude's dependencies: {reason}"
