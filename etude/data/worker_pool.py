"""Worker processes for the passes over a corpus: batches of items out, results back in the same order.

Workers are fresh interpreters that exchange pickles over pipes. multiprocessing is not used: its children import the
caller's main module again, or are forked from a process that may have threads and a GPU. Workers hold no state that
must be saved and exit when their standard input closes, however the builder ends. Starting them costs a third of a
second per core, so the first megabytes are processed in this process, and a small corpus starts no worker.
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

BATCH_BYTES = 1 << 20  # bytes of text in one task: large against the cost of a message, small against a pass
_MAX_BATCH_ITEMS = 256  # items of one task: many tiny files are work too
IN_PROCESS_BYTES = 8 << 20  # bytes processed in this process before workers are started
_TASKS_PER_WORKER = 2  # tasks in flight per worker, so that none idles; this bounds memory
MAX_WORKERS = 32  # one worker takes about 150 MB, and this process has to feed all of them
_PROGRAM = "from etude.data.worker_pool import serve; serve()"


class WorkerPool:
    """One worker process per usable core, started on demand; `directory` holds the files that workers share."""

    def __init__(self, directory: Path, processes: int | None = None) -> None:
        self.directory = directory
        self.processes = min(MAX_WORKERS, usable_cores()) if processes is None else processes
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def map(
        self,
        function: Callable[[list[Item]], Result],
        items: Iterable[Item],
        size: Callable[[Item], int],
        *,
        batch: int = BATCH_BYTES,
        make_worker_function: Callable[[], Callable[[list[Item]], Result]] | None = None,
    ) -> Iterator[Result]:
        """Yield `function` of batches of the items, in order; reads ahead in `items` by a few batches.

        `size` is the approximate number of bytes of an item. If `function` cannot be pickled or holds large state,
        `make_worker_function` returns the one that workers run, which loads its state from disk; it is called only
        when workers are started.
        """
        batches = _batches(items, size, batch)
        if self._threads is None:
            done = 0
            for weight, task in batches:
                if done >= IN_PROCESS_BYTES and self.processes:
                    batches = chain([(weight, task)], batches)
                    self._threads = self._start()
                    break
                done += weight
                yield function(task)
        if self._threads is not None:
            worker_function = make_worker_function() if make_worker_function else function
            yield from self._map(self._threads, worker_function, (task for _, task in batches))

    def _map(
        self, threads: ThreadPoolExecutor, function: Callable[[list[Item]], Result], tasks: Iterable[list[Item]]
    ) -> Iterator[Result]:
        in_flight: deque[Future[Result]] = deque()
        for task in tasks:
            in_flight.append(threads.submit(self._run, function, task))
            if len(in_flight) > _TASKS_PER_WORKER * self.processes:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()

    def _start(self) -> ThreadPoolExecutor:
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(self.processes):
            self._workers.append(_Worker())
            self._idle.put(self._workers[-1])
        return ThreadPoolExecutor(self.processes, thread_name_prefix="corpus-worker")

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
        """Kill all workers, also in the middle of a task: its result is no longer needed."""
        for worker in self._workers:
            worker.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._workers, self._threads, self._idle = [], None, SimpleQueue()


IN_PROCESS = WorkerPool(Path(), processes=0)  # runs everything in this process


class _Worker:
    """One process and the two pipes to it; called by one thread at a time."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # There is one process per core, so a library that starts a thread per core slows down the others.
            **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a keyboard interrupt goes to the builder only, which kills its workers
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
            raise EtudeError(self._exit_message()) from None
        if failure is not None:
            raise failure
        return result

    def _exit_message(self) -> str:
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        hint = "; the machine may be short of memory" if code == -signal.SIGKILL else ""
        return f"a worker process of the corpus build ended {how}{hint}; run the same command again to resume"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # half a task was still in the buffer
                pipe.close()


def serve() -> None:
    """Main loop of a worker: read tasks from standard input and write results to standard output until EOF."""
    tasks = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with the results
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
        except Exception:  # a bug: pass its traceback on to the builder
            answer = None, RuntimeError(f"in a worker process of the corpus build:\n{traceback.format_exc()}")
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
        if weight >= limit or len(batch) == _MAX_BATCH_ITEMS:
            yield weight, batch
            batch, weight = [], 0
    if batch:
        yield weight, batch
