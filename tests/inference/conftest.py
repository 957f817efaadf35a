"""Servers shared by several test files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from samplers import parrot, served, tiny_engine

from etude.inference.service import EngineService


@pytest.fixture(scope="module")
def hello() -> Iterator[str]:
    """Run a server whose model writes one sentence, with é as two byte tokens."""
    with served(parrot("Hello", ", ", "caf", 0xC3, 0xA9, "!", max_sequences=8)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def random_server() -> Iterator[tuple[str, EngineService]]:
    """Run a server whose model writes random tokens until max_tokens."""
    with served(tiny_engine(), max_waiting=32) as found:
        yield found
