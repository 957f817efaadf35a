"""Read, write, delete and list files in the pod."""

from collections.abc import Mapping
from typing import Any

from etude.harness.tools.context import ToolContext, server_tool
from etude.harness.tools.tool import Tool, ToolOutcome


async def _read_file(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    outcome = await context.server.call("read_file", arguments)
    context.mark_seen(outcome)
    return outcome


async def _write(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    guard = {"only_new": context.tool_set.strict, "seen": sorted(context.seen)}
    outcome = await context.server.call("write", {**arguments, **guard})
    context.mark_seen(outcome)
    return outcome


READ_FILE = Tool(
    "read_file",
    "Read a text file. Each line is shown as LINE_NUMBER|CONTENT; the number and the bar are not part of the file. At "
    "most 2000 lines or 50 KB at once; a notice tells the {offset} to go on with.",
    {
        "type": "object",
        "properties": {
            "target_file": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "offset": {"type": "integer", "description": "First line to read; a negative number counts from the end."},
            "limit": {"type": "integer", "minimum": 1, "description": "How many lines to read."},
        },
        "required": ["target_file"],
    },
    _read_file,
    read_only=True,
)

WRITE = Tool(
    "write",
    "Write a whole file, making the directories above it. A file that exists is replaced: read it first, and prefer "
    "editing for changes.",
    {
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "contents": {"type": "string", "description": "All that the file is to contain."},
        },
        "required": ["file_path", "contents"],
    },
    _write,
)

DELETE_FILE = Tool(
    "delete_file",
    "Delete a file.",
    {
        "type": "object",
        "properties": {
            "target_file": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "explanation": {"type": "string", "description": "One sentence: why."},
        },
        "required": ["target_file"],
    },
    server_tool("delete_file"),
)

LIST_DIR = Tool(
    "list_dir",
    "List what is in a directory, without names that begin with a dot. Directories end with /.",
    {
        "type": "object",
        "properties": {
            "target_directory": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "ignore_globs": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Globs of names to leave out, such as *.pyc.",
            },
        },
        "required": ["target_directory"],
    },
    server_tool("list_dir"),
    read_only=True,
)
