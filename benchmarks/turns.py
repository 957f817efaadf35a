"""Engine throughput under agents: many sessions with short turns at random times, and where the engine's time goes.

    python benchmarks/turns.py                     # on a GPU: SmolLM2-135M's shape, 96 sessions
    python benchmarks/turns.py --device cpu        # the nano shape, 16 sessions
    python benchmarks/turns.py --sessions 192

Every turn's prompt is all before it and some tokens more, as from a tool; its completion has 20 to 100 tokens, and then
the tool takes a moment. Measured without a server, and over HTTP from four other processes as in RL; each with prefill
in captured graphs and without. Weights are random.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sampler import NANO, SMOLLM2
from etude.inference import graphs, server
from etude.inference.clients.http import HttpPolicy
from etude.inference.engine import Engine
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.inference.server import ServedModel
from etude.inference.service import EngineService
from etude.inference.settings import EngineOptions
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize
from etude.system.http import bind

TURNS, OPENING, ADDED, PROCESSES = 8, 400, (40, 100), 4
LIMIT_S = 300.0  # of a round
ROUNDS = 2  # the first compiles kernels and captures graphs
TOOL_S = (0.01, 0.05)

Complete = Callable[[list[int], Sampling], Awaitable[list[Completion]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sessions", type=int, help="at once; 96 on a GPU, 16 on a CPU")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    shape, dtype = (SMOLLM2, torch.bfloat16) if cuda else (NANO, torch.float32)
    model = initialize(ModelConfig.from_hugging_face(shape), dtype=dtype).to(arguments.device)
    count = arguments.sessions or (96 if cuda else 16)
    if count < PROCESSES or count % PROCESSES:
        parser.error(f"--sessions {count}: expected a multiple of {PROCESSES}, the number of client processes")
    table = Table(
        title=f"{count} sessions of {TURNS} turns; milliseconds of an engine's step, and its share of the time"
    )
    decoding = "burst" if cuda else "decode"
    for column in ("", "turns/s", "tok/s", decoding, "prefill, graph", "prefill, launched", "else"):
        table.add_column(column, justify="right")
    for name, run_rounds in (("no server", in_process), ("over HTTP", over_http)):
        for limit in (graphs.MAX_GRAPH_TOKENS, 0) if cuda else (0,):
            seconds, spent, tokens = asyncio.run(measure_last_round(model, run_rounds, count, limit))
            rest = 1 - sum(sum(times) for times in spent.values()) / seconds
            cells = [cell(spent[kind], seconds) for kind in ("burst", "graph", "launched")]
            label = f"{name}, {'graphs prefill' if limit else 'graphs only decode'}" if cuda else name
            rates = f"{count * TURNS / seconds:,.0f}", f"{tokens / seconds:,.0f}"
            table.add_row(label, *rates, *cells, f"{rest:.0%}")
    Console(width=130).print(table)


def cell(times: list[float], seconds: float) -> str:
    return f"{1e3 * sum(times) / len(times):.1f}, {sum(times) / seconds:.0%}" if times else ""


async def measure_last_round(
    model: Transformer, run_rounds: Callable[[EngineService, int], AsyncIterator[None]], count: int, limit: int
) -> tuple[float, dict[str, list[float]], int]:
    """Return the seconds of the last round, those of every step of each kind, and its tokens."""
    before, graphs.MAX_GRAPH_TOKENS = graphs.MAX_GRAPH_TOKENS, limit
    engine = Engine(model, EngineOptions(kv_cache_tokens=400_000, max_sequences=256, max_step_tokens=4096))
    try:
        async with EngineService(engine) as service:
            rounds = run_rounds(service, count)
            await anext(rounds)
            tokens, start = engine.output_tokens, time.perf_counter()
            with timing(engine) as spent:
                await anext(rounds)
            seconds = time.perf_counter() - start
            async for _ in rounds:
                pass
            return seconds, spent, engine.output_tokens - tokens
    finally:
        graphs.MAX_GRAPH_TOKENS = before


@contextmanager
def timing(engine: Any) -> Any:
    """Collect the seconds of every step by its kind, as the engine's thread measures them."""
    spent: dict[str, list[float]] = {"burst": [], "graph": [], "launched": []}
    plain = engine._run

    def run(step: Any) -> None:
        runner = engine.graph_runner
        by_graph = runner is not None and (not step.prefill or runner.can_run_mixed(step))
        kind = "burst" if not step.prefill else "graph" if by_graph else "launched"
        start = time.perf_counter()
        plain(step)
        spent[kind].append(time.perf_counter() - start)

    engine._run = run
    try:
        yield spent
    finally:
        engine._run = plain


async def in_process(service: EngineService, count: int) -> AsyncIterator[None]:
    for number in range(ROUNDS):
        await sessions(service.complete_many, count, number * 1_000_000, service.engine.model.config.vocab_size)
        yield


async def over_http(service: EngineService, count: int) -> AsyncIterator[None]:
    ready = asyncio.Event()
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.run(service, listener, ServedModel("x"), grace=0.0, ready=ready.set))
        await ready.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        barrier, size = context.Barrier(PROCESSES + 1), service.engine.model.config.vocab_size
        others = [
            context.Process(target=client, args=(url, count // PROCESSES, index * count, size, barrier), daemon=True)
            for index in range(PROCESSES)
        ]
        for process in others:
            process.start()
        try:
            await asyncio.to_thread(barrier.wait, LIMIT_S)  # all have started
            for _ in range(ROUNDS):
                await asyncio.to_thread(barrier.wait, LIMIT_S)
                yield
        except BaseException:
            barrier.abort()
            raise
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def client(url: str, count: int, first: int, size: int, barrier: Any) -> None:
    async def run_rounds() -> None:
        http = HttpPolicy(url, "")
        await asyncio.to_thread(barrier.wait, LIMIT_S)
        for number in range(ROUNDS):
            await sessions(http.complete_many, count, first + number * 1_000_000, size)
            await asyncio.to_thread(barrier.wait, LIMIT_S)
        await http.close()

    try:
        asyncio.run(run_rounds())
    except BaseException:
        barrier.abort()  # do not leave the others waiting
        raise


async def sessions(complete: Complete, count: int, seed: int, size: int) -> None:
    await asyncio.gather(*(session(complete, random.Random(seed + number), size) for number in range(count)))


async def session(complete: Complete, rng: random.Random, size: int) -> None:
    text = [rng.randrange(size) for _ in range(OPENING)]
    for turn in range(TURNS):
        sampling = Sampling(max_tokens=rng.randint(20, 100), seed=turn)
        (completion,) = await complete(text, sampling)
        text += completion.tokens + [rng.randrange(size) for _ in range(rng.randint(*ADDED))]
        await asyncio.sleep(rng.uniform(*TOOL_S))


if __name__ == "__main__":
    main()
