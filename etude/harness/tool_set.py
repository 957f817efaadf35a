"""What differs between environments, as data: which tools there are, under which names, how strict, with what outside.

Training may be stricter than production and may take tools away; the session, the tools and the prompt are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Every tool of Cursor's agent that needs nothing from outside the machine.
ALL_TOOLS = (
    "read_file",
    "search_replace",
    "write",
    "delete_file",
    "list_dir",
    "glob_file_search",
    "grep",
    "codebase_search",
    "run_terminal_cmd",
    "await",
    "kill",
    "read_lints",
    "todo_write",
)


@dataclass(frozen=True)
class ToolSet:
    """Where a session runs, apart from its pod and its task."""

    tools: tuple[str, ...] = ALL_TOOLS
    naming: str = "cursor"  # the set of names the model sees: cursor, claude-code, bash
    renamed: Mapping[str, str] = field(default_factory=dict)  # tool -> name, over those of the naming
    brief: bool = False  # shortest system message and tool descriptions, for models with small windows
    strict: bool = False  # unknown arguments and loose types are errors, not ignored or converted
    web: bool = False  # web_search and web_fetch exist
    root: str = ""  # the workspace in the pod; "" is the pod's workdir
    command_timeout_s: float = 600.0  # after which a command is killed wherever it runs
    instructions: str = ""  # added to the system message, as a repository's AGENTS.md
