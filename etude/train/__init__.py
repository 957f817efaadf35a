"""Training: one trainer, small objectives, and the stages pretrain, mtp, extend and sft.

    trainer = etude.train.Trainer(model, etude.train.AdamSettings(learning_rate=1e-4))
    result = trainer.step([batch], etude.train.next_token)  # StepResult: metrics, gradient norms, tokens, seconds

Names are imported on first use, so that reading the settings (`etude.train.settings`) needs no torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.train.objectives import Objective, ObjectiveSums, next_token, with_mtp
    from etude.train.optim import AdamSettings, LRSchedule, MasterAdamW
    from etude.train.phase import TrainingPhase, train
    from etude.train.settings import ExtendSettings, MtpSettings, PretrainSettings, SftSettings, TrainingSettings
    from etude.train.trainer import StepResult, Trainer

_MODULES = {  # imported when first used
    "AdamSettings": "etude.train.optim",
    "ExtendSettings": "etude.train.settings",
    "LRSchedule": "etude.train.optim",
    "MasterAdamW": "etude.train.optim",
    "MtpSettings": "etude.train.settings",
    "Objective": "etude.train.objectives",
    "ObjectiveSums": "etude.train.objectives",
    "PretrainSettings": "etude.train.settings",
    "SftSettings": "etude.train.settings",
    "StepResult": "etude.train.trainer",
    "Trainer": "etude.train.trainer",
    "TrainingPhase": "etude.train.phase",
    "TrainingSettings": "etude.train.settings",
    "next_token": "etude.train.objectives",
    "train": "etude.train.phase",
    "with_mtp": "etude.train.objectives",
}
__all__ = [
    "AdamSettings",
    "ExtendSettings",
    "LRSchedule",
    "MasterAdamW",
    "MtpSettings",
    "Objective",
    "ObjectiveSums",
    "PretrainSettings",
    "SftSettings",
    "StepResult",
    "Trainer",
    "TrainingPhase",
    "TrainingSettings",
    "next_token",
    "train",
    "with_mtp",
]
__getattr__ = lazy_exports(__name__, _MODULES)
