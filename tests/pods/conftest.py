"""Fixtures for tests that create real pods."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pods.needs import namespaces


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    """A state directory for pods in namespaces; skip the test where there are none."""
    if not namespaces().works:
        pytest.skip(f"no namespaces here: {namespaces().reason}")
    with tempfile.TemporaryDirectory(prefix="etude-attacks-") as directory:
        yield Path(directory) / "state"
