"""The harness: one agent for training, evaluation and use.

    async with open_session(Request("Fix the failing test."), speaker, pod) as (session, tools):
        trace = await session.run()

A speaker is a policy in its dialect (`TokenSpeaker`) or a chat API (`ChatSpeaker`). The names are imported when first
used: the program that runs inside a pod lives here too, and must not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.harness.atif import from_atif, to_atif
    from etude.harness.model_client import ChatSpeaker, TokenSpeaker
    from etude.harness.open_session import open_session
    from etude.harness.prompt import Request
    from etude.harness.session import Budget, Session
    from etude.harness.summary import Summaries
    from etude.harness.tool_set import ToolSet
    from etude.harness.trace import Trace
    from etude.harness.trace_store import load_trace, save_trace

_HOMES = {
    "Budget": "session",
    "ChatSpeaker": "model_client",
    "ToolSet": "tool_set",
    "Request": "prompt",
    "Session": "session",
    "Summaries": "summary",
    "TokenSpeaker": "model_client",
    "Trace": "trace",
    "from_atif": "atif",
    "load_trace": "trace_store",
    "open_session": "open_session",
    "save_trace": "trace_store",
    "to_atif": "atif",
}
__all__ = [
    "Budget",
    "ChatSpeaker",
    "Request",
    "Session",
    "Summaries",
    "TokenSpeaker",
    "ToolSet",
    "Trace",
    "from_atif",
    "load_trace",
    "open_session",
    "save_trace",
    "to_atif",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.harness' has no attribute {name!r}")
    return getattr(import_module(f"etude.harness.{_HOMES[name]}"), name)
