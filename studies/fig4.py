"""The report's figure of KL estimators: the variance of k1, k2 and k3 as two distributions move apart.

With q = N(0, 1), p = N(m, 1) and r = p / q, samples of q have log r ~ N(-KL, 2 KL), where KL(q | p) = m^2 / 2. Every
mean and variance therefore has an exact value to compare the samples with:

    k1 = -log r              mean KL             variance 2 KL
    k2 = (log r)^2 / 2       mean KL + KL^2 / 2  variance 2 KL^2 + 2 KL^3
    k3 = r - 1 - log r       mean KL             variance e^(2 KL) - 1 - 2 KL
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.evaluation.plot import Axis, Line, Mark, Panel
from etude.rl.advantages import k1, k3
from etude.system.progress import ProgressCallback
from studies.kl import CROSSING, variance_crossing
from studies.study import Point, StudyResult, study

Floats = npt.NDArray[np.floating]
NAMES = ("k1", "k2", "k3")
SHOWN = (0.01, 0.1, CROSSING, 1.0, 2.0)  # divergences in the table
LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True)
class Fig4Settings:
    batch: int = 256  # samples of one estimate
    batches: int = 4096  # estimates, for their quantiles
    divergences: int = 21  # from 0.01 to 2 nats, in addition to those of the table


@study("fig4")
def fig4(seed: int, progress: ProgressCallback, settings: Fig4Settings | None = None) -> StudyResult:
    """k1, k2 or k3: what is the variance of three estimators of a divergence as the policies move apart?"""
    s = settings or Fig4Settings()
    divergences = sorted({*SHOWN, *np.geomspace(SHOWN[0], SHOWN[-1], s.divergences).round(6).tolist()})
    points = []
    for divergence in divergences:
        points.append(exact_values(divergence) | sampled_values(divergence, s, seed))
        progress(len(points), len(divergences))
    last = points[-1]
    return StudyResult(
        title="Three estimators of a divergence",
        conclusion=(
            f"Up to {variance_crossing(points):.2f} nats (exactly {CROSSING}) k3 has less variance than k1, above it "
            f"more: at {last['divergence']:g} nats the variance is {last['k1_variance']:.1f} for k1 and "
            f"{last['k3_variance']:.0f} for k3 (exactly {last['k1_exact']:g} and {last['k3_exact']:.1f}), and the "
            f"median estimate from {s.batch} samples is {last['k3_median']:.2f} with k3 and {last['k1_median']:.2f} "
            f"with k1; k2 has less variance than k3 there ({last['k2_variance']:.0f}), but its mean is "
            f"{last['k2_mean']:.2f}."
        ),
        columns=("divergence, nats", "mean of k2", *(f"variance of {name}, exact / sampled" for name in NAMES)),
        rows=[_row(point) for point in points if point["divergence"] in SHOWN],
        panels=panels(points, s),
        data={"points": points},
        settings=s,
    )


def k2(logprobs: Floats, reference: Floats) -> Floats:
    """Return half the square of log r: never negative, but biased."""
    return (reference - logprobs) ** 2 / 2


def exact_values(kl: float) -> dict[str, float]:
    return {
        "divergence": kl,
        "k1_exact": 2 * kl,
        "k2_exact": 2 * kl**2 + 2 * kl**3,
        "k3_exact": math.expm1(2 * kl) - 2 * kl,
        "k2_mean_exact": kl + kl**2 / 2,
    }


def sampled_values(kl: float, s: Fig4Settings, seed: int) -> dict[str, float]:
    """Return mean and variance of single estimates, and quantiles of the means of a batch."""
    x = np.random.default_rng([seed, round(1e6 * kl)]).standard_normal((s.batches, s.batch))
    logp, ref_logp = -(x**2) / 2, -((x - math.sqrt(2 * kl)) ** 2) / 2
    found: dict[str, float] = {}
    for name, values in zip(NAMES, (estimate(logp, ref_logp) for estimate in (k1, k2, k3)), strict=True):
        low, median, high = np.quantile(values.mean(axis=1), (LOW, 0.5, HIGH))
        found |= {f"{name}_mean": float(values.mean()), f"{name}_variance": float(values.var())}
        found |= {f"{name}_low": float(low), f"{name}_median": float(median), f"{name}_high": float(high)}
    return found


def _row(point: Point) -> tuple[str, ...]:
    variances = (f"{point[f'{name}_exact']:.3g} / {point[f'{name}_variance']:.3g}" for name in NAMES)
    return f"{point['divergence']:g}", f"{point['k2_mean']:.3f}", *variances


def panels(points: Sequence[Mapping[str, float]], s: Fig4Settings) -> list[Panel]:
    def column(key: str) -> list[float]:
        return [point[key] for point in points]

    kl = column("divergence")
    exact = [Line(f"{name} exact", kl, column(f"{name}_exact"), colour=index) for index, name in enumerate(NAMES)]
    sampled = [
        Line(f"{name} sampled", kl, column(f"{name}_variance"), style="points", colour=index)
        for index, name in enumerate(NAMES)
    ]
    share = {name: [mean / truth for mean, truth in zip(column(f"{name}_mean"), kl, strict=True)] for name in NAMES}
    bands = [Line(name, kl, column(f"{name}_median"), column(f"{name}_low"), column(f"{name}_high")) for name in NAMES]
    return [
        Panel(
            Axis("divergence, nats", log=True),
            Axis("variance of one estimate", log=True),
            [*exact, *sampled],
            title="Variance",
            marks=[Mark(CROSSING, f"{CROSSING}")],
        ),
        Panel(
            Axis("divergence, nats", log=True),
            Axis("mean / exact divergence", low=0.8),
            [Line(name, kl, values, style="both") for name, values in share.items()],
            title="Bias",
        ),
        Panel(
            Axis("divergence, nats"),
            Axis(f"estimate from {s.batch} samples", low=0),
            [*bands, Line("exact", kl, kl, style="dashed", colour=6)],
            title="Mean of a batch: median, 5% to 95%",
        ),
    ]


if __name__ == "__main__":
    from studies.cli import main

    main("fig4")
