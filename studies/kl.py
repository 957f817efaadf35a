"""Compare k1 and k3 as estimators of the KL divergence from a reference policy: variances and gradients.

With r = reference / policy, k1 = -log r and k3 = r - 1 - log r. The mean of both is the divergence. On Gaussians of
equal width the variances are known: 2 KL and e^(2 KL) - 1 - 2 KL, which cross at 0.628 nats. The policy here is a
transformer with answers so short that all of them can be enumerated, so that every mean, variance and gradient has an
exact value to compare the samples with.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.evaluation.plot import Axis, Line, Mark, Panel
from etude.harness.trace import Segment
from etude.model.transformer import Transformer, initialize
from etude.rl.advantages import k1, k3, kl_penalties, token_advantages
from etude.rl.objective import PolicyGradient
from etude.rl.packing import TrainingSequence
from etude.rollouts.group_advantages import group_advantages
from etude.system.progress import ProgressCallback
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import StudyResult, study
from studies.toy_policy import (
    copy_model,
    one_sequence_per_row,
    rl_step,
    sample_rows,
    toy_config,
    training_sequences,
)

VOCABULARY, LENGTH = 8, 3  # token ids, and tokens of an answer: 512 answers
PROMPT, REWARDED = 0, 1  # the prompt token, and the token that is rewarded
CROSSING = 0.628
FloatArray = npt.NDArray[np.floating]
KlForm = Callable[[FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True)
class KlSettings:
    draws: int = 200_000  # on Gaussians, for each divergence
    steps: int = 40  # of training the policy away from its reference
    rollouts: int = 256  # per step
    learning_rate: float = 3e-4
    samples: int = 512  # of one estimate
    estimates: int = 200  # for the quantiles
    gradient_samples: tuple[int, ...] = (16, 64, 256, 1024, 4096)  # numbers of samples in a mean gradient


@study("kl")
def kl(seed: int, progress: ProgressCallback, settings: KlSettings | None = None) -> StudyResult:
    """k1 or k3: which has the lower variance, and what is the gradient of each, as a loss and in the reward?"""
    s = settings or KlSettings()
    gaussians = [gaussian(float(kl), s.draws, seed) for kl in np.geomspace(0.01, 2.0, 16)]
    progress(1, 4, "training")
    reference = initialize(toy_config(VOCABULARY), seed)
    drift, half_nat_policy = train_away(reference, s, seed)
    progress(3, 4, "gradients")
    gradients = exact_gradients(half_nat_policy, reference)
    sampled_norms = sampled_gradients(half_nat_policy, reference, s, seed)
    progress(4, 4)
    last = drift[-1]
    crossing = variance_crossing(drift)
    return StudyResult(
        title="Two estimators of the divergence from the reference",
        conclusion=(
            f"On Gaussians the measured variances cross at {variance_crossing(gaussians):.2f} nats (exactly "
            f"{CROSSING}); on a policy trained away from its reference {describe_crossing(crossing)}, and at "
            f"{last['divergence']:.1f} nats the variance of k1 is {last['k1_variance']:.1f} and that of k3 "
            f"{last['k3_variance']:.0f}; k1 as a loss has a mean gradient of norm "
            f"{gradients['k1 as a loss']['norm']:.0e} where the true one has {gradients['truth']['norm']:.1f}, and k1 "
            f"in the reward has {gradients['k1 in the reward']['norm']:.1f}, at a cosine of "
            f"{gradients['k1 in the reward']['cosine']:.3f} with the true one; k3 has "
            f"{gradients['k3 for later tokens in the reward']['norm']:.1f} and "
            f"{gradients['k3 for later tokens in the reward']['cosine']:.3f} where only later tokens are estimated "
            f"with it, and {gradients['k3 for the token too in the reward']['norm']:.1f} and "
            f"{gradients['k3 for the token too in the reward']['cosine']:.3f} where the token itself is too."
        ),
        columns=(
            "gradient by enumeration",
            "norm",
            "cosine with KL(policy | reference)",
            "with KL(reference | policy)",
        ),
        rows=[
            (
                name,
                f"{found['norm']:.1e}",
                *(_format_cosine(found, key, gradients) for key in ("cosine", "other_cosine")),
            )
            for name, found in gradients.items()
        ],
        panels=panels(gaussians, drift, sampled_norms, gradients["truth"]["norm"], s),
        data={"gaussians": gaussians, "drift": drift, "gradients": gradients, "mean_gradient_norms": sampled_norms},
        settings=s,
    )


def _format_cosine(found: Mapping[str, float], key: str, gradients: Mapping[str, Mapping[str, float]]) -> str:
    """Format a cosine; "-" where the gradient is only rounding error and has no direction."""
    return f"{found[key]:.3f}" if found["norm"] > 1e-4 * gradients["truth"]["norm"] else "-"


def gaussian(divergence: float, draws: int, seed: int) -> dict[str, float]:
    """Return the variance of both estimators on samples of N(0, 1) against N(m, 1); the divergence is m^2 / 2."""
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


def variance_crossing(points: Sequence[Mapping[str, float]]) -> float:
    """Return the divergence above which k3 has more variance than k1, interpolated in log space; nan if none."""
    gaps = [math.log(point["k3_variance"] / point["k1_variance"]) for point in points]
    for (before, after), (low, high) in zip(pairwise(points), pairwise(gaps), strict=True):
        if low < 0 <= high:
            share = low / (low - high)
            return math.exp((1 - share) * math.log(before["divergence"]) + share * math.log(after["divergence"]))
    return math.nan


def describe_crossing(crossing: float) -> str:
    if math.isnan(crossing):
        return "they do not cross"
    return f"they cross at {crossing:.1f} nats per answer of {LENGTH} tokens"


# ------------------------------------------------------------------------------------------------- policy


def every_answer() -> Tensor:
    rows = torch.tensor(list(product(range(VOCABULARY), repeat=LENGTH)))
    return torch.cat((torch.full((len(rows), 1), PROMPT), rows), dim=1)


def token_logprobs(model: Transformer, rows: Tensor) -> Tensor:
    """Return log p of each token of an answer, [rows, LENGTH]."""
    logits: Tensor = model(rows)
    return logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]


def train_away(reference: Transformer, s: KlSettings, seed: int) -> tuple[list[dict[str, float]], Transformer]:
    """Train a copy towards one token; return the estimates at each step, and the policy nearest to half a nat."""
    trainer = Trainer(copy_model(reference), AdamSettings(s.learning_rate, weight_decay=0.0))
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    prompts = torch.full((s.rollouts, 1), PROMPT)
    points, half_nat_policy = [], copy_model(reference)
    for _ in range(s.steps):
        segments = sample_rows(trainer.model, prompts, LENGTH, generator)
        rewards = [float((segment.tokens[1:] == REWARDED).mean()) for segment in segments]
        advantages = group_advantages(rewards)
        sequences = [
            sequence
            for segment, advantage in zip(segments, advantages, strict=True)
            for sequence in training_sequences([segment], advantage)
        ]
        rl_step(trainer, sequences, PolicyGradient())
        point = estimates(trainer.model, reference, s, rng)
        points.append(point)
        if abs(point["divergence"] - 0.5) <= min(abs(each["divergence"] - 0.5) for each in points):
            half_nat_policy = copy_model(trainer.model)
    return points, half_nat_policy


def estimates(model: Transformer, reference: Transformer, s: KlSettings, rng: np.random.Generator) -> dict[str, float]:
    """Return the exact divergence and variances over all answers, and quantiles of estimates from samples."""
    rows = every_answer()
    with torch.inference_mode():
        logp, ref_logp = (token_logprobs(each, rows).double().numpy() for each in (model, reference))
    probabilities = np.exp(logp.sum(1))
    probabilities /= probabilities.sum()
    point = {"divergence": float(probabilities @ (logp - ref_logp).sum(1))}
    for name, values in (("k1", k1(logp, ref_logp).sum(1)), ("k3", k3(logp, ref_logp).sum(1))):
        mean = float(probabilities @ values)
        sampled = values[rng.choice(len(rows), size=(s.estimates, s.samples), p=probabilities)].mean(1)
        point |= {
            f"{name}_mean": mean,
            f"{name}_variance": float(probabilities @ (values - mean) ** 2),
            f"{name}_median": float(np.median(sampled)),
            f"{name}_low": float(np.quantile(sampled, 0.05)),
            f"{name}_high": float(np.quantile(sampled, 0.95)),
        }
    return point


# ------------------------------------------------------------------------------------------------- gradients


def exact_gradients(model: Transformer, reference: Transformer) -> dict[str, dict[str, float]]:
    """Return norm and cosines of mean gradients over all answers, as infinitely many samples would give them."""
    rows = every_answer()
    logp = token_logprobs(model, rows)
    ref_logp = token_logprobs(reference, rows).detach()
    probabilities = logp.sum(1).exp()
    fixed, log_ratio = probabilities.detach(), (logp - ref_logp)
    one, three = (in_reward(form, logp.detach().numpy(), ref_logp.numpy()) for form in (k1, k3))
    naive = -k3(logp.detach().numpy(), ref_logp.numpy())[:, ::-1].cumsum(1)[:, ::-1]  # a token's own estimate too
    rewarded = {"k1": one, "k3 for the token too": naive.copy(), "k3 for later tokens": three}
    losses = {
        "truth": (probabilities * log_ratio.sum(1)).sum(),
        "k1 as a loss": (fixed * log_ratio.sum(1)).sum(),
        "k3 as a loss": (fixed * ((-log_ratio).exp() - 1 + log_ratio).sum(1)).sum(),
    } | {
        f"{name} in the reward": -(fixed[:, None] * torch.from_numpy(advantages) * logp).sum()
        for name, advantages in rewarded.items()
    }
    reverse = flat_gradient(model, (ref_logp.sum(1).exp() * (ref_logp - logp).sum(1)).sum())
    found = {name: flat_gradient(model, loss) for name, loss in losses.items()}
    return {
        name: {
            "norm": float(gradient.norm()),
            "cosine": cosine(gradient, found["truth"]),
            "other_cosine": cosine(gradient, reverse),
        }
        for name, gradient in found.items()
    }


def in_reward(form: KlForm, logp: FloatArray, ref_logp: FloatArray) -> npt.NDArray[np.float32]:
    """Return the token advantages of a KL penalty in the reward, [answers, LENGTH], as training computes them."""
    pairs = zip(logp, ref_logp, strict=True)
    return np.stack([token_advantages(0.0, [LENGTH], penalties=kl_penalties(form, *pair))[0] for pair in pairs])


def flat_gradient(model: Transformer, loss: Tensor) -> Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([part.flatten() for part in gradients if part is not None]).double()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def sampled_gradients(model: Transformer, reference: Transformer, s: KlSettings, seed: int) -> dict[str, list[float]]:
    """Return the norm of mean gradients over growing numbers of samples, through the trainer's own objective."""
    generator = torch.Generator().manual_seed(seed)
    segments = sample_rows(model, torch.full((max(s.gradient_samples), 1), PROMPT), LENGTH, generator)
    rows = torch.from_numpy(np.stack([segment.tokens for segment in segments]).astype(np.int64))
    with torch.inference_mode():
        logp, ref_logp = (token_logprobs(each, rows).numpy() for each in (model, reference))
    as_loss = np.full(logp.shape, -1.0, np.float32)  # the gradient of log p - log r is that of log p
    rewarded = in_reward(k1, logp, ref_logp)
    return {
        "samples": list(map(float, s.gradient_samples)),
        "k1 as a loss": [mean_norm(model, segments[:n], as_loss[:n]) for n in s.gradient_samples],
        "k1 in the reward": [mean_norm(model, segments[:n], rewarded[:n]) for n in s.gradient_samples],
    }


def mean_norm(model: Transformer, segments: Sequence[Segment], advantages: npt.NDArray[np.float32]) -> float:
    """Return the norm of the mean policy gradient with these token advantages."""
    sequences = [TrainingSequence(segment, own) for segment, own in zip(segments, advantages, strict=True)]
    (batch,) = one_sequence_per_row(sequences, model.config)
    return float(flat_gradient(model, PolicyGradient()(model, batch).loss / len(segments)).norm())


# ------------------------------------------------------------------------------------------------- plot


def panels(
    gaussians: Sequence[Mapping[str, float]],
    drift: Sequence[Mapping[str, float]],
    sampled_norms: Mapping[str, list[float]],
    true_norm: float,
    s: KlSettings,
) -> list[Panel]:
    def column(points: Sequence[Mapping[str, float]], key: str) -> list[float]:
        return [point[key] for point in points]

    gaussian_kl, policy_kl = column(gaussians, "divergence"), column(drift, "divergence")
    return [
        Panel(
            Axis("divergence, nats", log=True),
            Axis("variance", log=True),
            [
                Line("k1 exact", gaussian_kl, column(gaussians, "k1_exact"), colour=0),
                Line("k3 exact", gaussian_kl, column(gaussians, "k3_exact"), colour=1),
                Line("k1 sampled", gaussian_kl, column(gaussians, "k1_variance"), style="points", colour=0),
                Line("k3 sampled", gaussian_kl, column(gaussians, "k3_variance"), style="points", colour=1),
            ],
            title="Gaussians",
            marks=[Mark(CROSSING, f"{CROSSING}")],
        ),
        Panel(
            Axis("divergence of an answer, nats", log=True),
            Axis("variance, exact", log=True),
            [
                Line("k1", policy_kl, column(drift, "k1_variance"), style="both"),
                Line("k3", policy_kl, column(drift, "k3_variance"), style="both"),
            ],
            title="A policy trained away from its reference",
        ),
        Panel(
            Axis("divergence of an answer, nats"),
            Axis(f"estimate from {s.samples} samples", low=0),
            [
                Line(
                    name,
                    policy_kl,
                    column(drift, f"{name}_median"),
                    column(drift, f"{name}_low"),
                    column(drift, f"{name}_high"),
                )
                for name in ("k1", "k3")
            ]
            + [Line("exact", policy_kl, policy_kl, style="dashed", colour=6)],
            title="Estimates: median, 5% to 95%",
        ),
        Panel(
            Axis("samples", log=True),
            Axis("norm of the mean gradient", log=True),
            [
                Line(name, sampled_norms["samples"], sampled_norms[name], style="both", colour=colour)
                for colour, name in ((1, "k1 as a loss"), (0, "k1 in the reward"))
            ],
            title="Gradients",
            marks=[Mark(true_norm, "exact", across="y")],
        ),
    ]


if __name__ == "__main__":
    from studies.cli import main

    main("kl")
