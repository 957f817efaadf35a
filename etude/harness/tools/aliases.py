"""Tool aliases: the tool and argument names of other agents, as data.

Each set gives the name of a tool, the names of its arguments, and the arguments that are fixed and not shown. A tool
that is not in a set is not available under it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.harness.tools.tool import Tool


@dataclass(frozen=True)
class ToolAlias:
    """How one tool is shown to the model."""

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)  # our name -> shown name, where they differ
    fixed: Mapping[str, Any] = field(default_factory=dict)  # our name -> its value; not shown
    hidden: frozenset[str] = frozenset()  # our names that are not shown
    description: str = ""  # replaces the tool's own
    parameters: Mapping[str, Any] | None = None  # a schema that replaces the tool's own
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None  # arguments of that schema -> ours

    def schema(self, tool: Tool, name: str, brief: bool = False) -> dict[str, Any]:
        """Return the tool's schema. If `brief`: one sentence, and the required arguments without descriptions."""
        shown = {key: self.arguments.get(key, key) for key in tool.parameters["properties"]}
        parameters = self.parameters or {
            "type": "object",
            "properties": {
                shown[key]: {**value, **_fill_description(value, shown)}
                for key, value in tool.parameters["properties"].items()
                if key not in self.fixed and key not in self.hidden
            },
            "required": [shown[key] for key in tool.parameters["required"] if key not in self.fixed],
        }
        description = _fill_names(self.description or tool.description, shown)
        if brief:
            description = re.split(r"(?<=\.)\s", description)[0]
            parameters = _without_descriptions(_only_required(parameters))
        return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

    def to_tool_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert shown arguments to the tool's own."""
        if self.translate is not None:
            given = self.translate(given)
        own_names = {shown: key for key, shown in self.arguments.items()}
        return {**{own_names.get(key, key): value for key, value in given.items()}, **self.fixed}


def _fill_names(text: str, shown: Mapping[str, str]) -> str:
    """Replace argument names in braces with the shown names."""
    return re.sub(r"\{(\w+)\}", lambda found: shown.get(found.group(1), found.group(0)), text)


def _only_required(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only required properties. Calls may still use the others."""
    required = {key: value for key, value in parameters["properties"].items() if key in parameters["required"]}
    return {**parameters, "properties": required or parameters["properties"]}


def _without_descriptions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without descriptions."""
    found = {key: value for key, value in schema.items() if key != "description"}
    if "properties" in schema:
        found["properties"] = {key: _without_descriptions(value) for key, value in schema["properties"].items()}
    if "items" in schema:
        found["items"] = _without_descriptions(schema["items"])
    return found


def _fill_description(value: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, str]:
    return {"description": _fill_names(value["description"], shown)} if "description" in value else {}


def _number_todos(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to-dos without ids: their position becomes the id."""
    todos = [{"id": str(at), **todo} for at, todo in enumerate(given["todos"], 1)]
    return {"merge": False, "todos": [{key: todo[key] for key in ("id", "content", "status")} for todo in todos]}


_CLAUDE_TODOS = {
    "type": "object",
    "properties": {
        "todos": {
            "type": "array",
            "description": "The whole list, as it is now.",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string"},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    "activeForm": {"type": "string"},
                },
                "required": ["content", "status"],
            },
        },
    },
    "required": ["todos"],
}

CURSOR = {
    tool: ToolAlias(tool)
    for tool in (
        *("read_file", "search_replace", "write", "delete_file", "list_dir", "glob_file_search", "grep"),
        *("codebase_search", "run_terminal_cmd", "await", "kill", "read_lints", "todo_write"),
        *("web_search", "web_fetch"),
    )
}

CLAUDE_CODE = {
    "read_file": ToolAlias("Read", {"target_file": "file_path"}),
    "write": ToolAlias("Write", {"contents": "content"}),
    "search_replace": ToolAlias("Edit"),
    "run_terminal_cmd": ToolAlias(
        "Bash",
        {"block_until_ms": "timeout", "is_background": "run_in_background", "explanation": "description"},
    ),
    "await": ToolAlias("BashOutput", {"job_id": "bash_id", "pattern": "filter", "block_until_ms": "timeout"}),
    "kill": ToolAlias("KillShell", {"job_id": "shell_id"}),
    "glob_file_search": ToolAlias("Glob", {"glob_pattern": "pattern", "target_directory": "path"}),
    "grep": ToolAlias("Grep"),
    "list_dir": ToolAlias("LS", {"target_directory": "path", "ignore_globs": "ignore"}),
    "todo_write": ToolAlias(
        "TodoWrite",
        description="Keep a list of things to do in a task of several steps. Only one may be in_progress; mark each "
        "completed as soon as it is done.",
        parameters=_CLAUDE_TODOS,
        translate=_number_todos,
    ),
    "web_search": ToolAlias("WebSearch", {"search_term": "query"}, hidden=frozenset({"explanation"})),
    "web_fetch": ToolAlias("WebFetch"),
}

BASH = {
    "run_terminal_cmd": ToolAlias(
        "bash",
        fixed={"block_until_ms": 1_000_000_000},  # always wait to the end: this set has no tool to wait for a job
        hidden=frozenset({"is_background", "explanation"}),
        description="Run a command in bash. Directory, variables and functions last from one command to the next; "
        "there is no input. Of long output the beginning and the end are shown; all of it is in a log file.",
    ),
}

TOOL_ALIASES: Mapping[str, Mapping[str, ToolAlias]] = {"cursor": CURSOR, "claude-code": CLAUDE_CODE, "bash": BASH}
