"""The names under which a model knows the tools: sets of them, as data.

A set says for each tool its name, what its arguments are called, and what is not shown but fixed. A tool that is not in
a set does not exist under it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.harness.tools.tool import Tool


@dataclass(frozen=True)
class Alias:
    """How one tool is shown."""

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)  # ours -> shown, where they differ
    fixed: Mapping[str, Any] = field(default_factory=dict)  # ours -> its value; not shown
    hidden: frozenset[str] = frozenset()  # ours that are not shown
    description: str = ""  # in place of the tool's own
    parameters: Mapping[str, Any] | None = None  # a schema in place of the tool's own
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None  # from those to ours

    def schema(self, tool: Tool, name: str, brief: bool = False) -> dict[str, Any]:
        """What the model is told of the tool; when `brief`, one sentence, and of the arguments the needed, bare."""
        shown = {key: self.arguments.get(key, key) for key in tool.parameters["properties"]}
        parameters = self.parameters or {
            "type": "object",
            "properties": {
                shown[key]: {**value, **_described(value, shown)}
                for key, value in tool.parameters["properties"].items()
                if key not in self.fixed and key not in self.hidden
            },
            "required": [shown[key] for key in tool.parameters["required"] if key not in self.fixed],
        }
        description = _filled(self.description or tool.description, shown)
        if brief:
            description = re.split(r"(?<=\.)\s", description)[0]
            parameters = _bare(_needed(parameters))
        return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

    def ours(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by the tool's own names."""
        if self.translate is not None:
            given = self.translate(given)
        back = {shown: key for key, shown in self.arguments.items()}
        return {**{back.get(key, key): value for key, value in given.items()}, **self.fixed}


def _filled(text: str, shown: Mapping[str, str]) -> str:
    """Text with the names of arguments, which stand in braces, as they are shown."""
    return re.sub(r"\{(\w+)\}", lambda found: shown.get(found.group(1), found.group(0)), text)


def _needed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Only what a call cannot do without. The rest still works, for a model that knows of it."""
    needed = {key: value for key, value in parameters["properties"].items() if key in parameters["required"]}
    return {**parameters, "properties": needed or parameters["properties"]}


def _bare(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without the descriptions of what is in it."""
    found = {key: value for key, value in schema.items() if key != "description"}
    if "properties" in schema:
        found["properties"] = {key: _bare(value) for key, value in schema["properties"].items()}
    if "items" in schema:
        found["items"] = _bare(schema["items"])
    return found


def _described(value: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, str]:
    return {"description": _filled(value["description"], shown)} if "description" in value else {}


def _numbered(given: Mapping[str, Any]) -> dict[str, Any]:
    """To-dos that have no ids, by their place."""
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
    tool: Alias(tool)
    for tool in (
        *("read_file", "search_replace", "write", "delete_file", "list_dir", "glob_file_search", "grep"),
        *("codebase_search", "run_terminal_cmd", "await", "kill", "read_lints", "todo_write"),
        *("web_search", "web_fetch"),
    )
}

CLAUDE_CODE = {
    "read_file": Alias("Read", {"target_file": "file_path"}),
    "write": Alias("Write", {"contents": "content"}),
    "search_replace": Alias("Edit"),
    "run_terminal_cmd": Alias(
        "Bash",
        {"block_until_ms": "timeout", "is_background": "run_in_background", "explanation": "description"},
    ),
    "await": Alias("BashOutput", {"job_id": "bash_id", "pattern": "filter", "block_until_ms": "timeout"}),
    "kill": Alias("KillShell", {"job_id": "shell_id"}),
    "glob_file_search": Alias("Glob", {"glob_pattern": "pattern", "target_directory": "path"}),
    "grep": Alias("Grep"),
    "list_dir": Alias("LS", {"target_directory": "path", "ignore_globs": "ignore"}),
    "todo_write": Alias(
        "TodoWrite",
        description="Keep a list of things to do in a task of several steps. Only one may be in_progress; mark each "
        "completed as soon as it is done.",
        parameters=_CLAUDE_TODOS,
        translate=_numbered,
    ),
    "web_search": Alias("WebSearch", {"search_term": "query"}, hidden=frozenset({"explanation"})),
    "web_fetch": Alias("WebFetch"),
}

BASH = {
    "run_terminal_cmd": Alias(
        "bash",
        fixed={"block_until_ms": 1_000_000_000},  # there is nothing to wait for a job with: to its end
        hidden=frozenset({"is_background", "explanation"}),
        description="Run a command in bash. Directory, variables and functions last from one command to the next; "
        "there is no input. Of long output the beginning and the end are shown; all of it is in a log file.",
    ),
}

NAMINGS: Mapping[str, Mapping[str, Alias]] = {"cursor": CURSOR, "claude-code": CLAUDE_CODE, "bash": BASH}
