"""The agent harness, the same for training, evaluation and `etude agent`.

    async with open_session(SessionRequest("Fix the failing test."), client, pod) as (session, tools):
        trace = await session.run()

A client is a policy with its dialect (`TokenModelClient`) or a chat API (`ChatModelClient`). Names are imported on
first use, because the tool server inside a pod is part of this package and must not load torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.harness.atif import from_atif, to_atif
    from etude.harness.budget import Budget
    from etude.harness.model_client import ChatModelClient, ModelClient, TokenModelClient
    from etude.harness.profile import AgentProfile
    from etude.harness.prompt import SessionRequest
    from etude.harness.session import Session
    from etude.harness.session_factory import open_session
    from etude.harness.summary import SummarySettings
    from etude.harness.tool_set import ToolSet
    from etude.harness.tools.context import ToolContext
    from etude.harness.tools.tool import Tool, ToolError, ToolOutcome, tool
    from etude.harness.trace import Segment, Step, Trace
    from etude.harness.trace_store import load_trace, save_trace

_MODULES = {
    "AgentProfile": "etude.harness.profile",
    "Budget": "etude.harness.budget",
    "ChatModelClient": "etude.harness.model_client",
    "ModelClient": "etude.harness.model_client",
    "Segment": "etude.harness.trace",
    "Session": "etude.harness.session",
    "SessionRequest": "etude.harness.prompt",
    "Step": "etude.harness.trace",
    "SummarySettings": "etude.harness.summary",
    "TokenModelClient": "etude.harness.model_client",
    "Tool": "etude.harness.tools.tool",
    "ToolContext": "etude.harness.tools.context",
    "ToolError": "etude.harness.tools.tool",
    "ToolOutcome": "etude.harness.tools.tool",
    "ToolSet": "etude.harness.tool_set",
    "Trace": "etude.harness.trace",
    "from_atif": "etude.harness.atif",
    "load_trace": "etude.harness.trace_store",
    "open_session": "etude.harness.session_factory",
    "save_trace": "etude.harness.trace_store",
    "to_atif": "etude.harness.atif",
    "tool": "etude.harness.tools.tool",
}
__all__ = [
    "AgentProfile",
    "Budget",
    "ChatModelClient",
    "ModelClient",
    "Segment",
    "Session",
    "SessionRequest",
    "Step",
    "SummarySettings",
    "TokenModelClient",
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolOutcome",
    "ToolSet",
    "Trace",
    "from_atif",
    "load_trace",
    "open_session",
    "save_trace",
    "to_atif",
    "tool",
]
__getattr__ = lazy_exports(__name__, _MODULES)
