"""Progress lines: in a narrow terminal only the note at the end is truncated."""

import io
import re

import pytest
from rich.console import Console

import etude.system.progress
from etude.system.progress import progress_bars, progress_line, time_left

NOTE = "24 in flight, 0 ready  reward 0.500  solved 50%  best 50%  [stale 1]  mismatch 1e-05  entropy 0.33  waits 93%"


@pytest.mark.parametrize("width", [60, 80, 132, 240])
def test_only_the_note_is_truncated_in_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with progress_bars() as progress:
        with progress_line("pretrain", progress) as report:
            report(40, 40, "loss 2.755")
        with progress_line("rl", progress) as report:
            report(3, 12, NOTE)
            written = io.StringIO()
            Console(file=written, width=width).print(progress.get_renderable())
    lines = written.getvalue().splitlines()
    assert len(lines) == 2
    assert re.search(r"pretrain +━+ +40/40 +0:00:00 +00:00 +loss 2.755", lines[0])
    found = re.search(r"rl +━*╺?━+ +3/12 +0:00:00 +--:-- +(24 in fl.*)", lines[1])
    assert found, lines[1]
    shown = found.group(1).rstrip()
    assert shown == NOTE if width > 200 else NOTE.startswith(shown.removesuffix("…")) and shown.endswith("…")


def test_without_a_terminal_lines_are_logged_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(etude.system.progress, "LOG_INTERVAL_S", 0.0)
    with progress_bars() as progress, progress_line("rl", progress) as report:
        report(0, 0)
        report(3, 12, NOTE)
    lines = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert lines[:2] == ["rl 0/?", f"rl 3/12 {NOTE}"]


def test_the_time_left_is_that_of_the_rate_so_far() -> None:
    assert time_left(3, 9, 60.0) == "about 3 min left"
    assert time_left(3, 1, 60.0) == "about 20 s left"
    assert time_left(0, 9, 60.0) == time_left(3, 0, 60.0) == ""
