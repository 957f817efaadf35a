"""Rollouts: scored trials with their traces, the durable queue of them, and the workers that run them.

    rollout = await run_rollout(fleet, task, PolicyBinding(policy, dialect, window), RolloutOptions())

An infrastructure failure is RolloutFailed and never a reward. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.rollouts.queue import ReadyGroup, RolloutQueue, Slot, StaleClaim
    from etude.rollouts.rollout import (
        PolicyBinding,
        Rollout,
        RolloutCheckpoint,
        RolloutFailed,
        RolloutOptions,
        run_rollout,
    )
    from etude.rollouts.sampler_pool import SamplerPool, SamplersUnavailable, open_sampler_pool
    from etude.rollouts.settings import QueueSettings, RolloutSettings

_MODULES = {
    "PolicyBinding": "etude.rollouts.rollout",
    "QueueSettings": "etude.rollouts.settings",
    "ReadyGroup": "etude.rollouts.queue",
    "Rollout": "etude.rollouts.rollout",
    "RolloutCheckpoint": "etude.rollouts.rollout",
    "RolloutFailed": "etude.rollouts.rollout",
    "RolloutOptions": "etude.rollouts.rollout",
    "RolloutQueue": "etude.rollouts.queue",
    "RolloutSettings": "etude.rollouts.settings",
    "SamplerPool": "etude.rollouts.sampler_pool",
    "SamplersUnavailable": "etude.rollouts.sampler_pool",
    "Slot": "etude.rollouts.queue",
    "StaleClaim": "etude.rollouts.queue",
    "open_sampler_pool": "etude.rollouts.sampler_pool",
    "run_rollout": "etude.rollouts.rollout",
}
__all__ = [
    "PolicyBinding",
    "QueueSettings",
    "ReadyGroup",
    "Rollout",
    "RolloutCheckpoint",
    "RolloutFailed",
    "RolloutOptions",
    "RolloutQueue",
    "RolloutSettings",
    "SamplerPool",
    "SamplersUnavailable",
    "Slot",
    "StaleClaim",
    "open_sampler_pool",
    "run_rollout",
]
__getattr__ = lazy_exports(__name__, _MODULES)
