"""The tool library: schemas shown to the model, validation of arguments, and execution of calls in a pod.

A tool is a `Tool`; `open_tool_executor` opens the tools of one session. Names are imported on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.harness.tools.context import ToolContext as ToolContext
    from etude.harness.tools.executor import ToolExecutor as ToolExecutor
    from etude.harness.tools.executor import exposed_tools as exposed_tools
    from etude.harness.tools.executor import open_tool_executor as open_tool_executor
    from etude.harness.tools.tool import Tool as Tool
    from etude.harness.tools.tool import ToolError as ToolError
    from etude.harness.tools.tool import ToolOutcome as ToolOutcome

__getattr__ = lazy_exports(__name__)
