"""Score a verified trial: a weighted sum of named terms, or 0 if a gate finds cheating.

A term is a small function of task, trace and verifier result that returns a number and its evidence. Weights are not
part of a term: they are in the recipe, and can change during a run. To add a term, decorate a function with `@term`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.errors import InputError
from etude.harness.trace import Trace
from etude.tasks.task import Task
from etude.tasks.verifier_result import VerifierResult


@dataclass(frozen=True)
class VerifiedTrial:
    """The input of terms and gates."""

    task: Task
    trace: Trace
    verifier_result: VerifierResult


@dataclass(frozen=True)
class TermResult:
    """The value of a term and its evidence. Penalties are negative, and 0 if there is nothing to penalise."""

    value: float
    evidence: Mapping[str, Any] = field(default_factory=dict)  # JSON


@dataclass(frozen=True)
class Reward:
    """The total and its weighted parts. If a gate found cheating, the total is 0 and there are no parts."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)  # weighted: their sum is the total
    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hack: str = ""  # finding of a gate


Term = Callable[[VerifiedTrial], TermResult]
Gate = Callable[[VerifiedTrial], str]  # returns its finding, "" if there is none

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


def score(trial: VerifiedTrial, weights: Mapping[str, float]) -> Reward:
    """Return the reward of a trial. Terms of weight 0 are evaluated too, and kept as evidence."""
    register_builtin_terms()
    unknown = sorted(set(weights) - set(TERMS))
    if unknown:
        raise InputError(f"rewards: {unknown[0]} is not a term; known terms: {', '.join(sorted(TERMS))}")
    for name, check in GATES.items():
        if found := check(trial):
            return Reward(0.0, {}, {name: {"found": found}}, hack=f"{name}: {found}")
    results = {name: function(trial) for name, function in TERMS.items()}
    weighted = {name: weights.get(name, 0.0) * result.value for name, result in results.items()}
    # Evidence includes the unweighted value, so that monitors can watch a term before it has a weight.
    evidence = {name: {"value": result.value, **result.evidence} for name, result in results.items()}
    return Reward(
        sum(weighted.values()), {name: value for name, value in weighted.items() if weights.get(name)}, evidence
    )


def _register(registry: dict[str, Any], function: Any) -> None:
    name = function.__name__
    if name in registry:
        raise InputError(f"rewards: {name} is registered twice; rename one of the functions")
    registry[name] = function


def register_builtin_terms() -> None:
    """Import the modules with the built-in terms and gates; other modules register theirs when they are imported."""
    import etude.rewards.behaviour
    import etude.rewards.gates
    import etude.rewards.terms  # noqa: F401
