"""Fixtures for tests that create real pods."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.pods.runtime.native.build import find_helper
from etude.pods.runtime.probe import cache_directory, probe


@pytest.fixture(scope="module", params=("python", "compiled"))
def zygote(request: pytest.FixtureRequest) -> str:
    """Each zygote implementation, for tests in which they could differ."""
    return require_usable(request.param)


@pytest.fixture(scope="module", params=("best", pytest.param("python", marks=pytest.mark.slow)))
def default_zygote(request: pytest.FixtureRequest) -> str:
    """The default zygote implementation; the other one only in the slow tests."""
    found, _ = find_helper(cache_directory(Path(tempfile.gettempdir())))
    return require_usable("compiled" if request.param == "best" and found else "python")


def require_usable(zygote: str) -> str:
    """Return the zygote implementation, or skip the test if pods cannot be created with it here."""
    verdict = asyncio.run(probe("namespace", compiled=False))
    if not verdict.works:
        pytest.skip(f"no namespaces here: {verdict.reason}")
    if zygote == "compiled":
        helper, reason = find_helper(cache_directory(Path(tempfile.gettempdir())))
        if helper is None:
            pytest.skip(f"there is no compiled zygote: {reason}")
    return zygote


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="etude-attacks-") as directory:
        yield Path(directory) / "state"
