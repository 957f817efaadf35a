"""What a stage of a run found, in lines that a person reads; programs take the facts themselves (`--json`)."""

from collections.abc import Callable, Mapping
from typing import Any

Facts = Mapping[str, Any]


def stage_summary(stage: str, facts: Facts) -> str:
    """One line, or a few: the first begins with the stage's name."""
    teller = TELLERS.get(stage)
    return f"{stage}: " + (teller(facts) if teller else listed(facts))


def listed(facts: Facts) -> str:
    """Every fact with its name."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in facts.items())


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return f"({listed(value)})"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _tasks(facts: Facts) -> str:
    sets = [f"{name} {found['tasks']:,}" for name, found in facts.items()]
    demonstrations = sum(found.get("demonstrations", 0) for found in facts.values())
    return ", ".join(sets) + (f"; {demonstrations:,} demonstrations" if demonstrations else "")


def _corpus(facts: Facts) -> str:
    def one(name: str, found: Facts) -> str:
        kept = f", {found['held_out']:,} held out" if found.get("held_out") else ""
        return f"{name} {found.get('train', 0):,} tokens{kept}"

    return "; ".join(one(name, found) for name, found in facts.items())


def _training(facts: Facts) -> str:
    parts = [f"{facts['steps']:,} steps, {facts['tokens']:,} tokens"]
    parts += [
        f"{name.removeprefix('first_')} {first:.3f} -> {facts[last]:.3f}"
        for name, first in facts.items()
        if name.startswith("first_") and (last := name.replace("first_", "last_", 1)) in facts
    ]
    if (before := facts.get("held_out_nats_before")) and (after := facts.get("held_out_nats_after")):
        parts.append(f"held-out code {before:,.0f} -> {after:,.0f} nats ({after / before - 1:+.1%})")
    if (after := facts.get("held_out_overlap_after")) is not None:
        before = facts["held_out_overlap_before"]
        parts.append(f"overlap with the model's own next token on held-out code {before:.0%} -> {after:.0%}")
    return "; ".join(parts)


def _rl(facts: Facts) -> str:
    first = f"{facts['steps']:,} steps"
    first += f" in {minutes(facts['seconds'])}" if "seconds" in facts else ""
    if "reward_first" in facts:
        first += f"; mean reward {facts['reward_first']:.2f} -> {facts['reward_last']:.2f}"
    troubles = [f"{facts[name]} {name}" for name in ("retried", "stale", "dropped", "deaths") if facts.get(name)]
    lines = [first + (f" ({', '.join(troubles)})" if troubles else "")]
    if "ended_early" in facts:
        lines.append(f"it ended early: {facts['ended_early']}")
    if "rise" in facts:
        before, after, rise = facts["before"], facts["after"], facts["rise"]
        solved = f"{before['solved']:.0%} -> {after['solved']:.0%}"
        lines.append(f"held-out tasks solved: {solved}, {_points(rise)}")
        best = next((name for name in after if name.startswith("best/") and name in before), None)
        if best:
            lines[-1] += f"; best of {best.removeprefix('best/')}: {before[best]:.0%} -> {after[best]:.0%}"
        sets = {name: facts[name] for name in sorted(facts) if name.startswith("rise_")}
        lines += [f"  {name.removeprefix('rise_')}: {_points(found)}" for name, found in sets.items()]
    return "\n  ".join(lines)


def _points(rise: Facts) -> str:
    low, high = (round(100 * rise[f"solved_{end}"]) for end in ("low", "high"))
    return f"{100 * rise['solved']:+.0f} points (95 % interval {low:+d} to {high:+d}, {rise['tasks']} tasks)"


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


TELLERS: dict[str, Callable[[Facts], str]] = {
    "tasks": _tasks,
    "corpus": _corpus,
    "pretrain": _training,
    "mtp": _training,
    "extend": _training,
    "sft": _training,
    "rl": _rl,
}
