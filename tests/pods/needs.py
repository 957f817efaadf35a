"""Skip a test that needs more of pods than this user can have here; the reason is what `etude pods doctor` notes."""

import asyncio
from functools import cache

import pytest

from etude.pods.runtime.probe import ProbeResult, probe


@cache
def namespaces() -> ProbeResult:
    return asyncio.run(probe("namespace"))


def need(*, limit: str = "", snapshot: str = "") -> None:
    """Skip the test unless pods in namespaces have this limit and this kind of snapshot.

    Live snapshots stand for control groups (v2): without one, pods cannot be frozen either.
    """
    if (can := namespaces().capabilities) is None:
        pytest.skip(f"no namespaces here: {namespaces().reason}")
    notes = "; ".join(note for note in can.notes if note.startswith("no "))
    if limit and limit not in can.limits:
        pytest.skip(f"pods have no limit on {limit} here: {notes}")
    if snapshot and snapshot not in can.snapshots:
        pytest.skip(f"pods have no snapshots of kind {snapshot} here: {notes}")
