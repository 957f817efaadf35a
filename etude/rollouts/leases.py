"""Leases of samplers to evaluations that run beside training.

An evaluation of a policy step is sampled by the weights of that step, so samplers are leased to it: they stay at that
version and take no training requests until the lease ends. The orchestrator grants a lease and renews it
(`etude.rl.run_evaluations`), the evaluation queue records it, and the run service tells samplers and workers of it. A
lease that is not renewed expires, and its samplers serve training again.

A run whose only sampler also serves training shares it instead: the sampler takes both kinds of requests and stays at
the version only as long as training does not suffer, so tokens of a shared evaluation may be of later versions.
"""

from dataclasses import dataclass, replace

LEASE_S = 60.0  # after which a lease expires that the orchestrator does not renew


@dataclass(frozen=True)
class EvaluationLease:
    """The samplers that serve the evaluation of a policy step."""

    step: int
    version: int | None  # that they stay at; None: they follow the newest again
    samplers: tuple[str, ...]
    shared: bool  # they serve training too
    sessions: int  # of the evaluation, at most at once
    expires: float = 0.0  # seconds since the epoch, on the run service's clock

    def is_served_with(self, version: int | None) -> bool:
        """Return whether a leased sampler that has these weights serves the evaluation."""
        if version is None or self.version is None:
            return version is not None
        return version >= self.version if self.shared else version == self.version

    def is_same(self, other: "EvaluationLease | None") -> bool:
        """Return whether another lease differs at most in its end."""
        return other is not None and replace(other, expires=self.expires) == self


def evaluated_step(task: str) -> int:
    """Return the policy step of a group of the evaluation queue, whose tasks are named STEP/SET/TASK."""
    return int(task.partition("/")[0])


def step_prefix(step: int, name: str = "") -> str:
    """Return what the tasks of an evaluation begin with in the queue: of a step, or of one task set at that step."""
    return f"{step:06d}/{name}/" if name else f"{step:06d}/"
