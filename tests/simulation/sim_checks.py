"""What must be true of a simulated run. Its parts note here what has really happened.

At all times:  a sampler's weights of a version are bit for bit those published as that version, whole
               a version stands for one set of weights
               no token is trained on more than max_staleness updates from the weights that sampled it
               no more than in_flight rollouts run, for all that the queue knows
               a service that died runs again, that of a dead node elsewhere (`sim_faults.Chaos.watch`)
At the end:    the run has taken its steps
               nothing is trained twice, and the queue says of every group which update has trained it
               nothing finished is lost, nor its trace
               without faults nothing was sampled twice or restarted
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sim_plan import Plan
from sim_time import SimulationFailed

from etude.harness.trace import Trace
from etude.rl.trainer_process import intact_checkpoints
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.stored_traces import attempt_of
from etude.weights.object_store import ROLLOUTS

if TYPE_CHECKING:
    from sim_run import SimulatedRun


def apply_update(weights: Mapping[str, torch.Tensor], step: int, update: int) -> None:
    """Change weights in place: `history` says which update was made by which step, the others change a little."""
    weights["history"][step] = update
    for name in ("a", "b", "c"):
        weights[name][(update * 7 + ord(name) + step) % 24] += update


def weights_of(updates: Sequence[int], steps: int) -> dict[str, torch.Tensor]:
    """Return the weights that these updates make."""
    found = {"history": torch.zeros(steps), **{name: torch.zeros(24) for name in ("a", "b", "c")}}
    for step, update in enumerate(updates):
        apply_update(found, step, update)
    return found


def updates_of(weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Return the updates that made these weights."""
    return tuple(int(value) for value in weights["history"].tolist() if value)


def same_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one
    )


@dataclass(frozen=True)
class Update:
    """One gradient step that was taken somewhere: the traces that it learned from, and what was wrong with them."""

    traces: tuple[str, ...]
    stale: str = ""


@dataclass
class History:
    """What has happened in a run."""

    plan: Plan
    updates: dict[int, Update] = field(default_factory=dict)
    published: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the updates of each version
    reported: list[tuple[int, int]] = field(default_factory=list)  # slot and attempt of finished rollouts

    def add_update(self, traces: Mapping[str, Trace], updates: tuple[int, ...]) -> int:
        """Take note of a gradient step on the weights that these updates have made; return its number.

        A trainer that was replaced may still take one, on whatever it finds: it must not publish the result.
        """
        stale = [found for name, trace in traces.items() if (found := self.staleness(name, trace, updates))]
        number = len(self.updates) + 1
        self.updates[number] = Update(tuple(traces), "; ".join(stale))
        return number

    def add_version(self, number: int, updates: tuple[int, ...]) -> None:
        for update in updates:
            expect(not self.updates[update].stale, self.updates[update].stale)
        before = self.published.setdefault(number, updates)
        expect(before == updates, f"version {number} is of updates {updates}, and of {before}")

    def check_weights(self, sampler: str, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        expect(version in self.published, f"{sampler} has version {version}, which was not published")
        expected = weights_of(self.published[version], self.plan.steps)
        expect(same_weights(weights, expected), f"{sampler}: its weights are not those of version {version}")

    def check_in_flight(self, count: int) -> None:
        expect(count <= self.plan.in_flight, f"{count} rollouts are in flight, limit {self.plan.in_flight}")

    def staleness(self, name: str, trace: Trace, updates: tuple[int, ...]) -> str:
        """No token is trained on more than max_staleness updates from the weights that sampled it: return which is."""
        for version in set(trace.segments[0].versions.tolist()):
            distance = len(set(self.published[version]) ^ set(updates))
            if distance > self.plan.max_staleness:
                return (
                    f"{name}: a token of version {version} (updates {self.published[version]}) is trained with the "
                    f"weights of {updates}: staleness {distance}, limit {self.plan.max_staleness}"
                )
        return ""


def check(run: SimulatedRun) -> None:
    """Compare what the run says of itself with what has happened."""
    plan, layout, history = run.plan, run.layout, run.history
    (step, newest), *_ = reversed(intact_checkpoints(layout))
    updates = json.loads((newest / "updates.json").read_text())
    with closing(RolloutQueue.open_read_only(layout.slots)) as queue:
        groups = {each.id: each for each in queue.progress()}
        slots = {slot.id: slot for id in groups for slot in queue.group(id).slots}
        incidents, counts = queue.incidents(), queue.counts()
    # Progress: all steps are taken, and the last weights are the sum of exactly these.
    expect(step == plan.steps == len(updates), f"the run has {step} steps of {plan.steps}, by {len(updates)} updates")
    # Nothing is trained twice.
    trained = Counter(name for update in updates for name in history.updates[update].traces)
    twice = sorted(name for name, count in trained.items() if count > 1)
    expect(not twice, f"trained twice: {twice}")
    prompts = Counter(groups[id].task for id in {group_of(name) for name in trained})
    expect(all(count == 1 for count in prompts.values()), f"trained twice: {prompts.most_common(1)}")
    # The queue says of every group which update has trained it.
    for number, update in enumerate(updates, start=1):
        learned = {group_of(name) for name in history.updates[update].traces}
        marked = {id for id, each in groups.items() if each.step == number}
        expect(learned <= marked, f"step {number} has learned from {learned}, the queue says {marked}")
        for id in marked - learned:
            totals = {slot.record["total"] for slot in slots.values() if slot.group == id}
            expect(len(totals) == 1, f"group {id} was consumed by step {number}, which has not learned from it")
    expect(all(each.step is None or each.step <= plan.steps for each in groups.values()), "a step that was not taken")
    # Nothing finished is lost: it was trained on, is still there, or became too stale.
    stale = Counter((each.task, each.number) for each in incidents if each.kind == "stale")
    finished: defaultdict[int, set[int]] = defaultdict(set)
    for id, attempt in history.reported:
        finished[id].add(attempt)
    for id, attempts in finished.items():
        slot = slots[id]
        kept = slot.state == "ready" and slot.attempt in attempts and slot.trace in run.buckets[ROLLOUTS].objects
        lost = len(attempts) - kept - stale[slot.task, slot.number]
        expect(lost <= 0, f"of the finished attempts {attempts} of slot {id}, {lost} are lost: {slot}")
    for slot in slots.values():
        own = slot.state != "ready" or attempt_of(slot.trace) == (slot.number, slot.attempt)
        expect(own, f"slot {slot.id} has the trace of another attempt: {slot}")
    expect(len(slots) == len(groups) * plan.group_size == sum(counts.values()), "slots are missing")
    if not plan.faults:
        expect(not incidents, f"without faults: {incidents}")
        expect(all(slot.attempt <= 1 for slot in slots.values()), "without faults a rollout was repeated")
        expect(run.heads == 1 and len(run.started) == len({each.spec.name for each in run.started}), "restarts")


def expect(true: bool, problem: str) -> None:
    if not true:
        raise SimulationFailed(problem)


def group_of(trace: str) -> int:
    return int(trace.split("/")[1])
