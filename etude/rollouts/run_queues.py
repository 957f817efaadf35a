"""Opens the rollout queues of a run for writing: in the run service, and before it starts in the process of the run."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from etude.errors import InputError
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import QueueName, load_queues
from etude.runs.layout import RunLayout


@contextmanager
def open_queues(layout: RunLayout) -> Iterator[dict[QueueName, RolloutQueue]]:
    """Open the queues of a run for writing; InputError if one is damaged, or was made with another group size."""
    paths: dict[QueueName, Path] = {"training": layout.slots, "evaluation": layout.evaluations}
    found: dict[QueueName, RolloutQueue] = {}
    with ExitStack() as stack:
        for name, settings in load_queues(layout).items():
            try:
                found[name] = stack.enter_context(closing(RolloutQueue(paths[name], settings)))
            except sqlite3.DatabaseError as error:
                raise InputError(f"{paths[name]}: {error}; restore it, or start another run") from error
        yield found
