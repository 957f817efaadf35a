"""A real sampler process on a run directory: it follows the chain in the middle of samples, and may be killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import patient_http
import pytest
import torch
from run_services import elsewhere, environment_of, facts_of, member_of, service_url, threaded_service
from samplers import config_of, tiny_model, tiny_tokenizer
from torch import Tensor

from etude.inference.policy import Completion
from etude.inference.sampling import Sampling
from etude.model.checkpoint import save
from etude.model.transformer import Transformer
from etude.rl.settings import open_rl_run
from etude.rollouts.leases import EvaluationLease
from etude.rollouts.queue_client import QueueClient
from etude.rollouts.sampler_pool import SamplerPool, SamplersUnavailable, open_sampler_pool
from etude.rollouts.settings import QueueSettings
from etude.runs.layout import RunLayout
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher

FAMILY = "qwen3_moe"
RECIPE = """
name = "test"
stages = ["rl"]
[rl]
model = "start"
tasks = "./tasks"
steps = 1
stall_s = {stall_s}
[rl.sampler]
device = "cpu"
kv_cache_tokens = 8192
max_sequences = 16
threads = 1
[rl.weights]
poll_s = 0.02
"""
State = dict[str, Tensor]
MakeRun = Callable[..., RunLayout]
WAIT_S = 300.0  # on a busy machine; nothing waits so long otherwise


@pytest.fixture
def make_run() -> Iterator[MakeRun]:
    """Make runs as an orchestrator leaves them to a sampler, each with its run service."""
    with contextlib.ExitStack() as stack:

        def make(path: Path, stall_s: float = 60.0) -> RunLayout:
            path.mkdir(exist_ok=True, parents=True)
            (path / "recipe.toml").write_text(RECIPE.format(stall_s=stall_s))
            place, _ = open_rl_run(path)
            place.make()
            save(tiny_model(FAMILY), place.model)
            tiny_tokenizer().save(place.model)
            stack.enter_context(threaded_service(place, {"training": QueueSettings(), "evaluation": QueueSettings()}))
            return place

        yield make


def weights(seed: int) -> State:
    """What a trainer publishes: bfloat16, for an engine in float32."""
    return {name: tensor.bfloat16() for name, tensor in tiny_model(FAMILY, seed).state_dict().items()}


def stepped(state: State, seed: int) -> State:
    """Some values moved a little, as a training step does."""
    chance = torch.Generator().manual_seed(seed)
    mask = {name: torch.rand(tensor.shape, generator=chance) < 0.02 for name, tensor in state.items()}
    return {name: torch.where(mask[name], tensor * 1.02, tensor) for name, tensor in state.items()}


def command(place: RunLayout, name: str) -> list[str]:
    return [sys.executable, "-m", "etude.inference.sampler_process", "--service", service_url(place), "--name", name]


@contextlib.contextmanager
def started(place: RunLayout, name: str = "sampler-0") -> Iterator[subprocess.Popen[str]]:
    """A sampler, from before it says anything until it is killed."""
    with subprocess.Popen(
        command(place, name), stderr=subprocess.PIPE, text=True, env=environment_of(place)
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def until(place: RunLayout, true: Callable[[dict[str, Any]], bool], process: subprocess.Popen[str]) -> dict[str, Any]:
    """The status of a sampler, once it is as wanted."""
    deadline = time.monotonic() + WAIT_S
    status: dict[str, Any] = {}
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {process.stderr and process.stderr.read()}")
        status = facts_of(place, "sampler-0") or {}
        if status.get("pid") == process.pid and true(status):
            return status
        time.sleep(0.02)
    raise AssertionError(f"not as wanted after {WAIT_S:g} s: {status}")


def ready(status: dict[str, Any]) -> bool:
    return bool(status["state"] == "ready")


def network(state: State) -> Transformer:
    model = Transformer(config_of(FAMILY)).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model


def assert_made_by(sample: Completion, prompt: list[int], state: State) -> None:
    """The sampler's numbers are those of the trainer's weights."""
    tokens = [*prompt, *sample.tokens]
    with torch.no_grad():
        logprobs = network(state)(torch.tensor([tokens])).log_softmax(-1)[0]
    wanted = [logprobs[i - 1, tokens[i]].item() for i in range(len(prompt), len(tokens))]
    assert sample.raw_logprobs == pytest.approx(wanted, abs=2e-3)


@contextlib.asynccontextmanager
async def pool_of(place: RunLayout, deadline_s: float) -> AsyncIterator[SamplerPool]:
    with member_of(place) as member:
        async with open_sampler_pool(member, deadline_s=deadline_s) as policy:
            yield policy


async def sampled(place: RunLayout, prompt: list[int], count: int, **options: Any) -> Completion:
    async with pool_of(place, 300) as policy:
        return await policy.complete(prompt, Sampling(max_tokens=count, **options), session="s")


async def long_sample(place: RunLayout, url: str, count: int, meanwhile: Callable[[], None]) -> Completion:
    """A sample of a second or more, and something that happens when the sampler is at work on it."""
    sampling = asyncio.create_task(sampled(place, [5, 6, 7], count, seed=1))
    async with asyncio.timeout(120), patient_http.open_client() as client:
        while not (await client.get(f"{url}/health")).json()["open"]:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(meanwhile)
    return await sampling


def test_a_sampler_follows_the_chain_in_the_middle_of_samples_over_broken_links_and_bad_numbers(
    make_run: MakeRun, tmp_path: Path
) -> None:
    place = make_run(tmp_path / "run")
    bucket = ObjectStore(place.store)
    with started(place) as process, Publisher(bucket, full_every=100) as publisher:
        status = until(place, lambda status: status["state"] == "waiting", process)
        assert status["waiting_for"] == f"a first version in {place.store}"
        state = weights(0)

        def publish(number: int, state: State) -> None:
            publisher.publish_soon(number, state)
            publisher.flush(20)

        publish(1, state)
        status = until(place, ready, process)
        assert (status["version"], status["checksum"]) == (1, publisher.history[-1].version.checksum)
        assert status["model"] == str(place.model)
        sample = asyncio.run(sampled(place, [5, 6, 7], 20))
        assert_made_by(sample, [5, 6, 7], state)
        assert sample.routing is not None
        assert len(sample.routing) == 3 + 20 - 1

        def train() -> None:
            nonlocal state
            for number in range(2, 7):
                state = stepped(state, number)
                publish(number, state)
                until(place, lambda status: status["version"] == publisher.history[-1].version.number, process)

        # new versions come while a sample is made, and every token says of which it is
        sample = asyncio.run(long_sample(place, status["url"], 800, train))
        assert len(sample.tokens) == 800
        assert sample.versions == sorted(sample.versions)
        assert len(set(sample.versions)) >= 2, set(sample.versions)
        status = until(place, lambda status: status["swaps"] >= 5, process)
        assert status["checksum"] == publisher.history[-1].version.checksum
        assert min(status["fetch_s"], status["apply_s"], status["swap_s"]) >= 0
        assert_made_by(asyncio.run(sampled(place, [9, 8], 20)), [9, 8], state)

        # weights with NaN in them are not loaded, the good ones after them are
        bad = {**state, "norm.weight": torch.full_like(state["norm.weight"], torch.nan)}
        publish(7, bad)
        status = until(place, lambda status: "not finite" in status["problem"], process)
        assert status["version"] == 6
        state = stepped(state, 8)
        publish(8, state)
        status = until(place, lambda status: status["version"] == 8 and not status["problem"], process)

        # a link is lost: the old version stays until the next full one
        process.send_signal(signal.SIGSTOP)
        for number in (9, 10):
            state = stepped(state, number)
            publish(number, state)
        (shard,) = (name for name in bucket.names("versions/00000009") if name.startswith("shard-000"))
        bucket.remove(f"versions/00000009/{shard}")
        process.send_signal(signal.SIGCONT)
        status = until(place, lambda status: f"version 9, {shard} is missing" in status["problem"], process)
        assert status["version"] == 8
        assert asyncio.run(sampled(place, [1], 5)).versions == [8] * 5
        state = stepped(state, 11)
        with Publisher(bucket) as anew:
            anew.publish_soon(11, state)
        status = until(place, lambda status: status["version"] == 11 and not status["problem"], process)
        assert status["checksum"] == anew.history[-1].version.checksum
        assert_made_by(asyncio.run(sampled(place, [9, 8], 20)), [9, 8], state)

        with pytest.raises(httpx.HTTPStatusError, match="401"):
            patient_http.post(f"{status['url']}/pause").raise_for_status()


def test_a_sample_outlives_the_sampler_that_was_killed_at_work_on_it(make_run: MakeRun, tmp_path: Path) -> None:
    place, state = make_run(tmp_path / "run"), weights(0)
    with Publisher(ObjectStore(place.store)) as publisher:
        publisher.publish_soon(1, state)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(started(place))
        url = until(place, ready, first)["url"]

        def kill() -> None:
            first.kill()
            first.wait()
            with pytest.raises(SamplersUnavailable, match="no connection: Connection refused"):
                asyncio.run(hurried())
            until(place, ready, stack.enter_context(started(place)))

        async def hurried() -> None:
            async with pool_of(place, 0.5) as policy:
                await policy.complete([1], Sampling(max_tokens=1))

        sample = asyncio.run(long_sample(place, url, 400, kill))
        assert len(sample.tokens) == 400
        assert_made_by(sample, [5, 6, 7], state)


def test_a_sampler_without_the_run_directory_gets_model_and_weights_from_the_run_service(
    make_run: MakeRun, tmp_path: Path
) -> None:
    place = make_run(tmp_path / "here/run")
    environment = environment_of(place) | {"XDG_CACHE_HOME": str(tmp_path / "there")}
    line = elsewhere(tmp_path / "here", command(place, "sampler-0"))
    state = weights(0)
    with Publisher(ObjectStore(place.store), full_every=100) as publisher:
        publisher.publish_soon(1, state)
        publisher.flush(20)
        with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment) as process:
            try:
                status = until(place, ready, process)
                assert status["model"].startswith(str(tmp_path / "there/etude/trees"))
                for number in (2, 3):
                    state = stepped(state, number)
                    publisher.publish_soon(number, state)
                    publisher.flush(20)
                status = until(place, lambda status: status["version"] == 3, process)
                assert status["checksum"] == publisher.history[-1].version.checksum
                assert_made_by(asyncio.run(sampled(place, [9, 8], 20)), [9, 8], state)
            finally:
                process.kill()


# ------------------------------------------------------------------------------------------- how it ends


def test_sigterm_ends_it_at_once_and_a_wait_for_weights_has_a_deadline(make_run: MakeRun, tmp_path: Path) -> None:
    place, late = make_run(tmp_path / "run"), make_run(tmp_path / "late", stall_s=0.5)
    with Publisher(ObjectStore(place.store)) as publisher:
        publisher.publish_soon(1, weights(0))
    with started(late) as waiting, started(place) as process:
        until(place, ready, process)

        def stop() -> None:
            process.terminate()
            assert process.wait(60) == 0
            status = facts_of(place, "sampler-0")
            assert status is not None
            assert (status["state"], status["url"]) == ("ended", "")

        async def work() -> None:
            async with pool_of(place, 0.5) as policy:
                sampling = asyncio.create_task(policy.complete([1], Sampling(max_tokens=1900)))
                await asyncio.sleep(0.3)
                await asyncio.to_thread(stop)
                with pytest.raises(SamplersUnavailable, match="sampler-0: ended"):
                    await asyncio.wait_for(sampling, 120)

        asyncio.run(work())
        assert waiting.wait(30) == 1
        assert waiting.stderr is not None
        assert f"sampler-0: after 0.5 s there is no usable version in {late.store}" in waiting.stderr.read()


FAULTY = """
import dataclasses, os, sys, time
from etude.inference.engine import Engine
from etude.inference import sampler_process
step = Engine.step
def fail(engine):
    if engine.steps >= 20:
        {fault}
    return step(engine)
Engine.step = fail
sampler_process.STUCK_S = 1.0
os._exit(sampler_process.main(sys.argv[1:]))
"""
PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise RuntimeError('a kernel failed')", "the engine failed: RuntimeError: a kernel failed"),
        ("time.sleep(1000)", "the engine made no step in 1 s with 1 sequences"),
    ],
    ids=["breaks", "hangs"],
)
def test_an_engine_that_breaks_or_hangs_ends_the_process_with_an_error(
    make_run: MakeRun, tmp_path: Path, fault: str, said: str
) -> None:
    place = make_run(tmp_path / "run")
    with Publisher(ObjectStore(place.store)) as publisher:
        publisher.publish_soon(1, weights(0))
    line = [sys.executable, "-c", FAULTY.format(fault=fault), "--service", service_url(place), "--name", "sampler-0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment_of(place)) as process:
        until(place, ready, process)

        async def work() -> None:
            async with pool_of(place, 2) as policy:
                with pytest.raises(SamplersUnavailable, match=said):
                    await policy.complete([1], Sampling(max_tokens=100))

        asyncio.run(work())
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert f"sampler-0: {said}" in process.stderr.read()


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it(make_run: MakeRun, tmp_path: Path) -> None:
    place = make_run(tmp_path / "run")
    line = [sys.executable, "-c", PARENT, *command(place, "sampler-0")]
    with subprocess.Popen(line, env=environment_of(place)) as parent:
        deadline = time.monotonic() + WAIT_S
        while (status := facts_of(place, "sampler-0")) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.kill()
    while Path(f"/proc/{status['pid']}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.getpid() != status["pid"]


def test_a_leased_sampler_stays_at_the_version_of_its_lease_and_then_catches_up(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """It goes back to an older version, is killed there, and returns to it; what it samples is of exactly that one."""
    place = make_run(tmp_path / "run")
    states = [weights(0)]
    with contextlib.ExitStack() as stack, Publisher(ObjectStore(place.store), full_every=2, keep=1) as publisher:
        publisher.pinned = [1]

        def publish(number: int) -> None:
            states.append(stepped(states[-1], number))
            publisher.publish_soon(number, states[-1])
            publisher.flush(20)

        for number in (1, 2, 3, 4):
            publish(number)
        with member_of(place) as member:
            queue = QueueClient(member.client, "evaluation", QueueSettings())
            process = stack.enter_context(started(place))
            until(place, lambda status: ready(status) and status["version"] == 4, process)
            queue.set_lease(EvaluationLease(10, 1, ("sampler-0",), shared=False, sessions=4))
            until(place, lambda status: status["version"] == 1 and status["leased"] == 1, process)
            publish(5)  # which prunes all but the pinned version and what it needs
            process.kill()
            process.wait()
            process = stack.enter_context(started(place))
            until(place, lambda status: ready(status) and status["version"] == 1 and status["leased"] == 1, process)

            async def evaluated() -> Completion:
                async with pool_of(place, 300) as policy:
                    return await policy.for_evaluation(10).complete([5, 6, 7], Sampling(max_tokens=20), session="s")

            sample = asyncio.run(evaluated())
            assert sample.versions == [1] * 20
            assert_made_by(sample, [5, 6, 7], states[1])
            queue.set_lease(None)
            status = until(place, lambda status: status["leased"] is None, process)
            assert status["version"] == 5, "it serves training with old weights"
            assert_made_by(asyncio.run(sampled(place, [9, 8], 20)), [9, 8], states[5])
