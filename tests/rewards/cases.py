"""Hand-made verified trials: a task, tool calls with their results, and changes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.chat.messages import Message, ToolCall
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import Cost, Step, Trace
from etude.pods.workspace import FileChange, FileState
from etude.rewards import VerifiedTrial
from etude.tasks.task import MachineSpec, Task, TaskPhase
from etude.tasks.verifier_result import VerifierResult

TOOLS = ("read_file", "search_replace", "write", "run_terminal_cmd", "todo_write")
Did = tuple[str, Mapping[str, Any], ToolOutcome]


def did(
    name: str, text: str = "ok", error: Any = None, facts: Mapping[str, Any] | None = None, **arguments: Any
) -> Did:
    return name, arguments, ToolOutcome(text, error, facts or {})


def changed(path: str, before: str | None, after: str | None) -> FileChange:
    return FileChange(path, *(None if text is None else FileState.file(text.encode()) for text in (before, after)))


def case(
    *calls: Did,
    final: str = "Done.",
    changes: Sequence[FileChange] = (),
    rewards: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    result_facts: Mapping[str, Any] | None = None,
    cost: Cost | None = None,
    text: str = "Do it.",
) -> VerifiedTrial:
    task = Task(Path("t"), "org/t", text, MachineSpec(), TaskPhase(), TaskPhase(), TaskPhase(), metadata=metadata or {})
    steps = [
        Step("turn", Message("assistant", calls=(ToolCall(name, arguments, f"call_{n}"),)), 0, (0, 0), (outcome,))
        for n, (name, arguments, outcome) in enumerate(calls)
    ]
    steps.append(Step("turn", Message("assistant", final), 0, (0, 0)))
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    trace = Trace("s", "org/t", "chatml", "", tools, (), steps, "final", cost or Cost(), facts=facts or {})
    result = VerifierResult(
        rewards if rewards is not None else {"reward": 1.0}, tuple(changes), facts=result_facts or {}
    )
    return VerifiedTrial(task, trace, result)
