"""The agent harness, the same for training, evaluation and `etude agent`.

    async with open_session(SessionRequest("Fix the failing test."), client, pod) as (session, tools):
        trace = await session.run()

A client is a policy with its dialect (`TokenModelClient`) or a chat API (`ChatModelClient`). Names are imported on
first use, because the tool server inside a pod is part of this package and must not load torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.harness.tool_set import ToolSet as ToolSet
    from etude.harness.tools.context import ToolContext as ToolContext
    from etude.harness.tools.tool import Tool as Tool
    from etude.harness.tools.tool import ToolError as ToolError
    from etude.harness.tools.tool import ToolOutcome as ToolOutcome
    from etude.harness.tools.tool import tool as tool

__getattr__ = lazy_exports(__name__)
