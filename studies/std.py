"""Why advantages are not divided by the group's deviation: where all are right, the smallest difference becomes news.

Every question is answered by three tokens: whether the work is checked, the answer, and a manner of saying it that
nobody cares about. The fine-tuned policy knows the answers. Most tasks are plain and come out right whatever it does; a
few have a catch, seen by nobody beforehand, and come out right far oftener when checked. Checking costs a little
effort, a thousandth of what a solution is worth. So it pays to check, and it is a matter of weights whether that is
learned: in a plain group only the effort differs, and dividing by the deviation makes as much of it as of a solution.
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
from etude.rl.advantages import advantages
from etude.rl.objective import PolicyGradient
from etude.system.progress import Report
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import Finding, Point, study
from studies.toy_policy import (
    advantages_by_group,
    continue_rows,
    copy_of,
    imitate,
    reinforce,
    segment_of,
    tiny_config,
    weigh,
)

QUESTIONS, ANSWERS, MANNERS = 8, 8, 8
CHECK = QUESTIONS  # token ids: questions, then check and skip, then answers, then manners
ANSWER = CHECK + 2
MANNER = ANSWER + ANSWERS
SPREADS = tuple(10.0**power for power in range(-6, 0))  # of rewards in a group where all are right


@dataclass(frozen=True)
class Settings:
    steps: int = 60
    replicas: int = 3
    groups: int = 16  # per step
    group_size: int = 16
    learning_rate: float = 5e-4
    catch: float = 0.25  # share of tasks that have one
    caught: float = 0.9  # how often those are right when checked
    missed: float = 0.4  # and when not
    effort_weight: float = 0.002
    fine_tuning_steps: int = 60


@study("std")
def std(seed: int, report: Report, settings: Settings | None = None) -> Finding:
    """Advantages divided by the group's standard deviation, or not: what happens where all rollouts are right?"""
    s = settings or Settings()
    blown = {name: [blow_up(spread, divide, seed) for spread in SPREADS] for name, divide in ARMS.items()}
    curves: dict[str, list[list[Point]]] = {name: [] for name in ARMS}
    for replica in range(s.replicas):
        base = fine_tuned(s, 1000 * seed + replica)
        for name, divide in ARMS.items():
            curves[name].append(learn(base, s, divide, 1000 * seed + replica))
            report(sum(map(len, curves.values())), 2 * s.replicas)
    ends = {name: {key: mean_of(runs, key)[-1] for key in runs[0][0]} for name, runs in curves.items()}
    start = {key: mean_of(curves[OFF], key)[0] for key in ends[OFF]}
    return Finding(
        title="Dividing advantages by the group's standard deviation",
        conclusion=(
            f"Among right rollouts whose rewards differ by {SPREADS[2]:g} the largest advantage is {blown[OFF][2]:.1g},"
            f" and {blown[ON][2]:.1f} when divided by the deviation; so checking, which costs {cost_of_checking(s):.4f}"
            f" and earns {s.catch * (s.caught - s.missed):.3f}, goes from {start['checked']:.0%} to"
            f" {ends[OFF]['checked']:.0%} without and to {ends[ON]['checked']:.0%} with the division, and success from"
            f" {start['success']:.1%} to {ends[OFF]['success']:.1%} and to {ends[ON]['success']:.1%}; manners that"
            f" nobody is paid for drift by {ends[OFF]['drift']:.2f} and {ends[ON]['drift']:.2f} nats."
        ),
        columns=("advantages", "success", "checked", "drift of manners, nats"),
        rows=[
            ("before", f"{start['success']:.1%}", f"{start['checked']:.1%}", f"{start['drift']:.3f}"),
            *(
                (name, f"{end['success']:.1%}", f"{end['checked']:.1%}", f"{end['drift']:.3f}")
                for name, end in ends.items()
            ),
        ],
        panels=panels(blown, curves),
        data={"spreads": list(SPREADS), "largest_advantage": blown, "curves": curves},
        settings=s,
    )


OFF, ON = "reward - mean", "divided by std"
ARMS = {OFF: False, ON: True}


def blow_up(spread: float, divide: bool, seed: int, groups: int = 256, size: int = 16) -> float:
    """The mean largest advantage in groups of solved tasks whose rewards differ by `spread`."""
    rewards = 1 - spread * np.random.default_rng(seed).random((groups, size))
    return float(np.mean([max(map(abs, advantages(list(row), divide_by_std=divide))) for row in rewards]))


def cost_of_checking(s: Settings) -> float:
    return s.effort_weight * (effort(2.0) - effort(1.0))


# ------------------------------------------------------------------------------------------------- the policy


def fine_tuned(s: Settings, seed: int) -> Transformer:
    """Knows the answers (question n has answer n); checks as often as not, in any manner."""
    trainer = Trainer(initialize(tiny_config(MANNER + MANNERS), seed), AdamSettings(3e-3, weight_decay=0.0))
    luck = np.random.default_rng(seed)
    for step in range(s.fine_tuning_steps):
        asked = luck.integers(QUESTIONS, size=256)
        said = (asked, CHECK + luck.integers(2, size=256), ANSWER + asked, MANNER + luck.integers(MANNERS, size=256))
        rows = torch.from_numpy(np.stack(said, axis=1))
        imitate(trainer, [segment_of(row, 1, torch.zeros(3)) for row in rows], 1 - step / s.fine_tuning_steps)
    return trainer.model


def learn(base: Transformer, s: Settings, divide: bool, seed: int) -> list[Point]:
    """Train a copy; where it stands before the first step and after each."""
    trainer = Trainer(copy_of(base), AdamSettings(s.learning_rate, weight_decay=0.0))
    luck, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    curve: list[Point] = [{**standing(trainer.model, base, s), "gradient_norm": 0.0}]
    for _ in range(s.steps):
        asked = luck.integers(QUESTIONS, size=s.groups)
        prompts = torch.from_numpy(np.repeat(asked, s.group_size))[:, None]
        segments = continue_rows(trainer.model, prompts, 3, generator)
        catch = np.repeat(luck.random(s.groups) < s.catch, s.group_size)
        found = advantages_by_group(paid(segments, catch, s, luck), s.group_size, divide_by_std=divide)
        pieces = [piece for seg, advantage in zip(segments, found, strict=True) for piece in weigh([seg], advantage)]
        result = reinforce(trainer, pieces, PolicyGradient())
        curve.append({**standing(trainer.model, base, s), "gradient_norm": result.gradient_norms["model"]})
    return curve


def paid(
    segments: Sequence[Segment], catch: npt.NDArray[np.bool_], s: Settings, luck: np.random.Generator
) -> list[float]:
    """One for a right outcome, less the effort: checking, and what nobody can help."""
    asked, checked, answer, _ = np.stack([segment.tokens for segment in segments]).astype(np.int64).T
    odds = np.where(catch, np.where(checked == CHECK, s.caught, s.missed), 1.0)
    right = (answer == ANSWER + asked) & (luck.random(len(segments)) < odds)
    work = 1.0 + (checked == CHECK) + 0.2 * luck.random(len(segments))
    return [float(won) - s.effort_weight * effort(float(x)) for won, x in zip(right, work, strict=True)]


def standing(model: Transformer, base: Transformer, s: Settings) -> dict[str, float]:
    """How often it checks and succeeds, computed and not sampled; and how far its manners are from the base's."""
    asked = torch.arange(QUESTIONS)
    success, checked, drift = (torch.zeros(QUESTIONS) for _ in range(3))
    for choice, odds in ((CHECK, s.caught), (CHECK + 1, s.missed)):
        rows = torch.stack((asked, torch.full_like(asked, choice), ANSWER + asked), dim=1)
        with torch.inference_mode():
            mine, theirs = model(rows).log_softmax(-1), base(rows).log_softmax(-1)
        share = mine[:, 0, choice].exp()
        knows = mine[:, 1].gather(1, rows[:, 2:])[:, 0].exp()
        success += share * knows * (1 - s.catch * (1 - odds))
        checked += share * (choice == CHECK)
        drift += share * (mine[:, 2].exp() * (mine[:, 2] - theirs[:, 2])).sum(-1)
    return {"success": float(success.mean()), "checked": float(checked.mean()), "drift": float(drift.mean())}


# ------------------------------------------------------------------------------------------------- the picture


def mean_of(runs: Sequence[Sequence[Point]], key: str) -> list[float]:
    return [float(np.mean([run[step][key] for run in runs])) for step in range(len(runs[0]))]


def panels(blown: Mapping[str, list[float]], curves: Mapping[str, list[list[Point]]]) -> list[Panel]:
    spread = [Line(name, SPREADS, values, style="both") for name, values in blown.items()]
    found = [
        Panel(
            Axis("differences of reward among solved rollouts", log=True),
            Axis("largest advantage", log=True),
            spread,
            title="One group, all right",
        )
    ]
    for key, title, axis in (
        ("success", "Success of the policy", Axis("tasks solved", percent=True)),
        ("checked", "Work that is checked", Axis("rollouts", low=0, high=1, percent=True)),
        ("drift", "Manners that nobody is paid for", Axis("divergence from the start, nats", low=0)),
    ):
        lines = []
        for name, runs in curves.items():
            values = [[run[step][key] for run in runs] for step in range(len(runs[0]))]
            low, high = [min(each) for each in values], [max(each) for each in values]
            lines.append(Line(name, range(len(values)), mean_of(runs, key), low, high))
        found.append(Panel(Axis("step"), axis, lines, title=title))
    return found
