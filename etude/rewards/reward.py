"""Score a verified trial: a weighted sum of named terms, or 0 if a gate finds cheating.

A term is a small function of task, trace and verifier result that returns a number and its evidence. A grader does the
same, but may wait: for a model that judges the change, or for a program in a pod. All terms are evaluated, and the
graders that have a weight. Weights are in the recipe, and can change during a run: `rescore` then gives the rollouts of
a group the same ones.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etude.config import Registry
from etude.errors import InputError, suggest
from etude.harness.trace import Trace
from etude.tasks.task import Task
from etude.tasks.verifier_result import VerifierResult


@dataclass(frozen=True)
class TermResult:
    """The value of a term and its evidence. Penalties are negative, and 0 if there is nothing to penalise."""

    value: float
    evidence: Mapping[str, Any] = field(default_factory=dict)  # JSON


@dataclass(frozen=True)
class VerifiedTrial:
    """The input of terms and gates."""

    task: Task
    trace: Trace
    verifier_result: VerifierResult
    grades: Mapping[str, TermResult] = field(default_factory=dict)  # of graders that have a weight


@dataclass(frozen=True)
class Reward:
    """The total and its weighted parts. If a gate found cheating, the total is 0 and there are no parts."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)  # weighted: their sum is the total
    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hack: str = ""  # finding of a gate


Term = Callable[[VerifiedTrial], TermResult]
Gate = Callable[[VerifiedTrial], str]  # returns its finding, "" if there is none
Grader = Callable[[VerifiedTrial], Awaitable[TermResult]]

TERMS = Registry[Term]("reward term", modules=("etude.rewards.terms", "etude.rewards.behaviour"))
GATES = Registry[Gate]("gate", modules=("etude.rewards.gates",))
GRADERS = Registry[Grader]("grader", modules=("etude.rewards.graders",))
term, gate, grader = TERMS.add, GATES.add, GRADERS.add  # decorators


async def grade(trial: VerifiedTrial, weights: Mapping[str, float]) -> VerifiedTrial:
    """Return the trial with the results of all graders that have a weight; they run concurrently."""
    names = [name for name in GRADERS if weights.get(name)]
    results = await asyncio.gather(*(GRADERS[name](trial) for name in names))
    return replace(trial, grades=dict(zip(names, results, strict=True)))


def score(trial: VerifiedTrial, weights: Mapping[str, float]) -> Reward:
    """Return the reward of a trial. Terms of weight 0 are evaluated too, and kept as evidence."""
    check_weights(weights, "rewards")
    for name, check in GATES.items():
        if found := check(trial):
            return Reward(0.0, {}, {name: {"found": found}}, hack=f"{name}: {found}")
    if missing := [name for name in weights if name in GRADERS and weights[name] and name not in trial.grades]:
        raise InputError(f"rewards: {missing[0]} is a grader; await grade(trial, weights) before score")
    results = {name: function(trial) for name, function in TERMS.items()} | dict(trial.grades)
    weighted = {name: weights.get(name, 0.0) * result.value for name, result in results.items()}
    # Evidence includes the unweighted value, so that monitors can watch a term before it has a weight.
    evidence = {name: {"value": result.value, **result.evidence} for name, result in results.items()}
    return Reward(
        sum(weighted.values()), {name: value for name, value in weighted.items() if weights.get(name)}, evidence
    )


def rescore(records: Sequence[Mapping[str, Any]], weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the records of a group's rollouts with total and parts under one set of weights, from their evidence.

    Workers score a rollout when it ends; weights that changed in between would turn into advantage. A grader that did
    not run on all rollouts of the group has no weight in it. Records without evidence are returned as they are.
    """
    clean = [record["evidence"] for record in records if not record.get("hack") and record.get("evidence")]
    if len(clean) + sum(bool(record.get("hack")) for record in records) < len(records):
        return [dict(record) for record in records]
    shared = {name: weight for name, weight in weights.items() if weight and all(name in each for each in clean)}
    scored = []
    for record in records:
        evidence = {} if record.get("hack") else record["evidence"]
        parts = {name: shared[name] * found["value"] for name, found in evidence.items() if name in shared}
        scored.append({**record, "total": sum(parts.values()), "parts": parts})
    return scored


def check_weights(weights: Mapping[str, Any], source: str) -> dict[str, float]:
    """Return the weights as floats; InputError if a term is unknown or a weight is not a finite number."""
    for name, value in weights.items():
        if name not in TERMS and name not in GRADERS:
            raise InputError(f"{source}: {name} is not a term; {suggest(name, sorted({*TERMS, *GRADERS}))}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{source}: {name} is {value!r}; expected a number")
    return {name: float(value) for name, value in weights.items()}
