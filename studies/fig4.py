"""The report's figure of estimators: how k1, k2 and k3 scatter as two distributions move apart.

With q = N(0, 1), p = N(m, 1) and r = p / q, samples of q have log r ~ N(-KL, 2 KL), where KL(q | p) = m^2 / 2. So all
of it is known exactly, and what is drawn is held against it:

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
from etude.system.progress import Report
from studies.kl import CROSSING, crossed
from studies.study import Finding, Point, study

Floats = npt.NDArray[np.floating]
NAMES = ("k1", "k2", "k3")
SHOWN = (0.01, 0.1, CROSSING, 1.0, 2.0)  # divergences in the table
LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True)
class Settings:
    batch: int = 256  # samples of one estimate
    batches: int = 4096  # estimates, to see how they scatter
    divergences: int = 21  # from 0.01 to 2 nats, beside those of the table


@study("fig4")
def fig4(seed: int, report: Report, settings: Settings | None = None) -> Finding:
    """k1, k2 or k3: how much do three estimates of a divergence scatter as the policies move apart?"""
    s = settings or Settings()
    wanted = sorted({*SHOWN, *np.geomspace(SHOWN[0], SHOWN[-1], s.divergences).round(6).tolist()})
    points = []
    for divergence in wanted:
        points.append(exactly(divergence) | drawn(divergence, s, seed))
        report(len(points), len(wanted))
    last = points[-1]
    return Finding(
        title="Three estimates of a divergence",
        conclusion=(
            f"Up to {crossed(points):.2f} nats (exactly {CROSSING}) k3 scatters less than k1, beyond it more: at "
            f"{last['divergence']:g} nats the variance is {last['k1_variance']:.1f} of k1 and "
            f"{last['k3_variance']:.0f} of k3 (exactly {last['k1_exact']:g} and {last['k3_exact']:.1f}), and half of "
            f"all estimates from {s.batch} samples are below {last['k3_median']:.2f} with k3 and "
            f"{last['k1_median']:.2f} with k1; k2 is steadier than k3 there ({last['k2_variance']:.0f}), but its mean "
            f"is {last['k2_mean']:.2f}."
        ),
        columns=("divergence, nats", "mean of k2", *(f"variance of {name}, exact / drawn" for name in NAMES)),
        rows=[_row(point) for point in points if point["divergence"] in SHOWN],
        panels=panels(points, s),
        data={"points": points},
        settings=s,
    )


def k2(logprobs: Floats, reference: Floats) -> Floats:
    """Half the square of log r: never negative, and its mean is not the divergence."""
    return (reference - logprobs) ** 2 / 2


def exactly(kl: float) -> dict[str, float]:
    return {
        "divergence": kl,
        "k1_exact": 2 * kl,
        "k2_exact": 2 * kl**2 + 2 * kl**3,
        "k3_exact": math.expm1(2 * kl) - 2 * kl,
        "k2_mean_exact": kl + kl**2 / 2,
    }


def drawn(kl: float, s: Settings, seed: int) -> dict[str, float]:
    """Mean and variance of single estimates, and where those of a whole batch lie."""
    x = np.random.default_rng([seed, round(1e6 * kl)]).standard_normal((s.batches, s.batch))
    mine, theirs = -(x**2) / 2, -((x - math.sqrt(2 * kl)) ** 2) / 2
    found: dict[str, float] = {}
    for name, values in zip(NAMES, (estimate(mine, theirs) for estimate in (k1, k2, k3)), strict=True):
        low, median, high = np.quantile(values.mean(axis=1), (LOW, 0.5, HIGH))
        found |= {f"{name}_mean": float(values.mean()), f"{name}_variance": float(values.var())}
        found |= {f"{name}_low": float(low), f"{name}_median": float(median), f"{name}_high": float(high)}
    return found


def _row(point: Point) -> tuple[str, ...]:
    variances = (f"{point[f'{name}_exact']:.3g} / {point[f'{name}_variance']:.3g}" for name in NAMES)
    return f"{point['divergence']:g}", f"{point['k2_mean']:.3f}", *variances


def panels(points: Sequence[Mapping[str, float]], s: Settings) -> list[Panel]:
    def of(key: str) -> list[float]:
        return [point[key] for point in points]

    kl = of("divergence")
    exact = [Line(f"{name} exact", kl, of(f"{name}_exact"), colour=place) for place, name in enumerate(NAMES)]
    seen = [
        Line(f"{name} drawn", kl, of(f"{name}_variance"), style="points", colour=place)
        for place, name in enumerate(NAMES)
    ]
    share = {name: [mean / truth for mean, truth in zip(of(f"{name}_mean"), kl, strict=True)] for name in NAMES}
    bands = [Line(name, kl, of(f"{name}_median"), of(f"{name}_low"), of(f"{name}_high")) for name in NAMES]
    return [
        Panel(
            Axis("divergence, nats", log=True),
            Axis("variance of one estimate", log=True),
            [*exact, *seen],
            title="Variance",
            marks=[Mark(CROSSING, f"{CROSSING}")],
        ),
        Panel(
            Axis("divergence, nats", log=True),
            Axis("mean, as a share of the truth", low=0.8),
            [Line(name, kl, values, style="both") for name, values in share.items()],
            title="Bias",
        ),
        Panel(
            Axis("divergence, nats"),
            Axis(f"estimate from {s.batch} samples", low=0),
            [*bands, Line("truth", kl, kl, style="dashed", colour=6)],
            title="What a batch says: median, 5% to 95%",
        ),
    ]
