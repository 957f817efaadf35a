"""Reinforcement learning: groups of rollouts, what they are worth, and the loop that learns from them."""

from etude.rl.advantages import advantages

__all__ = ["advantages"]
