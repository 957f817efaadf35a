"""Summarize the facts of a finished stage in lines for people; programs use the facts themselves (`--json`)."""

from collections.abc import Callable, Mapping
from typing import Any

Facts = Mapping[str, Any]


def summarize_stage(stage: str, facts: Facts) -> str:
    """Return one or a few lines; the first begins with the stage's name."""
    summarize = SUMMARIES.get(stage, list_facts)
    return f"{stage}: {summarize(facts)}"


def list_facts(facts: Facts) -> str:
    """Return every fact with its name."""
    return ", ".join(f"{name} {_show_fact(value)}" for name, value in facts.items())


def _show_fact(value: object) -> str:
    if isinstance(value, dict):
        return f"({list_facts(value)})"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _summarize_tasks(facts: Facts) -> str:
    sets = [f"{name} {counts['tasks']:,}" for name, counts in facts.items()]
    demonstrations = sum(counts.get("demonstrations", 0) for counts in facts.values())
    return ", ".join(sets) + (f"; {demonstrations:,} demonstrations" if demonstrations else "")


def _summarize_corpora(facts: Facts) -> str:
    def one(name: str, tokens: Facts) -> str:
        held_out = f", {tokens['held_out']:,} held out" if tokens.get("held_out") else ""
        return f"{name} {tokens.get('train', 0):,} tokens{held_out}"

    return "; ".join(one(name, tokens) for name, tokens in facts.items())


def _summarize_training(facts: Facts) -> str:
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


def _summarize_rl(facts: Facts) -> str:
    first = f"{facts['steps']:,} steps"
    first += f" in {format_minutes(facts['seconds'])}" if "seconds" in facts else ""
    if "reward_first" in facts:
        first += f"; mean reward {facts['reward_first']:.2f} -> {facts['reward_last']:.2f}"
    problems = [f"{facts[name]} {name}" for name in ("retried", "stale", "dropped", "deaths") if facts.get(name)]
    lines = [first + (f" ({', '.join(problems)})" if problems else "")]
    if "ended_early" in facts:
        lines.append(f"ended early: {facts['ended_early']}")
    if "rise" in facts:
        before, after, rise = facts["before"], facts["after"], facts["rise"]
        solved = f"{before['solved']:.0%} -> {after['solved']:.0%}"
        lines.append(f"held-out tasks solved: {solved}, {_points(rise)}")
        best = next((name for name in after if name.startswith("best/") and name in before), None)
        if best:
            lines[-1] += f"; best of {best.removeprefix('best/')}: {before[best]:.0%} -> {after[best]:.0%}"
        by_set = {name: facts[name] for name in sorted(facts) if name.startswith("rise_")}
        lines += [f"  {name.removeprefix('rise_')}: {_points(rise)}" for name, rise in by_set.items()]
    return "\n  ".join(lines)


def _points(rise: Facts) -> str:
    low, high = (round(100 * rise[f"solved_{end}"]) for end in ("low", "high"))
    return f"{100 * rise['solved']:+.0f} points (95 % interval {low:+d} to {high:+d}, {rise['tasks']} tasks)"


def format_minutes(seconds: float) -> str:
    """Return whole seconds, from sixty on as minutes and seconds."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


SUMMARIES: dict[str, Callable[[Facts], str]] = {
    "tasks": _summarize_tasks,
    "corpus": _summarize_corpora,
    "pretrain": _summarize_training,
    "mtp": _summarize_training,
    "extend": _summarize_training,
    "sft": _summarize_training,
    "rl": _summarize_rl,
}
