"""Rollouts: scored trials with their traces, the durable queue of them, and the workers that run them.

    rollout = await run_rollout(fleet, task, PolicyBinding(policy, dialect, window), RolloutOptions())

An infrastructure failure is RolloutFailed and never a reward. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.rollouts.queue import ReadyGroup as ReadyGroup
    from etude.rollouts.queue import RolloutQueue as RolloutQueue
    from etude.rollouts.queue import Slot as Slot
    from etude.rollouts.queue import StaleClaim as StaleClaim
    from etude.rollouts.rollout import PolicyBinding as PolicyBinding
    from etude.rollouts.rollout import Rollout as Rollout
    from etude.rollouts.rollout import RolloutCheckpoint as RolloutCheckpoint
    from etude.rollouts.rollout import RolloutFailed as RolloutFailed
    from etude.rollouts.rollout import RolloutOptions as RolloutOptions
    from etude.rollouts.rollout import run_rollout as run_rollout
    from etude.rollouts.sampler_pool import SamplerPool as SamplerPool
    from etude.rollouts.sampler_pool import SamplersUnavailable as SamplersUnavailable
    from etude.rollouts.sampler_pool import open_sampler_pool as open_sampler_pool
    from etude.rollouts.settings import QueueSettings as QueueSettings
    from etude.rollouts.settings import RolloutSettings as RolloutSettings

__getattr__ = lazy_exports(__name__)
