"""Fixtures of the tests that make real pods."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.pods.native.build import find_helper
from etude.pods.probe import cache_directory, probe


@pytest.fixture(scope="module", params=("python", "compiled"))
def keeper(request: pytest.FixtureRequest) -> str:
    verdict = asyncio.run(probe("namespace", compiled=False))
    if not verdict.works:
        pytest.skip(f"no namespaces here: {verdict.reason}")
    if request.param == "compiled":
        helper, reason = find_helper(cache_directory(Path(tempfile.gettempdir())))
        if helper is None:
            pytest.skip(f"there is no compiled keeper: {reason}")
    return str(request.param)


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="etude-attacks-") as directory:
        yield Path(directory) / "state"
