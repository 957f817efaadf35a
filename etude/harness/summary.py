"""Summaries for sessions longer than the window: the model summarizes its work and continues from the summary.

`self`: at a token threshold the same model is asked for a summary in the same segment (its KV cache is reused), and the
summary is trained like any other turn. `compaction` is the baseline: a long prompt over the transcript, sampled in a
separate segment that is not trained. `off`: a full window ends the session.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from etude.chat.messages import Message, ParsedTurn
from etude.config import Settings
from etude.harness.trace import Step

SummaryMode = Literal["self", "compaction", "off"]

SUMMARY_PROMPT = (
    "Please summarize the conversation. You will continue the task from your summary alone. Do not call tools."
)
SUMMARY_RETRY_PROMPT = "That cannot be used as a summary: {why}. Please write the summary as a plain message."

COMPACTION_PROMPT = """\
Your task is to write a detailed summary of the coding session below, so that another assistant, who sees nothing but \
your summary and the workspace, can continue it without loss. Think about every part of the session in order, then \
write all of these sections, with their headings:

1. Request and intent: everything the user asked for, explicitly and implicitly, in detail.
2. Constraints and preferences: rules the user or the repository set for the work.
3. Key concepts: technologies, patterns and conventions that matter here.
4. Files and code: each file that was read, created or changed, why it matters, and the important snippets in full.
5. Commands: those that were run, their results, and how to build and test.
6. Errors and fixes: every error met, its cause, how it was solved, and what was tried in vain.
7. Decisions: choices made, with the reasons.
8. State of the work: what is finished and verified, what is finished and not verified, what is in progress.
9. Pending work: what remains to be done, in order.
10. Next step: the very next action, with the exact place where work stopped.

Be precise: give file names, function names, commands and error messages verbatim. Do not call tools.

<session>
{session}
</session>"""


class SummarySettings(Settings):
    """When and how a session that outgrows the window is summarised."""

    renamed_keys: ClassVar[dict[str, str]] = {"most": "max_summaries", "attempts": "max_attempts"}

    mode: SummaryMode = Field(
        default="self", description="self-summaries, compaction, or off: the session ends when the window is full"
    )
    trigger: int = Field(default=0, ge=0, description="tokens of a segment that trigger a summary; 0: when nearly full")
    reserve: int = Field(default=2048, ge=1, description="tokens of the window kept free for a summary")
    max_attempts: int = Field(default=2, ge=1, description="unusable summaries after which the session ends")
    max_summaries: int = Field(default=0, ge=0, description="summaries of one session; 0: no limit")

    def at(self, window: int) -> int:
        """Return the segment size in tokens that triggers a summary."""
        full = window - self.reserve
        return min(self.trigger, full) if self.trigger else full


def why_unusable(turn: ParsedTurn) -> str:
    """Return why a turn cannot be used as a summary, "" if it can."""
    if turn.calls:
        return "it calls tools"
    if not turn.closed:
        return "it was cut off before its end"
    return "" if turn.text.strip() else "it is empty"


def compaction_request(steps: Sequence[Step], max_chars: int) -> Message:
    """Return the compaction prompt over these steps; the middle of a transcript over `max_chars` is left out."""
    session = "\n\n".join(map(_transcript, steps))
    if len(session) > max_chars:
        session = f"{session[: max_chars // 2]}\n[left out]\n{session[len(session) - max_chars // 2 :]}"
    return Message("user", COMPACTION_PROMPT.replace("{session}", session))


def _transcript(step: Step) -> str:
    message = step.message
    parts = [f"[{message.role}]", message.content]
    for call, outcome in zip(message.calls, step.outcomes, strict=False):
        parts += [f"[call {call.name}] {call.raw}", f"[result] {outcome.text}"]
    return "\n".join(filter(None, parts))
