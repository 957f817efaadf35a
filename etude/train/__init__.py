"""Training: one trainer, small objectives, and the stages pretrain, mtp, extend and sft.

    trainer = etude.train.Trainer(model, etude.train.AdamSettings(learning_rate=1e-4))
    result = trainer.step([batch], etude.train.next_token)  # StepResult: metrics, gradient norms, tokens, seconds

Names are imported on first use, so that reading the settings (`etude.train.settings`) needs no torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.train.objectives import Objective as Objective
    from etude.train.objectives import ObjectiveSums as ObjectiveSums
    from etude.train.objectives import next_token as next_token
    from etude.train.objectives import with_mtp as with_mtp
    from etude.train.optim import AdamSettings as AdamSettings
    from etude.train.optim import LRSchedule as LRSchedule
    from etude.train.optim import MasterAdamW as MasterAdamW
    from etude.train.phase import TrainingPhase as TrainingPhase
    from etude.train.phase import train as train
    from etude.train.settings import ExtendSettings as ExtendSettings
    from etude.train.settings import MtpSettings as MtpSettings
    from etude.train.settings import PretrainSettings as PretrainSettings
    from etude.train.settings import SftSettings as SftSettings
    from etude.train.settings import TrainingSettings as TrainingSettings
    from etude.train.trainer import StepResult as StepResult
    from etude.train.trainer import Trainer as Trainer

__getattr__ = lazy_exports(__name__)
