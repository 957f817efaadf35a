"""Rollouts: scored trials with their traces, the durable queue of them, and the workers that run them.

    rollout = await run_rollout(fleet, task, PolicyBinding(policy, dialect, window), RolloutOptions())

An infrastructure failure is RolloutFailed and never a reward.
"""
