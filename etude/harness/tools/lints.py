"""Linter errors of edited files, new ones marked; uses the pod's ruff, or uploads the host's."""

import logging
from collections.abc import Mapping
from typing import Any

from etude.harness.tools.context import ToolContext
from etude.harness.tools.programs import lend_program
from etude.harness.tools.tool import Tool, ToolOutcome
from etude.harness.toolserver.client import outcome_of

LINT_S = 120.0

log = logging.getLogger("etude.harness")


async def _read_lints(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    result = await context.server.request("lints", arguments, LINT_S)
    if result.get("need") == "ruff":
        if problem := await lend_program(context, "ruff", "ruff"):
            log.warning("read_lints finds only syntax errors: %s", problem)
        result = await context.server.request("lints", {**arguments, "without_ruff": bool(problem)}, LINT_S)
    return outcome_of(result)


READ_LINTS = Tool(
    "read_lints",
    "Show linter errors of Python files. Those that were not there before this session's edits are marked as new.",
    {
        "type": "object",
        "properties": {
            "paths": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Files or directories to check. Default: the files edited in this session.",
            },
        },
        "required": [],
    },
    _read_lints,
    read_only=True,
)
