"""The prompt of a session, in the parts of the report: system message, recent files, past messages, the task.

The tool-call format is the dialect's part: it stands where the family's own template puts it. The same function serves
training, evaluation and a person's terminal, so their prompts are equal to the byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from etude.chat.messages import Message
from etude.harness.tool_set import ToolSet

SYSTEM = """\
You are a coding agent. You work in a workspace through tools until the user's request is done, then give a short \
final message without a tool call.

- Find out before you change: search and read the code that matters.
- Independent calls belong in one turn; they run side by side.
- Change what the request needs and nothing else, in the style of the code around it.
- Check your work: run the tests or the program. Say what you saw, not what you hope.
- When a question was asked, answer it and change nothing."""

# For models with small windows: the same in one line.
BRIEF = "You are a coding agent. Use the tools until the request is done, then answer without a tool call."


@dataclass(frozen=True)
class Request:
    """What a session is asked to do, and what the user had in view when asking."""

    text: str
    recent: tuple[str, ...] = ()  # files seen or changed lately, newest first
    past: tuple[Message, ...] = ()  # earlier requests and final messages of the same conversation
    id: str = ""  # of the task, for the record


@dataclass(frozen=True)
class Recap:
    """What a later segment starts from, besides the request."""

    summary: str
    plan: str  # to-dos, as they stand
    number: int  # summaries so far


def opening(request: Request, environment: ToolSet, root: str, recap: Recap | None = None) -> list[Message]:
    """The messages a segment begins with."""
    return [
        Message("system", system_message(environment, root)),
        *request.past,
        Message("user", "\n\n".join(filter(None, [_recent(request.recent), request.text, _recap(recap)]))),
    ]


def system_message(environment: ToolSet, root: str) -> str:
    if environment.brief:
        return "\n".join(filter(None, [BRIEF, environment.instructions]))
    parts = [SYSTEM, f"The workspace is {root}; relative paths start there.", environment.instructions]
    return "\n\n".join(filter(None, parts))


def _recent(files: Sequence[str]) -> str:
    return "\n".join(["<recent_files>", *files, "</recent_files>"]) if files else ""


def _recap(recap: Recap | None) -> str:
    if recap is None:
        return ""
    parts = [f'<summary number="{recap.number}">', recap.summary, "</summary>"]
    if recap.plan:
        parts += ["<plan>", recap.plan, "</plan>"]
    return "\n".join([*parts, "Work done before the summary is in the workspace. Go on from there."])
