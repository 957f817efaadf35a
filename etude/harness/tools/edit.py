"""Exact replacement in a file."""

from collections.abc import Mapping
from typing import Any

from etude.harness.tools.context import ToolContext
from etude.harness.tools.tool import Tool, ToolOutcome


async def _search_replace(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    outcome = await context.server.call("search_replace", arguments)
    if arguments["old_string"] == "":
        context.mark_seen(outcome)  # a new file: the model knows its content
    return outcome


SEARCH_REPLACE = Tool(
    "search_replace",
    "Replace text in a file. {old_string} must be in the file exactly once, white space and indentation included, "
    "without line numbers; give enough lines around the change to make it unique, or set {replace_all}. With an empty "
    "{old_string} a new file is made of {new_string}.",
    {
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "old_string": {"type": "string", "description": "The text to replace."},
            "new_string": {"type": "string", "description": "The text to put in its place."},
            "replace_all": {"type": "boolean", "description": "Replace every occurrence. Default false."},
        },
        "required": ["file_path", "old_string", "new_string"],
    },
    _search_replace,
)
