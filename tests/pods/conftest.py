"""Fixtures of the tests that make real pods."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.pods.runtime.native.build import find_helper
from etude.pods.runtime.probe import cache_directory, probe


@pytest.fixture(scope="module", params=("python", "compiled"))
def keeper(request: pytest.FixtureRequest) -> str:
    """Each keeper, for tests in which they could differ."""
    return usable(request.param)


@pytest.fixture(scope="module", params=("best", pytest.param("python", marks=pytest.mark.slow)))
def one_keeper(request: pytest.FixtureRequest) -> str:
    """The keeper that is used here by default; the other among the slow tests."""
    found, _ = find_helper(cache_directory(Path(tempfile.gettempdir())))
    return usable("compiled" if request.param == "best" and found else "python")


def usable(keeper: str) -> str:
    """The keeper, if pods can be made with it here."""
    verdict = asyncio.run(probe("namespace", compiled=False))
    if not verdict.works:
        pytest.skip(f"no namespaces here: {verdict.reason}")
    if keeper == "compiled":
        helper, reason = find_helper(cache_directory(Path(tempfile.gettempdir())))
        if helper is None:
            pytest.skip(f"there is no compiled keeper: {reason}")
    return keeper


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="etude-attacks-") as directory:
        yield Path(directory) / "state"
