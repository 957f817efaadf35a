"""The prompt of a session: system message, past messages, recent files and the task, as in Composer 2's report.

The chat template of the dialect adds the tool-call format. Training, evaluation and `etude agent` use the same
functions, so their prompts are identical.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from etude.chat.messages import Message
from etude.harness.tool_set import ToolSet

SYSTEM_PROMPT = """\
You are a coding agent. You work in a workspace through tools until the user's request is done, then give a short \
final message without a tool call.

- Find out before you change: search and read the code that matters.
- Independent calls belong in one turn; they run side by side.
- Change what the request needs and nothing else, in the style of the code around it.
- Check your work: run the tests or the program. Say what you saw, not what you hope.
- When a question was asked, answer it and change nothing."""

# The same in one line, for models with small windows.
SHORT_SYSTEM_PROMPT = (
    "You are a coding agent. Use the tools until the request is done, then answer without a tool call."
)


@dataclass(frozen=True)
class SessionRequest:
    """The task of a session, with the user's recent files and earlier messages."""

    text: str
    recent: tuple[str, ...] = ()  # files recently viewed or changed, newest first
    past: tuple[Message, ...] = ()  # earlier requests and final messages of the same conversation
    id: str = ""  # of the task; stored in the trace


@dataclass(frozen=True)
class Recap:
    """The state that a segment after a summary opens with, in addition to the request."""

    summary: str
    plan: str  # current to-dos
    number: int  # summaries so far


def opening_messages(
    request: SessionRequest, tool_set: ToolSet, root: str, recap: Recap | None = None
) -> list[Message]:
    """Return the messages that open a segment."""
    return [
        Message("system", system_message(tool_set, root)),
        *request.past,
        Message(
            "user", "\n\n".join(filter(None, [_format_recent(request.recent), request.text, _format_recap(recap)]))
        ),
    ]


def system_message(tool_set: ToolSet, root: str) -> str:
    if tool_set.short_system_prompt:
        return "\n".join(filter(None, [SHORT_SYSTEM_PROMPT, tool_set.instructions]))
    parts = [SYSTEM_PROMPT, f"The workspace is {root}; relative paths start there.", tool_set.instructions]
    return "\n\n".join(filter(None, parts))


def _format_recent(files: Sequence[str]) -> str:
    return "\n".join(["<recent_files>", *files, "</recent_files>"]) if files else ""


def _format_recap(recap: Recap | None) -> str:
    if recap is None:
        return ""
    parts = [f'<summary number="{recap.number}">', recap.summary, "</summary>"]
    if recap.plan:
        parts += ["<plan>", recap.plan, "</plan>"]
    return "\n".join([*parts, "Work done before the summary is in the workspace. Go on from there."])
