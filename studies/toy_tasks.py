"""Tasks of a few tokens in the real harness. A note states the value of a thing; the only tool shows the next note.

Session, model client, summaries and trace are those of every rollout; the tool runs in this process, and nothing that a
model writes is executed. A policy first learns to look up facts in its context (`pretrain_recall`): that takes a small
model longest, and is not what is studied.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from etude.chat.messages import Message, Role, ToolCall, ToolSchema
from etude.data.packing import Batch
from etude.harness.budget import Budget
from etude.harness.model_client import TokenModelClient
from etude.harness.prompt import SessionRequest
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.session import Session, SessionSpec
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import Trace
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.kernels.loss import IGNORE
from etude.model.transformer import Transformer, initialize
from etude.train.objectives import next_token
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.toy_dialect import ToyDialect
from studies.toy_policy import toy_config

THINGS, VALUES = "abcdef", 10
UNKNOWN = "unknown"
ROLES: tuple[Role, Role] = ("tool", "user")
Integers = npt.NDArray[np.int64]
LOOK_TOOL: ToolSchema = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
LOOK_CALL = Message("assistant", calls=(ToolCall("look", {}, "call"),))


def note(thing: str, value: int | str) -> str:
    return f"{thing} is {value}"


NOTES = tuple(tuple(note(thing, value) for value in range(VALUES)) for thing in THINGS)


@dataclass(frozen=True)
class ToyTask:
    request: str
    notes: Sequence[str]  # in the order in which the tool shows them; the last one is repeated
    answer: str


@dataclass(frozen=True)
class ToySessionSettings:
    """The settings that all sessions of a study share."""

    budget: Budget
    summaries: SummarySettings = field(default_factory=lambda: SummarySettings(mode="off"))
    window: int = 256


class NoteTools:
    """The tool `look`, which shows the next note."""

    root, plan, pod_seconds = "", "", 0.0
    schemas: Sequence[ToolSchema] = (LOOK_TOOL,)

    def __init__(self, notes: Sequence[str]) -> None:
        self._notes, self._next = notes, 0

    def interrupt(self) -> None:
        """Do nothing: a call takes no time."""

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        return [self._look() if call.status == "ok" else ToolOutcome(call.problem, "unknown_tool") for call in calls]

    def _look(self) -> ToolOutcome:
        shown = self._notes[min(self._next, len(self._notes) - 1)]
        self._next += 1
        return ToolOutcome(shown)


def toy_task_dialect(*words: str) -> ToyDialect:
    """Return a dialect in which every note is one token, and so is each of `words`."""
    return ToyDialect(["look", UNKNOWN, *(f"Find {thing}" for thing in THINGS), *sum(NOTES, ()), *words])


# ------------------------------------------------------------------------------------------------- sessions


async def _run_session(
    task: ToyTask, policy: Policy, dialect: ToyDialect, settings: ToySessionSettings, seed: int
) -> Trace:
    session = Session(
        SessionRequest(task.request),
        TokenModelClient(policy, dialect, Sampling(seed=seed), window=settings.window),
        NoteTools(task.notes),
        SessionSpec(ToolSet(short_system_prompt=True), settings.budget, settings.summaries, id=str(seed)),
    )
    return await session.run()


def run_sessions(
    tasks: Sequence[ToyTask], policy: Policy, dialect: ToyDialect, settings: ToySessionSettings, first_seed: int
) -> list[Trace]:
    """Run one session per task, all at once, with consecutive seeds."""

    async def run_all() -> list[Trace]:
        sessions = (_run_session(task, policy, dialect, settings, first_seed + n) for n, task in enumerate(tasks))
        return await asyncio.gather(*sessions)

    return asyncio.run(run_all())


def run_demonstrations(
    tasks: Iterable[ToyTask],
    demonstrator: Callable[[ToyTask], Callable[[str], str]],
    dialect: ToyDialect,
    settings: ToySessionSettings,
) -> list[Trace]:
    """Run sessions of a scripted demonstrator: it maps the context to a message, or to "" for a call of `look`."""

    def scripted_policy(task: ToyTask) -> ScriptedPolicy:
        respond = demonstrator(task)

        def next_message(tokens: Sequence[int]) -> Message:
            text = respond(dialect.decode(tokens))
            return Message("assistant", text) if text else LOOK_CALL

        return ScriptedPolicy(dialect, next_message)

    async def run_all() -> list[Trace]:
        return [await _run_session(task, scripted_policy(task), dialect, settings, 0) for task in tasks]

    return asyncio.run(run_all())


# ------------------------------------------------------------------------------------------------- pretraining


def pretrain_recall(dialect: ToyDialect, seed: int, steps: int) -> Transformer:
    """Train a new model on one skill: given some notes and a request for a thing, to repeat the note about it."""
    trainer = Trainer(initialize(toy_config(len(dialect)), seed), AdamSettings(3e-3, weight_decay=0.0))
    rng = np.random.default_rng(seed)
    for step in range(steps):
        trainer.step([_recall_batch(dialect, rng, 64)], next_token, min(1.0, (step + 1) / 10))
    return trainer.model


def _recall_batch(dialect: ToyDialect, rng: np.random.Generator, rows: int) -> Batch:
    """Return rows of all notes in random order as tool messages, then requests as user messages with their answers."""
    tool, user = (dialect.render([Message(role)])[0] for role in ROLES)
    notes = np.array([[dialect.encode(text)[0] for text in of_thing] for of_thing in NOTES])
    requests = np.array([dialect.encode(f"Find {thing}")[0] for thing in THINGS])
    things = len(THINGS)
    values = rng.integers(VALUES, size=(rows, things))
    order = np.argsort(rng.random((rows, things)), axis=1)
    requested = rng.integers(things, size=(rows, things))

    def notes_about(which: Integers) -> Integers:
        found: Integers = notes[which, np.take_along_axis(values, which, axis=1)]
        return found

    def interleave(*parts: Integers | int) -> Integers:
        columns = [np.full((rows, things), part) if isinstance(part, int) else part for part in parts]
        return np.stack(columns, axis=-1).reshape(rows, -1)

    shown = interleave(tool, notes_about(order), dialect.end)
    turns = interleave(user, requests[requested], dialect.end, dialect.assistant, notes_about(requested), dialect.end)
    tokens = torch.from_numpy(np.concatenate((shown, turns), axis=1))
    targets = torch.full_like(tokens, IGNORE)
    first = shown.shape[1] + 3  # the assistant token before the first answer
    for position in (first, first + 1):
        targets[:, position:-1:6] = tokens[:, position + 1 :: 6]
    return Batch(tokens, targets, tuple((tokens.shape[1],) for _ in tokens), (), int((targets != IGNORE).sum()))
