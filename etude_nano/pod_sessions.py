"""Demonstrations run in the real harness, in real pods, and the training data that they give.

A demonstration is a trace like any other: the scripted turns are written in the dialect's own tokens, and the tool
results come from the pod. It gives a row for SFT (messages and tools) and a token-exact loss mask: the tokens of the
scripted turns, without those of mistakes.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.chat.dialects.dialect import Dialect
from etude.chat.tokenizer import CHAT_TEMPLATE
from etude.errors import EtudeError
from etude.harness.budget import Budget
from etude.harness.chat_rows import chat_row
from etude.harness.model_client import TokenModelClient
from etude.harness.prompt import system_message
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.session import SessionSpec
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import exposed_tools
from etude.harness.trace import Trace
from etude.inference.sampling import Sampling
from etude.pods.fleet import Fleet
from etude.tasks.environment import open_environment
from etude.tasks.session_agent import open_task_session
from etude.tasks.task import Task
from etude.tasks.verifier import verify_environment
from etude.tasks.verifier_result import VerifierResult
from etude_nano.demonstrator import NANO_TOOL_SET, DemonstratorStyle, ScriptedTurn, demonstration_turns, read_files
from etude_nano.source import nano_task
from etude_nano.task_writer import WORKSPACE

WINDOW = 2048
# Fixed texts of tool results and of the chat template.
TOOL_RESULTS = (
    "Edited cart.py at line 3.\n[exit code 0]\n[exit code 1]\n1|def\n10|    return",
    'Traceback (most recent call last):\n  File "/work/check.py", line 4, in <module>\nAssertionError: got',
    "old_string was not found in cart.py.\nThe nearest text is:\n3|The first difference is at line 3; it has there:",
    CHAT_TEMPLATE,
)
BUDGET = Budget(turns=16, max_turn_tokens=400)
NO_SUMMARIES = SummarySettings(mode="off")


@dataclass(frozen=True)
class Demonstration:
    """One scripted session. `deviation` says where it left its script; such a session is not trained on."""

    task: str
    metadata: Mapping[str, Any]  # of the task
    trace: Trace
    loss_mask: npt.NDArray[np.bool_]  # for each token of the trace's only segment
    verifier_result: VerifierResult | None
    deviation: str = ""

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        return self.trace.segments[0].tokens

    def row(self) -> dict[str, Any]:
        """Return messages and tools as `etude.data.conversations` reads them; a masked turn has weight 0."""
        return chat_row(self.trace.steps, self.trace.tools, lambda step: not self.loss_mask[slice(*step.span)].any())


async def run_demonstrations(
    tasks: Iterable[Task],
    dialect: Dialect,
    fleet: Fleet,
    *,
    tool_set: ToolSet = NANO_TOOL_SET,
    style: DemonstratorStyle | None = None,
    seed: int = 0,
    concurrency: int = 8,
    verify: bool = True,
) -> AsyncIterator[Demonstration]:
    """Run a demonstration of every task, `concurrency` at a time; yield them in the order of the tasks."""
    semaphore = asyncio.Semaphore(concurrency)

    async def run(task: Task) -> Demonstration:
        async with semaphore:
            return await run_demonstration(task, dialect, fleet, tool_set, style, seed, verify=verify)

    running: list[asyncio.Task[Demonstration]] = []
    try:
        for task in tasks:
            running.append(asyncio.create_task(run(task)))
            if len(running) >= 2 * concurrency:
                yield await running.pop(0)
        while running:
            yield await running.pop(0)
    finally:
        for left in running:
            left.cancel()
        for left in running:
            with contextlib.suppress(asyncio.CancelledError, EtudeError):
                await left


async def run_demonstration(
    task: Task,
    dialect: Dialect,
    fleet: Fleet,
    tool_set: ToolSet = NANO_TOOL_SET,
    style: DemonstratorStyle | None = None,
    seed: int = 0,
    *,
    verify: bool = True,
) -> Demonstration:
    """Run one demonstration in a pod and verify it like any other session."""
    turns = demonstration_turns(read_files(task.directory), seed, style)
    async with open_environment(fleet, task) as environment:
        spec = SessionSpec(tool_set, BUDGET, NO_SUMMARIES, id=f"{task.name}-expert-{seed}")
        async with open_task_session(environment, None, scripted_client(dialect, turns), spec) as (session, _):
            trace = await session.run()
        if verify:
            await environment.write_final_message(trace.final)
        result = await verify_environment(environment) if verify else None
    deviation = find_deviation(turns, trace)
    if not deviation and result is not None and result.score != 1.0:
        deviation = f"the verifier scored it {result.score:g}: {result.log.strip()[-200:]}"
    return Demonstration(task.name, task.metadata, trace, demonstration_loss_mask(turns, trace), result, deviation)


def scripted_client(dialect: Dialect, turns: Sequence[ScriptedTurn]) -> TokenModelClient:
    """Return a model client that answers with the scripted turns, in the dialect's own tokens."""
    script = ScriptedPolicy(dialect, [turn.message for turn in turns])
    return TokenModelClient(script, dialect, Sampling(), window=WINDOW, model="expert")


def vocabulary_texts(count: int = 2000, tool_set: ToolSet = NANO_TOOL_SET) -> Iterator[str]:
    """Yield texts to train a tokenizer on, with about the content of sessions on training tasks."""
    prompt = [json.dumps(shown.schema) for shown in exposed_tools(tool_set).values()]
    prompt += [system_message(tool_set, WORKSPACE), *TOOL_RESULTS]
    for seed in range(count):
        files = nano_task(seed)
        yield from prompt
        yield from (text for path, text in files.items() if path.startswith(("instruction", "environment/repo/")))
        for turn in demonstration_turns(files):
            yield turn.message.thinking
            yield turn.message.content
            yield from (json.dumps({"name": call.name, "arguments": call.arguments}) for call in turn.message.calls)


def find_deviation(turns: Sequence[ScriptedTurn], trace: Trace) -> str:
    """Return where a session left its script; an empty string if it did not."""
    if trace.ending != "final" or len(trace.segments) != 1:
        return f"it ended with {trace.ending} after {len(trace.segments)} segments"
    steps = [step for step in trace.steps if step.kind == "turn"]
    for number, (turn, step) in enumerate(zip(turns, steps, strict=True), 1):
        failed = next((outcome for outcome in step.outcomes if outcome.error), None)
        if failed is not None and not turn.mistake:
            return f"turn {number} failed ({failed.error}): {failed.text[:200]}"
        codes = [outcome.facts.get("exit_code") for outcome in step.outcomes]
        if turn.exit_code is not None and codes[0] != turn.exit_code:
            output = step.outcomes[0].text[-200:]
            return f"turn {number}: its command ended with {codes[0]}, not {turn.exit_code}: {output}"
    return ""


def demonstration_loss_mask(turns: Sequence[ScriptedTurn], trace: Trace) -> npt.NDArray[np.bool_]:
    """Return the mask of the tokens of scripted turns, without those of mistakes."""
    mask = trace.segments[0].sampled.copy()
    steps = [step for step in trace.steps if step.kind == "turn"]
    for turn, step in zip(turns, steps, strict=False):
        if turn.mistake:
            mask[slice(*step.span)] = False
    return mask
