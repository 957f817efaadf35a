"""The statuses that the services of a run have reported, and what workers need to know of samplers."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from etude.rollouts.leases import EvaluationLease
from etude.runs.layout import RunLayout
from etude.runs.service_status import SAMPLER, read_copy

SILENT_S = 10.0  # samplers report every second, on a busy machine later: one that is silent for longer gets no requests
# What workers see of a sampler ...
SHOWN = ("url", "pid", "host", "state", "version", "waiting_for", "problem", "purpose", "leased")
URGENT = ("url", "pid", "host", "state", "purpose", "leased")  # ... at once: where requests can be sent


class Bell:
    """Lets requests wait for something; the one that has waited longest is woken first."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, timeout_s: float) -> None:
        """Return when the bell rings for this request, or after the timeout."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            if not future.done() or future.cancelled():
                self._waiting.remove(future) if future in self._waiting else None

    def ring(self, count: int | None = None) -> None:
        """Wake the `count` requests that have waited longest; without a count, all."""
        for _ in range(len(self._waiting) if count is None else min(count, len(self._waiting))):
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)


@dataclass
class StatusBoard:
    """The last status of every service, each with the `time` at which it arrived."""

    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    samplers: dict[str, dict[str, Any]] = field(default_factory=dict)  # what workers see of the samplers
    sampler_changes: int = 1  # grows when that changes urgently: every change is told to every worker
    lease: EvaluationLease | None = None  # of samplers to an evaluation

    @classmethod
    def restored(cls, layout: RunLayout) -> Self:
        """Return the statuses that a run service before this one wrote last."""
        return cls({name: each.facts for name, each in read_copy(layout).items()})

    def report(self, name: str, facts: dict[str, Any], now: float) -> None:
        before, facts = self.statuses.get(name, {}), {**facts, "time": now}
        if facts.get("pid") == before.get("pid") and {"cpu_s", "time"} <= facts.keys() & before.keys():
            seconds = now - before["time"]
            busy = (facts["cpu_s"] - before["cpu_s"]) / seconds if seconds > 0 else 0.0
            facts["cpus"] = round(max(0.0, busy), 2)  # of one core
        self.statuses[name] = facts
        if facts.get("kind") == SAMPLER:
            self._show(name, {key: facts.get(key) for key in SHOWN})

    def set_lease(self, lease: EvaluationLease | None) -> None:
        """Take note of the lease, and tell workers if it is another one."""
        same = lease is self.lease if lease is None else lease.is_same(self.lease)
        self.lease = lease
        if not same:
            self.sampler_changes += 1

    def shown(self) -> dict[str, dict[str, Any]]:
        """Return what workers see of the samplers; those that are leased have the `lease`."""
        leased = self.lease.samplers if self.lease is not None else ()
        return {name: {**each, "lease": self.lease if name in leased else None} for name, each in self.samplers.items()}

    def serves_lease(self) -> bool:
        """Return whether a leased sampler can take the requests of the evaluation now."""
        if (lease := self.lease) is None:
            return False
        ready = [each for name in lease.samplers if (each := self.samplers.get(name)) and each["state"] == "ready"]
        return any(lease.is_served_with(each["version"]) for each in ready)

    def instructions(self, name: str, now: float) -> dict[str, Any] | None:
        """Return what a sampler must know of its lease; None if it has none."""
        lease = self.lease
        if lease is None or name not in lease.samplers or lease.version is None:
            return None
        return {"version": lease.version, "shared": lease.shared, "seconds": lease.expires - now}

    def forget(self, name: str) -> None:
        self.statuses.pop(name, None)
        self._show(name, None)

    def expire(self, now: float) -> None:
        """Show samplers that have not reported for a while as silent."""
        for name, shown in list(self.samplers.items()):
            age = now - self.statuses[name]["time"]
            if age > SILENT_S and shown["state"] == "ready":
                self._show(name, {**shown, "state": "silent", "waiting_for": f"no status for {age:.0f} s"})

    def ages(self, now: float) -> dict[str, dict[str, Any]]:
        """Return the statuses, each with its age in seconds."""
        return {name: {**facts, "age_s": now - facts["time"]} for name, facts in sorted(self.statuses.items())}

    def end(self) -> None:
        """Mark every service as ended."""
        self.statuses = {name: {**facts, "state": "ended", "waiting_for": ""} for name, facts in self.statuses.items()}

    def _show(self, name: str, shown: dict[str, Any] | None) -> None:
        if (before := self.samplers.get(name)) == shown:
            return
        self.samplers = {key: each for key, each in self.samplers.items() if key != name}
        self.samplers |= {name: shown} if shown is not None else {}
        leased = self.lease is not None and name in self.lease.samplers
        urgent = (*URGENT, "version") if leased else URGENT
        if before is None or shown is None or any(before[key] != shown[key] for key in urgent):
            self.sampler_changes += 1
