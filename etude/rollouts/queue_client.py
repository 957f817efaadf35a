"""The rollout queues as other processes see them: the methods of `RolloutQueue`, called through the run service.

The service applies a request that arrives twice only once, so a call that got no response is sent again. What the
trainer marks is on disk when a call returns.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar, cast

from etude.harness.trace_store import from_json
from etude.rollouts.leases import EvaluationLease
from etude.rollouts.queue import RolloutQueue, StaleClaim, SupersededWorker
from etude.rollouts.queue_records import GroupProgress, GroupRecord, Incident, QueueState, ReadyGroup, StepOffer
from etude.rollouts.settings import QueueName, QueueSettings
from etude.runs.client import RunClient, RunServiceError

T = TypeVar("T")
ERRORS = {"stale": StaleClaim, "superseded": SupersededWorker}


def call(client: RunClient, path: str, body: Any, **options: Any) -> Any:
    """POST to the run service; its refusals become the queue's own errors."""
    try:
        return client.call("POST", path, body, **options)
    except RunServiceError as error:
        if error.code in ERRORS:
            raise ERRORS[error.code](str(error)) from None
        raise


class QueueClient:
    """One rollout queue of a run, for the trainer, the orchestrator and other processes beside the run directory."""

    def __init__(self, client: RunClient, name: QueueName, settings: QueueSettings) -> None:
        self.client, self.name, self.settings = client, name, settings
        self.session = self._request = 0  # of the trainer

    def _call(self, method: str, kind: Any, /, **arguments: Any) -> Any:
        """Return the result of a method of the queue, which is of type `kind`."""
        found = call(self.client, f"/queues/{self.name}/{method}", arguments)
        return None if kind is None else from_json(kind, found, f"{self.name}.{method}")

    def _change(self, method: str, kind: Any, /, **arguments: Any) -> Any:
        """Call a method for the trainer: it is applied once, and not after later ones or those of another trainer."""
        self._request += 1
        sender = {"trainer": (self.session, self._request)} if self.session else {}
        return self._call(method, kind, **arguments, **sender)

    # ------------------------------------------------------------------------------------------ the orchestrator

    def add(self, tasks: Iterable[tuple[str, float]], size: int | None = None, *, max_uses: int = 1) -> int:
        """Start groups for prompts. Unlike the others, this call is not sent again: `max_uses` may allow it twice."""
        body = {"tasks": list(tasks), "size": size, "max_uses": max_uses}
        return int(call(self.client, f"/queues/{self.name}/add", body, patience_s=0))

    def set_served_step(self, step: int, newest: int | None = None) -> None:
        self._call("set_served_step", None, step=step, newest=newest)

    def set_lease(self, lease: EvaluationLease | None) -> None:
        self._call("set_lease", None, lease=lease)

    def groups_to_start(self, *, fresh: bool = True, steps_left: int | None = None) -> int:
        return cast(int, self._call("groups_to_start", int, fresh=fresh, steps_left=steps_left))

    def release(self, worker: str = "") -> int:
        return cast(int, self._call("release", int, worker=worker))

    def discard(self, group: int, reason: str) -> None:
        self._call("discard", None, group=group, reason=reason)

    def changed_groups(self, since: int, limit: int = 1000) -> list[GroupRecord]:
        return list(self._call("changed_groups", list[GroupRecord], since=since, limit=limit))

    def trained_rewards(self, step: int, limit: int) -> list[dict[str, Any]]:
        return list(self._call("trained_rewards", list[dict[str, Any]], step=step, limit=limit))

    def incidents(self, step: int | None = None) -> list[Incident]:
        return list(self._call("incidents", list[Incident], step=step))

    # ------------------------------------------------------------------------------------------ the trainer

    def take(
        self, step: int, is_informative: Callable[[ReadyGroup], bool] = lambda group: True
    ) -> list[ReadyGroup] | None:
        """Return the groups of the step after `step`, which are judged here; None while there are not enough."""
        offer = self.offer(step)
        if offer.unjudged:
            self.judge((group.id, is_informative(group)) for group in offer.unjudged)
            offer = self.offer(step)
        return None if offer.groups is None else list(offer.groups)

    def trainer_session(self) -> int:
        return cast(int, self._call("trainer_session", int))

    def begin_session(self, session: int) -> None:
        """Take the place of any earlier trainer, whose requests are refused from now on."""
        self._call("begin_session", None, session=session)
        self.session = session

    def awaited_tasks(self, step: int) -> list[str]:
        return list(self._call("awaited_tasks", list[str], step=step))

    def offer(self, step: int) -> StepOffer:
        return cast(StepOffer, self._call("offer", StepOffer, step=step))

    def judge(self, verdicts: Iterable[tuple[int, bool]]) -> None:
        self._change("judge", None, verdicts=list(verdicts))

    def mark_trained(self, groups: Iterable[ReadyGroup], step: int) -> None:
        self._change("mark_trained", None, groups=list(groups), step=step)

    def record_version(self, number: int, step: int) -> None:
        self._change("record_version", None, number=number, step=step)

    def rewind(self, step: int) -> int:
        return cast(int, self._change("rewind", int, step=step))

    def requeue_lost(self, prefix: str = "") -> int:
        return cast(int, self._change("requeue_lost", int, prefix=prefix))

    # ------------------------------------------------------------------------------------------ reading

    def state(self) -> QueueState:
        return cast(QueueState, self._call("state", QueueState))

    def counts(self) -> dict[str, int]:
        return self.state().counts

    def outstanding(self) -> int:
        return self.state().outstanding

    def last_step(self) -> int:
        return self.state().last_step

    def lineage(self) -> int:
        return self.state().lineage

    def last_heartbeat(self) -> float:
        return self.state().last_heartbeat

    def waiting_for(self) -> str:
        return self.state().waiting_for

    def alike_groups(self) -> int:
        return cast(int, self._call("alike_groups", int))

    def step_of(self, number: int) -> int:
        return cast(int, self._call("step_of", int, number=number))

    def versions_of(self, step: int) -> list[int]:
        return list(self._call("versions_of", list[int], step=step))

    def lease(self) -> EvaluationLease | None:
        return cast("EvaluationLease | None", self._call("lease", EvaluationLease | None))

    def newest_version(self) -> int:
        return cast(int, self._call("newest_version", int))

    def group(self, id: int) -> ReadyGroup:
        return cast(ReadyGroup, self._call("group", ReadyGroup, id=id))

    def groups(self, ids: Iterable[int]) -> list[ReadyGroup]:
        return list(self._call("groups", list[ReadyGroup], ids=list(ids)))

    def progress(self, prefix: str = "") -> list[GroupProgress]:
        return list(self._call("progress", list[GroupProgress], prefix=prefix))

    def numbers(self) -> list[int]:
        return list(self._call("numbers", list[int]))


AnyQueue: TypeAlias = RolloutQueue | QueueClient  # for functions that serve the processes of a run and tools alike
