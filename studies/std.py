"""Advantages divided by the group's standard deviation, or not: the division amplifies the smallest reward differences.

An answer has three tokens: whether the work is checked, the answer, and a style token that no reward depends on. The
fine-tuned policy knows the answers. Most tasks succeed whether or not the work is checked. A few are tricky, which no
token shows, and succeed far more often when checked. Checking costs a little effort, about a thousandth of the reward
for a solution, so it pays to check. In a group of easy tasks only the effort differs, and dividing by the standard
deviation gives that difference as much weight as a solution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from etude.evaluation.plot import Axis, Line, Panel
from etude.harness.trace import Segment
from etude.model.transformer import Transformer, initialize
from etude.rewards.effort import effort
from etude.rl.objective import PolicyGradient
from etude.rollouts.group_advantages import group_advantages
from etude.system.progress import ProgressCallback
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import Point, StudyResult, study
from studies.toy_policy import (
    advantages_by_group,
    copy_model,
    make_segment,
    rl_step,
    sample_rows,
    sft_step,
    toy_config,
    training_sequences,
)

QUESTIONS, ANSWERS, STYLES = 8, 8, 8
CHECK = QUESTIONS  # token ids: questions, then check and skip, then answers, then styles
ANSWER = CHECK + 2
STYLE = ANSWER + ANSWERS
SPREADS = tuple(10.0**power for power in range(-6, 0))  # of the rewards in a group of solved rollouts
OFF, ON = "reward - mean", "divided by std"
ARMS = {OFF: False, ON: True}


@dataclass(frozen=True)
class StdSettings:
    steps: int = 60
    replicas: int = 3
    groups: int = 16  # per step
    group_size: int = 16
    learning_rate: float = 5e-4
    tricky_share: float = 0.25  # of the tasks
    tricky_checked: float = 0.9  # success rate of tricky tasks when the work is checked
    tricky_unchecked: float = 0.4  # and when it is not
    effort_weight: float = 0.002
    fine_tuning_steps: int = 60


@study("std")
def std(seed: int, progress: ProgressCallback, settings: StdSettings | None = None) -> StudyResult:
    """Advantages divided by the group's standard deviation, or not: what happens where all rollouts are right?"""
    s = settings or StdSettings()
    largest = {name: [largest_advantage(spread, divide, seed) for spread in SPREADS] for name, divide in ARMS.items()}
    curves: dict[str, list[list[Point]]] = {name: [] for name in ARMS}
    for replica in range(s.replicas):
        base = fine_tune(s, 1000 * seed + replica)
        for name, divide in ARMS.items():
            curves[name].append(train(base, s, divide, 1000 * seed + replica))
            progress(sum(map(len, curves.values())), 2 * s.replicas)
    ends = {name: {key: mean_over_runs(runs, key)[-1] for key in runs[0][0]} for name, runs in curves.items()}
    start = {key: mean_over_runs(curves[OFF], key)[0] for key in ends[OFF]}
    gain = s.tricky_share * (s.tricky_checked - s.tricky_unchecked)
    return StudyResult(
        title="Dividing advantages by the group's standard deviation",
        conclusion=(
            f"Among solved rollouts whose rewards differ by {SPREADS[2]:g} the largest advantage is"
            f" {largest[OFF][2]:.1g}, and {largest[ON][2]:.1f} when divided by the standard deviation; so checking,"
            f" which costs {cost_of_checking(s):.4f} and gains {gain:.3f}, goes from {start['checked']:.0%} to"
            f" {ends[OFF]['checked']:.0%} without the division and to {ends[ON]['checked']:.0%} with it, and success"
            f" from {start['success']:.1%} to {ends[OFF]['success']:.1%} and to {ends[ON]['success']:.1%}; the style"
            f" token, which no reward depends on, drifts by {ends[OFF]['drift']:.2f} and {ends[ON]['drift']:.2f} nats."
        ),
        columns=("advantages", "success", "checked", "drift of the style, nats"),
        rows=[
            ("before", f"{start['success']:.1%}", f"{start['checked']:.1%}", f"{start['drift']:.3f}"),
            *(
                (name, f"{end['success']:.1%}", f"{end['checked']:.1%}", f"{end['drift']:.3f}")
                for name, end in ends.items()
            ),
        ],
        panels=panels(largest, curves),
        data={"spreads": list(SPREADS), "largest_advantage": largest, "curves": curves},
        settings=s,
    )


def largest_advantage(spread: float, divide: bool, seed: int, groups: int = 256, size: int = 16) -> float:
    """Return the mean largest advantage in groups of solved rollouts whose rewards differ by `spread`."""
    rewards = 1 - spread * np.random.default_rng(seed).random((groups, size))
    return float(np.mean([max(map(abs, group_advantages(list(row), divide_by_std=divide))) for row in rewards]))


def cost_of_checking(s: StdSettings) -> float:
    return s.effort_weight * (effort(2.0) - effort(1.0))


# ------------------------------------------------------------------------------------------------- policy


def fine_tune(s: StdSettings, seed: int) -> Transformer:
    """Return a policy that knows the answers (question n has answer n), checks half of the time, in any style."""
    trainer = Trainer(initialize(toy_config(STYLE + STYLES), seed), AdamSettings(3e-3, weight_decay=0.0))
    rng = np.random.default_rng(seed)
    for step in range(s.fine_tuning_steps):
        asked = rng.integers(QUESTIONS, size=256)
        columns = (asked, CHECK + rng.integers(2, size=256), ANSWER + asked, STYLE + rng.integers(STYLES, size=256))
        rows = torch.from_numpy(np.stack(columns, axis=1))
        sft_step(trainer, [make_segment(row, 1, torch.zeros(3)) for row in rows], 1 - step / s.fine_tuning_steps)
    return trainer.model


def train(base: Transformer, s: StdSettings, divide: bool, seed: int) -> list[Point]:
    """Train a copy of the base; return its exact metrics before the first step and after each."""
    trainer = Trainer(copy_model(base), AdamSettings(s.learning_rate, weight_decay=0.0))
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    curve: list[Point] = [{**exact_metrics(trainer.model, base, s), "gradient_norm": 0.0}]
    for _ in range(s.steps):
        asked = rng.integers(QUESTIONS, size=s.groups)
        prompts = torch.from_numpy(np.repeat(asked, s.group_size))[:, None]
        segments = sample_rows(trainer.model, prompts, 3, generator)
        tricky = np.repeat(rng.random(s.groups) < s.tricky_share, s.group_size)
        advantages = advantages_by_group(rewards_of(segments, tricky, s, rng), s.group_size, divide_by_std=divide)
        sequences = [
            sequence
            for segment, advantage in zip(segments, advantages, strict=True)
            for sequence in training_sequences([segment], advantage)
        ]
        result = rl_step(trainer, sequences, PolicyGradient())
        curve.append({**exact_metrics(trainer.model, base, s), "gradient_norm": result.gradient_norms["model"]})
    return curve


def rewards_of(
    segments: Sequence[Segment], tricky: npt.NDArray[np.bool_], s: StdSettings, rng: np.random.Generator
) -> list[float]:
    """Return 1 for each success, less the effort: that of checking, and a random part that the policy cannot change."""
    asked, checked, answer, _ = np.stack([segment.tokens for segment in segments]).astype(np.int64).T
    probability = np.where(tricky, np.where(checked == CHECK, s.tricky_checked, s.tricky_unchecked), 1.0)
    solved = (answer == ANSWER + asked) & (rng.random(len(segments)) < probability)
    units = 1.0 + (checked == CHECK) + 0.2 * rng.random(len(segments))
    return [float(success) - s.effort_weight * effort(float(x)) for success, x in zip(solved, units, strict=True)]


def exact_metrics(model: Transformer, base: Transformer, s: StdSettings) -> dict[str, float]:
    """Return exact rates of success and checking, and the divergence of the style token from the base's."""
    asked = torch.arange(QUESTIONS)
    success, checked, drift = (torch.zeros(QUESTIONS) for _ in range(3))
    for choice, tricky_success in ((CHECK, s.tricky_checked), (CHECK + 1, s.tricky_unchecked)):
        rows = torch.stack((asked, torch.full_like(asked, choice), ANSWER + asked), dim=1)
        with torch.inference_mode():
            logp, base_logp = model(rows).log_softmax(-1), base(rows).log_softmax(-1)
        share = logp[:, 0, choice].exp()
        right = logp[:, 1].gather(1, rows[:, 2:])[:, 0].exp()
        success += share * right * (1 - s.tricky_share * (1 - tricky_success))
        checked += share * (choice == CHECK)
        drift += share * (logp[:, 2].exp() * (logp[:, 2] - base_logp[:, 2])).sum(-1)
    return {"success": float(success.mean()), "checked": float(checked.mean()), "drift": float(drift.mean())}


# ------------------------------------------------------------------------------------------------- plot


def mean_over_runs(runs: Sequence[Sequence[Point]], key: str) -> list[float]:
    return [float(np.mean([run[step][key] for run in runs])) for step in range(len(runs[0]))]


def panels(largest: Mapping[str, list[float]], curves: Mapping[str, list[list[Point]]]) -> list[Panel]:
    found = [
        Panel(
            Axis("reward differences among solved rollouts", log=True),
            Axis("largest advantage", log=True),
            [Line(name, SPREADS, values, style="both") for name, values in largest.items()],
            title="One group, all solved",
        )
    ]
    for key, title, axis in (
        ("success", "Success of the policy", Axis("tasks solved", percent=True)),
        ("checked", "Rollouts that check", Axis("rollouts", low=0, high=1, percent=True)),
        ("drift", "Drift of the unrewarded style token", Axis("divergence from the start, nats", low=0)),
    ):
        lines = []
        for name, runs in curves.items():
            values = [[run[step][key] for run in runs] for step in range(len(runs[0]))]
            low, high = [min(each) for each in values], [max(each) for each in values]
            lines.append(Line(name, range(len(values)), mean_over_runs(runs, key), low, high))
        found.append(Panel(Axis("step"), axis, lines, title=title))
    return found


if __name__ == "__main__":
    from studies.cli import main

    main("std")
