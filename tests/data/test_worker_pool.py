"""Worker processes: the results are those of a single process, and no process is left behind."""

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
from etude.data.ingest import filter_files
from etude.data.worker_pool import IN_PROCESS, WorkerPool
from etude.errors import EtudeError, InputError

ITEMS = [bytes([at % 256]) * (at % 977) for at in range(3000)]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """Two workers, started for the first byte."""
    monkeypatch.setattr("etude.data.worker_pool.IN_PROCESS_BYTES", 0)
    with WorkerPool(tmp_path / "workers", processes=2) as two:
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
def test_results_come_in_order_and_are_those_of_one_process(pool: WorkerPool, batch: int) -> None:
    expected = list(IN_PROCESS.map(b"".join, ITEMS, len, batch=batch))
    assert list(pool.map(b"".join, ITEMS, len, batch=batch)) == expected
    assert b"".join(expected) == b"".join(ITEMS)
    assert len(expected) > 3000 // 257


def test_a_small_input_starts_no_process(tmp_path: Path) -> None:
    before = children(os.getpid())
    with WorkerPool(tmp_path / "workers") as pool:
        assert b"".join(pool.map(b"".join, ITEMS, len)) == b"".join(ITEMS)
        assert children(os.getpid()) == before
    assert not (tmp_path / "workers").exists()


def test_a_worker_function_is_made_only_for_worker_processes(pool: WorkerPool) -> None:
    function, worker_function = partial(sorted, reverse=True), partial(sorted, reverse=False)
    assert list(IN_PROCESS.map(function, [1, 2, 3], int, make_worker_function=lambda: worker_function)) == [[3, 2, 1]]
    assert list(pool.map(function, [1, 2, 3], int, make_worker_function=lambda: worker_function)) == [[1, 2, 3]]


def test_it_reads_a_few_batches_ahead_and_no_more(pool: WorkerPool) -> None:
    read = 0

    def counted() -> Iterator[bytes]:
        nonlocal read
        for item in ITEMS:
            read += 1
            yield item

    next(pool.map(b"".join, counted(), len, batch=1))
    assert read < 20


def test_bad_input_and_bugs_are_raised_in_the_calling_process(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "gone.py").write_text("text = 1\n")
    files = list(read_source(str(tmp_path / "source")))
    (tmp_path / "source" / "gone.py").unlink()
    with pytest.raises(InputError, match=r"source file .*gone\.py cannot be read: No such file"):
        list(pool.map(partial(filter_files, Filters()), files, lambda file: file.size))
    with pytest.raises(RuntimeError, match=r"in a worker process(?s:.*)TypeError: must be real number, not list"):
        list(pool.map(math.sqrt, [4], int))  # type: ignore[arg-type]
    assert list(pool.map(sum, [4, 5], lambda _: 0)) == [9]  # the workers still run


def test_a_worker_that_is_killed_is_reported(pool: WorkerPool) -> None:
    before = children(os.getpid())
    results = pool.map(b"".join, ITEMS * 20, len, batch=2000)
    next(results)
    for process in children(os.getpid()) - before:
        os.kill(process, signal.SIGKILL)
    with pytest.raises(
        EtudeError, match=r"ended by SIGKILL; the machine may be short of memory; run the same command again"
    ):
        list(results)


def test_workers_end_with_the_builder_however_it_ends(tmp_path: Path) -> None:
    program = (
        "import time\nfrom pathlib import Path\nfrom etude.data import worker_pool\nworker_pool.IN_PROCESS_BYTES = 0\n"
        f"pool = worker_pool.WorkerPool(Path({str(tmp_path)!r}), processes=2)\n"
        "results = pool.map(b''.join, [b'x'] * 9, len, batch=1)\n"
        "next(results)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"ready\n"
        workers = children(builder.pid)
        assert len(workers) == 2
        builder.kill()
    deadline = time.monotonic() + 120
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, workers))


def test_a_worker_never_loads_torch() -> None:
    """torch would take seconds and hundreds of megabytes in each worker."""
    program = (
        "import sys, etude.data.ingest, etude.data.decontaminate, etude.data.encoder, etude.data.document_format\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
