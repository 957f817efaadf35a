"""Training: one trainer, small objectives, and the stages pretrain, mtp, extend and sft.

    trainer = etude.train.Trainer(model, etude.train.AdamSettings(learning_rate=1e-4))
    result = trainer.step([batch], etude.train.next_token)  # StepResult: metrics, gradient norms, tokens, seconds

Names are imported on first use, so that reading the settings (`etude.train.settings`) needs no torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.train.objectives import next_token as next_token
    from etude.train.optim import AdamSettings as AdamSettings
    from etude.train.trainer import Trainer as Trainer

__getattr__ = lazy_exports(__name__)
