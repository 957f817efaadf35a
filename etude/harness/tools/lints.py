"""Linter errors of edited files, new ones marked; uses the pod's ruff, or uploads the host's."""

import asyncio
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.harness.tools.context import ToolContext, outcome_of
from etude.harness.tools.tool import Tool, ToolOutcome
from etude.pods.pod import PodFileError

LINT_S = 120.0

log = logging.getLogger("etude.harness")


async def _read_lints(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    result = await context.request("lints", arguments, LINT_S)
    if result.get("need") == "ruff":
        uploaded = await _upload_ruff(context)
        result = await context.request("lints", {**arguments, "without_ruff": not uploaded}, LINT_S)
    return outcome_of(result)


async def _upload_ruff(context: ToolContext) -> bool:
    """Upload the host's ruff to the pod; return False if there is none or the pod has no room."""
    beside_python = Path(sys.executable).parent / "ruff"
    found = str(beside_python) if beside_python.is_file() else shutil.which("ruff")
    if found is None:
        return False
    program = await asyncio.to_thread(Path(found).read_bytes)
    try:
        await context.server.pod.write(f"{context.server.state}/ruff", program, mode=0o755)
    except PodFileError as error:
        log.warning("pod %s has no room for ruff: %s", context.server.pod.id, error)
        return False
    return True


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
