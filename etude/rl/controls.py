"""Controls of an RL run: the same loop with another signal, so that a gain can be attributed.

placebo    the rewards of each group are shuffled among its rollouts: same steps, no information
rejection  fine-tuning on its own solved rollouts: advantage 1 for a solved rollout, 0 for others, no baseline
imitation  further epochs on the demonstrations of the stage sft instead of rollouts (`etude.rl.imitation`)
"""

from __future__ import annotations

import random

from etude.rl.settings import RlSettings
from etude.rollouts.group_advantages import ADVANTAGES
from etude.rollouts.queue_records import ReadyGroup


def used_rewards(group: ReadyGroup, settings: RlSettings, seed: int) -> list[float]:
    """Return the reward of each rollout as this run learns from it; the recorded rewards stay the true ones."""
    if settings.control == "rejection":
        return [float(bool(slot.record.get("solved"))) for slot in group.slots]
    rewards = [float(slot.record["total"]) for slot in group.slots]
    if settings.control == "placebo":
        random.Random(f"{seed}/placebo/{group.id}").shuffle(rewards)
    return rewards


def rollout_advantages(group: ReadyGroup, settings: RlSettings, seed: int) -> list[float]:
    """Return the advantage of each rollout of a group."""
    rewards, estimator = used_rewards(group, settings, seed), settings.estimator
    if settings.control == "rejection":
        return rewards
    return list(ADVANTAGES[estimator.advantage](rewards, **estimator.all_advantage_options))
