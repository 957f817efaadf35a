"""The owner of a weight store: a store holds the versions of one run, which `owner.json` names.

Samplers load the newest version of a store, so the versions of another run must never be in it. A store that is a
directory is also locked by the process that runs the run.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from etude.errors import InputError
from etude.files import take_lock
from etude.weights.object_store import ObjectStore
from etude.weights.versions import latest

OWNER = "owner.json"


@contextmanager
def claimed(store: ObjectStore, run: str, *, inside: bool) -> Iterator[None]:
    """Make the store that of the run with this id; InputError if it holds another run's, BusyError if it is locked.

    `inside` is a store in the run directory, which cannot be another run's.
    """
    lock = None
    if store.directory is not None:
        store.directory.mkdir(parents=True, exist_ok=True)
        lock = take_lock(store.directory / "lock", f"weight store {store.url}")
    try:
        owner = _owner(store)
        if owner is None:
            if not inside and latest(store) is not None:
                raise InputError(_refusal(store))
            store.put(OWNER, json.dumps({"run": run}).encode())
        elif owner != run:
            raise InputError(_refusal(store))
        yield
    finally:
        if lock is not None:
            os.close(lock)


def check_owner(store: ObjectStore, run: str) -> None:
    """Raise InputError if the store belongs to another run, OSError if it is not there."""
    owner = _owner(store)
    if owner is None:  # a directory that is not mounted looks empty, and must not be written to
        raise FileNotFoundError(f"{store.url} is not there, or not a weight store: it has no {OWNER}")
    if owner != run:
        raise InputError(_refusal(store))


def _owner(store: ObjectStore) -> str | None:
    data = store.get(OWNER)
    return None if data is None else str(json.loads(data)["run"])


def _refusal(store: ObjectStore) -> str:
    return (
        f"{store.url} holds the weights of another run; name another place in rl.weights.store, or delete this one "
        "if that run is no longer needed"
    )
