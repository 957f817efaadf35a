"""How many rollouts may be under way: `in_flight` at most, and after every step what that step says.

More at once keep the samplers busier, but each of them takes longer, so that its group is older when it is complete,
and beyond `max_staleness` it was sampled for nothing. Where the two meet nobody can know beforehand: it depends on the
samplers, the tasks and the trainer. So what was thrown away comes off, and when the trainer had to wait a little comes
on. Nothing is remembered but the number itself, which is in the table.
"""

from etude.rl.slots import Plan

# Of a step's rollouts, at every step. It settles where as much comes off: about one sample in ten is thrown away then.
# Half or twice of this changes the throughput by a few per cent (tests/rl/test_balance.py has the simulation).
GROWTH = 1 / 16


def balanced(allowed: float, plan: Plan, stale: int, waited: bool) -> float:
    """How many to allow after a step on whose way so many samples grew too old, and for whose rollouts the trainer
    waited or did not. Never fewer than a group; where nothing may be stale, always as planned."""
    if not plan.max_staleness:
        return plan.in_flight
    step = plan.group_size * plan.groups_per_step
    wanted = allowed * step / (step + stale) + (GROWTH * step if waited else 0.0)
    return min(plan.in_flight, max(plan.group_size, wanted))
