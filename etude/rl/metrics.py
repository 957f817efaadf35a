"""Metrics of an RL run: one flat record per policy step, a progress line, and the summary of the stage.

They are computed from the rewards in the rollout queue, the trainer's step facts and the status files. Means are over
scored rollouts; infrastructure failures are counted separately. A fact that is unknown is left out, never 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from etude.evaluation.run_results import validations
from etude.rewards.monitors import HISTORY, monitor_readings
from etude.rollouts.queue_client import AnyQueue
from etude.rollouts.queue_records import ReadyGroup

Facts = dict[str, Any]
TOKEN_KINDS = ("thinking", "call", "commentary", "final", "summary", "output", "prompt", "cached")  # in a cost
MISMATCHES = tuple(f"mismatch_{kind}_{form}" for kind in ("numerics", "staleness") for form in ("mean", "p99"))


# ------------------------------------------------------------------------------------------- one step


def step_metrics(
    groups: Sequence[ReadyGroup],
    step: int,
    step_facts: Mapping[str, Any],
    services: Mapping[str, Mapping[str, Any]],
    queue: AnyQueue,
    previous: Mapping[str, Any] | None = None,
) -> Facts:
    """Return the record of a step, from the trainer's facts of it; `previous` is the record of the step before."""
    record = rollout_facts(groups) | staleness_facts(groups, step - 1) | trainer_facts(step_facts)
    record |= sampler_facts(services, previous)
    record |= incident_facts(queue, step) | monitor_facts(queue.trained_rewards(step, HISTORY))
    record["alarms"] = [*step_facts.get("alarms", ()), *record.get("alarms", ())]
    return record


def rollout_facts(groups: Sequence[ReadyGroup]) -> Facts:
    """Return rewards, costs and endings of the rollouts of a step."""
    rewards = [slot.record for group in groups for slot in group.slots]
    if not rewards:
        return {}
    totals = [[float(slot.record["total"]) for slot in group.slots] for group in groups]
    flat = np.concatenate(totals)
    record: Facts = {
        "groups": len(groups),
        "rollouts": len(rewards),
        "reward": float(flat.mean()),
        "reward_std": float(flat.std()),
        "reward_best": float(np.mean([max(group) for group in totals])),
        # Groups of equal rewards: all advantages are 0, so they have no gradient.
        "groups_alike": float(np.mean([min(group) == max(group) for group in totals])),
        "informative": float(np.mean([min(group) < max(group) for group in totals])),
        "hacks": sum(bool(reward.get("hack")) for reward in rewards),
    }
    solved = [[bool(slot.record.get("solved")) for slot in group.slots] for group in groups]
    if any("solved" in reward for reward in rewards):
        record |= {"solved": float(np.mean(np.concatenate(solved))), "solved_best": float(np.mean([*map(any, solved)]))}
        record |= solve_rate_histogram([float(np.mean(group)) for group in solved])
    record |= _means(rewards, "score", "segments", "tokens", "made", "pod_s")
    record |= {f"seconds/{name}": value for name, value in _means(_part(rewards, "seconds")).items()}
    return record | _parts(rewards) | _categories(rewards) | _costs(rewards) | _endings(rewards)


def solve_rate_histogram(rates: Sequence[float]) -> Facts:
    """Return the share of groups that no rollout solved, that all did, and of each quarter in between."""
    bins = Counter("none" if not rate else "all" if rate == 1 else f"{min(3, int(rate * 4)) * 25}" for rate in rates)
    return {f"solve_rate/{name}": bins[name] / len(rates) for name in ("none", "0", "25", "50", "75", "all")}


def _parts(rewards: Sequence[Facts]) -> Facts:
    """Return the mean of each part of the reward over all rollouts; a rollout caught by a gate counts as 0."""
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
    record: Facts = {}
    for name, found in sorted(by_name.items()):
        record[f"category/{name}/rollouts"] = len(found)
        record[f"category/{name}/reward"] = float(np.mean([reward["total"] for reward in found]))
        record |= {f"category/{name}/{key}": value for key, value in _means(found, "solved").items()}
    return record


def _costs(rewards: Sequence[Facts]) -> Facts:
    """Return mean tokens by kind, turns and calls per rollout, and errors per call by class."""
    costs = _part(rewards, "cost")
    record = {f"tokens/{name}": value for name, value in _means(costs, *TOKEN_KINDS).items()}
    record |= _means(costs, "turns", "calls", "summaries", "model_s", "wall_s")
    if "wall_s" in record:
        record["session_s"] = record.pop("wall_s")  # wall_s is the trainer's
    errors = sum((Counter(found) for found in _part(rewards, "errors")), Counter[str]())
    calls = sum(cost.get("calls", 0) for cost in costs)
    return record | {f"errors/{name}": count / max(1, calls) for name, count in sorted(errors.items())}


def _endings(rewards: Sequence[Facts]) -> Facts:
    endings = Counter(reward["ending"] for reward in rewards if "ending" in reward)
    return {f"ending/{name}": count / endings.total() for name, count in sorted(endings.items())}


def staleness_facts(groups: Sequence[ReadyGroup], step: int) -> Facts:
    """Return the staleness at a policy step: of the oldest token of each rollout, and of the newest."""
    slots = [slot for group in groups for slot in group.slots]
    oldest = [step - slot.oldest_step for slot in slots if slot.oldest_step is not None]
    newest = [step - slot.newest_step for slot in slots if slot.newest_step is not None]
    if not oldest or not newest:
        return {}
    record = {
        "staleness": float(np.mean(oldest)),
        "staleness_max": max(oldest),
        "staleness_newest": float(np.mean(newest)),
    }
    # Rollouts that were sampled by several weight versions.
    record["swapped"] = float(np.mean([slot.oldest_step != slot.newest_step for slot in slots]))
    return record | {f"staleness/{steps}": count / len(oldest) for steps, count in sorted(Counter(oldest).items())}


def trainer_facts(step_facts: Mapping[str, Any]) -> Facts:
    """Return the trainer's facts of its step under the names of the metrics."""
    names = (
        "gradient_norm",
        "step_scale",
        "store_problem",
        "clipped",
        "imbalance",
        *MISMATCHES,
        "version",
        "trained_tokens",
        "step_s",
        "waited_s",
        "wall_s",
    )
    record = {name: step_facts[name] for name in names if name in step_facts}
    values = step_facts.get("values", {})
    renamed = {"loss": "loss", "entropy_seen": "entropy", "ratio": "ratio"}
    record |= {new: values[old] for old, new in renamed.items() if old in values}
    record |= {name: value for name, value in values.items() if name.startswith("expert")}
    if record.get("wall_s"):
        record["waited_share"] = record.get("waited_s", 0.0) / record["wall_s"]
    for reason, seconds in step_facts.get("waited_for", {}).items():
        record[f"waited/{reason}"] = seconds
    for upload in step_facts.get("upload", ()):
        if not upload.get("skipped"):
            record |= {"upload_bytes": upload["bytes"], "upload_s": upload["seconds"], "upload_full": upload["full"]}
            record["changed"] = upload["changed"] / max(1, upload["values"])
    return record


def sampler_facts(services: Mapping[str, Mapping[str, Any]], previous: Mapping[str, Any] | None) -> Facts:
    """Return the counters of each sampler since its start, and their idle seconds since the previous record."""
    record: Facts = {}
    idle = observed = 0.0
    for name, status in sorted(services.items()):
        if "busy_s" not in status:
            continue
        time, busy = float(status["time"]), float(status["busy_s"])
        record |= {f"{name}/told": time, f"{name}/busy_s": busy, f"{name}/made_tokens": status.get("made_tokens", 0)}
        last_time, last_busy = ((previous or {}).get(f"{name}/{key}") for key in ("told", "busy_s"))
        if last_time is not None and last_busy is not None and last_busy <= busy:  # else it was restarted
            observed += time - last_time
            idle += max(0.0, time - last_time - (busy - last_busy))
    return record | ({"samplers_idle_s": idle, "samplers_seen_s": observed} if observed else {})


def incident_facts(queue: AnyQueue, step: int) -> Facts:
    """Return the number of incidents since the previous step, by kind, and the most common reason of failure."""
    incidents = queue.incidents(step)
    counts = Counter(incident.kind for incident in incidents)
    record: Facts = {f"infrastructure/{kind}": counts[kind] for kind in ("failed", "lost", "stale", "dropped")}
    if reasons := Counter(incident.why for incident in incidents if incident.kind == "failed"):
        record["infrastructure/mostly"] = reasons.most_common(1)[0][0][:200]
    return record


# ------------------------------------------------------------------------------------------- monitors


def monitor_facts(rewards: Iterable[Mapping[str, Any]]) -> Facts:
    """Return the rates of all monitors over these sessions, and their alarms."""
    found = monitor_readings(reward.get("habits", {}) for reward in rewards)
    readings = [reading for reading in found if reading.sessions]
    record: Facts = {f"habit/{reading.name}": reading.rate for reading in readings}
    return record | ({"alarms": [reading.alarm for reading in readings if reading.alarm]} if readings else {})


# ------------------------------------------------------------------------------------------- summaries


def progress_line(facts: Mapping[str, Any]) -> str:
    """Return the main figures of a step for the progress line."""
    forms = (
        ("reward", "reward {:.3f}"),
        ("solved", "solved {:.0%}"),
        ("solved_best", "best {:.0%}"),
        ("informative", "informative {:.0%}"),
        ("staleness_max", "stale {}"),
        ("mismatch_numerics_p99", "mismatch {:.2g} numerics"),
        ("mismatch_staleness_p99", "{:.2g} staleness"),
        ("entropy", "entropy {:.2f}"),
        ("gradient_norm", "norm {:.2g}"),
        ("waited_share", "waits {:.0%}"),
    )
    parts = [form.format(facts[name]) for name, form in forms if facts.get(name) is not None]
    retried = sum(facts.get(f"infrastructure/{kind}", 0) for kind in ("failed", "lost"))
    parts += [f"{retried} retried"] if retried else []
    parts += [f"ALARM {alarm}" for alarm in facts.get("alarms", ())]
    return "  ".join(parts)


def stage_facts(
    metrics: Sequence[Mapping[str, Any]], queue: AnyQueue, deaths: Sequence[str], result_step: int | None = None
) -> Facts:
    """Return the summary of a finished stage, from its metrics; `result_step` made its model, by default the last."""
    steps = [record for record in metrics if not record.get("evaluation")]
    evaluations = sorted(validations(metrics), key=lambda record: record["step"])
    facts: Facts = {"steps": len(steps)}
    if steps:
        if "reward" in steps[0]:
            facts |= {"reward_first": steps[0]["reward"], "reward_last": steps[-1]["reward"]}
        facts["staleness_max"] = max((record.get("staleness_max", 0) for record in steps), default=0)
        facts |= {name: max(found) for name in MISMATCHES if (found := [r[name] for r in steps if name in r])}
        facts["clipped_share"] = sum(record.get("clipped", 0.0) for record in steps) / len(steps)
    wall = sum(record.get("wall_s", 0.0) for record in steps)
    if wall:
        facts |= {"seconds": wall, "waited_share": sum(record.get("waited_s", 0.0) for record in steps) / wall}
    if observed := sum(record.get("samplers_seen_s", 0.0) for record in steps):
        facts["samplers_idle_share"] = sum(record.get("samplers_idle_s", 0.0) for record in steps) / observed
    of_result = next((record for record in evaluations if record["step"] == result_step), (evaluations or [{}])[-1])
    for name, record in (("before", evaluations[0]), ("after", of_result)) if len(evaluations) > 1 else ():
        bests = [key for key in record if key.startswith("best/") and key.removeprefix("best/").isdigit()]
        top = max(bests, key=lambda key: int(key.removeprefix("best/")), default="")
        kept = [key for key in ("solved", "solved_low", "solved_high", top) if record.get(key) is not None]
        facts[name] = {"step": record["step"], **{key: record[key] for key in kept}}
    incidents = Counter(incident.kind for incident in queue.incidents())
    facts |= {"retried": incidents["failed"] + incidents["lost"], "stale": incidents["stale"]}
    return facts | {"dropped": incidents["dropped"], "deaths": len(deaths)}


# ------------------------------------------------------------------------------------------- helpers


def _part(rewards: Iterable[Mapping[str, Any]], name: str) -> list[Facts]:
    return [reward[name] for reward in rewards if isinstance(reward.get(name), dict)]


def _means(records: Sequence[Mapping[str, Any]], *names: str) -> dict[str, float]:
    """Return the mean of each named value (without names: of all) over the records that have it."""
    wanted = names or sorted({name for facts in records for name in facts})
    values = {name: [float(facts[name]) for facts in records if facts.get(name) is not None] for name in wanted}
    return {name: float(np.mean(numbers)) for name, numbers in values.items() if numbers}
