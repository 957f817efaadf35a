"""Asynchronous reinforcement learning: the learning loop, the trainer process and the orchestrator.

    take ready groups -> token advantages -> pack -> one step -> mark trained -> publish -> checkpoint

`run_rl` runs the stage to its end. Everything that computes with torch is imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports
from etude.rl.advantages import EstimatorSettings as EstimatorSettings
from etude.rl.advantages import k1 as k1
from etude.rl.advantages import k3 as k3
from etude.rl.advantages import kl_form as kl_form
from etude.rl.advantages import token_advantages as token_advantages
from etude.rollouts.group_advantages import group_advantage as group_advantage
from etude.rollouts.group_advantages import group_advantages as group_advantages

if TYPE_CHECKING:
    from etude.rl.curriculum import Curriculum as Curriculum
    from etude.rl.curriculum import CurriculumSettings as CurriculumSettings
    from etude.rl.curriculum import PromptChoice as PromptChoice
    from etude.rl.curriculum import prompt_order as prompt_order
    from etude.rl.health import RlHealth as RlHealth
    from etude.rl.health import rl_health as rl_health
    from etude.rl.loop import RlLoop as RlLoop
    from etude.rl.loop import learn as learn
    from etude.rl.objective import PolicyGradient as PolicyGradient
    from etude.rl.objective import RolloutBatch as RolloutBatch
    from etude.rl.orchestrator import run_rl as run_rl
    from etude.rl.packing import TrainingSequence as TrainingSequence
    from etude.rl.packing import pack as pack
    from etude.rl.settings import RlSettings as RlSettings
    from etude.rl.settings import open_rl_run as open_rl_run
    from etude.rl.settings import policy_objective as policy_objective

__getattr__ = lazy_exports(__name__)
