"""How long a corpus takes on one core, on two, on all, and what it holds in memory; beside it, no worker processes.

    python benchmarks/corpus.py --tokenizer runs/smollm2-135m                 # the standard library, under a minute
    python benchmarks/corpus.py site-packages --suffix .py --held-out sympy --tokenizer T --cores 1 4 16

Each build is a process of its own that may run on so many cores. In the row "alone" that process does everything, with
the threads of the `tokenizers` library on the same cores. Memory is the largest sum over all processes of a build, with
shared pages counted once. All builds must give the same bytes, and find the files in the page cache.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.chat.tokenizer import Tokenizer
from etude.data import worker_pool
from etude.data.corpus import CorpusOptions, Size, build_corpus
from etude.data.documents import read_source
from etude.data.filters import Filters

STEPS = ("collect", "decide", "encode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="stdlib")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--suffix", nargs="*", default=[".py"])
    parser.add_argument("--held-out", nargs="*", default=[])
    parser.add_argument("--cores", type=int, nargs="*", default=sorted({1, 2, len(os.sched_getaffinity(0))}))
    parser.add_argument(
        "--build", type=int, metavar="CORES", help=argparse.SUPPRESS
    )  # one row, in a process of its own
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.build:
        print(json.dumps(build(asked)))
        return
    for file in read_source(asked.source):
        if file.size <= Filters().max_bytes:
            file.read()
    most = max(asked.cores)
    rows = {f"{cores} cores": measure(cores) for cores in asked.cores}
    rows[f"{most} cores, alone"] = measure(most, "--alone")
    slowest = rows[f"{most} cores, alone"]["seconds"]
    Console().print(table_of(rows, slowest))
    same = len({row["digest"] for row in rows.values()}) == 1
    found = next(iter(rows.values()))
    print(
        f"{asked.source}: {found['bytes'] / 1e6:.0f} MB of text in {found['documents']:,} documents become "
        f"{found['tokens'] / 1e6:.1f} million tokens; "
        f"{'every build gave the same bytes' if same else 'THE BUILDS DIFFER'}."
    )


def measure(cores: int, *more: str) -> dict[str, Any]:
    """One build in a new process, and the most memory that it and its workers had."""
    command = [sys.executable, __file__, *sys.argv[1:], "--build", str(cores), *more]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(memory_of, family(process.pid))))
            time.sleep(0.2)
        assert process.stdout is not None
        told: dict[str, Any] = json.loads(process.stdout.read())
    return {**told, "memory": peak}


def build(asked: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.build])
    worker_pool.MOST = 0 if asked.alone else worker_pool.MOST
    options = CorpusOptions(suffixes=tuple(asked.suffix), held_out=tuple(asked.held_out))
    tokenizer = Tokenizer.load(asked.tokenizer)
    started: dict[str, float] = {}

    def hear(done: int, total: int, note: str = "") -> None:
        started.setdefault(note, time.perf_counter())

    with tempfile.TemporaryDirectory(dir=".") as place:
        begun = time.perf_counter()
        report = build_corpus([asked.source], tokenizer, Path(place) / "corpus", options, hear)
        ended = time.perf_counter()
        files = sorted(path for path in (Path(place) / "corpus").rglob("*") if path.is_file())
        digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()
    # A step is first heard of when part of it is done: its beginning is counted with the one before.
    edges = [begun, *(started.get(step, ended) for step in STEPS[1:]), ended]
    total = sum(report.splits.values(), start=Size())
    return {
        "seconds": ended - begun,
        **{step: edges[at + 1] - edges[at] for at, step in enumerate(STEPS)},
        "documents": total.documents,
        "bytes": total.bytes,
        "tokens": total.tokens,
        "digest": digest,
    }


def family(process: int) -> set[int]:
    try:
        found = [task.read_text().split() for task in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:
        return set()
    children = {int(child) for line in found for child in line}
    return {process}.union(*map(family, children))


def memory_of(process: int) -> int:
    """Proportional set size: a page that n processes share counts 1/n for each."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def table_of(rows: dict[str, dict[str, Any]], slowest: float) -> Table:
    table = Table("on", title="building a corpus, wall-clock seconds")
    for column in (*STEPS, "total", "MB/s", "ratio", "memory"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            *(f"{row[step]:.1f}" for step in (*STEPS, "seconds")),
            f"{row['bytes'] / 1e6 / row['seconds']:.1f}",
            f"{slowest / row['seconds']:.1f}",
            f"{row['memory'] / 1e6:.0f} MB",
        )
    return table


if __name__ == "__main__":
    main()
