"""The state of a run's reinforcement learning: its services, its rollouts by state, and process deaths."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from etude.errors import InputError
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.runs.service_status import read_statuses

Facts = dict[str, Any]
SILENT_S = 10.0  # services report every second; a busy machine is late


@dataclass(frozen=True)
class RlHealth:
    """How the reinforcement learning of a run is, as data."""

    services: list[Facts]  # name, state, silent_s, about
    rollouts: dict[str, dict[str, int]]  # to train on and to measure with, by state
    deaths: list[Facts]  # of processes, oldest first: time, name, why


def rl_health(run: Path | str, now: float | None = None) -> RlHealth:
    """Its services and what each waits for, its rollouts by state, and who has died."""
    place, now = RunLayout(Path(run)), time.time() if now is None else now
    if not place.root.is_dir():
        raise InputError(f"{run}: there is no reinforcement learning here; name a run that has begun its stage rl")
    services = []
    for name, status in read_statuses(place).items():
        silent = now - float(status.get("time", 0.0))
        over = status.get("state") == "ended"
        state = "silent" if silent > SILENT_S and not over else str(status.get("state", ""))
        about = str(status.get("waiting_for") or "") or _figures(status)
        services.append({"name": name, "state": state, "silent_s": round(silent, 1), "about": about})
    rollouts = {}
    for name, path in (("training", place.slots), ("evaluation", place.evaluations)):
        if path.exists():
            with closing(RolloutQueue.open_read_only(path)) as slots:
                rollouts[name] = slots.counts()
    deaths: list[Facts] = []
    log = place.logs / "deaths.jsonl"
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        with suppress(ValueError):  # the last may be half written
            deaths.append(json.loads(line))
    return RlHealth(services, rollouts, deaths)


def health_table(run: Path | str, now: float | None = None) -> Table:
    """How a run is, for people."""
    now = time.time() if now is None else now
    found = rl_health(run, now)
    shown = Table(box=None, header_style="bold")
    for column in ("service", "state", "heard", "waits for, or does"):
        shown.add_column(column, overflow="fold", no_wrap=column != "waits for, or does")
    for each in found.services:
        shown.add_row(
            escape(each["name"]), escape(each["state"]), f"{each['silent_s']:.0f} s ago", escape(each["about"])
        )
    for name, states in found.rollouts.items():
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        shown.add_row(name, "rollouts", "", counts or "none")
    if found.deaths:
        last = found.deaths[-1]
        told = f"{len(found.deaths)}, the last: {last['name']} {last['why']}"
        shown.add_row("deaths", "", f"{now - last['time']:.0f} s ago", escape(told))
    return shown


def _figures(status: Mapping[str, Any]) -> str:
    known = {"step": "step", "version": "version", "running": "running", "waiting": "waiting", "tokens_s": "tokens/s"}
    found = [f"{word} {status[name]}" for name, word in known.items() if isinstance(status.get(name), int | float)]
    held = status.get("held")
    return ", ".join([*found, f"{len(held)} rollouts"] if isinstance(held, list | dict) else found)
