"""What a run shows of itself: one flat line of facts for every step, one line of words, a table, and its rollouts.

Everything is read: from the rewards in the slots' table, from what the trainer wrote down of its step, from the status
files, from the traces. Means are over rollouts that were graded; what the infrastructure lost stands beside them. A
fact that nobody gave is left out of the line, never zero.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from etude.errors import EtudeError, InputError
from etude.harness.atif import to_atif
from etude.harness.trace_store import SUFFIX, load_trace
from etude.rewards.monitors import MONITORS, Seen, Watch
from etude.rewards.reward import Graded, Reward
from etude.rollouts.queue import ReadyGroup, Slot, Slots
from etude.runs.layout import Place, statuses, write_whole

Facts = dict[str, Any]
KINDS = ("thinking", "call", "commentary", "final", "summary", "output", "prompt", "cached")  # of tokens, in a cost
SILENT_S = 10.0  # services write every second; a busy machine is late
WINDOW = 200  # sessions that monitors look back over


# ------------------------------------------------------------------------------------------- one step


def step_facts(
    groups: Sequence[ReadyGroup],
    step: int,
    told: Mapping[str, Any],
    services: Mapping[str, Mapping[str, Any]],
    slots: Slots,
    before: Mapping[str, Any] | None = None,
) -> Facts:
    """The line of a step: `told` is what the trainer wrote down of it, `before` the line of the step before."""
    line = rollout_facts(groups) | staleness_facts(groups, step - 1) | trainer_facts(told)
    line |= sampler_facts(services, before)
    line |= trouble_facts(slots, step) | monitor_facts(slots.trained_rewards(step, WINDOW))
    return line


def rollout_facts(groups: Sequence[ReadyGroup]) -> Facts:
    """What the rollouts of a step were like."""
    rewards = [_reward(slot) for group in groups for slot in group.slots]
    if not rewards:
        return {}
    totals = [[float(_reward(slot)["total"]) for slot in group.slots] for group in groups]
    flat = np.concatenate(totals)
    line: Facts = {
        "groups": len(groups),
        "rollouts": len(rewards),
        "reward": float(flat.mean()),
        "reward_std": float(flat.std()),
        "reward_best": float(np.mean([max(group) for group in totals])),
        # all alike: the advantage of each is zero, and the group teaches nothing
        "groups_alike": float(np.mean([min(group) == max(group) for group in totals])),
        "hacks": sum(bool(reward.get("hack")) for reward in rewards),
    }
    solved = [[bool(_reward(slot).get("solved")) for slot in group.slots] for group in groups]
    if any("solved" in reward for reward in rewards):
        line |= {"solved": float(np.mean(np.concatenate(solved))), "solved_best": float(np.mean([*map(any, solved)]))}
    line |= _means(rewards, "score", "segments", "tokens", "made", "pod_s")
    line |= {f"seconds/{name}": value for name, value in _means(_part(rewards, "seconds")).items()}
    return line | _parts(rewards) | _categories(rewards) | _costs(rewards) | _endings(rewards)


def _parts(rewards: Sequence[Facts]) -> Facts:
    """Each part of the reward, over all rollouts: what cheated has none, and gets nothing from any."""
    names = sorted({name for reward in rewards for name in reward.get("parts", ())})
    return {
        f"reward/{name}": float(np.mean([reward.get("parts", {}).get(name, 0.0) for reward in rewards]))
        for name in names
    }


def _categories(rewards: Sequence[Facts]) -> Facts:
    by_name: defaultdict[str, list[Facts]] = defaultdict(list)
    for reward in rewards:
        if "category" in reward:
            by_name[reward["category"] or "none"].append(reward)
    line: Facts = {}
    for name, found in sorted(by_name.items()):
        line[f"category/{name}/rollouts"] = len(found)
        line[f"category/{name}/reward"] = float(np.mean([reward["total"] for reward in found]))
        line |= {f"category/{name}/{key}": value for key, value in _means(found, "solved").items()}
    return line


def _costs(rewards: Sequence[Facts]) -> Facts:
    """Tokens by kind, turns and calls of a rollout; errors of a call, by class."""
    costs = _part(rewards, "cost")
    line = {f"tokens/{name}": value for name, value in _means(costs, *KINDS).items()}
    line |= _means(costs, "turns", "calls", "summaries", "model_s", "wall_s")
    if "wall_s" in line:
        line["session_s"] = line.pop("wall_s")  # the trainer's own is another
    errors = sum((Counter(found) for found in _part(rewards, "errors")), Counter[str]())
    calls = sum(cost.get("calls", 0) for cost in costs)
    return line | {f"errors/{name}": count / max(1, calls) for name, count in sorted(errors.items())}


def _endings(rewards: Sequence[Facts]) -> Facts:
    endings = Counter(reward["ending"] for reward in rewards if "ending" in reward)
    return {f"ending/{name}": count / endings.total() for name, count in sorted(endings.items())}


def staleness_facts(groups: Sequence[ReadyGroup], version: int) -> Facts:
    """How many steps older than the trainer the tokens were: the oldest of each rollout, and the newest."""
    slots = [slot for group in groups for slot in group.slots]
    oldest = [version - slot.oldest for slot in slots if slot.oldest is not None and slot.oldest >= 0]
    newest = [version - slot.newest for slot in slots if slot.newest is not None and slot.newest >= 0]
    if not oldest or not newest:
        return {}
    line = {
        "staleness": float(np.mean(oldest)),
        "staleness_max": max(oldest),
        "staleness_newest": float(np.mean(newest)),
    }
    # a rollout whose oldest and newest token differ went on through a change of weights
    line["swapped"] = float(np.mean([slot.oldest != slot.newest for slot in slots]))
    return line | {f"staleness/{age}": count / len(oldest) for age, count in sorted(Counter(oldest).items())}


def trainer_facts(told: Mapping[str, Any]) -> Facts:
    """What the trainer says of its step, under the names of the line."""
    names = (
        "gradient_norm",
        "mismatch_mean",
        "mismatch_p99",
        "version",
        "trained_tokens",
        "step_s",
        "waited_s",
        "wall_s",
    )
    line = {name: told[name] for name in names if name in told}
    values = told.get("values", {})
    renamed = {"loss": "loss", "entropy_seen": "entropy", "ratio": "ratio"}
    line |= {new: values[old] for old, new in renamed.items() if old in values}
    if line.get("wall_s"):
        line["waited_share"] = line.get("waited_s", 0.0) / line["wall_s"]
    for wait, seconds in told.get("waited_for", {}).items():
        line[f"waited/{wait}"] = seconds
    for upload in told.get("upload", ()):
        if not upload.get("skipped"):
            line |= {"upload_bytes": upload["bytes"], "upload_s": upload["seconds"], "upload_full": upload["full"]}
            line["changed"] = upload["changed"] / max(1, upload["values"])
    return line


def sampler_facts(services: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any] | None) -> Facts:
    """What each sampler has done since it started, and how long they did nothing since the line before."""
    line: Facts = {}
    idle = seen = 0.0
    for name, status in sorted(services.items()):
        if "busy_s" not in status:
            continue
        told, busy = float(status["time"]), float(status["busy_s"])
        line |= {f"{name}/told": told, f"{name}/busy_s": busy, f"{name}/made_tokens": status.get("made_tokens", 0)}
        then, was_busy = ((before or {}).get(f"{name}/{key}") for key in ("told", "busy_s"))
        if then is not None and was_busy is not None and was_busy <= busy:  # less: another process has its name now
            seen += told - then
            idle += max(0.0, told - then - (busy - was_busy))
    return line | ({"samplers_idle_s": idle, "samplers_seen_s": seen} if seen else {})


def trouble_facts(slots: Slots, step: int) -> Facts:
    """What the infrastructure did to rollouts on the way to this step: it is in no mean above."""
    troubles = slots.troubles(step)
    counts = Counter(trouble.kind for trouble in troubles)
    line: Facts = {f"infrastructure/{kind}": counts[kind] for kind in ("failed", "lost", "stale", "dropped")}
    if reasons := Counter(trouble.why for trouble in troubles if trouble.kind == "failed"):
        line["infrastructure/mostly"] = reasons.most_common(1)[0][0][:200]
    return line


# ------------------------------------------------------------------------------------------- monitors


def habits(graded: Graded, reward: Reward) -> dict[str, float]:
    """What every monitor measures of one session: for its reward's record, since nobody else has all of it at hand."""
    seen = Seen(graded, reward)
    rates = {monitor.name: monitor.rate(seen) for monitor in MONITORS}
    return {name: float(rate) for name, rate in rates.items() if rate is not None}


def monitor_facts(rewards: Iterable[Mapping[str, Any]]) -> Facts:
    """The monitors' rates over these sessions, and what is alarming about them."""
    watch = Watch(window=WINDOW)
    for reward in rewards:
        watch.restore({name: [rate] for name, rate in reward.get("habits", {}).items()})
    readings = [reading for reading in watch.readings() if reading.sessions]
    line: Facts = {f"habit/{reading.name}": reading.rate for reading in readings}
    return line | ({"alarms": [reading.alarm for reading in readings if reading.alarm]} if readings else {})


# ------------------------------------------------------------------------------------------- for people


def line(facts: Mapping[str, Any]) -> str:
    """A step in words, for the line that shows how a run goes."""
    forms = (
        ("reward", "reward {:.3f}"),
        ("solved", "solved {:.0%}"),
        ("solved_best", "best {:.0%}"),
        ("staleness_max", "stale {}"),
        ("mismatch_p99", "mismatch {:.2g}"),
        ("entropy", "entropy {:.2f}"),
        ("gradient_norm", "norm {:.2g}"),
        ("waited_share", "waits {:.0%}"),
    )
    words = [form.format(facts[name]) for name, form in forms if facts.get(name) is not None]
    again = sum(facts.get(f"infrastructure/{kind}", 0) for kind in ("failed", "lost"))
    words += [f"{again} retried"] if again else []
    words += [f"ALARM {alarm}" for alarm in facts.get("alarms", ())]
    return "  ".join(words)


def stage_facts(metrics: Sequence[Mapping[str, Any]], slots: Slots, problems: Sequence[str]) -> Facts:
    """What a finished stage is remembered by, from its lines of metrics."""
    steps = [record for record in metrics if not record.get("evaluation")]
    measured = sorted((record for record in metrics if record.get("evaluation")), key=lambda record: record["step"])
    facts: Facts = {"steps": len(steps)}
    if steps:
        facts |= {"reward_first": steps[0]["reward"], "reward_last": steps[-1]["reward"]}
        facts["staleness_max"] = max((record.get("staleness_max", 0) for record in steps), default=0)
        facts["mismatch_p99"] = max(record.get("mismatch_p99", 0.0) for record in steps)
    wall = sum(record.get("wall_s", 0.0) for record in steps)
    if wall:
        facts |= {"seconds": wall, "waited_share": sum(record.get("waited_s", 0.0) for record in steps) / wall}
    if seen := sum(record.get("samplers_seen_s", 0.0) for record in steps):
        facts["samplers_idle_share"] = sum(record.get("samplers_idle_s", 0.0) for record in steps) / seen
    for name, record in (("before", measured[0]), ("after", measured[-1])) if len(measured) > 1 else ():
        bests = [key for key in record if key.startswith("best/") and key.removeprefix("best/").isdigit()]
        top = max(bests, key=lambda key: int(key.removeprefix("best/")), default="")
        kept = [key for key in ("solved", "solved_low", "solved_high", top) if record.get(key) is not None]
        facts[name] = {"step": record["step"], **{key: record[key] for key in kept}}
    troubles = Counter(trouble.kind for trouble in slots.troubles())
    facts |= {"retried": troubles["failed"] + troubles["lost"], "stale": troubles["stale"]}
    return facts | {"dropped": troubles["dropped"], "deaths": len(problems)}


@dataclass(frozen=True)
class Health:
    """How the reinforcement learning of a run is, as data."""

    services: list[Facts]  # name, state, silent_s, about
    rollouts: dict[str, dict[str, int]]  # to train on and to measure with, by state
    deaths: list[Facts]  # of processes, oldest first: time, name, why


def health(run: Path | str, now: float | None = None) -> Health:
    """Its services and what each waits for, its rollouts by state, and who has died."""
    place, now = Place(Path(run)), time.time() if now is None else now
    if not place.root.is_dir():
        raise InputError(f"{run}: there is no reinforcement learning here; name a run that has begun its stage rl")
    services = []
    for name, status in statuses(place).items():
        silent = now - float(status.get("time", 0.0))
        over = status.get("state") == "ended"
        state = "silent" if silent > SILENT_S and not over else str(status.get("state", ""))
        about = str(status.get("waiting_for") or "") or _figures(status)
        services.append({"name": name, "state": state, "silent_s": round(silent, 1), "about": about})
    rollouts = {}
    for name, path in (("training", place.slots), ("evaluation", place.evaluations)):
        if path.exists():
            with closing(Slots.look(path)) as slots:
                rollouts[name] = slots.counts()
    deaths: list[Facts] = []
    log = place.logs / "deaths.jsonl"
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        with suppress(ValueError):  # the last may be half written
            deaths.append(json.loads(line))
    return Health(services, rollouts, deaths)


def table(run: Path | str, now: float | None = None) -> Table:
    """How a run is, for people."""
    now = time.time() if now is None else now
    found = health(run, now)
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


# ------------------------------------------------------------------------------------------- every rollout


@dataclass(frozen=True)
class Kept:
    """A rollout on disk. One that was sampled again keeps its file and has no reward: it was not trained on."""

    path: Path
    name: str  # of the file, from where all of them lie: traces/000012/03-1
    step: int | None  # that trained it, or at which it was measured; None: none has yet
    group: int
    number: int
    attempt: int
    task: str
    reward: Mapping[str, Any] | None

    @property
    def row(self) -> Facts:
        """For a list."""
        said = self.reward or {}
        cost = said.get("cost", {})
        facts = {key: said.get(key) for key in ("total", "score", "solved", "ending", "hack")}
        return {
            "name": self.name,
            "step": self.step,
            "group": self.group,
            "slot": self.number,
            "attempt": self.attempt,
            "task": self.task,
            **facts,
            "turns": cost.get("turns"),
            "path": str(self.path),
        }


def rollouts(place: Place, prefix: str = "") -> list[Kept]:
    """Every rollout that was kept, training first, by group and number; those whose name begins so."""
    found: list[Kept] = []
    if not place.root.is_dir():
        raise InputError(f"{place.run}: there is no reinforcement learning here; name a run with a stage rl")
    for database, traces in ((place.slots, place.traces), (place.evaluations, place.evaluation_traces)):
        if not database.exists():
            if any(traces.glob("[0-9]*")):
                raise EtudeError(f"{database} is missing: nobody can say what the rollouts in {traces} are")
            continue
        with closing(Slots.look(database)) as slots:
            steps = {standing.id: (standing.task, standing.step) for standing in slots.standings()}
            for directory in sorted(traces.glob("[0-9]*")):
                names = [path for path in sorted(directory.glob(f"*{SUFFIX}")) if _name(place, path).startswith(prefix)]
                if names and int(directory.name) in steps:
                    group = slots.group(int(directory.name))
                    found += [_kept(place, path, group, *steps[group.id]) for path in names]
    return found


def _kept(place: Place, path: Path, group: ReadyGroup, task: str, step: int | None) -> Kept:
    number, _, attempt = path.stem.partition("-")
    (slot,) = (slot for slot in group.slots if slot.number == int(number))
    current = slot.reward is not None and place.root / slot.trace == path
    if path.is_relative_to(place.evaluation_traces):
        measured, _, task = task.partition("/")
        step = int(measured)
    elif not current:
        step = None  # another attempt was trained on, if any
    reward = slot.reward if current else None
    return Kept(path, _name(place, path), step, group.id, slot.number, int(attempt), task, reward)


def _name(place: Place, path: Path) -> str:
    return path.relative_to(place.root).with_suffix("").as_posix()


def rollouts_table(kept: Iterable[Kept]) -> Table:
    """Rollouts for people to choose from."""
    columns = ("name", "step", "total", "solved", "ending", "turns", "task")
    shown = Table(*columns, box=None, header_style="bold")
    for rollout in kept:
        row = rollout.row | {"ending": rollout.row["ending"] or "sampled again"}
        shown.add_row(*("" if row[name] is None else escape(_word(row[name])) for name in columns))
    return shown


def export_rollouts(kept: Iterable[Kept], directory: Path) -> tuple[int, list[str]]:
    """Write rollouts as documents of the Agent Trajectory Interchange Format, one file each; how many, and what is
    wrong with those that cannot be read."""
    count, problems = 0, []
    for rollout in kept:
        try:
            document = to_atif(load_trace(rollout.path))
        except InputError as error:
            problems.append(str(error))
            continue
        document["extra"]["rollout"] = rollout.row | {"path": rollout.name, "reward": rollout.reward}
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
        write_whole(directory / f"{rollout.name.replace('/', '-')}.json", text)
        count += 1
    return count, problems


# ------------------------------------------------------------------------------------------- small things


def _reward(slot: Slot) -> Facts:
    if slot.reward is None:
        raise EtudeError(f"slot {slot.id} of {slot.task} is {slot.state}: it has no reward to be shown")
    return slot.reward


def _part(rewards: Iterable[Mapping[str, Any]], name: str) -> list[Facts]:
    return [reward[name] for reward in rewards if isinstance(reward.get(name), dict)]


def _word(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _means(found: Sequence[Mapping[str, Any]], *names: str) -> dict[str, float]:
    """The mean of each of these names (or of all there are), over those that have it."""
    wanted = names or sorted({name for facts in found for name in facts})
    values = {name: [float(facts[name]) for facts in found if facts.get(name) is not None] for name in wanted}
    return {name: float(np.mean(numbers)) for name, numbers in values.items() if numbers}
