"""Stop a run when a step goes wrong, and save the batch of that step to disk for inspection and replay."""

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
class LossSpikeGuard:
    """Rejects a step with a non-finite metric or gradient norm, or with `metric` more than `threshold` nats above
    the median of the recent steps. A threshold of 0 turns the spike check off."""

    threshold: float
    directory: Path
    metric: str = "loss"
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    MIN_HISTORY = 20  # steps; before that a spike cannot be distinguished from the initial fall of the loss

    def check(self, step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        """Raise EtudeError and save the batches if this step is bad."""
        value = result.metrics[self.metric]
        problem = None
        if not all(map(math.isfinite, [*result.metrics.values(), *result.gradient_norms.values()])):
            problem = f"{self.metric} {value} and gradient norms {result.gradient_norms} at step {step}"
        elif self.threshold and len(self.recent) >= self.MIN_HISTORY:
            median = sorted(self.recent)[len(self.recent) // 2]
            if value > median + self.threshold:
                problem = (
                    f"{self.metric} {value:.3f} at step {step} is {value - median:.3f} nats above "
                    f"the recent median {median:.3f}"
                )
        self.recent.append(value)
        if problem:
            saved = self._save_batches(step, result, batches)
            raise EtudeError(
                f"training stopped: {problem}; the batch is in {saved}. Inspect it, then start a new run with a lower "
                "learning rate or a higher spike limit, or without the document"
            )

    def _save_batches(self, step: int, result: StepResult, batches: Sequence[Batch]) -> Path:
        directory = self.directory / f"step-{step}"
        directory.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            tensors |= {f"{number}.tokens": batch.tokens.contiguous(), f"{number}.targets": batch.targets.contiguous()}
        save_file(tensors, directory / "batch.safetensors")
        record = {
            "values": {k: repr(v) for k, v in result.metrics.items()},
            "gradient_norms": repr(result.gradient_norms),
            "pieces": [[asdict(span) for span in batch.spans] for batch in batches],
        }
        (directory / "batch.json").write_text(json.dumps(record, indent=1))
        return directory
