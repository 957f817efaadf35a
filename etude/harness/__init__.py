"""The agent harness, the same for training, evaluation and `etude agent`.

    async with open_session(SessionRequest("Fix the failing test."), client, pod) as (session, tools):
        trace = await session.run()

A client is a policy with its dialect (`TokenModelClient`) or a chat API (`ChatModelClient`). Names are imported on
first use, because the tool server inside a pod is part of this package and must not load torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.harness.atif import from_atif as from_atif
    from etude.harness.atif import to_atif as to_atif
    from etude.harness.budget import Budget as Budget
    from etude.harness.model_client import ChatModelClient as ChatModelClient
    from etude.harness.model_client import ModelClient as ModelClient
    from etude.harness.model_client import TokenModelClient as TokenModelClient
    from etude.harness.profile import AgentProfile as AgentProfile
    from etude.harness.prompt import SessionRequest as SessionRequest
    from etude.harness.session import Session as Session
    from etude.harness.session_factory import open_session as open_session
    from etude.harness.summary import SummarySettings as SummarySettings
    from etude.harness.tool_set import ToolSet as ToolSet
    from etude.harness.tools.context import ToolContext as ToolContext
    from etude.harness.tools.tool import Tool as Tool
    from etude.harness.tools.tool import ToolError as ToolError
    from etude.harness.tools.tool import ToolOutcome as ToolOutcome
    from etude.harness.tools.tool import tool as tool
    from etude.harness.trace import Segment as Segment
    from etude.harness.trace import Step as Step
    from etude.harness.trace import Trace as Trace
    from etude.harness.trace_store import load_trace as load_trace
    from etude.harness.trace_store import save_trace as save_trace

__getattr__ = lazy_exports(__name__)
