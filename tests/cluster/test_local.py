"""Local services: which are restarted, and which end the run."""

import time
from pathlib import Path

import pytest

from etude.cluster.local import LocalServices, ServiceFailed
from etude.runs.layout import RunLayout

ENDS = "print('done')"
GIVES_UP = "import sys; print('nothing moves'); sys.exit(4)"


def layout_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> RunLayout:
    """Return the layout of a run whose services can be this program."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/etude_test_program.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    layout = RunLayout(tmp_path / "run")
    layout.make()
    return layout


def tick_until(services: LocalServices, condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        services.tick()
        time.sleep(0.02)


def test_a_service_that_should_not_finish_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[tuple[str, str]] = []
    with LocalServices(layout_with(tmp_path, monkeypatch, ENDS), lambda *death: deaths.append(death)) as services:
        services.add("worker-0", "etude_test_program")
        services.add("trainer", "etude_test_program", finishes=True)
        tick_until(services, lambda: services.services["worker-0"].starts > 1 and services.services["trainer"].finished)
        assert services.services["trainer"].starts == 1
    assert ("worker-0", "ended with exit code 0") in deaths
    assert {name for name, _ in deaths} == {"worker-0"}


def test_a_service_that_gives_up_ends_the_run_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServices(layout_with(tmp_path, monkeypatch, GIVES_UP)) as services:
        services.add("trainer", "etude_test_program", finishes=True)
        with pytest.raises(ServiceFailed, match=r"trainer ended with exit code 4; its log ends:\n  nothing moves"):
            tick_until(services, lambda: False)
        assert services.services["trainer"].starts == 1
