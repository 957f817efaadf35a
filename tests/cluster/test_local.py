"""Processes that end, die, give up: who is started again, and what ends a run."""

import time
from pathlib import Path

import pytest

from etude.cluster.local import ServiceFailed, Services
from etude.runs.layout import Place

ENDS = "print('done')"
GIVES_UP = "import sys; print('nothing moves'); sys.exit(4)"


def place_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Place:
    """A run whose processes can be this program."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/etude_test_program.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    place = Place(tmp_path / "run")
    place.make()
    return place


def tend_until(services: Services, there: object) -> None:
    deadline = time.monotonic() + 30
    while not there():  # type: ignore[operator]
        assert time.monotonic() < deadline
        services.tend()
        time.sleep(0.02)


def test_whoever_has_no_end_to_come_to_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[tuple[str, str]] = []
    with Services(place_with(tmp_path, monkeypatch, ENDS), lambda *news: deaths.append(news)) as services:
        services.add("worker-0", "etude_test_program")
        services.add("trainer", "etude_test_program", ends=True)
        tend_until(services, lambda: services.all["worker-0"].lives > 1 and services.all["trainer"].ended)
        assert services.all["trainer"].lives == 1
    assert ("worker-0", "ended with exit code 0") in deaths
    assert {name for name, _ in deaths} == {"worker-0"}


def test_whoever_gives_up_ends_the_run_at_once_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Services(place_with(tmp_path, monkeypatch, GIVES_UP)) as services:
        services.add("trainer", "etude_test_program", ends=True)
        with pytest.raises(ServiceFailed, match=r"trainer ended with exit code 4; its log ends:\n  nothing moves"):
            tend_until(services, lambda: False)
        assert services.all["trainer"].lives == 1
