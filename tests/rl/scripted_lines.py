"""Rollouts by heart, for tests: a task that pays for three lines in order, and who writes them: here, or by HTTP."""

import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from session_helpers import call, chatml, says

from etude.chat.messages import Message
from etude.harness.budget import Budget
from etude.harness.scripted_policy import scripted_completion
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.inference.generate_protocol import completion_to_json
from etude.inference.policy import PolicyBase, Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.rollouts.rollout import PolicyBinding, RolloutOptions
from etude.runs.layout import RunLayout
from etude.runs.service_status import write_status

WINDOW = 20_000
SETTINGS = RolloutOptions(
    environment=ToolSet(tools=("read_file", "run_terminal_cmd"), short_system_prompt=True),
    budget=Budget(turns=12, max_turn_tokens=500),
    summaries=SummarySettings(mode="off"),
)
OFTEN = replace(SETTINGS, checkpoint_s=0.001)
# Pays for three lines in order: a command that was run twice is seen.
TEST = (
    '#!/bin/sh\n[ "$(cat /work/log.txt)" = "$(printf \'one\\ntwo\\nthree\')" ] && r=1 || r=0\n'
    "echo $r > /logs/verifier/reward.txt\n"
)
TASK = {
    "task.toml": 'schema_version = "1.4"\n[task]\nname = "etude/lines"\n[metadata]\ncategory = "feature"\n',
    "instruction.md": "Write three lines.",
    "environment/Dockerfile": "FROM host\nWORKDIR /work\nCOPY repo/ .\n",
    "environment/repo/README.md": "Lines.\n",
    "tests/test.sh": TEST,
}


def writes(word: str) -> Message:
    return says("", call("run_terminal_cmd", command=f"echo {word} >> log.txt"))


LINES = (
    writes("one"),
    writes("two"),
    writes("three"),
    says("", call("read_file", target_file="log.txt")),
    says("Done."),
)


def turn_of(tokens: Sequence[int]) -> int:
    """How many answers a prompt has already."""
    return chatml().tokenizer.decode(list(tokens)).count("<|im_start|>assistant") - 1


class Actor(PolicyBase):
    """Says the line that its prompt is at, whoever asks and however often; `hook` hears of every answer before."""

    def __init__(
        self, lines: Sequence[Message] = LINES, hook: Callable[[int], Awaitable[None]] | None = None, version: int = 0
    ) -> None:
        self.lines, self.hook, self.at = lines, hook, version
        self.asked: list[tuple[int, int]] = []  # turn and seed
        self.since: list[int | None] = []

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        turn = turn_of(tokens)
        self.asked.append((turn, sampling.seed))
        self.since.append(sampling.since)
        if self.hook is not None:
            await self.hook(turn)
        sample = scripted_completion(chatml().write(self.lines[turn]), sampling)
        return [replace(sample, versions=[self.at] * len(sample.tokens))]

    async def load(self, weights: Weights, version: int) -> None:
        self.at = version

    async def version(self) -> int:
        return self.at

    async def close(self) -> None:
        pass


def voice(policy: PolicyBase) -> PolicyBinding:
    return PolicyBinding(policy, chatml(), WINDOW)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- by HTTP


@contextmanager
def stage(
    place: RunLayout, hook: Callable[[int], None] = lambda turn: None, name: str = "sampler-0"
) -> Iterator[list[int]]:
    """A server that says the lines, as a sampler does; the turns it was asked for. `hook` hears of them before."""
    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({"version": 3})

        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["content-length"])))
            turn = turn_of(given["tokens"])
            asked.append(turn)
            hook(turn)
            stop, most = frozenset(given["sampling"]["stop"]), given["sampling"]["max_tokens"]
            sample = scripted_completion(chatml().write(LINES[turn]), Sampling(stop=stop, max_tokens=most))
            sample = replace(sample, versions=[3] * len(sample.tokens))
            self.answer({"samples": [completion_to_json(sample, False)]})

        def answer(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    ended = threading.Event()

    def tell() -> None:
        url = f"http://127.0.0.1:{server.server_port}"
        while True:
            write_status(place, name, kind="sampler", state="ready", url=url, version=3, model=str(place.model))
            if ended.wait(1.0):
                return

    threads = [threading.Thread(target=work, daemon=True) for work in (server.serve_forever, tell)]
    for thread in threads:
        thread.start()
    try:
        yield asked
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()
