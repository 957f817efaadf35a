"""`etude agent --print`: one request, no questions, for scripts. The final message goes to standard output."""

import asyncio
import json
import signal
from dataclasses import asdict
from typing import Any

from etude.agent.conversation import Earlier, open_work
from etude.agent.diff import patch
from etude.agent.options import Options
from etude.agent.screen import Screen, visible
from etude.harness.trace import Trace

INTERRUPTED = 130


async def run_once(
    options: Options, screen: Screen, request: str, earlier: Earlier | None, *, apply: bool, as_json: bool
) -> int:
    """Work on one request and print what came of it; the exit code is 0 for a final message and nothing refused."""
    async with open_work(options, screen, earlier=earlier) as work:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, work.interrupt)
        try:
            trace = await work.ask(request)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        assert work.place is not None
        changes = list(work.changes)
        text = patch(changes, options.directory)
        refused: dict[str, str] = {}
        if apply and changes and trace.ending == "final":
            applied = await work.apply(changes)
            refused = {change.path: why for change, why in applied.refused}
            screen.note(f"applied {len(applied.done)} of {len(changes)}")
            for path, why in refused.items():
                screen.error(f"not applied: {path}: {why}")
        elif changes:
            screen.note(f"{len(changes)} not applied: {work.place / 'changes.patch'}")
        if as_json:
            facts = {
                "directory": str(options.directory),
                "patch": str(work.place / "changes.patch") if work.changes else None,
                "applied": sorted({change.path for change in changes} - {change.path for change in work.changes}),
                "refused": refused,
            }
            print(json.dumps(report(trace, text) | facts))
        else:
            print(visible(trace.final))
    if trace.ending == "interrupted":
        return INTERRUPTED
    return 0 if trace.ending == "final" and not refused else 1


def report(trace: Trace, diff: str) -> dict[str, Any]:
    """A session for programs."""
    return {
        "final": trace.final,
        "ending": trace.ending,
        "cost": asdict(trace.cost),
        "errors": dict(trace.errors),
        "diff": diff.encode("utf-8", "replace").decode(),
        "session": trace.id,
        "model": trace.model,
        "exact": trace.exact,
    }
