"""`etude agent --print`: one request without questions, for scripts. The final message goes to standard output."""

import asyncio
import json
import signal
from dataclasses import asdict
from typing import Any

from etude.agent.changes import format_patch
from etude.agent.conversation import LoadedSession, open_conversation
from etude.agent.options import AgentOptions
from etude.agent.screen import Screen
from etude.harness.trace import Trace
from etude.system.terminal import escape_control

INTERRUPTED = 130  # exit code


async def run_print_mode(
    options: AgentOptions, screen: Screen, request: str, loaded: LoadedSession | None, *, apply: bool, as_json: bool
) -> int:
    """Run one request and print the result; return exit code 0 for a final message with no change refused."""
    async with open_conversation(options, screen, loaded=loaded) as conversation:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, conversation.interrupt)
        try:
            trace = await conversation.ask(request)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        assert conversation.saved_at is not None
        changes = list(conversation.changes)
        text = format_patch(changes)
        refused: dict[str, str] = {}
        if apply and changes and trace.ending == "final":
            result = await conversation.apply(changes)
            refused = {change.path: why for change, why in result.refused}
            screen.note(f"applied {len(result.applied)} of {len(changes)}")
            for path, why in refused.items():
                screen.error(f"not applied: {path}: {why}")
        elif changes:
            screen.note(f"{len(changes)} changes not applied: {conversation.saved_at / 'changes.patch'}")
        if as_json:
            facts = {
                "directory": str(options.directory),
                "patch": str(conversation.saved_at / "changes.patch") if conversation.changes else None,
                "applied": sorted(
                    {change.path for change in changes} - {change.path for change in conversation.changes}
                ),
                "refused": refused,
            }
            print(json.dumps(session_report(trace, text) | facts))
        else:
            print(escape_control(trace.final))
    if trace.ending == "interrupted":
        return INTERRUPTED
    return 0 if trace.ending == "final" and not refused else 1


def session_report(trace: Trace, diff: str) -> dict[str, Any]:
    """Return the JSON object that describes a session."""
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
