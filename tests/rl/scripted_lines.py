"""A task that rewards three lines in order, and a scripted policy that writes them, in process or behind HTTP."""

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
from etude.harness.session import SessionSpec
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.inference.generate_protocol import completion_to_json
from etude.inference.policy import PolicyBase, Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.rollouts.rollout import PolicyBinding, RolloutOptions
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout

WINDOW = 20_000
OPTIONS = RolloutOptions(
    SessionSpec(
        ToolSet(tools=("read_file", "run_terminal_cmd"), short_system_prompt=True),
        Budget(turns=12, max_turn_tokens=500),
        SummarySettings(mode="off"),
    ),
    checkpoint_s=0,
)
CHECKPOINTING = replace(OPTIONS, checkpoint_s=0.001)
# Rewards three lines in order, so it detects a command that was run twice.
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
    """Return the number of turns that a prompt already has."""
    return chatml().tokenizer.decode(list(tokens)).count("<|im_start|>assistant") - 1


class LinesPolicy(PolicyBase):
    """Returns the line for the turn that its prompt is at, however often it is requested. `hook` is called before."""

    def __init__(
        self, lines: Sequence[Message] = LINES, hook: Callable[[int], Awaitable[None]] | None = None, version: int = 0
    ) -> None:
        self.lines, self.hook, self.weight_version = lines, hook, version
        self.requests: list[tuple[int, int]] = []  # turn and seed
        self.since: list[int | None] = []

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        turn = turn_of(tokens)
        self.requests.append((turn, sampling.seed))
        self.since.append(sampling.since)
        if self.hook is not None:
            await self.hook(turn)
        sample = scripted_completion(chatml().write(self.lines[turn]), sampling)
        return [replace(sample, versions=[self.weight_version] * len(sample.tokens))]

    async def load(self, weights: Weights, version: int) -> None:
        self.weight_version = version

    async def version(self) -> int:
        return self.weight_version

    async def close(self) -> None:
        pass


def bind(policy: PolicyBase) -> PolicyBinding:
    return PolicyBinding(policy, chatml(), WINDOW)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- behind HTTP


@contextmanager
def lines_sampler(
    layout: RunLayout, hook: Callable[[int], None] = lambda turn: None, name: str = "sampler-0"
) -> Iterator[list[int]]:
    """Serve the lines as a sampler; give the list of requested turns. `hook` is called before each completion."""
    requests: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.respond({"version": 3})

        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["content-length"])))
            turn = turn_of(given["tokens"])
            requests.append(turn)
            hook(turn)
            stop, max_tokens = frozenset(given["sampling"]["stop"]), given["sampling"]["max_tokens"]
            sample = scripted_completion(chatml().write(LINES[turn]), Sampling(stop=stop, max_tokens=max_tokens))
            sample = replace(sample, versions=[3] * len(sample.tokens))
            self.respond({"samples": [completion_to_json(sample, False)]})

        def respond(self, body: object) -> None:
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

    def report_status() -> None:
        url = f"http://127.0.0.1:{server.server_port}"
        client = RunClient.beside(layout)
        while True:
            client.report_status(name, kind="sampler", state="ready", url=url, version=3, model=str(layout.model))
            if ended.wait(1.0):
                client.close()
                return

    threads = [threading.Thread(target=work, daemon=True) for work in (server.serve_forever, report_status)]
    for thread in threads:
        thread.start()
    try:
        yield requests
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()
