"""Run a comparison: every policy on every task, several trials each, a few of them at a time.

Each trial is a slot in its policy's queue. Infrastructure failures are retried and counted separately; a task that
fails too often is given up for that policy, never scored zero. Checkpoints are loaded one after the other; endpoints
run concurrently with them. A run can be killed at any time: scored trials are kept, the others start again.
"""

import asyncio
import json
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from etude.bench.directory import BenchDirectory, BenchSpec, read_all_results
from etude.bench.policies import (
    NO_LIMITS,
    BenchPolicy,
    CostLimitReached,
    EndpointLimits,
    OpenedPolicy,
    TokenPrice,
    open_policy,
)
from etude.bench.provenance import tasks_digest
from etude.bench.report import render_page
from etude.bench.results import latest_groups, summarize, task_name, trial_rows
from etude.bench.spending import UsageLedger
from etude.errors import EtudeError
from etude.evaluation.held_out import start
from etude.files import write_atomically
from etude.harness.search.searcher import open_searcher
from etude.harness.trace_store import save_trace
from etude.pods.fleet import Fleet, open_fleet
from etude.pods.settings import PodSettings
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import Slot
from etude.rollouts.rollout import Rollout, RolloutFailed, rollout_seed, run_rollout
from etude.rollouts.settings import QueueSettings, evaluation_queue
from etude.system.progress import progress_bars
from etude.tasks.task import Task

WORKER = "bench"  # the only worker of these queues
MAX_REASON_LENGTH = 1000  # characters of a failure reason kept in the queue
POLICY_KEYS = (
    "kind",
    "where",
    "model",
    "window",
    "dialect",
    "digest",
    "tools",
    "prompt",
    "sampling",
)  # of bench.json, copied to the summary
MAX_UNSCORED_TASKS = 3  # tasks given up without any scored trial: the cause is not in the tasks

log = logging.getLogger("etude.bench")


@dataclass(frozen=True)
class BenchProgress:
    """Progress of a policy, in trials."""

    graded: int = 0
    wanted: int = 0
    solved: int = 0
    failures: int = 0  # of the infrastructure

    @property
    def note(self) -> str:
        words = [f"{self.solved / self.graded:.0%} solved"] if self.graded else []
        return ", ".join([*words, f"{self.failures} failures"] if self.failures else words)


T = TypeVar("T")
ProgressListener = Callable[[str, BenchProgress], None]
# Whether another trial of a policy may start, given its queue and how many trials of each policy run.
StartRule = Callable[[str, RolloutQueue, Mapping[str, int]], bool]


def run_with_fleet(
    names: Sequence[str],
    state: Path | None,
    pods: PodSettings,
    work: Callable[[Fleet, ProgressListener], Coroutine[Any, Any, T]],
) -> T:
    """Run `work` with pods and a progress bar for each policy; return its result. SIGTERM cancels it."""

    async def run() -> T:
        main_task = asyncio.current_task()
        assert main_task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
        with show_progress(names) as report:
            async with open_fleet(pods=pods, state=state) as fleet:
                return await work(fleet, report)

    return asyncio.run(run())


async def run_trials(
    bench: BenchDirectory,
    spec: BenchSpec,
    fleet: Fleet,
    report: ProgressListener = lambda name, progress: None,
    *,
    at_once: int,
    device: str = "auto",
    limits: Mapping[str, EndpointLimits] | None = None,
    may_start: StartRule = lambda policy, slots, running: True,
) -> dict[str, EtudeError]:
    """Run all trials that are missing. A policy that fails does not stop the others; return the errors by policy.

    `limits` are those of policies by name. `may_start` is asked before every trial, and again when another has ended;
    if it declines while none runs, the policy's other trials stay queued.
    """
    run = _BenchRun(bench, spec, fleet, at_once, device, report, limits or {}, may_start)
    checkpoints = [number for number, each in enumerate(spec.policies) if each.kind == "checkpoint"]
    endpoints = [number for number, each in enumerate(spec.policies) if each.kind == "endpoint"]
    async with asyncio.TaskGroup() as group:
        group.create_task(run.run_policies(checkpoints))
        for number in endpoints:
            group.create_task(run.run_policies([number]))
    return run.errors


class _BenchRun:
    """The state of a running comparison."""

    def __init__(
        self,
        bench: BenchDirectory,
        spec: BenchSpec,
        fleet: Fleet,
        at_once: int,
        device: str,
        report: ProgressListener,
        limits: Mapping[str, EndpointLimits],
        may_start: StartRule,
    ) -> None:
        self.bench, self.spec, self.fleet, self.at_once = bench, spec, fleet, at_once
        self.device, self.report, self.limits, self.may_start = device, report, limits, may_start
        self.semaphore = asyncio.Semaphore(at_once)  # over all policies: pods share the machine
        searcher = open_searcher()  # loads its model when it is first used
        profiles, host = spec.profiles.items(), spec.host_settings
        self.options = {name: profile.rollout_options(host, searcher) for name, profile in profiles}
        self.numbers = {name: number for number, name in enumerate(spec.tasks)}
        self.running, self.trial_ended = Counter[str](), asyncio.Event()  # replaced by every trial that ends
        self.progress: dict[str, BenchProgress] = {}
        self.errors: dict[str, EtudeError] = {}

    async def run_policies(self, numbers: Sequence[int]) -> None:
        """Run policies one after the other; record the error of each that fails."""
        for number in numbers:
            policy = self.spec.policies[number]
            try:
                await self.run_policy(number, policy)
            except* EtudeError as group:
                self.errors[policy.name] = _first(group)

    async def run_policy(self, number: int, policy: BenchPolicy) -> None:
        """Run all missing trials of one policy."""
        spec = self.spec
        plan = evaluation_queue(QueueSettings(in_flight=self.at_once), spec.samples)
        with closing(open_queue(self.bench.slots(policy.name), plan)) as slots:
            slots.release()  # slots claimed by a run that was killed
            queue_tasks(slots, spec.tasks)
            self.update_progress(policy, slots)
            if all(group.is_finished for group in latest_groups(slots).values()):
                return
            profile, limits = spec.profiles[policy.name], self.limits.get(policy.name, NO_LIMITS)
            opening = open_policy(policy, profile, at_once=self.at_once, device=self.device, limits=limits)
            try:
                async with opening as opened, asyncio.TaskGroup() as group:
                    for _ in range(self.at_once):
                        group.create_task(self.run_queued_trials(number, policy, opened, slots))
            finally:
                slots.release()

    async def run_queued_trials(
        self, number: int, policy: BenchPolicy, opened: OpenedPolicy, slots: RolloutQueue
    ) -> None:
        """Run trials until none is queued. A failed trial is queued again by the loop that ran it, which continues."""
        while True:
            async with self.semaphore:
                if self.may_start(policy.name, slots, self.running):
                    slot = slots.claim(WORKER, time.time())
                    if slot is None or not await self.run_claimed(number, policy, opened, slots, slot):
                        return
                    continue
                ended = self.trial_ended
            if not any(self.running.values()):
                return
            await ended.wait()

    async def run_claimed(
        self, number: int, policy: BenchPolicy, opened: OpenedPolicy, slots: RolloutQueue, slot: Slot
    ) -> bool:
        """Run one trial and record its result; return False if its endpoint may not be asked any more."""
        self.running[policy.name] += 1
        try:
            rollout = await self.run_trial(number, policy, opened, slot)
        except RolloutFailed as error:
            if isinstance(error.__cause__, CostLimitReached):  # no failure: its slot is released when all loops end
                return False
            slots.fail(slot, str(error)[:MAX_REASON_LENGTH])
            self.update_progress(policy, slots)
            await opened.check(error)
            check_some_trial_scored(slots, error)
        else:
            await self.save_trial(policy, slots, slot, rollout)
        finally:
            self.running[policy.name] -= 1
            ended, self.trial_ended = self.trial_ended, asyncio.Event()
            ended.set()
        return True

    async def run_trial(self, number: int, policy: BenchPolicy, opened: OpenedPolicy, slot: Slot) -> Rollout:
        name, task = self.bench.root.name, task_name(slot.task)
        # The attempt is not part of the seed: a trial that is run again is the same trial.
        seed = rollout_seed(self.spec.seed, number, self.numbers[task], slot.number)
        facts = {"bench": name, "policy": policy.name, "sample": slot.number}
        id = f"{name}/{policy.name}/{task}/{slot.number:02d}"
        try:
            return await run_rollout(
                self.fleet,
                self.spec.tasks[task],
                opened.model,
                self.options[policy.name],
                seed=seed,
                id=id,
                facts=facts,
            )
        except EtudeError:
            raise
        except Exception as error:  # a bug; the other trials continue
            log.exception("%s on %s, sample %d", policy.name, task, slot.number)
            raise RolloutFailed(f"bug: {type(error).__name__}: {error}") from error

    async def save_trial(self, policy: BenchPolicy, slots: RolloutQueue, slot: Slot, rollout: Rollout) -> None:
        """Save the trace, then finish the slot: a trace named in the queue must exist."""
        task = task_name(slot.task)
        path = self.bench.trace(policy.name, task, slot.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(save_trace, rollout.trace, path)
        record = trial_record(rollout, self.spec.tasks[task])
        slots.finish(slot, record, path.relative_to(self.bench.root).as_posix(), rollout.trace.versions())
        before = self.progress[policy.name]
        self.set_progress(policy, replace(before, graded=before.graded + 1, solved=before.solved + record["solved"]))

    def update_progress(self, policy: BenchPolicy, slots: RolloutQueue) -> None:
        """Recompute a policy's progress from its queue. Too slow to do after every trial."""
        groups = latest_groups(slots).values()
        current = {group.task for group in groups}
        efforts = [effort for effort in slots.efforts() if effort.task in current]
        found = BenchProgress(
            graded=sum(group.ready for group in groups),
            wanted=sum(group.ready if group.dropped else group.size for group in groups),
            solved=round(sum((effort.solved or 0) * effort.rollouts for effort in efforts)),
            failures=sum(group.failures for group in slots.progress()),
        )
        self.set_progress(policy, found)

    def set_progress(self, policy: BenchPolicy, progress: BenchProgress) -> None:
        self.progress[policy.name] = progress
        self.report(policy.name, progress)


def open_queue(path: Path, plan: QueueSettings) -> RolloutQueue:
    """Open a policy's queue. It is created under a temporary name: others read it, and a kill may come at any time."""
    if not path.exists():
        part = path.with_suffix(".part")
        for left in path.parent.glob(f"{part.name}*"):
            left.unlink()
        RolloutQueue(part, plan).close()
        part.rename(path)
    return RolloutQueue(path, plan)


def queue_tasks(slots: RolloutQueue, tasks: Iterable[str]) -> None:
    """Queue every task that was never run, and again those that were given up."""
    groups = latest_groups(slots)
    for task in tasks:
        before = groups.get(task)
        if before is None or before.dropped:
            start(slots, 0 if before is None else int(before.task.partition("/")[0]) + 1, [task])


def check_some_trial_scored(slots: RolloutQueue, error: RolloutFailed) -> None:
    """Raise EtudeError if a policy has no scored trial and several tasks given up: the cause is not in the tasks."""
    groups = latest_groups(slots).values()
    given_up = sum(bool(group.dropped) for group in groups)
    if given_up >= min(MAX_UNSCORED_TASKS, len(groups)) and not any(group.ready for group in groups):
        raise EtudeError(f"no trial could be scored, and {given_up} tasks were given up; the last error: {error}")


def trial_record(rollout: Rollout, task: Task) -> dict[str, Any]:
    """Return the record of a trial. A trial that cheated scores 0; `verifier_score` keeps the verifier's score."""
    record = rollout.record(task)
    if record["hack"]:
        return {**record, "verifier_score": record["score"], "score": 0.0}
    return record


def _first(group: BaseExceptionGroup[EtudeError]) -> EtudeError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EtudeError)
    return error


# ------------------------------------------------------------------------------------------- output


def describe(
    bench: BenchDirectory, prices: Mapping[str, TokenPrice] | None = None, stopped: str = ""
) -> dict[str, Any]:
    """Return the summary of the trials so far as JSON; `prices` override those of the specification.

    `stopped` is the reason why no more trials were started, if there is one.
    """
    spec, found = read_all_results(bench)
    known = {**recorded_prices(spec), **(prices or {})}
    summary = summarize(found, known)
    policies = [{key: each[key] for key in POLICY_KEYS} for each in spec["policies"]]
    summary["policies"] = [{**policy, **results} for policy, results in zip(policies, summary["policies"], strict=True)]
    kept = {key: value for key, value in spec.items() if key not in ("format", "policies", "prices", "tasks")}
    kept["tasks_digest"] = tasks_digest(spec["tasks"])
    summary |= {"stopped": stopped, "usage": _usage(UsageLedger(bench.usage, known))}
    sessions = {f"sessions of {each['name']}": _flat(each["session"]) for each in spec["policies"]}
    return {**summary, "settings": {**kept, "tasks": len(spec["tasks"]), **sessions}}


def recorded_prices(spec: Mapping[str, Any]) -> dict[str, TokenPrice]:
    return {name: TokenPrice(**price) for name, price in spec["prices"].items()}


def _usage(ledger: UsageLedger) -> dict[str, Any]:
    """Return the tokens and dollars of all replies of endpoints, also of trials that failed."""
    policies = {name: {**asdict(ledger.of(name)), "dollars": ledger.dollars_of(name)} for name in [*ledger.policies]}
    return {"policies": policies, "dollars": ledger.dollars if policies else None}


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table and of the tables in it."""
    nested = [each for each in table.values() if isinstance(each, dict)]
    return {key: value for each in (table, *nested) for key, value in each.items() if not isinstance(value, dict)}


def write_outputs(bench: BenchDirectory, stopped: str = "") -> dict[str, Any]:
    """Write trials.jsonl, summary.json and report.html, each atomically; return the summary."""
    spec, found = read_all_results(bench)
    prices = recorded_prices(spec)
    lines = [json.dumps(row) for results in found for row in trial_rows(results, prices.get(results.name))]
    summary = describe(bench, stopped=stopped)
    write_atomically(bench.trials, "".join(f"{line}\n" for line in lines))
    write_atomically(bench.summary, json.dumps(summary, indent=1) + "\n")
    write_atomically(bench.report, render_page(summary, bench.root.name))
    return summary


@contextmanager
def show_progress(names: Sequence[str]) -> Iterator[ProgressListener]:
    """Show a progress bar per policy on standard error."""
    with progress_bars() as bars:
        lines = {name: bars.add_task(name, total=None, note="") for name in names}

        def report(name: str, progress: BenchProgress) -> None:
            bars.update(lines[name], completed=progress.graded, total=progress.wanted, note=progress.note)

        yield report
