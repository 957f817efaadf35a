"""Sessions longer than the window: the model sums up its own work and goes on from that.

`self`: at a number of tokens the same model is asked, in the same stream of tokens (its cache is reused), for a
summary, and its answer is part of the chain that the final reward trains. `compaction` is the baseline to compare
with: a long, worded prompt over the written-out conversation, sampled apart and trained on by nobody. `off`: a full
window ends the session.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from etude.chat.messages import Answer, Message
from etude.errors import InputError
from etude.harness.trace import Step

SummaryMode = Literal["self", "compaction", "off"]

ASK = "Please summarize the conversation. You will continue the task from your summary alone. Do not call tools."
ASK_AGAIN = "That cannot be used as a summary: {why}. Please write the summary as a plain message."

COMPACT = """\
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


@dataclass(frozen=True)
class Summaries:
    """When and how a session sums up."""

    mode: SummaryMode = "self"
    trigger: int = 0  # tokens in the segment at which a summary is asked for; 0: when the window is nearly full
    reserve: int = 2048  # tokens kept free in the window for a summary
    attempts: int = 3  # answers that may be unusable before the session ends
    most: int = 0  # summaries in a session; 0: any number

    def __post_init__(self) -> None:
        if self.trigger < 0 or self.reserve < 1 or self.attempts < 1 or self.most < 0:
            raise InputError(f"summaries: {self}; expected trigger and most >= 0, reserve and attempts >= 1")

    def at(self, window: int) -> int:
        """The size of a segment at which it is time."""
        full = window - self.reserve
        return min(self.trigger, full) if self.trigger else full


def unusable(answer: Answer) -> str:
    """Why an answer is not a summary; "" when it is one."""
    if answer.calls:
        return "it calls tools"
    if not answer.closed:
        return "it was cut off before its end"
    return "" if answer.text.strip() else "it is empty"


def compaction_request(steps: Sequence[Step], most: int) -> Message:
    """The baseline's prompt over what was said since the last summary; `most` characters of it, its middle left out."""
    session = "\n\n".join(map(_written, steps))
    if len(session) > most:
        session = f"{session[: most // 2]}\n[left out]\n{session[len(session) - most // 2 :]}"
    return Message("user", COMPACT.replace("{session}", session))


def _written(step: Step) -> str:
    message = step.message
    parts = [f"[{message.role}]", message.content]
    for call, outcome in zip(message.calls, step.outcomes, strict=False):
        parts += [f"[call {call.name}] {call.raw}", f"[result] {outcome.text}"]
    return "\n".join(filter(None, parts))
