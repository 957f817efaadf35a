"""What the evaluations beside RL's training will be, for a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etude.recipe.recipe import Recipe


@dataclass(frozen=True)
class ValidationPlan:
    """The validations of the stage: how many, and tasks and sessions of each; and those of further sets, by name."""

    count: int = 0
    tasks: int = 0
    samples: int = 0
    benchmarks: Mapping[str, ValidationPlan] = field(default_factory=dict)

    @property
    def sessions(self) -> int:
        return self.tasks * self.samples

    @property
    def all_sessions(self) -> int:
        return self.count * self.sessions + sum(each.all_sessions for each in self.benchmarks.values())


def validation_plan(recipe: Recipe, sizes: Mapping[str, int]) -> ValidationPlan:
    """Return the validations of the recipe: before, after, and in between; `sizes` are those of the task sets."""
    evaluation, rl = recipe.evaluation, recipe.rl
    if evaluation is None or rl is None:
        return ValidationPlan()
    found = {}
    for name, each in evaluation.sets_during_rl().items():
        between = max(0, rl.steps - 1) // each.every if each.every else 0
        size = sizes.get(each.tasks, 0)
        found[name] = ValidationPlan(2 + between, min(size, each.max_tasks or size), each.samples)
    validation, *_ = found.values()
    return replace(validation, benchmarks={name: each for name, each in found.items() if each is not validation})
