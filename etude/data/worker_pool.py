"""Worker processes for the passes over a corpus: batches of items out, what became of them back, in the same order.

Fresh interpreters that speak pickle over pipes, not multiprocessing: its children import the caller's main module again
or are forked from a process that may have threads and a GPU. They hold nothing that has to be saved and end when their
standard input does, however the builder ends. Starting them costs a third of a second of each core, so the first
megabytes are done in this process, and a small corpus needs no other.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from etude.errors import EtudeError
from etude.system.cores import usable_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH = 1 << 20  # bytes of text in one task: long against a message, short against a pass
_ITEMS = 256  # of one task at most: tiny files are work too
FIRST = 8 << 20  # bytes that are done here before processes are started
_AHEAD = 2  # tasks under way for each process, so that none waits for the next; what bounds memory
MOST = 32  # processes; one holds about 150 MB, and this process has to feed them all
_PROGRAM = "from etude.data.worker_pool import serve; serve()"


class Crew:
    """As many processes as there are cores, started when they are worth it; `directory` is for what they share."""

    def __init__(self, directory: Path, processes: int | None = None) -> None:
        self.directory = directory
        self.processes = min(MOST, usable_cores()) if processes is None else processes
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def map(
        self,
        function: Callable[[list[Item]], Result],
        items: Iterable[Item],
        size: Callable[[Item], int],
        *,
        batch: int = BATCH,
        elsewhere: Callable[[], Callable[[list[Item]], Result]] | None = None,
    ) -> Iterator[Result]:
        """`function` of batches of the items, in order; it reads ahead in `items` by a few batches.

        `size` is about the bytes of an item. A function that cannot be pickled, or holds much, has a stand-in that
        finds its state on disk: `elsewhere` makes it, and is called when processes are needed.
        """
        batches = _batches(items, size, batch)
        if self._threads is None:
            done = 0
            for weight, task in batches:
                if done >= FIRST and self.processes:
                    batches = chain([(weight, task)], batches)
                    self._threads = self._start()
                    break
                done += weight
                yield function(task)
        if self._threads is not None:
            there = elsewhere() if elsewhere else function
            yield from self._map(self._threads, there, (task for _, task in batches))

    def _map(
        self, threads: ThreadPoolExecutor, function: Callable[[list[Item]], Result], tasks: Iterable[list[Item]]
    ) -> Iterator[Result]:
        under_way: deque[Future[Result]] = deque()
        for task in tasks:
            under_way.append(threads.submit(self._run, function, task))
            if len(under_way) > _AHEAD * self.processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _start(self) -> ThreadPoolExecutor:
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(self.processes):
            self._workers.append(_Worker())
            self._idle.put(self._workers[-1])
        return ThreadPoolExecutor(self.processes, thread_name_prefix="crew")

    def _run(self, function: Callable[[list[Item]], Result], task: list[Item]) -> Result:
        worker = self._idle.get()
        try:
            result: Result = worker.call(function, task)
            return result
        finally:
            self._idle.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all of them, also in the middle of a task: what it found is asked for by nobody."""
        for worker in self._workers:
            worker.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._workers, self._threads, self._idle = [], None, SimpleQueue()


ALONE = Crew(Path(), processes=0)  # everything in this process


class _Worker:
    """One process, and the two pipes to it; one thread calls it at a time."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # One process for each core: a library that starts threads for all of them slows down the others.
            **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is for the builder, which ends us
        )

    def call(self, function: Callable[[list[Item]], Result], task: list[Item]) -> Any:
        tasks, results = self._process.stdin, self._process.stdout
        assert tasks is not None
        assert results is not None
        try:
            pickle.dump((function, task), tasks, protocol=5)
            tasks.flush()
            result, failure = pickle.load(results)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            raise EtudeError(self._obituary()) from None
        if failure is not None:
            raise failure
        return result

    def _obituary(self) -> str:
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        hint = "; the machine may be short of memory" if code == -signal.SIGKILL else ""
        return f"a worker process of the corpus ended {how}{hint}; the same command goes on where it was"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # half a task was still in the buffer
                pipe.close()


def serve() -> None:
    """The life of a worker: tasks on standard input, answers on standard output, until there is no more input."""
    tasks = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    while True:
        try:
            function, task = pickle.load(tasks)
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = function(task), None
        except EtudeError as error:
            answer = None, error
        except Exception:  # a bug: its traceback is here, and has to be seen there
            answer = None, RuntimeError(f"in a worker process of the corpus:\n{traceback.format_exc()}")
        try:
            pickle.dump(answer, results, protocol=5)
            results.flush()
        except BrokenPipeError:  # the builder is gone
            os._exit(1)


def _batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[tuple[int, list[Item]]]:
    batch: list[Item] = []
    weight = 0
    for item in items:
        batch.append(item)
        weight += size(item)
        if weight >= limit or len(batch) == _ITEMS:
            yield weight, batch
            batch, weight = [], 0
    if batch:
        yield weight, batch
