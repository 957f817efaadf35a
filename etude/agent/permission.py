"""Leave to act on a person's own directory: reading in it is free, everything else is asked for.

Asked for are changes, commands, the web, and reading outside the directory. A person says yes, no (or why not, which
the model is told), always for this tool, or always for this very command or file.
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from etude.chat.messages import Call
from etude.harness.tools.tool import Tool
from etude.harness.toolserver.inside.paths import unquoted

# These act on the session alone: its to-dos, and jobs that were allowed when they were started.
FREE = ("todo_write", "await", "kill")
WEB = ("web_search", "web_fetch")
PATHS = ("target_file", "file_path", "target_directory", "target_directories", "path", "paths", "glob_pattern")
CHOICES = "[y]es  [n]o  [a]lways for {tool}  [s]ame {what} always  (anything else: no, and the model is told)"

Ask = Callable[[Call, Tool, str], Awaitable[str]]  # shows the call and its choices; what the person typed


class Permissions:
    """What a person has allowed in this session. An instance is the toolbox's `approve`."""

    def __init__(self, root: str, ask: Ask) -> None:
        self.root, self.ask = os.path.realpath(root), ask
        self.tools: set[str] = set()
        self.exact: set[tuple[str, str]] = set()

    async def __call__(self, call: Call, tool: Tool) -> bool | str:
        about = subject(call)
        if self.free(call, tool) or tool.name in self.tools or (tool.name, about) in self.exact:
            return True
        what = "command" if tool.name == "run_terminal_cmd" else "file" if path_of(call) else "call"
        answer = (await self.ask(call, tool, CHOICES.format(tool=call.name, what=what))).strip()
        match answer.lower():
            case "y" | "yes":
                return True
            case "a" | "always":
                self.tools.add(tool.name)
                return True
            case "s" | "same":
                self.exact.add((tool.name, about))
                return True
            case "" | "n" | "no":
                return False
            case _:
                return answer

    def free(self, call: Call, tool: Tool) -> bool:
        """Whether nobody needs to be asked."""
        if tool.name in FREE:
            return True
        return tool.reads_only and tool.name not in WEB and all(map(self._inside, paths_of(call)))

    def _inside(self, path: str) -> bool:
        # A name in quotes is one that tools have shown so, and they take it back so.
        readings = [path, unquoted(path)] if len(path) > 1 and path[0] == path[-1] == '"' else [path]
        reals = [os.path.realpath(os.path.join(self.root, os.path.expanduser(each))) for each in readings]
        return all(real == self.root or real.startswith(self.root.rstrip(os.sep) + os.sep) for real in reals)


def paths_of(call: Call) -> list[str]:
    """The paths that a call names."""
    given: Mapping[str, Any] = call.arguments or {}
    found: list[str] = []
    for name in PATHS:
        value = given.get(name)
        found += [value] if isinstance(value, str) else [str(item) for item in value] if isinstance(value, list) else []
    return found


def path_of(call: Call) -> str:
    return next(iter(paths_of(call)), "")


def subject(call: Call) -> str:
    """What "the same" means for a call: its command, or its file, or all that it says."""
    given = call.arguments or {}
    command = given.get("command")
    if isinstance(command, str):
        return command
    return path_of(call) or json.dumps(given, sort_keys=True, default=str)
