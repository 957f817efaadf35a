"""Sessions to be judged, made by hand: a task, what was called with what result, what changed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.chat.messages import Call, Message
from etude.harness.tools.tool import Outcome
from etude.harness.trace import Cost, Step, Trace
from etude.rewards import Graded
from etude.tasks.task import Machine, Phase, Task
from etude.tasks.verifier_result import FileChange, Grade

TOOLS = ("read_file", "search_replace", "write", "run_terminal_cmd", "todo_write")
Did = tuple[str, Mapping[str, Any], Outcome]


def did(
    name: str, text: str = "ok", error: Any = None, facts: Mapping[str, Any] | None = None, **arguments: Any
) -> Did:
    return name, arguments, Outcome(text, error, facts or {})


def changed(path: str, before: str | None, after: str | None) -> FileChange:
    return FileChange(path, *(None if text is None else text.encode() for text in (before, after)))


def case(
    *calls: Did,
    final: str = "Done.",
    changes: Sequence[FileChange] = (),
    rewards: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    grade_facts: Mapping[str, Any] | None = None,
    cost: Cost | None = None,
) -> Graded:
    task = Task(Path("t"), "org/t", "Do it.", Machine(), Phase(), Phase(), Phase(), metadata=metadata or {})
    steps = [
        Step("turn", Message("assistant", calls=(Call(name, arguments, f"call_{n}"),)), 0, (0, 0), (outcome,))
        for n, (name, arguments, outcome) in enumerate(calls)
    ]
    steps.append(Step("turn", Message("assistant", final), 0, (0, 0)))
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    trace = Trace("s", "org/t", "chatml", "", tools, (), steps, "final", cost or Cost(), facts=facts or {})
    grade = Grade(rewards if rewards is not None else {"reward": 1.0}, tuple(changes), facts=grade_facts or {})
    return Graded(task, trace, grade)
