"""The evaluations of a run beside training: which are due, which samplers serve them, and their results.

    due at a step -> lease of samplers at the step's weight version -> samples in the evaluation queue -> metrics

Training waits for none of it: the trainer publishes and pins the version of an evaluated step and goes on. One step is
evaluated at a time, the oldest first, with all its task sets. Samplers that only evaluate are leased if there are some
(`evaluation.sampler`); else one of the training samplers is borrowed, or all of them while no rollout is trained on. A
run's only sampler is shared with training (`etude.rollouts.leases`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.errors import EtudeError
from etude.evaluation import held_out, statistics
from etude.evaluation.scorings import record_scoring
from etude.rl.best_checkpoint import write_finished_steps
from etude.rl.services import EVALUATION_SAMPLER, SAMPLER
from etude.rl.settings import RlSettings
from etude.rollouts.leases import LEASE_S, EvaluationLease
from etude.rollouts.queue_client import AnyQueue
from etude.rollouts.queue_records import QueueState
from etude.rollouts.settings import EvaluationSettings
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.runs.service_status import ServiceStatus
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.weights.object_store import ObjectStore
from etude.weights.versions import has_version, latest

LOOK_S = 0.3  # between two looks for the weights of an evaluation that is due
RETRY_S = 60.0  # before an evaluation that has stalled is leased samplers again
ABSENT_S = 10.0  # for a borrowed sampler to come back before another one is borrowed


@dataclass
class RunEvaluations:
    """The evaluations of one run. `tick` does what is to be done; it asks for little when nothing has changed."""

    run: Run
    layout: RunLayout
    settings: RlSettings
    evaluation: EvaluationSettings
    queue: AnyQueue
    tasks: Mapping[str, Sequence[str]]  # by set, each as SET/TASK
    status_of: Callable[[str], ServiceStatus | None]
    store: ObjectStore
    in_flight: Callable[[], int]  # rollouts that may run at once
    clock: Clock = MACHINE_CLOCK
    lease: EvaluationLease | None = field(init=False, default=None)
    logged: set[tuple[int, str]] = field(init=False)  # steps and sets whose results are in the metrics
    impossible: dict[int, str] = field(init=False, default_factory=dict)  # steps that cannot be evaluated, and why
    waiting: list[int] = field(init=False, default_factory=list)  # steps that are due and not evaluated yet
    waiting_for: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.sets = self.evaluation.sets_during_rl()
        self.validation = next(iter(self.sets))
        records = (record for record in self.run.metrics("rl") if record.get("evaluation"))
        self.logged = {(record["step"], record.get("benchmark", self.validation)) for record in records}
        self.lineage = -1  # of the results that were checked last
        self._retry: dict[int, float] = {}  # steps that have stalled, and when they are tried again
        self._watch = held_out.StallWatch(self.settings.stall_s)
        self._renewed_at = self._looked_at = self._present_at = float("-inf")
        self._seen: object = None
        self._finished: object = None
        self._started: set[tuple[int, str]] = set()  # steps and sets whose samples are in the queue
        self._version = -1  # of the weights that the lease is for

    # ------------------------------------------------------------------------------------------ what is due

    def due(self, step: int, over: bool) -> dict[int, list[str]]:
        """Return the sets that are due at each step up to `step`; all are after the last one, when training is over."""
        found: dict[int, list[str]] = {}
        for name, each in self.sets.items():
            steps = {0, *(range(each.every, step + 1, each.every) if each.every else ()), *((step,) if over else ())}
            for at in steps:
                found.setdefault(at, []).append(name)
        return {at: found[at] for at in sorted(found)}

    def pending(self, step: int, over: bool) -> dict[int, list[str]]:
        """Return the sets that are due and not in the metrics yet, by step, the oldest first."""
        due = self.due(step, over)
        left = {at: [name for name in names if (at, name) not in self.logged] for at, names in due.items()}
        return {at: names for at, names in left.items() if names and at not in self.impossible}

    def validated(self) -> set[int]:
        """Return the steps whose validation is in the metrics."""
        return {step for step, name in self.logged if name == self.validation}

    # ------------------------------------------------------------------------------------------ every tick

    def tick(self, step: int, over: bool, logged_steps: int, state: QueueState) -> None:
        """Log results, and lease samplers to the evaluation that is next.

        `over` is whether training has ended, `logged_steps` the last step in the metrics, `state` that of the queue.
        """
        if (seen := (step, over, logged_steps, state.changes, state.lineage)) != self._seen:
            if state.lineage != self.lineage:
                self._drop_lost(state.lineage)
            self._log_results(self.pending(step, over), logged_steps)
            self._seen = seen
        pending = self.pending(step, over)
        self.waiting = list(pending)
        self._record_finished(step, over, pending)
        if self.lease is not None and self.lease.step not in pending:  # finished, or its weights are lost
            self.end_lease()
        if self.lease is not None and self._has_stalled(state, over):
            self._retry[self.lease.step] = self.clock.monotonic() + RETRY_S
            self.end_lease()
        if pending:
            self._lease_samplers(step, over, pending)

    def forget_after(self, step: int) -> None:
        """Forget results of later steps: they are not in the metrics any more."""
        self.logged = {(at, name) for at, name in self.logged if at <= step}
        self.impossible = {at: why for at, why in self.impossible.items() if at <= step}

    def end_lease(self) -> None:
        """Give the samplers back; samples in progress are requeued."""
        self.queue.set_lease(None)
        if self.lease is not None:
            self.queue.release()
        self.lease, self._seen, self._started = None, None, set()

    # ------------------------------------------------------------------------------------------ results

    def _drop_lost(self, lineage: int) -> None:
        """Remove the records of evaluations of weights that were lost when the trainer went back to a checkpoint."""
        lost = {key for key in self.logged if not held_out.is_finished(self.queue, *key)}

        def is_lost(record: Mapping[str, Any]) -> bool:
            key = record["step"], record.get("benchmark", self.validation)
            return bool(record.get("evaluation")) and key in lost

        if lost:
            self.run.remove_metrics("rl", is_lost)
        self.logged -= lost
        if self.lease is not None:
            self.end_lease()
        self.lineage = lineage

    def _log_results(self, pending: Mapping[int, Sequence[str]], logged_steps: int) -> None:
        started = held_out.started(self.queue)
        for step in (each for each in pending if each in started and each <= logged_steps):
            for name in pending[step]:
                if held_out.is_finished(self.queue, step, name):
                    record = statistics.summarise(held_out.results(self.queue, step, name))
                    further = {} if name == self.validation else {"benchmark": name}
                    self.run.log("rl", step, evaluation=True, **further, **record)
                    self.logged.add((step, name))

    def _record_finished(self, step: int, over: bool, pending: Mapping[int, object]) -> None:
        """Tell the trainer which steps it need not keep the weights of any more."""
        finished = self.lineage, [each for each in self.due(step, over) if each not in pending]
        if finished != self._finished:
            write_finished_steps(self.layout, *finished)
            self._finished = finished

    # ------------------------------------------------------------------------------------------ leases

    def _lease_samplers(self, step: int, over: bool, pending: Mapping[int, Sequence[str]]) -> None:
        """Lease samplers to the oldest evaluation that is due, and start it; or renew its lease."""
        now = self.clock.monotonic()
        if self.lease is not None:
            at, version = self.lease.step, self._version
        else:
            if now - self._looked_at < LOOK_S:
                return
            if (found := self._next(pending, now)) is None:
                self._looked_at = now
                return
            at, version = found
        wanted = self._wanted_lease(at, version, step, over)
        if wanted is None:
            if self.lease is not None:
                self.end_lease()
            return
        if wanted == self.lease and now - self._renewed_at < LEASE_S / 4:
            self._start(at, pending[at])
            return
        if self.lease is None:
            self._watch.restart(now)
        self.queue.set_lease(wanted)
        self.lease, self._version, self._renewed_at, self.waiting_for = wanted, version, now, ""
        self._start(at, pending[at])

    def _next(self, pending: Mapping[int, object], now: float) -> tuple[int, int] | None:
        """Return the oldest step that is due and has its weights in the store, with their version."""
        for at in pending:
            if now < self._retry.get(at, now):
                continue
            versions = self.queue.versions_of(at)
            try:
                newest = latest(self.store)
                stored = [version for version in versions if has_version(self.store, version)]
            except (OSError, EtudeError) as error:  # it is away
                self.waiting_for = f"the weight store: {error}"
                return None
            if stored:
                return at, stored[-1]
            if versions and newest is not None and newest > versions[-1]:  # versions are uploaded in order
                self.impossible[at] = f"its weights (version {versions[-1]}) are not in the store"
                continue
            self.waiting_for = f"the weights of step {at} in the store"
            return None
        return None

    def _wanted_lease(self, at: int, version: int, step: int, over: bool) -> EvaluationLease | None:
        """Return the lease that the evaluation of step `at` should have now; None if no sampler is to spare."""
        limit, held = self.in_flight(), version
        training = [f"{SAMPLER}-{number}" for number in range(self.settings.sampler.count)]
        trains_rollouts = not over and self.settings.control != "imitation"
        sessions = max(1, limit // 2) if trains_rollouts else limit  # the other half is for training
        if self.evaluation.sampler is not None:
            own = tuple(f"{EVALUATION_SAMPLER}-{number}" for number in range(self.evaluation.sampler.count))
            return EvaluationLease(at, version, own, False, sessions)
        if not trains_rollouts:
            return EvaluationLease(at, version, tuple(training), False, sessions)
        if len(training) > 1:
            borrowed = self._borrowed(training)
            return EvaluationLease(at, version, (borrowed,), False, sessions) if borrowed else None
        if self.lease is not None and self.lease.step == at and self.lease.version is not None:
            held = self.lease.version
        else:  # it never goes back to older weights: training would get them
            held = max(version, self._version_of(training[0]))
        stays = step <= at + self.settings.max_staleness // 2
        return EvaluationLease(at, held if stays else None, tuple(training), True, sessions)

    def _borrowed(self, training: Sequence[str]) -> str:
        """Return the training sampler that an evaluation borrows; "" if training would be left with none."""
        now, ready = self.clock.monotonic(), [name for name in training if self._is_ready(name)]
        if self.lease is not None and not self.lease.shared:
            (name,) = self.lease.samplers[:1]
            if name in ready:
                self._present_at = now
            if name in training and now - self._present_at < ABSENT_S:
                return name
        if len(ready) < 2:
            self.waiting_for = f"a second sampler that is ready: {len(ready)} of {len(training)} are"
            return ""
        self._present_at = now
        return ready[-1]

    def _is_ready(self, name: str) -> bool:
        status = self.status_of(name)
        return status is not None and status.state == "ready"

    def _version_of(self, name: str) -> int:
        status = self.status_of(name)
        version = status.facts.get("version") if status is not None else None
        return -1 if version is None else int(version)

    def _start(self, step: int, names: Sequence[str]) -> None:
        """Queue the samples of sets that are not queued yet, and record that they are scored."""
        for name in names:
            if (step, name) in self._started:
                continue
            known = held_out.progress(self.queue, step, name)
            if not known.wanted + known.dropped:  # else an earlier lease has started it
                record_scoring(self.run, name, f"rl step {step}", f"rl/{self.lineage}/{step}")
                held_out.start(self.queue, step, sorted(self.tasks[name]), samples=self.sets[name].samples)
            self._started.add((step, name))
        if step and not self.layout.step_file(step).exists():  # the trainer went back to a checkpoint meanwhile
            held_out.discard_later(self.queue, step - 1)

    def _has_stalled(self, state: QueueState, over: bool) -> bool:
        """Return whether the evaluation makes no progress any more; EtudeError if nothing but it is left to do."""
        assert self.lease is not None
        if not self._watch.has_stalled((state.counts, state.last_heartbeat), self.clock.monotonic()):
            return False
        stalled = f"no progress for {self.settings.stall_s:g} s ({state.waiting_for})"
        if over:
            what = f"the evaluation of step {self.lease.step} made {stalled}"
            raise EtudeError(f"{what}; the logs are in {self.layout.logs}; --resume continues")
        self.waiting_for = f"another try: it made {stalled}"
        return True

    # ------------------------------------------------------------------------------------------ status

    def describe(self) -> str:
        """Return what is evaluated now and how far it is, or what a due evaluation waits for; "" if none is due."""
        lease, more = self.lease, len(self.waiting) - 1
        then = f", {more} more due" if more > 0 else ""
        if lease is None:
            waits = f" waits for {self.waiting_for}" if self.waiting_for else " is due"
            return f"evaluation of step {self.waiting[0]}{waits}{then}" if self.waiting else ""
        parts = []
        for name in self.sets:
            found = held_out.progress(self.queue, lease.step, name)
            if found.wanted and not found.finished:
                parts.append(f"{name} of step {lease.step} runs, {found.ready} of {found.wanted}")
        about = " (shared sampler)" if lease.shared else ""
        if not any(self._is_ready(name) and lease.is_served_with(self._version_of(name)) for name in lease.samplers):
            about = f" (waits for {', '.join(lease.samplers)} at version {lease.version})"
        return ", ".join(parts or [f"evaluation of step {lease.step} starts"]) + about + then

    def facts(self) -> dict[str, Any]:
        """Return the facts of the orchestrator's status."""
        found: dict[str, Any] = {"evaluations_due": self.waiting, "evaluates": self.describe()}
        if self.impossible:
            found["not_evaluated"] = {str(step): why for step, why in self.impossible.items()}
        if (lease := self.lease) is not None:
            names = ("step", "version", "samplers", "shared")
            found["lease"] = {name: getattr(lease, name) for name in names}
        return found
