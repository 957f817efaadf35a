"""The tool set of a session: which tools the model is shown, under which names, and how strictly calls are checked.

Training may use fewer tools and stricter checks than production; the session, tools and prompt are the same code.
"""

from typing import ClassVar, Literal

from pydantic import Field

from etude.config import Settings

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


class ToolSet(Settings):
    """The tools, prompt and limits shown to the model."""

    renamed_keys: ClassVar[dict[str, str]] = {"naming": "aliases", "brief": "short_system_prompt"}

    tools: tuple[str, ...] = Field(default=ALL_TOOLS, strict=False, description="names of the tools")
    aliases: Literal["cursor", "claude-code", "bash"] = Field(
        default="cursor", description="which agent's tool names the model sees"
    )
    renamed: dict[str, str] = Field(default={}, description="tool = name, overriding single names of the aliases")
    short_system_prompt: bool = Field(
        default=False, description="shortest system message and tool descriptions, for small windows"
    )
    strict: bool = Field(default=False, description="unknown arguments and loose types of calls are errors")
    web: bool = Field(default=False, description="offer web_search and web_fetch")
    root: str = Field(default="", description="workspace in the pod; empty: the pod's working directory")
    command_timeout_s: float = Field(default=600.0, gt=0, description="seconds after which a command is killed")
    instructions: str = Field(default="", description="text added to the system message, as a repository's AGENTS.md")
