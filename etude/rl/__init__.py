"""Asynchronous reinforcement learning: the learning loop, the trainer process and the orchestrator.

    take ready groups -> token advantages -> pack -> one step -> mark trained -> publish -> checkpoint

`run_rl` runs the stage to its end. Everything that computes with torch is imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports
from etude.rl.advantages import EstimatorSettings, k1, k3, kl_form, token_advantages
from etude.rollouts.group_advantages import group_advantage, group_advantages

if TYPE_CHECKING:
    from etude.rl.curriculum import Curriculum, CurriculumSettings, PromptChoice, prompt_order
    from etude.rl.health import RlHealth, rl_health
    from etude.rl.loop import RlLoop, learn
    from etude.rl.objective import PolicyGradient, RolloutBatch
    from etude.rl.orchestrator import run_rl
    from etude.rl.packing import TrainingSequence, pack
    from etude.rl.settings import RlSettings, open_rl_run, policy_objective

_MODULES = {  # imported when first used
    "Curriculum": "etude.rl.curriculum",
    "CurriculumSettings": "etude.rl.curriculum",
    "PolicyGradient": "etude.rl.objective",
    "PromptChoice": "etude.rl.curriculum",
    "RlHealth": "etude.rl.health",
    "RlLoop": "etude.rl.loop",
    "RlSettings": "etude.rl.settings",
    "RolloutBatch": "etude.rl.objective",
    "TrainingSequence": "etude.rl.packing",
    "learn": "etude.rl.loop",
    "open_rl_run": "etude.rl.settings",
    "pack": "etude.rl.packing",
    "policy_objective": "etude.rl.settings",
    "prompt_order": "etude.rl.curriculum",
    "rl_health": "etude.rl.health",
    "run_rl": "etude.rl.orchestrator",
}
__all__ = [
    "Curriculum",
    "CurriculumSettings",
    "EstimatorSettings",
    "PolicyGradient",
    "PromptChoice",
    "RlHealth",
    "RlLoop",
    "RlSettings",
    "RolloutBatch",
    "TrainingSequence",
    "group_advantage",
    "group_advantages",
    "k1",
    "k3",
    "kl_form",
    "learn",
    "open_rl_run",
    "pack",
    "policy_objective",
    "prompt_order",
    "rl_health",
    "run_rl",
    "token_advantages",
]
__getattr__ = lazy_exports(__name__, _MODULES)
