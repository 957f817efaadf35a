"""What a session is paid: named terms, each a small function of task, trace and grade, each with its evidence.

A term says a number and why. Weights are not its business: they stand in the recipe and may change while a run goes on.
A gate that finds cheating takes everything away and says what it found. To add a term, write a function and `@term` it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.errors import InputError
from etude.harness.trace import Trace
from etude.tasks.task import Task
from etude.tasks.verifier_result import Grade


@dataclass(frozen=True)
class Graded:
    """All a term may look at."""

    task: Task
    trace: Trace
    grade: Grade


@dataclass(frozen=True)
class Part:
    """One term's word: a number, and what it saw. Penalties are negative, and zero when there is nothing to say."""

    value: float
    evidence: Mapping[str, Any] = field(default_factory=dict)  # JSON


@dataclass(frozen=True)
class Reward:
    """A total and its named parts, as weighed; of what cheated, the finding and nothing else."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)  # weighted: they add up to the total
    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hack: str = ""  # what was found; the total is 0 then


Term = Callable[[Graded], Part]
Gate = Callable[[Graded], str]

TERMS: dict[str, Term] = {}
GATES: dict[str, Gate] = {}


def term(function: Term) -> Term:
    """Register a term under its function's name."""
    _register(TERMS, function)
    return function


def gate(function: Gate) -> Gate:
    """Register a gate under its function's name."""
    _register(GATES, function)
    return function


def score(graded: Graded, weights: Mapping[str, float]) -> Reward:
    """The reward of a session under these weights; terms of weight 0 are looked at all the same, for the record."""
    known_terms()
    unknown = sorted(set(weights) - set(TERMS))
    if unknown:
        raise InputError(f"rewards: {unknown[0]} is no term; there are {', '.join(sorted(TERMS))}")
    for name, find in GATES.items():
        if found := find(graded):
            return Reward(0.0, {}, {name: {"found": found}}, hack=f"{name}: {found}")
    parts = {name: function(graded) for name, function in TERMS.items()}
    weighed = {name: weights.get(name, 0.0) * part.value for name, part in parts.items()}
    # the plain value beside what was seen: a term that is not paid for yet can still be watched
    evidence = {name: {"value": part.value, **part.evidence} for name, part in parts.items()}
    return Reward(
        sum(weighed.values()), {name: value for name, value in weighed.items() if weights.get(name)}, evidence
    )


def _register(where: dict[str, Any], function: Any) -> None:
    name = function.__name__
    if name in where:
        raise InputError(f"rewards: there are two of the name {name}")
    where[name] = function


def known_terms() -> None:
    """Register the terms of this room; others are registered by whoever imports theirs."""
    import etude.rewards.behaviour
    import etude.rewards.gates
    import etude.rewards.terms  # noqa: F401
