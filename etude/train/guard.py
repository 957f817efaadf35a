"""Stops a run that goes wrong, and keeps the evidence: the batch that did it, on disk, to be looked at and replayed."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from etude.data.packing import Batch
from etude.errors import EtudeError
from etude.train.trainer import StepResult


@dataclass
class Guard:
    """A step is bad if a value or gradient norm is not finite, or what is watched is `spike` above its median."""

    spike: float
    directory: Path
    watch: str = "loss"
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    SETTLE = 20  # steps before a spike can be told from the fall at the beginning

    def check(self, step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        loss = result.values[self.watch]
        problem = None
        if not all(map(math.isfinite, [*result.values.values(), *result.gradient_norms.values()])):
            problem = f"{self.watch} {loss} and gradient norms {result.gradient_norms} at step {step}"
        elif self.spike and len(self.recent) >= self.SETTLE:
            usual = sorted(self.recent)[len(self.recent) // 2]
            if loss > usual + self.spike:
                problem = (
                    f"{self.watch} {loss:.3f} at step {step} is {loss - usual:.3f} nats above the usual {usual:.3f}"
                )
        self.recent.append(loss)
        if problem:
            where = self._keep(step, result, batches)
            raise EtudeError(
                f"training stopped: {problem}; the batch is in {where}. Look at it, then resume with a lower learning "
                "rate or a higher spike limit in a new run, or remove the document"
            )

    def _keep(self, step: int, result: StepResult, batches: Sequence[Batch]) -> Path:
        where = self.directory / f"step-{step}"
        where.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            tensors |= {f"{number}.tokens": batch.tokens.contiguous(), f"{number}.targets": batch.targets.contiguous()}
        save_file(tensors, where / "batch.safetensors")
        pieces = [[asdict(piece) for piece in batch.pieces] for batch in batches]
        facts = {
            "values": {k: repr(v) for k, v in result.values.items()},
            "gradient_norms": repr(result.gradient_norms),
        }
        (where / "batch.json").write_text(json.dumps({**facts, "pieces": pieces}, indent=1))
        return where
