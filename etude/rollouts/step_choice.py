"""Which groups a policy step takes: the stalest complete ones, and which unfinished ones it waits for."""

from collections.abc import Sequence
from dataclasses import dataclass

from etude.rollouts.settings import QueueSettings


@dataclass(frozen=True)
class GroupAge:
    """A group that may still be trained on."""

    grp: int
    task: str
    informative: int | None  # None: not judged
    missing: int  # unfinished slots
    tries: int  # of the unfinished slot that was started most often
    age: int  # oldest policy step of its tokens


def choose_groups(
    groups: Sequence[GroupAge], step: int, settings: QueueSettings
) -> tuple[list[GroupAge], list[GroupAge]]:
    """Return the stalest complete groups for one step, and the staler unfinished groups to wait for.

    `groups` are sorted, the stalest first. Waiting is chosen only if fewer groups will then exceed max_staleness in the
    steps to come. An unfinished group may turn out to be alike: it is counted as if it were informative.
    """
    size = settings.groups_per_step
    chosen = [group for group in groups if not group.missing][:size]
    # A group that has repeatedly killed its workers is not waited for.
    unfinished = [group for group in groups if group.missing and group.tries <= settings.max_attempts]
    first = sorted((*chosen, *unfinished), key=lambda group: group.age)[:size]
    awaited = [group for group in first if group.missing]
    if awaited and _will_be_stale(groups, first, step, settings) >= _will_be_stale(groups, chosen, step, settings):
        awaited = []
    return chosen, awaited


def _will_be_stale(groups: Sequence[GroupAge], taken: Sequence[GroupAge], step: int, settings: QueueSettings) -> int:
    """Return a lower bound on how many groups will exceed max_staleness before they are trained, if the next step
    takes `taken`."""
    size, least = settings.groups_per_step, step + 1 - settings.max_staleness
    left = [group.age for group in groups if group not in taken]  # the stalest first
    kept = 0
    for age in left:
        kept += age >= least + kept // size
    return len(left) - kept
