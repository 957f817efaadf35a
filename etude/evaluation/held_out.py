"""Held-out evaluation: K samples of each task, through the same queue and sessions as training.

An evaluation is a set of groups named STEP/SET/TASK in a queue of its own. It runs while training continues, so its
results record the weight versions that sampled it. A task with a rollout that failed for good because of the
infrastructure is left out of every mean and counted separately; it is not a failure of the agent. `statistics`
summarises the results. Where a function takes a `name`, that is one of the task sets of the step.

An evaluation belongs to the lineage of weights that it evaluates: when the trainer goes back to a checkpoint, later
evaluations are discarded and started again when their step is reached again, and samples of lost weights are repeated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from etude.errors import EtudeError, InputError
from etude.rollouts.leases import step_prefix
from etude.rollouts.queue_client import AnyQueue
from etude.rollouts.queue_records import ReadyGroup

# ------------------------------------------------------------------------------------------- starting


def choose_tasks(tasks: Iterable[str], max_tasks: int | None) -> list[str]:
    """Return at most `max_tasks` tasks, evenly spread over their sorted names: the same at every evaluation."""
    names = sorted(tasks)
    count = len(names) if max_tasks is None else min(max_tasks, len(names))
    return [names[index * len(names) // count] for index in range(count)]


def start(
    evaluations: AnyQueue,
    step: int,
    tasks: Iterable[str],
    expected: Mapping[str, float] | None = None,
    samples: int | None = None,
) -> int:
    """Queue the samples of every task; return how many tasks are new. Starting an evaluation twice is harmless.

    `samples` is the number for each task, where it is another than that of the queue.
    """
    names = list(tasks)
    if not names:
        raise InputError(f"evaluation at step {step}: there are no held-out tasks")
    seconds = expected or {}
    return evaluations.add(((f"{step_prefix(step)}{name}", seconds.get(name, 0.0)) for name in names), samples)


def rewind(evaluations: AnyQueue, step: int) -> None:
    """Go back to the checkpoint after `step`: discard later evaluations, and samples of the lost weights."""
    evaluations.rewind(step)
    discard_later(evaluations, step)
    evaluations.requeue_lost()


def discard_later(evaluations: AnyQueue, step: int) -> None:
    """Discard the evaluations of later steps, which the trainer has lost."""
    for later in (number for number in evaluations.numbers() if number > step):
        for group in evaluations.progress(step_prefix(later)):
            evaluations.discard(group.id, f"the trainer went back to step {step}")


@dataclass(frozen=True)
class EvaluationProgress:
    """Progress of an evaluation in samples; those of dropped tasks are not wanted any more."""

    ready: int
    wanted: int
    dropped: int  # tasks

    @property
    def finished(self) -> bool:
        return self.ready >= self.wanted


def started(evaluations: AnyQueue) -> list[int]:
    """Return the steps for which an evaluation was started."""
    return evaluations.numbers()


def progress(evaluations: AnyQueue, step: int, name: str = "") -> EvaluationProgress:
    """Return the progress of the evaluation of a step."""
    groups = evaluations.progress(step_prefix(step, name))
    kept = [group for group in groups if not group.dropped]
    ready, wanted = sum(group.ready for group in kept), sum(group.size for group in kept)
    return EvaluationProgress(ready, wanted, len(groups) - len(kept))


def is_finished(evaluations: AnyQueue, step: int, name: str = "") -> bool:
    """Return whether an evaluation was started and all its groups are finished or dropped."""
    prefix = step_prefix(step, name)
    evaluations.requeue_lost(prefix)  # a sample that was in progress when its weights were lost
    groups = evaluations.progress(prefix)
    return bool(groups) and all(group.is_finished for group in groups)


@dataclass
class StallWatch:
    """Tells when something has not changed for too long."""

    limit_s: float
    seen: object = None
    moved_at: float = 0.0

    def restart(self, now: float) -> None:
        self.seen, self.moved_at = None, now

    def has_stalled(self, state: object, now: float) -> bool:
        """Return whether this state has been the same for longer than the limit."""
        if state != self.seen:
            self.seen, self.moved_at = state, now
        return now - self.moved_at > self.limit_s


# ------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Evaluation:
    """The results of one evaluation: a complete group for each task."""

    step: int
    groups: tuple[ReadyGroup, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)  # task to reason
    failures: int = 0  # of the infrastructure, over all samples, whether retried or dropped


def results(evaluations: AnyQueue, step: int, name: str = "") -> Evaluation:
    """Return the results of a finished evaluation."""
    groups = evaluations.progress(step_prefix(step, name))
    if waiting := [group.task for group in groups if not group.is_finished] if groups else ["all of it"]:
        raise EtudeError(f"evaluation at step {step} is not finished: {len(waiting)} missing, such as {waiting[0]}")
    names = {group.id: group.task.removeprefix(step_prefix(step)) for group in groups}
    complete = (evaluations.group(group.id) for group in groups if not group.dropped)
    return Evaluation(
        step,
        tuple(replace(group, task=names[group.id]) for group in complete),
        {names[group.id]: group.dropped for group in groups if group.dropped},
        sum(group.failures for group in groups),
    )


def subset(evaluation: Evaluation, prefix: str) -> Evaluation:
    """Return the results of the tasks whose names have this prefix."""
    groups = tuple(group for group in evaluation.groups if group.task.startswith(prefix))
    dropped = {task: reason for task, reason in evaluation.dropped.items() if task.startswith(prefix)}
    return replace(evaluation, groups=groups, dropped=dropped)
