"""Time and memory of building a corpus on one core, two cores and all cores, and without worker processes.

    python benchmarks/corpus.py --tokenizer runs/smollm2-135m                 # the standard library, under a minute
    python benchmarks/corpus.py site-packages --suffix .py --held-out sympy --tokenizer T --cores 1 4 16

Each build runs in a process of its own, restricted to that many cores. In the row "no workers" that process does
everything, with the threads of the `tokenizers` library on the same cores. Memory is the peak of the sum over all
processes of a build, with shared pages counted once. The files are read into the page cache first, and all builds must
give the same bytes.
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
from etude.data.corpus import CorpusOptions, CorpusSize, build_corpus
from etude.data.documents import read_source
from etude.data.filters import Filters

STEPS = ("ingest", "decide", "encode")


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
    parser.add_argument("--no-workers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        print(json.dumps(build(args)))
        return
    for file in read_source(args.source):
        if file.size <= Filters().max_bytes:
            file.read()
    max_cores = max(args.cores)
    rows = {f"{cores} cores": measure(cores) for cores in args.cores}
    rows[f"{max_cores} cores, no workers"] = measure(max_cores, "--no-workers")
    slowest = rows[f"{max_cores} cores, no workers"]["seconds"]
    Console().print(table_of(rows, slowest))
    same = len({row["digest"] for row in rows.values()}) == 1
    found = next(iter(rows.values()))
    print(
        f"{args.source}: {found['bytes'] / 1e6:.0f} MB of text in {found['documents']:,} documents become "
        f"{found['tokens'] / 1e6:.1f} million tokens; "
        f"{'every build gave the same bytes' if same else 'THE BUILDS DIFFER'}."
    )


def measure(cores: int, *more: str) -> dict[str, Any]:
    """Run one build in a new process; return its results and the peak memory of it and its workers."""
    command = [sys.executable, __file__, *sys.argv[1:], "--build", str(cores), *more]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(memory_of, process_tree(process.pid))))
            time.sleep(0.2)
        assert process.stdout is not None
        result: dict[str, Any] = json.loads(process.stdout.read())
    return {**result, "memory": peak}


def build(args: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.build])
    worker_pool.MAX_WORKERS = 0 if args.no_workers else worker_pool.MAX_WORKERS
    options = CorpusOptions(suffixes=tuple(args.suffix), held_out=tuple(args.held_out))
    tokenizer = Tokenizer.load(args.tokenizer)
    started: dict[str, float] = {}

    def record_start(done: int, total: int, note: str = "") -> None:
        started.setdefault(note, time.perf_counter())

    with tempfile.TemporaryDirectory(dir=".") as directory:
        begun = time.perf_counter()
        report = build_corpus([args.source], tokenizer, Path(directory) / "corpus", options, record_start)
        ended = time.perf_counter()
        files = sorted(path for path in (Path(directory) / "corpus").rglob("*") if path.is_file())
        digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()
    # A step reports first when part of it is done, so its beginning is counted with the step before.
    edges = [begun, *(started.get(step, ended) for step in STEPS[1:]), ended]
    total = sum(report.splits.values(), start=CorpusSize())
    return {
        "seconds": ended - begun,
        **{step: edges[at + 1] - edges[at] for at, step in enumerate(STEPS)},
        "documents": total.documents,
        "bytes": total.bytes,
        "tokens": total.tokens,
        "digest": digest,
    }


def process_tree(process: int) -> set[int]:
    """Return the pids of a process and all its descendants."""
    try:
        found = [task.read_text().split() for task in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:
        return set()
    children = {int(child) for line in found for child in line}
    return {process}.union(*map(process_tree, children))


def memory_of(process: int) -> int:
    """Return the proportional set size: a page that n processes share counts 1/n for each."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def table_of(rows: dict[str, dict[str, Any]], slowest: float) -> Table:
    table = Table("run", title="building a corpus, wall-clock seconds")
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
