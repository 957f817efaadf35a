"""Commands in the pod's shell; long ones become background jobs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etude.harness.tools.context import ToolContext
from etude.harness.tools.tool import ErrorClass, Tool, ToolOutcome

BLOCK_MS = 30_000
MAX_BLOCK_MS = 600_000  # that a call waits
TERMINATION_S = 5.0  # for a command to end after being signalled


async def _run_terminal_cmd(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    timeout_s = context.tool_set.command_timeout_s
    block_s = 0.0 if arguments.get("is_background") else arguments.get("block_until_ms", BLOCK_MS) / 1000
    block_s = min(block_s, timeout_s + TERMINATION_S)
    request = {"command": arguments["command"], "block_s": block_s, "timeout_s": timeout_s}
    return _classified(await context.server.call("run", request, block_s + TERMINATION_S))


async def _await(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    block_s = arguments.get("block_until_ms", BLOCK_MS) / 1000
    request = {"job_id": arguments["job_id"], "block_s": block_s, "pattern": arguments.get("pattern", "")}
    return _classified(await context.server.call("await", request, block_s + TERMINATION_S))


async def _kill(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    return await context.server.call("kill", {"job_id": arguments["job_id"]}, 2 * TERMINATION_S)


def _classified(outcome: ToolOutcome) -> ToolOutcome:
    """Set the error class: a failing command is a result; a timeout, or a command that could not run, is an error."""
    facts = outcome.facts
    error: ErrorClass | None = None
    if facts.get("timed_out"):
        error = "timeout"
    elif facts.get("lost") or facts.get("failed"):
        error = "environment"
    return replace(outcome, error=error)


def _block(what: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": MAX_BLOCK_MS, "description": f"{what} Default {BLOCK_MS}."}


RUN_TERMINAL_CMD = Tool(
    "run_terminal_cmd",
    "Run a command in bash. Directory, variables and functions last from one command to the next; there is no input. A "
    "command that is not over after {block_until_ms} goes on as a background job, whose number and log file are told. "
    "Of long output the beginning and the end are shown; all of it is in the log file.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command."},
            "block_until_ms": _block("How long to wait for it; 0 puts it in the background at once."),
            "is_background": {"type": "boolean", "description": "Put it in the background at once, as a server needs."},
            "explanation": {"type": "string", "description": "One sentence: why."},
        },
        "required": ["command"],
    },
    _run_terminal_cmd,
)

AWAIT = Tool(
    "await",
    "Wait for a background job: until it ends, prints what {pattern} matches, or the time is over. Gives what it "
    "printed since it was last looked at.",
    {
        "type": "object",
        "properties": {
            "job_id": {"type": "string", "description": "The number of the job."},
            "block_until_ms": _block("How long to wait; 0 only looks."),
            "pattern": {"type": "string", "description": "A regular expression for one line of its output."},
        },
        "required": ["job_id"],
    },
    _await,
    read_only=True,
)

KILL = Tool(
    "kill",
    "End a background job with all its processes.",
    {
        "type": "object",
        "properties": {"job_id": {"type": "string", "description": "The number of the job."}},
        "required": ["job_id"],
    },
    _kill,
)
