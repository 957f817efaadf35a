"""Worker processes: nobody can tell from what comes back who did the work, and nothing of them stays."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from etude.data.documents import read_source
from etude.data.filters import Filters
from etude.data.ingest import look_at
from etude.data.worker_pool import ALONE, Crew
from etude.errors import EtudeError, InputError

ITEMS = [bytes([at % 256]) * (at % 977) for at in range(3000)]


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Two processes from the first byte on."""
    monkeypatch.setattr("etude.data.worker_pool.FIRST", 0)
    with Crew(tmp_path / "crew", processes=2) as two:
        yield two


def children(parent: int) -> set[int]:
    found = (task.read_text().split() for task in Path(f"/proc/{parent}/task").glob("*/children"))
    return {int(child) for line in found for child in line}


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("batch", [1, 5000, 1 << 20])
def test_results_come_in_order_and_are_those_of_one_process(crew: Crew, batch: int) -> None:
    alone = list(ALONE.map(b"".join, ITEMS, len, batch=batch))
    assert list(crew.map(b"".join, ITEMS, len, batch=batch)) == alone
    assert b"".join(alone) == b"".join(ITEMS)
    assert len(alone) > 3000 // 257


def test_a_small_input_starts_no_process(tmp_path: Path) -> None:
    before = children(os.getpid())
    with Crew(tmp_path / "crew") as crew:
        assert b"".join(crew.map(b"".join, ITEMS, len)) == b"".join(ITEMS)
        assert children(os.getpid()) == before
    assert not (tmp_path / "crew").exists()


def test_a_stand_in_is_made_only_for_other_processes(crew: Crew) -> None:
    here, there = partial(sorted, reverse=True), partial(sorted, reverse=False)
    assert list(ALONE.map(here, [1, 2, 3], int, elsewhere=lambda: there)) == [[3, 2, 1]]
    assert list(crew.map(here, [1, 2, 3], int, elsewhere=lambda: there)) == [[1, 2, 3]]


def test_it_reads_a_few_batches_ahead_and_no_more(crew: Crew) -> None:
    read = 0

    def counted() -> Iterator[bytes]:
        nonlocal read
        for item in ITEMS:
            read += 1
            yield item

    next(crew.map(b"".join, counted(), len, batch=1))
    assert read < 20


def test_bad_input_and_bugs_are_raised_where_the_work_was_asked_for(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "gone.py").write_text("text = 1\n")
    files = list(read_source(str(tmp_path / "source")))
    (tmp_path / "source" / "gone.py").unlink()
    with pytest.raises(InputError, match=r"source file .*gone\.py cannot be read: No such file"):
        list(crew.map(partial(look_at, Filters()), files, lambda file: file.size))
    with pytest.raises(RuntimeError, match=r"in a worker process(?s:.*)TypeError: must be real number, not list"):
        list(crew.map(math.sqrt, [4], int))  # type: ignore[arg-type]
    assert list(crew.map(sum, [4, 5], lambda _: 0)) == [9]  # the processes go on


def test_a_worker_that_is_killed_is_reported(crew: Crew) -> None:
    before = children(os.getpid())
    results = crew.map(b"".join, ITEMS * 20, len, batch=2000)
    next(results)
    for process in children(os.getpid()) - before:
        os.kill(process, signal.SIGKILL)
    with pytest.raises(EtudeError, match=r"ended by SIGKILL; the machine may be short of memory; the same command"):
        list(results)


def test_they_end_with_the_builder_however_it_ends(tmp_path: Path) -> None:
    program = (
        "import time\nfrom pathlib import Path\nfrom etude.data import crew\ncrew.FIRST = 0\n"
        f"results = crew.Crew(Path({str(tmp_path)!r}), processes=2).map(b''.join, [b'x'] * 9, len, batch=1)\n"
        "next(results)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"ready\n"
        workers = children(builder.pid)
        assert len(workers) == 2
        builder.kill()
    deadline = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, workers))


def test_a_worker_never_loads_torch() -> None:
    """It would take seconds and hundreds of megabytes, in each of them."""
    program = (
        "import sys, etude.data.ingest, etude.data.decontaminate, etude.data.encoder, etude.data.document_format\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
