"""k1 against k3 as estimates of how far a policy is from its reference, and what either does as a loss.

With r = reference / policy, k1 = -log r and k3 = r - 1 - log r. Both have the divergence as their mean. On Gaussians of
equal width the variances are known: 2 KL, and e^(2 KL) - 1 - 2 KL, which cross at 0.628 nats. The policy here is a
transformer whose answers are so short that all of them can be enumerated, so that every mean, variance and gradient
has an exact value to hold the samples against.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.evaluation.plot import Axis, Line, Mark, Panel
from etude.harness.trace import Segment
from etude.model.transformer import Transformer, initialize
from etude.rl.advantages import advantages, k1, k3, worths
from etude.rl.objective import PolicyGradient
from etude.rl.packing import Piece
from etude.system.progress import Report
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import Finding, study
from studies.toy_policy import continue_rows, copy_of, reinforce, tiny_config, weigh, whole_rows

WORDS, LENGTH = 8, 3  # tokens there are, and in an answer: 512 answers
ASK, LIKED = 0, 1  # the token that stands before an answer; the one that is paid for
CROSSING = 0.628


@dataclass(frozen=True)
class Settings:
    draws: int = 200_000  # on Gaussians, for each divergence
    steps: int = 40  # that the policy drifts
    rollouts: int = 256  # per step
    learning_rate: float = 3e-4
    samples: int = 512  # of one estimate
    estimates: int = 200  # to see how they scatter
    checks: tuple[int, ...] = (16, 64, 256, 1024, 4096)  # samples under a mean gradient


@study("kl")
def kl(seed: int, report: Report, settings: Settings | None = None) -> Finding:
    """k1 or k3: which estimate of the divergence is steadier, and what is the gradient of each as a loss?"""
    s = settings or Settings()
    gaussians = [gaussian(float(kl), s.draws, seed) for kl in np.geomspace(0.01, 2.0, 16)]
    report(1, 4, "a policy drifts")
    reference = initialize(tiny_config(WORDS), seed)
    drift, near = drifting(reference, s, seed)
    report(3, 4, "gradients")
    gradients = exact_gradients(near, reference)
    shrinking = sampled_gradients(near, reference, s, seed)
    report(4, 4)
    last = drift[-1]
    crossing = crossed(drift)
    return Finding(
        title="Two estimates of the divergence from the reference",
        conclusion=(
            f"On Gaussians the measured variances cross at {crossed(gaussians):.2f} nats (exactly {CROSSING}); on a "
            f"policy that drifts {words_of_crossing(crossing)}, and at {last['divergence']:.1f} the variance is "
            f"{last['k1_variance']:.1f} of k1 and {last['k3_variance']:.0f} of k3; as a loss, k1 has a mean gradient "
            f"of {gradients['k1 as a loss']['norm']:.0e} where the true one is {gradients['truth']['norm']:.1f}, and "
            f"in the reward {gradients['k1 in the reward']['norm']:.1f}, at a cosine of "
            f"{gradients['k1 in the reward']['cosine']:.3f} with the true one."
        ),
        columns=(
            "gradient by enumeration",
            "norm",
            "cosine with KL(policy | reference)",
            "with KL(reference | policy)",
        ),
        rows=[
            (name, f"{found['norm']:.1e}", *(_shown(found, key, gradients) for key in ("cosine", "other_cosine")))
            for name, found in gradients.items()
        ],
        panels=panels(gaussians, drift, shrinking, gradients["truth"]["norm"], s),
        data={"gaussians": gaussians, "drift": drift, "gradients": gradients, "mean_gradient_norms": shrinking},
        settings=s,
    )


def _shown(found: Mapping[str, float], key: str, gradients: Mapping[str, Mapping[str, float]]) -> str:
    """A cosine; nothing where the gradient is but rounding, and has no direction."""
    return f"{found[key]:.3f}" if found["norm"] > 1e-4 * gradients["truth"]["norm"] else "-"


def gaussian(divergence: float, draws: int, seed: int) -> dict[str, float]:
    """Both estimates on samples of N(0, 1) against N(m, 1), where the divergence is m^2 / 2."""
    shift = math.sqrt(2 * divergence)
    x = np.random.default_rng(seed).standard_normal(draws)
    one, three = k1(-(x**2) / 2, -((x - shift) ** 2) / 2), k3(-(x**2) / 2, -((x - shift) ** 2) / 2)
    return {
        "divergence": divergence,
        "k1_variance": float(one.var()),
        "k3_variance": float(three.var()),
        "k1_exact": 2 * divergence,
        "k3_exact": math.exp(2 * divergence) - 1 - 2 * divergence,
    }


def crossed(points: Sequence[Mapping[str, float]]) -> float:
    """The divergence from which on k3 scatters more than k1, between two points by their logarithms; nan: nowhere."""
    gaps = [math.log(point["k3_variance"] / point["k1_variance"]) for point in points]
    for (before, after), (low, high) in zip(pairwise(points), pairwise(gaps), strict=True):
        if low < 0 <= high:
            share = low / (low - high)
            return math.exp((1 - share) * math.log(before["divergence"]) + share * math.log(after["divergence"]))
    return math.nan


def words_of_crossing(crossing: float) -> str:
    if math.isnan(crossing):
        return "they do not cross"
    return f"they cross at {crossing:.1f} nats per answer of {LENGTH} tokens"


# ------------------------------------------------------------------------------------------------- the policy


def every_answer() -> Tensor:
    rows = torch.tensor(list(product(range(WORDS), repeat=LENGTH)))
    return torch.cat((torch.full((len(rows), 1), ASK), rows), dim=1)


def token_logprobs(model: Transformer, rows: Tensor) -> Tensor:
    """log p of each token of an answer, [rows, LENGTH]."""
    logits: Tensor = model(rows)
    return logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]


def drifting(reference: Transformer, s: Settings, seed: int) -> tuple[list[dict[str, float]], Transformer]:
    """Train a copy to say one word: how the estimates fare on the way, and the policy when nearest to half a nat."""
    trainer = Trainer(copy_of(reference), AdamSettings(s.learning_rate, weight_decay=0.0))
    generator, luck = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    prompts = torch.full((s.rollouts, 1), ASK)
    points, near = [], copy_of(reference)
    for _ in range(s.steps):
        segments = continue_rows(trainer.model, prompts, LENGTH, generator)
        rewards = [float((segment.tokens[1:] == LIKED).mean()) for segment in segments]
        pieces = [piece for seg, adv in zip(segments, advantages(rewards), strict=True) for piece in weigh([seg], adv)]
        reinforce(trainer, pieces, PolicyGradient())
        point = estimates(trainer.model, reference, s, luck)
        points.append(point)
        if abs(point["divergence"] - 0.5) <= min(abs(each["divergence"] - 0.5) for each in points):
            near = copy_of(trainer.model)
    return points, near


def estimates(model: Transformer, reference: Transformer, s: Settings, luck: np.random.Generator) -> dict[str, float]:
    """Exact divergence and variances over all answers, and how estimates from samples scatter."""
    rows = every_answer()
    with torch.inference_mode():
        mine, theirs = (token_logprobs(each, rows).double().numpy() for each in (model, reference))
    odds = np.exp(mine.sum(1))
    odds /= odds.sum()
    point = {"divergence": float(odds @ (mine - theirs).sum(1))}
    for name, values in (("k1", k1(mine, theirs).sum(1)), ("k3", k3(mine, theirs).sum(1))):
        mean = float(odds @ values)
        drawn = values[luck.choice(len(rows), size=(s.estimates, s.samples), p=odds)].mean(1)
        point |= {
            f"{name}_mean": mean,
            f"{name}_variance": float(odds @ (values - mean) ** 2),
            f"{name}_median": float(np.median(drawn)),
            f"{name}_low": float(np.quantile(drawn, 0.05)),
            f"{name}_high": float(np.quantile(drawn, 0.95)),
        }
    return point


# ------------------------------------------------------------------------------------------------- gradients


def exact_gradients(model: Transformer, reference: Transformer) -> dict[str, dict[str, float]]:
    """Mean gradients over all answers, by their probabilities: what infinitely many samples would give."""
    rows = every_answer()
    mine = token_logprobs(model, rows)
    theirs = token_logprobs(reference, rows).detach()
    odds = mine.sum(1).exp()
    fixed, log_ratio = odds.detach(), (mine - theirs)
    later = torch.from_numpy(np.stack([worth_of(row) for row in log_ratio.detach().numpy()]))
    losses = {
        "truth": (odds * log_ratio.sum(1)).sum(),
        "k1 as a loss": (fixed * log_ratio.sum(1)).sum(),
        "k1 in the reward": -(fixed[:, None] * later * mine).sum(),
        "k3 as a loss": (fixed * ((-log_ratio).exp() - 1 + log_ratio).sum(1)).sum(),
    }
    other = flat_gradient(model, (theirs.sum(1).exp() * (theirs - mine).sum(1)).sum())
    found = {name: flat_gradient(model, loss) for name, loss in losses.items()}
    return {
        name: {
            "norm": float(gradient.norm()),
            "cosine": cosine(gradient, found["truth"]),
            "other_cosine": cosine(gradient, other),
        }
        for name, gradient in found.items()
    }


def worth_of(divergences: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """What the loop makes of k1: each token answers for what comes after it."""
    (worth,) = worths(0.0, [len(divergences)], kl=[divergences], kl_weight=1.0)
    return worth


def flat_gradient(model: Transformer, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([part.flatten() for part in found if part is not None]).double()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def sampled_gradients(model: Transformer, reference: Transformer, s: Settings, seed: int) -> dict[str, list[float]]:
    """The norm of mean gradients over ever more samples, through the trainer's own objective."""
    generator = torch.Generator().manual_seed(seed)
    segments = continue_rows(model, torch.full((max(s.checks), 1), ASK), LENGTH, generator)
    rows = torch.from_numpy(np.stack([segment.tokens for segment in segments]).astype(np.int64))
    with torch.inference_mode():
        mine, theirs = (token_logprobs(each, rows).numpy() for each in (model, reference))
    right = [worth_of(row) for row in k1(mine, theirs)]
    naive = [np.full(LENGTH, -1.0, np.float32)] * len(segments)  # the gradient of log p - log r is that of log p
    return {
        "samples": list(map(float, s.checks)),
        "k1 as a loss": [mean_norm(model, segments[:n], naive[:n]) for n in s.checks],
        "k1 in the reward": [mean_norm(model, segments[:n], right[:n]) for n in s.checks],
    }


def mean_norm(model: Transformer, segments: Sequence[Segment], each: Sequence[npt.NDArray[np.float32]]) -> float:
    pieces = [Piece(segment, worth) for segment, worth in zip(segments, each, strict=True)]
    (batch,) = whole_rows(pieces, model.config)
    return float(flat_gradient(model, PolicyGradient()(model, batch).total / len(segments)).norm())


# ------------------------------------------------------------------------------------------------- the picture


def panels(
    gaussians: Sequence[Mapping[str, float]],
    drift: Sequence[Mapping[str, float]],
    shrinking: Mapping[str, list[float]],
    truth: float,
    s: Settings,
) -> list[Panel]:
    def of(points: Sequence[Mapping[str, float]], key: str) -> list[float]:
        return [point[key] for point in points]

    known, moved = of(gaussians, "divergence"), of(drift, "divergence")
    return [
        Panel(
            Axis("divergence, nats", log=True),
            Axis("variance", log=True),
            [
                Line("k1 exact", known, of(gaussians, "k1_exact"), colour=0),
                Line("k3 exact", known, of(gaussians, "k3_exact"), colour=1),
                Line("k1 drawn", known, of(gaussians, "k1_variance"), style="points", colour=0),
                Line("k3 drawn", known, of(gaussians, "k3_variance"), style="points", colour=1),
            ],
            title="Gaussians",
            marks=[Mark(CROSSING, f"{CROSSING}")],
        ),
        Panel(
            Axis("divergence of an answer, nats", log=True),
            Axis("variance, exact", log=True),
            [
                Line("k1", moved, of(drift, "k1_variance"), style="both"),
                Line("k3", moved, of(drift, "k3_variance"), style="both"),
            ],
            title="A policy that drifts from its reference",
        ),
        Panel(
            Axis("divergence of an answer, nats"),
            Axis(f"estimate from {s.samples} samples", low=0),
            [
                Line(name, moved, of(drift, f"{name}_median"), of(drift, f"{name}_low"), of(drift, f"{name}_high"))
                for name in ("k1", "k3")
            ]
            + [Line("truth", moved, moved, style="dashed", colour=6)],
            title="What is estimated: median, 5% to 95%",
        ),
        Panel(
            Axis("samples", log=True),
            Axis("norm of the mean gradient", log=True),
            [
                Line(name, shrinking["samples"], shrinking[name], style="both", colour=place)
                for place, name in ((1, "k1 as a loss"), (0, "k1 in the reward"))
            ],
            title="Gradients",
            marks=[Mark(truth, "the true one", across="y")],
        ),
    ]
