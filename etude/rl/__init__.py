"""Asynchronous reinforcement learning: the learning loop, the trainer process and the orchestrator.

    take ready groups -> token advantages -> pack -> one step -> mark trained -> publish -> checkpoint

`run_rl` runs the stage to its end. Everything that computes with torch is imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports
from etude.rl.advantages import kl_form as kl_form
from etude.rollouts.group_advantages import group_advantage as group_advantage

if TYPE_CHECKING:
    from etude.rl.curriculum import prompt_order as prompt_order
    from etude.rl.settings import policy_objective as policy_objective

__getattr__ = lazy_exports(__name__)
