"""Problems in the files that were edited, the new ones marked; with the pod's own ruff, or ours lent to it."""

import asyncio
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.harness.tools.context import Workbench, outcome_of
from etude.harness.tools.tool import Outcome, Tool
from etude.pods.pod import PodFileError

CHECK_S = 120.0

log = logging.getLogger("etude.harness")


async def _read_lints(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    answer = await bench.ask("lints", given, CHECK_S)
    if answer.get("need") == "ruff":
        lent = await _lend_ruff(bench)
        answer = await bench.ask("lints", {**given, "without_ruff": not lent}, CHECK_S)
    return outcome_of(answer)


async def _lend_ruff(bench: Workbench) -> bool:
    """Put this environment's ruff into the pod; False, and the model is told, where there is none or no room for it."""
    beside = Path(sys.executable).parent / "ruff"
    found = str(beside) if beside.is_file() else shutil.which("ruff")
    if found is None:
        return False
    program = await asyncio.to_thread(Path(found).read_bytes)
    try:
        await bench.server.pod.write(f"{bench.server.state}/ruff", program, mode=0o755)
    except PodFileError as error:
        log.warning("pod %s has no room for ruff: %s", bench.server.pod.id, error)
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
    reads_only=True,
)
