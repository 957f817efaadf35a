"""Helpers for session tests: a small tokenizer with the chatml dialect, and tools that need no pod."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message, ToolCall, ToolSchema
from etude.chat.tokenizer import train_tokenizer
from etude.harness.model_client import TokenModelClient
from etude.harness.scripted_policy import ScriptedPolicy, ScriptLine
from etude.harness.tools.tool import ToolOutcome
from etude.inference.sampling import Sampling


@cache
def chatml() -> Dialect:
    """Return the chatml dialect with a tokenizer of 600 tokens, trained on the source of the harness."""
    texts = [path.read_text() for path in sorted(Path("etude/harness").glob("*.py"))]
    return dialect_for(train_tokenizer(texts, 600))


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name, arguments, "")


def says(text: str = "", *calls: ToolCall, thinking: str = "") -> Message:
    return Message("assistant", text, thinking, calls)


def scripted_client(
    lines: Sequence[ScriptLine] | Callable[[Sequence[int]], ScriptLine], window: int = 100_000
) -> TokenModelClient:
    dialect = chatml()
    return TokenModelClient(ScriptedPolicy(dialect, lines), dialect, Sampling(), window=window)


def schema(name: str) -> ToolSchema:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}


class FakeTools:
    """Tools in memory: `echo` returns its text, `sleep` sleeps, `fail` fails."""

    root = "/work"
    pod_seconds = 0.0
    plan = "- [ ] finish"

    def __init__(self) -> None:
        self.ran: list[ToolCall] = []
        self.schemas = [schema(name) for name in ("echo", "sleep", "fail")]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        self.stop = asyncio.Event()
        outcomes = []
        for call in calls:
            work, stop = asyncio.ensure_future(self._one(call)), asyncio.ensure_future(self.stop.wait())
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            outcomes.append(work.result() if work.done() else ToolOutcome("interrupted this call", "aborted"))
            work.cancel(), stop.cancel()
        return outcomes

    def interrupt(self) -> None:
        self.stop.set()

    async def _one(self, call: ToolCall) -> ToolOutcome:
        if call.status != "ok" or call.arguments is None:
            return ToolOutcome(f"error: {call.problem}", "malformed_call")
        self.ran.append(call)
        if call.name == "sleep":
            await asyncio.sleep(float(call.arguments["seconds"]))
        if call.name == "fail":
            return ToolOutcome("no", "environment")
        return ToolOutcome(str(call.arguments.get("text", "")) * int(call.arguments.get("times", 1)))
