"""The health of an RL run: its services, its rollouts by state, and process deaths."""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from etude.errors import InputError
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.runs.service_status import ServiceView, read_statuses

Facts = dict[str, Any]


@dataclass(frozen=True)
class RlHealth:
    """The health of an RL run as data."""

    services: list[ServiceView]
    rollouts: dict[str, dict[str, int]]  # by state, of the training and the evaluation queue
    deaths: list[Facts]  # of processes, oldest first: time, name, why


def rl_health(run: Path | str) -> RlHealth:
    """Return the services and what each waits for, the rollouts by state, and the process deaths."""
    layout = RunLayout(Path(run))
    if not layout.root.is_dir():
        raise InputError(f"{run} has no RL stage yet; name a run that has started its stage rl")
    services = [ServiceView.of(name, status) for name, status in read_statuses(layout).items()]
    rollouts = {}
    for name, path in (("training", layout.slots), ("evaluation", layout.evaluations)):
        if path.exists():
            with closing(RolloutQueue.open_read_only(path)) as queue:
                rollouts[name] = queue.counts()
    deaths: list[Facts] = []
    log = layout.logs / "deaths.jsonl"
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        with suppress(ValueError):  # the last line may be incomplete
            deaths.append(json.loads(line))
    return RlHealth(services, rollouts, deaths)


def health_table(run: Path | str, now: float | None = None) -> Table:
    """Return the health of an RL run as a table for the terminal."""
    now = time.time() if now is None else now
    health = rl_health(run)
    table = Table(box=None, header_style="bold")
    for column in ("service", "state", "host", "version", "load", "waiting for"):
        table.add_column(column, overflow="fold", no_wrap=column in ("service", "state"))
    for service in health.services:
        state = f"silent {service.age_s:.0f} s" if service.state == "silent" else service.state
        found = (service.name, state, service.host, service.version, service.load, service.waiting_for)
        table.add_row(*map(escape, found))
    for name, states in health.rollouts.items():
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        table.add_row(name, "rollouts", "", "", "", counts or "none")
    if health.deaths:
        last = health.deaths[-1]
        text = f"the last {now - last['time']:.0f} s ago: {last['name']} {last['why']}"
        table.add_row("deaths", str(len(health.deaths)), "", "", "", escape(text))
    return table
