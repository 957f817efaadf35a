"""Time from the trainer's call to publish weights to the first token sampled with them, beside the size of the delta.

    python benchmarks/publish_to_use.py                                  # nano and SmolLM2-135M, directory and S3
    python benchmarks/publish_to_use.py --models nano --stores directory --versions 5

A run service, a sampler process and a trainer, as in a run on one machine; the S3 server is moto. The trainer takes
real steps on random rollouts (`deltas.py`) and waits after each for its weights to arrive. Meanwhile one client samples
without a pause, and every token has its version. SmolLM2-135M has its shape and random weights. All share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tomli_w
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.deltas import GROUP, TOKENS, rollouts
from benchmarks.s3_server import BUCKET, s3_server
from etude.chat.tokenizer import Tokenizer
from etude.files import write_atomically
from etude.inference.clients.http import parse_stream_line
from etude.inference.clients.transport import Transport
from etude.inference.generate_protocol import sampling_to_json
from etude.inference.sampling import Sampling
from etude.model import load, save
from etude.model.adapters import published_views
from etude.model.config import ModelConfig
from etude.model.known import KNOWN_MODELS
from etude.model.transformer import Transformer, initialize
from etude.rl.objective import PolicyGradient
from etude.rl.settings import open_rl_run
from etude.rollouts.run_files import sampler_token
from etude.runs.address import choose_address, run_token, service_environment
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed
from etude.weights.publisher import Publisher

NANO = Path(__file__).resolve().parents[1] / "base/nano"
START_S, USE_S = 300.0, 120.0
RATE = 1e-6  # learning rate


@dataclass(frozen=True)
class Arrival:
    """The way of one version, in seconds since it was given to the publisher, and its size."""

    copied_s: float  # the trainer goes on
    visible_s: float  # in the store
    used_s: float  # the first token
    fetch_s: float
    apply_s: float
    swap_s: float
    size: int
    full: bool


class TokenWatch:
    """Samples without a pause, and records when the first token of each version arrived."""

    def __init__(self, url: str, token: str, prompt: list[int]) -> None:
        self.url, self.token, self.prompt = url, token, prompt
        self.first: dict[int, float] = {}
        self.gaps: list[float] = []  # seconds between two lines of a response
        self.problem: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> TokenWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            asyncio.run(self._sample())
        except BaseException as error:
            self.problem = error
            raise

    async def _sample(self) -> None:
        transport, seed = Transport(self.token), 0
        try:
            while not self._stop.is_set():
                seed += 1
                sampling = Sampling(max_tokens=256, seed=seed)
                body = {"tokens": self.prompt, "sampling": sampling_to_json(sampling), "stream": True}
                last = 0.0
                async for line in transport.lines("/generate", lambda: self.url, json=body):
                    delta, now = parse_stream_line(line, self.url), time.monotonic()
                    self.gaps += [now - last] if last else []
                    last = now
                    for version in delta["versions"]:
                        self.first.setdefault(version, now)
                    if self._stop.is_set():
                        break
        finally:
            await transport.close()

    def wait_for(self, version: int) -> float:
        """Return when the first token of a version arrived."""
        deadline = time.monotonic() + USE_S
        while version not in self.first:
            if self.problem is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no token of version {version}: {self.problem}")
            time.sleep(0.002)
        return self.first[version]


# ------------------------------------------------------------------------------------------- a run


def make_run(directory: Path, name: str, store: str) -> tuple[RunLayout, Transformer]:
    """Return a run whose sampler reads weights from a store ("": a directory in the run), and its model."""
    sampler = {"device": "cpu", "kv_cache_tokens": 8192, "max_sequences": 8, "threads": 1}
    table = {"model": "start", "tasks": "./tasks", "steps": 1, "sampler": sampler, "weights": {"store": store}}
    write_atomically(directory / "run/recipe.toml", tomli_w.dumps({"name": "use", "stages": ["rl"], "rl": table}))
    layout, _ = open_rl_run(directory / "run")
    layout.make()
    write_atomically(layout.id, secrets.token_hex(16))
    write_atomically(layout.tasks, json.dumps({"train": {}, "held_out": {}}))
    if name == "nano":
        model = load(NANO, dtype=torch.float32)
    else:
        model = initialize(ModelConfig.from_hugging_face(KNOWN_MODELS[name].config), dtype=torch.float32)
    save(model, layout.model)
    Tokenizer.load(NANO).save(layout.model)
    return layout, model


@contextmanager
def services(layout: RunLayout) -> Iterator[RunClient]:
    """Run the run service and a sampler; give a client of the run service."""
    choose_address(layout)
    with ExitStack() as stack:

        def start(*arguments: str, **environment: str) -> None:
            command = [sys.executable, "-m", *arguments]
            process = stack.enter_context(subprocess.Popen(command, env={**os.environ, **environment}))
            stack.callback(process.terminate)

        start("etude.rollouts.run_service", str(layout.run))
        client = stack.enter_context(closing(RunClient.beside(layout, patience_s=START_S)))
        client.connect()
        known = ("--service", client.url, "--name", "sampler-0")
        start("etude.inference.sampler_process", *known, **service_environment(layout))
        yield client


def sampler_status(client: RunClient, version: int) -> dict[str, float]:
    """Return the status of the sampler, once it has reported this version."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = client.statuses().get("sampler-0", {})
        if found.get("state") == "ready" and found["version"] >= version:
            return found
        time.sleep(0.05)
    raise RuntimeError(f"the sampler did not report version {version}: {found}")


# ------------------------------------------------------------------------------------------- measuring


def measure(directory: Path, name: str, store: str, versions: int) -> tuple[list[Arrival], float]:
    """Return the way of so many deltas, after a full version, and the median seconds between two tokens."""
    layout, model = make_run(directory, name, store)
    trainer = Trainer(model, AdamSettings(RATE, weight_decay=0.0, round_to_bfloat16=True))
    url = ObjectStore(layout.store)
    found: list[Arrival] = []
    with claimed(url, layout.run_id(), inside=not store), Publisher(url, run=layout.run_id()) as publisher:
        publisher.publish_soon(0, published_views(model, torch.bfloat16))
        publisher.flush(START_S)
        with services(layout) as client:
            address = str(sampler_status(client, 0)["url"])
            prompt = torch.randint(1000, (64,)).tolist()
            with TokenWatch(address, sampler_token(run_token(layout)), prompt) as watch:
                watch.wait_for(0)
                for number in range(1, versions + 1):
                    trainer.step([rollouts(model.config.vocab_size)], PolicyGradient(), divisor=GROUP * TOKENS)
                    found.append(publish(publisher, model, number, watch, client))
    return found, float(np.median(watch.gaps))


def publish(publisher: Publisher, model: Transformer, number: int, watch: TokenWatch, client: RunClient) -> Arrival:
    """Publish a version and follow it to its first token."""
    started = time.monotonic()
    with torch.no_grad():
        publisher.publish_soon(number, published_views(model, torch.bfloat16))
    copied = time.monotonic()
    publisher.flush(USE_S)
    visible, used = time.monotonic(), watch.wait_for(number)
    status, version = sampler_status(client, number), publisher.history[-1].version
    copied_s, visible_s, used_s = (each - started for each in (copied, visible, used))
    fetch_s, apply_s, swap_s = (status[key] for key in ("fetch_s", "apply_s", "swap_s"))
    return Arrival(copied_s, visible_s, used_s, fetch_s, apply_s, swap_s, version.bytes, version.full)


def table_of(rows: dict[tuple[str, str], tuple[list[Arrival], float]]) -> Table:
    table = Table(title="milliseconds, median (maximum) over versions")
    columns = ("model, store", "deltas", "size", "trainer waits", "in the store", "fetch", "apply", "swap")
    for column in (*columns, "first token", "token each"):
        table.add_column(column, justify="right")
    for (model, store), (found, gap) in rows.items():

        def cell(key: str, found: list[Arrival] = found) -> str:
            values = 1000 * np.array([getattr(each, key) for each in found])
            return f"{np.median(values):,.0f} ({values.max():,.0f})"

        table.add_row(
            f"{model}, {store}",
            str(sum(not each.full for each in found)),
            f"{np.mean([each.size for each in found]) / 1e6:.3f} MB",
            *(cell(f"{key}_s") for key in ("copied", "visible", "fetch", "apply", "swap", "used")),
            f"{1000 * gap:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["nano", "smollm2-135m"], choices=["nano", *KNOWN_MODELS])
    parser.add_argument("--stores", nargs="+", default=["directory", "s3"], choices=["directory", "s3"])
    parser.add_argument("--versions", type=int, default=10, help="deltas; every 20th version is a full one")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], tuple[list[Arrival], float]] = {}
    loads: list[float] = []
    for model in given.models:
        for store in given.stores:
            with ExitStack() as stack:
                directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="etude-use-"))
                if store == "s3":
                    os.environ.update(stack.enter_context(s3_server()))
                url = f"s3://{BUCKET}/{model}" if store == "s3" else ""
                rows[model, store] = measure(Path(directory), model, url, given.versions)
            loads.append(os.getloadavg()[0])
    Console(width=150).print(table_of(rows))
    print(f"Learning rate {RATE:g}, {os.cpu_count()} cores, load of the machine {[round(each, 1) for each in loads]}.")
    if given.json:
        plain = {", ".join(key): [each.__dict__ for each in found] for key, (found, _) in rows.items()}
        given.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
