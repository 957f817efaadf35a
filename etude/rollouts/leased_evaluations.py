"""How the run service gives out the sessions of evaluations beside training, whose samplers are leased."""

from collections.abc import Mapping
from dataclasses import dataclass

from etude.rollouts.leases import evaluated_step, step_prefix
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import QueueName
from etude.rollouts.status_board import StatusBoard


@dataclass
class LeasedEvaluations:
    """The evaluation queue of a run that trains, and the lease of samplers to one of its evaluations."""

    queues: Mapping[QueueName, RolloutQueue]
    board: StatusBoard

    def includes(self, queue: str) -> bool:
        """Return whether the slots of a queue need leased samplers: those of evaluations beside training."""
        return queue == "evaluation" and "training" in self.queues

    def read(self, now: float) -> None:
        """Take note of the lease that the queue has now."""
        if "evaluation" in self.queues:
            self.board.set_lease(self.queues["evaluation"].lease(now))

    def prefix(self) -> str:
        """Return what the tasks of the evaluation with the lease begin with."""
        return "" if self.board.lease is None else step_prefix(self.board.lease.step)

    def room(self) -> int:
        """Return how many more of its sessions may start now."""
        lease = self.board.lease
        if lease is None or not self.board.serves_lease():
            return 0
        return max(0, lease.sessions - self.queues["evaluation"].in_flight())

    def claimable(self, queue: QueueName) -> int:
        """Return how many slots of a queue could be given to workers now."""
        count = self.queues[queue].claimable()
        return min(count, self.room()) if count and self.includes(queue) else count

    def counts(self, task: str, versions: tuple[int, int]) -> bool:
        """Return whether a sample counts: its weights are those of the evaluated step.

        A sample without a token counts, and one of samplers that the evaluation shares with training.
        """
        step, lease = evaluated_step(task), self.board.lease
        if versions[0] < 0 or (lease is not None and lease.shared and lease.step == step):
            return True
        return {*range(versions[0], versions[1] + 1)} <= {*self.queues["evaluation"].versions_of(step)}
