"""What tests of sessions share: a small tokenizer in our own dialect, and tools that need no pod."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Call, Message, ToolSchema
from etude.chat.tokenizer import train_tokenizer
from etude.harness.model_client import TokenSpeaker
from etude.harness.scripted_policy import Line, Scripted
from etude.harness.tools.tool import Outcome
from etude.inference.sampling import Sampling


@cache
def chatml() -> Dialect:
    """Our dialect over 600 tokens learned from the source of the harness."""
    texts = [path.read_text() for path in sorted(Path("etude/harness").glob("*.py"))]
    return dialect_for(train_tokenizer(texts, 600))


def call(name: str, **arguments: object) -> Call:
    return Call(name, arguments, "")


def says(text: str = "", *calls: Call, thinking: str = "") -> Message:
    return Message("assistant", text, thinking, calls)


def speaker(lines: Sequence[Line] | Callable[[Sequence[int]], Line], window: int = 100_000) -> TokenSpeaker:
    dialect = chatml()
    return TokenSpeaker(Scripted(dialect, lines), dialect, Sampling(), window=window)


def schema(name: str) -> ToolSchema:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}


class Bench:
    """Tools in memory: `echo` gives its text back, `sleep` takes its time, `fail` fails."""

    root = "/work"
    pod_seconds = 0.0
    plan = "- [ ] finish"

    def __init__(self) -> None:
        self.ran: list[Call] = []
        self.schemas = [schema(name) for name in ("echo", "sleep", "fail")]

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        self.stop = asyncio.Event()
        outcomes = []
        for call in calls:
            work, stop = asyncio.ensure_future(self._one(call)), asyncio.ensure_future(self.stop.wait())
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            outcomes.append(work.result() if work.done() else Outcome("interrupted this call", "aborted"))
            work.cancel(), stop.cancel()
        return outcomes

    def interrupt(self) -> None:
        self.stop.set()

    async def _one(self, call: Call) -> Outcome:
        if call.status != "ok" or call.arguments is None:
            return Outcome(f"error: {call.problem}", "malformed_call")
        self.ran.append(call)
        if call.name == "sleep":
            await asyncio.sleep(float(call.arguments["seconds"]))
        if call.name == "fail":
            return Outcome("no", "environment")
        return Outcome(str(call.arguments.get("text", "")) * int(call.arguments.get("times", 1)))
