"""Servers that several files of tests ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from samplers import parrot, served, tiny_engine

from etude.inference.service import EngineService


@pytest.fixture(scope="module")
def hello() -> Iterator[str]:
    """A server whose model says one sentence: café comes in bytes."""
    with served(parrot("Hello", ", ", "caf", 0xC3, 0xA9, "!", max_streams=8)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def random_server() -> Iterator[tuple[str, EngineService]]:
    """A server whose model babbles for as long as it may."""
    with served(tiny_engine(), max_waiting=32) as found:
        yield found
