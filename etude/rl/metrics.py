"""What a run shows of itself: one flat line of facts for every step, one line of words, a table, and its rollouts.

Everything is read: from the rewards in the slots' table, from what the trainer wrote down of its step, from the status
files, from the traces. Means are over rollouts that were graded; what the infrastructure lost stands beside them. A
fact that nobody gave is left out of the line, never zero.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from etude.errors import EtudeError
from etude.rewards.monitors import MonitorSet
from etude.rollouts.queue import ReadyGroup, RolloutQueue, Slot

Facts = dict[str, Any]
KINDS = ("thinking", "call", "commentary", "final", "summary", "output", "prompt", "cached")  # of tokens, in a cost
WINDOW = 200  # sessions that monitors look back over


# ------------------------------------------------------------------------------------------- one step


def step_metrics(
    groups: Sequence[ReadyGroup],
    step: int,
    told: Mapping[str, Any],
    services: Mapping[str, Mapping[str, Any]],
    slots: RolloutQueue,
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
    oldest = [version - slot.oldest_step for slot in slots if slot.oldest_step is not None and slot.oldest_step >= 0]
    newest = [version - slot.newest_step for slot in slots if slot.newest_step is not None and slot.newest_step >= 0]
    if not oldest or not newest:
        return {}
    line = {
        "staleness": float(np.mean(oldest)),
        "staleness_max": max(oldest),
        "staleness_newest": float(np.mean(newest)),
    }
    # a rollout whose oldest and newest token differ went on through a change of weights
    line["swapped"] = float(np.mean([slot.oldest_step != slot.newest_step for slot in slots]))
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


def trouble_facts(slots: RolloutQueue, step: int) -> Facts:
    """What the infrastructure did to rollouts on the way to this step: it is in no mean above."""
    troubles = slots.incidents(step)
    counts = Counter(trouble.kind for trouble in troubles)
    line: Facts = {f"infrastructure/{kind}": counts[kind] for kind in ("failed", "lost", "stale", "dropped")}
    if reasons := Counter(trouble.why for trouble in troubles if trouble.kind == "failed"):
        line["infrastructure/mostly"] = reasons.most_common(1)[0][0][:200]
    return line


# ------------------------------------------------------------------------------------------- monitors


def monitor_facts(rewards: Iterable[Mapping[str, Any]]) -> Facts:
    """The monitors' rates over these sessions, and what is alarming about them."""
    watch = MonitorSet(window=WINDOW)
    for reward in rewards:
        watch.restore({name: [rate] for name, rate in reward.get("habits", {}).items()})
    readings = [reading for reading in watch.readings() if reading.sessions]
    line: Facts = {f"habit/{reading.name}": reading.rate for reading in readings}
    return line | ({"alarms": [reading.alarm for reading in readings if reading.alarm]} if readings else {})


# ------------------------------------------------------------------------------------------- for people


def progress_line(facts: Mapping[str, Any]) -> str:
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


def stage_facts(metrics: Sequence[Mapping[str, Any]], slots: RolloutQueue, problems: Sequence[str]) -> Facts:
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
    troubles = Counter(trouble.kind for trouble in slots.incidents())
    facts |= {"retried": troubles["failed"] + troubles["lost"], "stale": troubles["stale"]}
    return facts | {"dropped": troubles["dropped"], "deaths": len(problems)}


# ------------------------------------------------------------------------------------------- small things


def _reward(slot: Slot) -> Facts:
    if slot.reward is None:
        raise EtudeError(f"slot {slot.id} of {slot.task} is {slot.state}: it has no reward to be shown")
    return slot.reward


def _part(rewards: Iterable[Mapping[str, Any]], name: str) -> list[Facts]:
    return [reward[name] for reward in rewards if isinstance(reward.get(name), dict)]


def _means(found: Sequence[Mapping[str, Any]], *names: str) -> dict[str, float]:
    """The mean of each of these names (or of all there are), over those that have it."""
    wanted = names or sorted({name for facts in found for name in facts})
    values = {name: [float(facts[name]) for facts in found if facts.get(name) is not None] for name in wanted}
    return {name: float(np.mean(numbers)) for name, numbers in values.items() if numbers}
