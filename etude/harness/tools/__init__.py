"""The tool library: schemas shown to the model, validation of arguments, and execution of calls in a pod.

A tool is a `Tool`; `open_tool_executor` opens the tools of one session. Names are imported on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.harness.tools.context import ToolContext
    from etude.harness.tools.executor import ToolExecutor, exposed_tools, open_tool_executor
    from etude.harness.tools.tool import Tool, ToolError, ToolOutcome

_MODULES = {
    "Tool": "etude.harness.tools.tool",
    "ToolContext": "etude.harness.tools.context",
    "ToolError": "etude.harness.tools.tool",
    "ToolExecutor": "etude.harness.tools.executor",
    "ToolOutcome": "etude.harness.tools.tool",
    "exposed_tools": "etude.harness.tools.executor",
    "open_tool_executor": "etude.harness.tools.executor",
}
__all__ = [
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolExecutor",
    "ToolOutcome",
    "exposed_tools",
    "open_tool_executor",
]
__getattr__ = lazy_exports(__name__, _MODULES)
