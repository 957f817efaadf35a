"""Errands: tasks of a few tokens in the real harness. A note says what a thing is; one tool shows the next note.

`Session`, `TokenSpeaker`, `Summaries` and the trace are those of every rollout; the tool runs in this process, where
nothing that a model writes is ever executed. A policy for them first learns to look things up in what it has read
(`taught_to_recall`): that is what takes a small model long, and has nothing to do with what is studied.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from etude.chat.messages import Call, Message, Role, ToolSchema
from etude.data.packing import Batch
from etude.harness.model_client import TokenSpeaker
from etude.harness.prompt import Request
from etude.harness.scripted_policy import Scripted
from etude.harness.session import Budget, Session
from etude.harness.summary import Summaries
from etude.harness.tool_set import ToolSet
from etude.harness.tools.tool import Outcome
from etude.harness.trace import Trace
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.kernels.loss import IGNORE
from etude.model.transformer import Transformer, initialize
from etude.train.objectives import next_token
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.toy_dialect import Shorthand
from studies.toy_policy import tiny_config

THINGS, VALUES = "abcdef", 10
UNKNOWN = "unknown"
ROLES: tuple[Role, Role] = ("tool", "user")
Integers = npt.NDArray[np.int64]
LOOK: ToolSchema = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
LOOKING = Message("assistant", calls=(Call("look", {}, "call"),))


def note(thing: str, value: int | str) -> str:
    return f"{thing} is {value}"


NOTES = tuple(tuple(note(thing, value) for value in range(VALUES)) for thing in THINGS)


@dataclass(frozen=True)
class Errand:
    request: str
    notes: Sequence[str]  # in the order they are shown; the last is shown for ever
    answer: str


@dataclass(frozen=True)
class Rules:
    """What every session of a study has in common."""

    budget: Budget
    summaries: Summaries = field(default_factory=lambda: Summaries(mode="off"))
    window: int = 256


class Drawer:
    """The one tool there is."""

    root, plan, pod_seconds = "", "", 0.0
    schemas: Sequence[ToolSchema] = (LOOK,)

    def __init__(self, notes: Sequence[str]) -> None:
        self._notes, self._at = notes, 0

    def interrupt(self) -> None:
        """Nothing here takes time."""

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        return [self._look() if call.status == "ok" else Outcome(call.problem, "unknown_tool") for call in calls]

    def _look(self) -> Outcome:
        shown = self._notes[min(self._at, len(self._notes) - 1)]
        self._at += 1
        return Outcome(shown)


def errand_dialect(*words: str) -> Shorthand:
    """A note is one token, and so are the words of a study."""
    return Shorthand(["look", UNKNOWN, *(f"Find {thing}" for thing in THINGS), *sum(NOTES, ()), *words])


# ------------------------------------------------------------------------------------------------- sessions


async def _play(errand: Errand, policy: Policy, dialect: Shorthand, rules: Rules, seed: int) -> Trace:
    session = Session(
        Request(errand.request),
        TokenSpeaker(policy, dialect, Sampling(seed=seed), window=rules.window),
        Drawer(errand.notes),
        environment=ToolSet(brief=True),
        budget=rules.budget,
        summaries=rules.summaries,
        id=str(seed),
    )
    return await session.run()


def play(errands: Sequence[Errand], policy: Policy, dialect: Shorthand, rules: Rules, first_seed: int) -> list[Trace]:
    """All at the same time, each with luck of its own."""

    async def all_of_them() -> list[Trace]:
        games = (_play(errand, policy, dialect, rules, first_seed + n) for n, errand in enumerate(errands))
        return await asyncio.gather(*games)

    return asyncio.run(all_of_them())


def demonstrate(
    errands: Iterable[Errand], say: Callable[[Errand], Callable[[str], str]], dialect: Shorthand, rules: Rules
) -> list[Trace]:
    """Sessions of an expert, who reads what a model would and says words, or nothing: then it looks."""

    def script(errand: Errand) -> Scripted:
        speak = say(errand)

        def line(tokens: Sequence[int]) -> Message:
            words = speak(dialect.decode(tokens))
            return Message("assistant", words) if words else LOOKING

        return Scripted(dialect, line)

    async def all_of_them() -> list[Trace]:
        return [await _play(errand, script(errand), dialect, rules, 0) for errand in errands]

    return asyncio.run(all_of_them())


# ------------------------------------------------------------------------------------------------- what comes before


def taught_to_recall(dialect: Shorthand, seed: int, steps: int) -> Transformer:
    """A fresh model that has learned one thing: asked for something after some notes, to say the note of it."""
    trainer = Trainer(initialize(tiny_config(len(dialect)), seed), AdamSettings(3e-3, weight_decay=0.0))
    luck = np.random.default_rng(seed)
    for step in range(steps):
        trainer.step([_lesson(dialect, luck, 64)], next_token, min(1.0, (step + 1) / 10))
    return trainer.model


def _lesson(dialect: Shorthand, luck: np.random.Generator, rows: int) -> Batch:
    """Rows of all notes in any order, as a tool says them, then questions after each other, as a user asks them."""
    tool, user = (dialect.render([Message(role)])[0] for role in ROLES)
    notes = np.array([[dialect.encode(text)[0] for text in of_thing] for of_thing in NOTES])
    questions = np.array([dialect.encode(f"Find {thing}")[0] for thing in THINGS])
    things = len(THINGS)
    values = luck.integers(VALUES, size=(rows, things))
    order = np.argsort(luck.random((rows, things)), axis=1)
    asked = luck.integers(things, size=(rows, things))

    def said(which: Integers) -> Integers:
        found: Integers = notes[which, np.take_along_axis(values, which, axis=1)]
        return found

    def beside(*parts: Integers | int) -> Integers:
        columns = [np.full((rows, things), part) if isinstance(part, int) else part for part in parts]
        return np.stack(columns, axis=-1).reshape(rows, -1)

    told = beside(tool, said(order), dialect.end)
    answered = beside(user, questions[asked], dialect.end, dialect.assistant, said(asked), dialect.end)
    tokens = torch.from_numpy(np.concatenate((told, answered), axis=1))
    targets = torch.full_like(tokens, IGNORE)
    first = told.shape[1] + 3  # the mark after which the first answer stands
    for place in (first, first + 1):
        targets[:, place:-1:6] = tokens[:, place + 1 :: 6]
    return Batch(tokens, targets, tuple((tokens.shape[1],) for _ in tokens), (), int((targets != IGNORE).sum()))
