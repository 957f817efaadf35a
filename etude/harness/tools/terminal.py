"""Commands in the pod's shell, and the jobs that they become when they take long."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etude.harness.tools.context import Workbench
from etude.harness.tools.tool import ErrorClass, Outcome, Tool

BLOCK_MS = 30_000
LONGEST_MS = 600_000  # that a call waits
ENDING_S = 5.0  # for a command that was told to end


async def _run_terminal_cmd(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    timeout_s = bench.environment.command_timeout_s
    block_s = 0.0 if given.get("is_background") else given.get("block_until_ms", BLOCK_MS) / 1000
    block_s = min(block_s, timeout_s + ENDING_S)
    asked = {"command": given["command"], "block_s": block_s, "timeout_s": timeout_s}
    return _classified(await bench.have_done("run", asked, block_s + ENDING_S))


async def _await(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    block_s = given.get("block_until_ms", BLOCK_MS) / 1000
    asked = {"job_id": given["job_id"], "block_s": block_s, "pattern": given.get("pattern", "")}
    return _classified(await bench.have_done("await", asked, block_s + ENDING_S))


async def _kill(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    return await bench.have_done("kill", {"job_id": given["job_id"]}, 2 * ENDING_S)


def _classified(outcome: Outcome) -> Outcome:
    """A command that fails is a result; one that ran out of time, or could not run, is an error."""
    facts = outcome.facts
    error: ErrorClass | None = None
    if facts.get("timed_out"):
        error = "timeout"
    elif facts.get("lost") or facts.get("failed"):
        error = "environment"
    return replace(outcome, error=error)


def _block(what: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": LONGEST_MS, "description": f"{what} Default {BLOCK_MS}."}


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
    reads_only=True,
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
