"""What is drawn from the seed of a simulated run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

FAULTS: tuple[str, ...] = (
    "kills",
    "moments",
    "nodes",
    "isolation",
    "freezes",
    "pauses",
    "head",
    "partitions",
    "slow",
    "losses",
    "repeats",
    "store",
    "clocks",
    "damage",
    "failures",
    "checkpoints",
)


@dataclass(frozen=True)
class Plan:
    """What is drawn from the seed."""

    seed: int
    steps: int
    group_size: int
    groups_per_step: int
    max_staleness: int
    in_flight: int
    lease_s: float
    full_every: int
    keep: int
    checkpoint_every: int
    samplers: int
    nodes: int  # beside that of the run
    workers_per_node: int
    alike: float  # share of groups whose rewards are alike
    faults: frozenset[str]  # kinds
    fault_s: float  # mean time between two
    until: float  # when faults stop

    @classmethod
    def of_seed(cls, seed: int, faults: bool | None = None) -> Plan:
        rng = random.Random(f"plan/{seed}")
        kinds = [kind for kind in FAULTS if rng.random() < 0.6] if rng.random() < 0.9 else []
        if faults is not None:
            kinds = list(FAULTS) if faults else []
        return cls(
            seed=seed,
            steps=rng.randint(2, 5),
            group_size=rng.randint(2, 3),
            groups_per_step=rng.randint(1, 2),
            max_staleness=rng.choice([0, 1, 1, 2, 3]),
            in_flight=rng.randint(2, 8),
            lease_s=rng.choice([6.0, 20.0]),
            full_every=rng.choice([1, 2, 3, 20]),
            keep=rng.randint(1, 2),
            checkpoint_every=rng.choice([1, 2, 3]),
            samplers=rng.randint(1, 2),
            nodes=rng.randint(1, 3),
            workers_per_node=rng.randint(1, 2),
            alike=rng.choice([0.0, 0.0, 0.3]),
            faults=frozenset(kinds),
            fault_s=rng.choice([4.0, 8.0, 15.0]),
            until=rng.choice([40.0, 80.0]) if kinds else 0.0,
        )

    def settings(self) -> dict[str, Any]:
        """Return the table [rl] of the recipe."""
        return {
            "tasks": "/tasks",
            "steps": self.steps,
            "group_size": self.group_size,
            "groups_per_step": self.groups_per_step,
            "max_staleness": self.max_staleness,
            "in_flight": self.in_flight,
            "lease_s": self.lease_s,
            "max_attempts": 1000,
            "checkpoint_every": self.checkpoint_every,
            "stall_s": 240.0,
            "workers": self.workers_per_node,
            "device": "cpu",
            "sampler": {"count": self.samplers, "device": "cpu"},
            "weights": {"full_every": self.full_every, "keep": self.keep, "poll_s": 0.5, "dtype": "float32"},
            "precision": "float32",
        }
