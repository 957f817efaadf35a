"""Sampler processes that start a server: it ends with them, and they with it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_servers import FAULT_VARIABLE, stub_python_path
from run_services import environment_of, facts_of, member_of, service_url, threaded_service
from samplers import tiny_model, tiny_tokenizer

from etude.inference.sampling import Sampling
from etude.model.adapters import published_views
from etude.model.checkpoint import save
from etude.rl.settings import open_rl_run
from etude.rollouts.sampler_pool import SamplersUnavailable, open_sampler_pool
from etude.rollouts.settings import QueueSettings
from etude.runs.layout import RunLayout
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher

RECIPE = """
name = "test"
stages = ["rl"]
[rl]
model = "start"
tasks = "./tasks"
steps = 1
stall_s = 120.0
[rl.sampler]
backend = "{program}"
threads = 1
max_sequences = 16
server_arguments = {arguments}
[rl.weights]
poll_s = 0.02
"""
WAIT_S = 300.0  # on a busy machine


class SamplerRun:
    """A run with published weights, and a sampler process with a fake server in it."""

    def __init__(self, path: Path, program: str = "vllm", arguments: str = "[]") -> None:
        run = path / "run"
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(RECIPE.format(program=program, arguments=arguments))
        self.layout: RunLayout = open_rl_run(run)[0]
        self.layout.make()
        self.model = tiny_model()
        save(self.model, self.layout.model)
        tiny_tokenizer().save(self.layout.model)
        self.publisher = Publisher(ObjectStore(self.layout.store))
        self.publish(1)
        # Short: it holds sockets, whose names have at most 108 characters.
        self.files, self.fault = Path(tempfile.mkdtemp(prefix="s-", dir=path.parent)), path / "fault"
        stubs = stub_python_path(path / "stubs")
        self.places = {"TMPDIR": str(self.files), FAULT_VARIABLE: str(self.fault), "PYTHONPATH": stubs}

    def publish(self, number: int) -> None:
        self.publisher.publish_soon(number, published_views(self.model, torch.bfloat16))
        self.publisher.flush(60)

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        with threaded_service(self.layout, {"training": QueueSettings()}):
            command = [sys.executable, "-m", "etude.inference.sampler_process"]
            command += ["--service", service_url(self.layout), "--name", "sampler-0"]
            environment = {**environment_of(self.layout), **self.places}
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
                try:
                    yield process
                finally:
                    process.kill()

    def until(self, true: Callable[[dict[str, Any]], bool], process: subprocess.Popen[str]) -> dict[str, Any]:
        """Return the status of the sampler, once it is as wanted."""
        deadline = time.monotonic() + WAIT_S
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            status = facts_of(self.layout, "sampler-0") or {}
            if status.get("pid") == process.pid and true(status):
                return status
            time.sleep(0.05)
        raise AssertionError(f"not as wanted: {status}")

    def servers(self) -> list[int]:
        """Return the processes that were started for this run's sampler: its guard and its server."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.files).encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def until_gone(self) -> None:
        """Wait until the server has ended and its files are removed."""
        deadline = time.monotonic() + WAIT_S
        while self.servers() or any(self.files.glob("etude-sampler-*")):
            assert time.monotonic() < deadline, (self.servers(), list(self.files.iterdir()))
            time.sleep(0.05)


def test_a_server_ends_with_its_sampler_however_that_ends(tmp_path: Path) -> None:
    run = SamplerRun(tmp_path)
    with run.started() as process:
        run.until(lambda status: status["state"] == "ready", process)
        run.publish(2)
        status = run.until(lambda status: status["version"] == 2, process)
        assert (status["backend"], status["swaps"], status["problem"]) == ("vllm", 2, "")
        assert len(run.servers()) == 2

        async def work() -> list[int]:
            with member_of(run.layout) as member:
                async with open_sampler_pool(member, deadline_s=60) as pool:
                    sampling = Sampling(max_tokens=4, temperature=0.5)
                    return (await pool.complete([5, 6, 7], sampling, session="s")).versions

        assert asyncio.run(work()) == [2] * 4
        process.send_signal(signal.SIGKILL)
    run.until_gone()


@pytest.mark.slow
def test_sigterm_ends_both_and_sglang_starts_too(tmp_path: Path) -> None:
    run = SamplerRun(tmp_path, "sglang")
    with run.started() as process:
        run.until(lambda status: status["state"] == "ready", process)
        process.terminate()
        assert process.wait(60) == 0
        status = facts_of(run.layout, "sampler-0")
        assert status is not None
        assert (status["state"], status["url"]) == ("ended", "")
    run.until_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", "the server ended with exit code 1"),
        ("hangs", "health checks failed"),
        ("nonsense", "invalid responses in a row"),
    ],
)
def test_a_fault_of_the_server_ends_the_process_and_the_pool_goes_elsewhere(
    fault: str, said: str, tmp_path: Path
) -> None:
    run = SamplerRun(tmp_path)
    with run.started() as process:
        run.until(lambda status: status["state"] == "ready", process)
        run.fault.write_text(fault)

        async def work() -> None:
            with member_of(run.layout) as member:
                async with open_sampler_pool(member, deadline_s=5) as pool:
                    with pytest.raises(SamplersUnavailable):
                        await pool.complete([1], Sampling(max_tokens=100))

        for _ in range(2):
            asyncio.run(work())
        assert process.wait(WAIT_S) == 1
        assert process.stderr is not None
        assert said in process.stderr.read()
    run.until_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fault", "code", "said"),
    [
        ('["--no-such-option"]', "", 2, "vLLM does not start: its own message is above"),
        ("[]", "stale_head", 2, "vLLM with the weights of version 1 samples from something else"),
        ("[]", "refuses", 1, "the server did not take version 1"),
    ],
)
def test_a_server_that_cannot_be_used_ends_the_process_with_the_reason(
    arguments: str, fault: str, code: int, said: str, tmp_path: Path
) -> None:
    run = SamplerRun(tmp_path, arguments=arguments)
    run.fault.write_text(fault)
    with run.started() as process:
        assert process.wait(WAIT_S) == code
        assert process.stderr is not None
        assert said in process.stderr.read()
    run.until_gone()
