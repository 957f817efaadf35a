"""Expert sessions played in the real harness, in real pods, and what a model is to learn from them.

A demonstration is a trace like any other: the expert's turns are written in the dialect's own tokens and the tools'
results are what the pod gave. From it come a row for supervised training (messages and tools) and, exact to the token,
which tokens to teach: those that the expert made, without its mistakes.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message, ToolSchema
from etude.chat.tokenizer import CHAT_TEMPLATE
from etude.errors import EtudeError
from etude.harness.model_client import TokenSpeaker
from etude.harness.open_session import open_session
from etude.harness.prompt import Request, system_message
from etude.harness.scripted_policy import Scripted
from etude.harness.session import Budget
from etude.harness.summary import Summaries
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import shown_tools
from etude.harness.trace import Trace
from etude.inference.sampling import Sampling
from etude.pods.fleet import Fleet
from etude.tasks.environment import open_ground
from etude.tasks.task import Task
from etude.tasks.verifier import grade_ground
from etude.tasks.verifier_result import Grade
from etude_nano.demonstrator import NANO_ENVIRONMENT, Manner, Turn, expert, read_files
from etude_nano.source import nano_task
from etude_nano.task_writer import WORKSPACE

WINDOW = 2048
# What tools and the chat template say around what they show.
RESULTS = (
    "Edited cart.py at line 3.\n[exit code 0]\n[exit code 1]\n1|def\n10|    return",
    'Traceback (most recent call last):\n  File "/work/check.py", line 4, in <module>\nAssertionError: got',
    "old_string was not found in cart.py.\nThe nearest text is:\n3|The first difference is at line 3; it has there:",
    CHAT_TEMPLATE,
)
BUDGET = Budget(turns=16, answer=400)
NO_SUMMARIES = Summaries(mode="off")


@dataclass(frozen=True)
class Demonstration:
    """One expert session. `odd` says why it did not go as the expert meant it to; such a one teaches nothing."""

    task: str
    facts: Mapping[str, Any]  # of the task: its metadata
    trace: Trace
    taught: npt.NDArray[np.bool_]  # for each token of the trace's only segment
    grade: Grade | None
    odd: str = ""

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        return self.trace.segments[0].tokens

    def row(self) -> dict[str, Any]:
        """Messages and tools, as `etude.data.conversations` reads them; a masked turn has a weight of 0."""
        return chat_row(self.trace, self.taught)


async def render_experts(
    tasks: Iterable[Task],
    dialect: Dialect,
    fleet: Fleet,
    *,
    environment: ToolSet = NANO_ENVIRONMENT,
    manner: Manner | None = None,
    seed: int = 0,
    at_once: int = 8,
    graded: bool = True,
) -> AsyncIterator[Demonstration]:
    """Play the expert in every task, several at a time; demonstrations come in the order of the tasks."""
    room = asyncio.Semaphore(at_once)

    async def play(task: Task) -> Demonstration:
        async with room:
            return await play_expert(task, dialect, fleet, environment, manner, seed, graded=graded)

    playing: list[asyncio.Task[Demonstration]] = []
    try:
        for task in tasks:
            playing.append(asyncio.create_task(play(task)))
            if len(playing) >= 2 * at_once:
                yield await playing.pop(0)
        while playing:
            yield await playing.pop(0)
    finally:
        for left in playing:
            left.cancel()
        for left in playing:
            with contextlib.suppress(asyncio.CancelledError, EtudeError):
                await left


async def play_expert(
    task: Task,
    dialect: Dialect,
    fleet: Fleet,
    environment: ToolSet = NANO_ENVIRONMENT,
    manner: Manner | None = None,
    seed: int = 0,
    *,
    graded: bool = True,
) -> Demonstration:
    """One session of the expert; graded like any other session."""
    turns = expert(read_files(task.directory), seed, manner)
    async with open_ground(fleet, task) as ground:
        opened = open_session(
            Request(task.instruction, id=task.name),
            expert_speaker(dialect, turns),
            ground.pod,
            environment=replace(environment, root=ground.workspace),
            budget=BUDGET,
            summaries=NO_SUMMARIES,
            id=f"{task.name}-expert-{seed}",
        )
        async with opened as (session, _):
            trace = await session.run()
        if graded:
            await ground.leave_message(trace.final)
        verdict = await grade_ground(ground) if graded else None
    odd = oddity(turns, trace)
    if not odd and verdict is not None and verdict.score != 1.0:
        odd = f"it was graded {verdict.score:g}: {verdict.log.strip()[-200:]}"
    return Demonstration(task.name, task.metadata, trace, taught_tokens(turns, trace), verdict, odd)


def expert_speaker(dialect: Dialect, turns: Sequence[Turn]) -> TokenSpeaker:
    """Who says the expert's turns, in the dialect's own tokens."""
    script = Scripted(dialect, [turn.message for turn in turns])
    return TokenSpeaker(script, dialect, Sampling(), window=WINDOW, model="expert")


def vocabulary_texts(count: int = 2000, environment: ToolSet = NANO_ENVIRONMENT) -> Iterator[str]:
    """Texts to train a tokenizer on: what there is to read and to write in training tasks, in about its proportions."""
    prompt = [json.dumps(shown.schema) for shown in shown_tools(environment).values()]
    prompt += [system_message(environment, WORKSPACE), *RESULTS]
    for seed in range(count):
        files = nano_task(seed)
        yield from prompt
        yield from (text for path, text in files.items() if path.startswith(("instruction", "environment/repo/")))
        for turn in expert(files):
            yield turn.message.thinking
            yield turn.message.content
            yield from (json.dumps({"name": call.name, "arguments": call.arguments}) for call in turn.message.calls)


def oddity(turns: Sequence[Turn], trace: Trace) -> str:
    """What in a session was not as the expert expected; nothing if all was."""
    if trace.ending != "final" or len(trace.segments) != 1:
        return f"it ended with {trace.ending} after {len(trace.segments)} segments"
    spoken = [step for step in trace.steps if step.kind == "turn"]
    for number, (turn, step) in enumerate(zip(turns, spoken, strict=True), 1):
        failed = next((outcome for outcome in step.outcomes if outcome.error), None)
        if failed is not None and not turn.mistake:
            return f"turn {number} failed ({failed.error}): {failed.text[:200]}"
        codes = [outcome.facts.get("exit_code") for outcome in step.outcomes]
        if turn.exits is not None and codes[0] != turn.exits:
            return f"turn {number}: its command ended with {codes[0]}, not {turn.exits}: {step.outcomes[0].text[-200:]}"
    return ""


def taught_tokens(turns: Sequence[Turn], trace: Trace) -> npt.NDArray[np.bool_]:
    """The tokens that the expert made, but for those of its mistakes."""
    taught = trace.segments[0].made.copy()
    spoken = [step for step in trace.steps if step.kind == "turn"]
    for turn, step in zip(turns, spoken, strict=False):
        if turn.mistake:
            taught[slice(*step.span)] = False
    return taught


def chat_row(trace: Trace, taught: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """A trace as one row of a chat file."""
    messages: list[dict[str, Any]] = []
    for step in trace.steps:
        messages.append(_chat_message(step.message))
        if step.kind == "turn" and not taught[slice(*step.span)].any():
            messages[-1]["weight"] = 0
        messages += [{"role": "tool", "content": result.content} for result in step.results()]
    return {"messages": messages, "tools": _plain(trace.tools)}


def _chat_message(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        said["reasoning_content"] = message.thinking
    if message.calls:
        functions = [{"name": call.name, "arguments": dict(call.arguments or {})} for call in message.calls]
        said["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return said


def _plain(tools: Sequence[ToolSchema]) -> list[Mapping[str, Any]]:
    plain: list[Mapping[str, Any]] = json.loads(json.dumps(list(tools)))
    return plain
