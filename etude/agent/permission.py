"""Permission to act on the user's own directory (`--direct`): reading in it needs no approval, everything else does.

Approval is needed for changes, commands, web access, and reading outside the directory. The user answers yes, no (or a
reason, which is passed to the model), always for this tool, or always for this command or file.
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from etude.chat.messages import ToolCall
from etude.harness.tools.tool import Tool
from etude.harness.toolserver.inside.paths import unquote_name

# Tools that act on the session only: its to-dos, and jobs that were approved when they were started.
SESSION_TOOLS = ("todo_write", "await", "kill")
WEB_TOOLS = ("web_search", "web_fetch")
PATH_ARGUMENTS = ("target_file", "file_path", "target_directory", "target_directories", "path", "paths", "glob_pattern")
CHOICES = "[y]es  [n]o  [a]lways for {tool}  [s]ame {what} always  (anything else: no, and the model is told)"

AskUser = Callable[[ToolCall, Tool, str], Awaitable[str]]  # shows the call and the choices; returns what the user typed


class Permissions:
    """The user's approvals in this session. An instance is the `approve` callback of the tool executor."""

    def __init__(self, root: str, ask: AskUser) -> None:
        self.root, self.ask = os.path.realpath(root), ask
        self.tools: set[str] = set()
        self.exact: set[tuple[str, str]] = set()

    async def __call__(self, call: ToolCall, tool: Tool) -> bool | str:
        subject = approval_subject(call)
        if self.is_always_allowed(call, tool) or tool.name in self.tools or (tool.name, subject) in self.exact:
            return True
        what = "command" if tool.name == "run_terminal_cmd" else "file" if first_path(call) else "call"
        answer = (await self.ask(call, tool, CHOICES.format(tool=call.name, what=what))).strip()
        match answer.lower():
            case "y" | "yes":
                return True
            case "a" | "always":
                self.tools.add(tool.name)
                return True
            case "s" | "same":
                self.exact.add((tool.name, subject))
                return True
            case "" | "n" | "no":
                return False
            case _:
                return answer

    def is_always_allowed(self, call: ToolCall, tool: Tool) -> bool:
        """Return whether a call needs no approval."""
        if tool.name in SESSION_TOOLS:
            return True
        return tool.read_only and tool.name not in WEB_TOOLS and all(map(self._inside, call_paths(call)))

    def _inside(self, path: str) -> bool:
        # Tools show unusual file names in quotes and accept them in quotes, so both readings are checked.
        readings = [path, unquote_name(path)] if len(path) > 1 and path[0] == path[-1] == '"' else [path]
        reals = [os.path.realpath(os.path.join(self.root, os.path.expanduser(each))) for each in readings]
        return all(real == self.root or real.startswith(self.root.rstrip(os.sep) + os.sep) for real in reals)


def call_paths(call: ToolCall) -> list[str]:
    """Return the paths among the arguments of a call."""
    given: Mapping[str, Any] = call.arguments or {}
    found: list[str] = []
    for name in PATH_ARGUMENTS:
        value = given.get(name)
        found += [value] if isinstance(value, str) else [str(item) for item in value] if isinstance(value, list) else []
    return found


def first_path(call: ToolCall) -> str:
    return next(iter(call_paths(call)), "")


def approval_subject(call: ToolCall) -> str:
    """Return what "[s]ame" compares for a call: its command, its file, or all its arguments."""
    given = call.arguments or {}
    command = given.get("command")
    if isinstance(command, str):
        return command
    return first_path(call) or json.dumps(given, sort_keys=True, default=str)
