"""Virtual time: real synchronous loops and real event loops, of many processes, one step at a time.

Every thread of a simulated process is a thread, but only the one that holds the baton runs. It gives the baton away
where it would wait: sleep, conditions, events, an event loop without work. The next one is that with the earliest time;
among equals a seeded generator chooses. So a run is a function of its seed, and takes no more time than its work.

A process that is killed runs no line of its own any more: `Killed` is raised where its threads wait, and again at
whatever they would wait for while it passes through them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from etude.system.clock import Clock

T = TypeVar("T")
HANG_S = 600.0  # of real time, after which a simulated run waits for something that is not simulated
JITTER_S = 0.004  # by which every wait is longer, at most


class Killed(BaseException):
    """The process of this thread has been killed."""


class SimulationFailed(AssertionError):
    """The simulated run has done what it must not do."""


class Carrier:
    """A thread of the machine, which runs one simulated thread after the other."""

    idle: ClassVar[list[Carrier]] = []

    def __init__(self) -> None:
        self.go, self.job = threading.Lock(), lambda: None
        self.go.acquire()
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            self.job()


class SimThread:
    """One thread of a simulated process."""

    def __init__(self, process: SimProcess, name: str) -> None:
        self.process, self.name = process, name
        self.done = False
        self.turn = 0  # counts its waits: a wake-up is for one of them
        self.joining: list[SimThread] = []
        self.carrier = Carrier.idle.pop() if Carrier.idle else Carrier()

    def join(self, timeout: float | None = None) -> None:
        simulation = self.process.simulation
        if not self.done:
            self.joining.append(simulation.running)
            simulation.wait(timeout)

    def is_alive(self) -> bool:
        return not self.done


class Host:
    """A machine: its clock is wrong by `skew` seconds and runs faster by `drift`."""

    def __init__(self, name: str, skew: float = 0.0, drift: float = 0.0) -> None:
        self.name, self.skew, self.drift = name, skew, drift
        self.up = True


class SimProcess:
    """A process on a host; also the clock that it is given."""

    def __init__(self, simulation: Simulation, name: str, host: Host) -> None:
        self.simulation, self.name, self.host = simulation, name, host
        self.clock = SimClock(self)
        self.alive, self.paused_until = True, 0.0
        self.code: int | None = None  # with which it has ended by itself
        self.threads: list[SimThread] = []
        self.on_end: list[Callable[[], None]] = []

    def kill(self) -> None:
        """End the process at once; its threads run no further."""
        if self.alive:
            self.alive, self.paused_until = False, 0.0
            for thread in self.threads:
                self.simulation.wake(thread)
            for act in self.on_end:
                act()

    def start(self, main: Callable[[], int]) -> None:
        """Run `main` in the process, which ends with it."""

        def run() -> None:
            code = main()
            self.simulation.check()
            self.code = code
            self.kill()

        self.simulation.spawn(self, run, "main")


class Simulation:
    """Virtual time, and what happens in it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.log: list[str] = []
        self.problem: BaseException | None = None
        self.running: SimThread = None  # type: ignore[assignment]
        self.switches = 0
        self._events: list[tuple[float, float, int, SimThread | Callable[[], None], int]] = []
        self._number = itertools.count()
        self._threads: list[SimThread] = []
        self._ended = threading.Event()

    def say(self, where: str, what: str) -> None:
        self.log.append(f"{self.now:9.3f} {where}: {what}")

    def fail(self, problem: BaseException | str) -> None:
        """End the simulation: it has shown a fault."""
        if self.problem is None:
            self.problem = SimulationFailed(problem) if isinstance(problem, str) else problem

    # ------------------------------------------------------------------------------------------ threads

    def spawn(self, process: SimProcess, target: Callable[[], Any], name: str) -> SimThread:
        thread = SimThread(process, name)
        process.threads.append(thread)
        self._threads.append(thread)

        def run() -> None:
            try:
                self.check()
                target()
            except Killed:
                pass
            except BaseException as error:
                self.say(process.name, f"{name} fails: {error!r}")
                self.fail(error)
            thread.done = True
            process.threads.remove(thread)
            for each in thread.joining:
                self.wake(each)
            self._pass_on(None, thread.carrier)

        thread.carrier.job = run
        self.wake(thread)
        return thread

    def wake(self, thread: SimThread, at: float | None = None) -> None:
        """Let a waiting thread run on, now or later."""
        self._push(self.now if at is None else at, thread, thread.turn)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call a function, which must not wait, after some seconds."""
        self._push(self.now + seconds, act, 0)

    def _push(self, at: float, what: SimThread | Callable[[], None], turn: int) -> None:
        heapq.heappush(self._events, (at, self.rng.random(), next(self._number), what, turn))

    def check(self) -> None:
        """Raise Killed if the process of the running thread is dead."""
        if not self.running.process.alive:
            raise Killed

    def wait(self, seconds: float | None) -> None:
        """Wait until woken, at most so long."""
        me = self.running
        self.check()
        if seconds is not None:
            self.wake(me, self.now + max(0.0, seconds) + self.rng.uniform(0, JITTER_S))
        self._pass_on(me, me.carrier)
        self.running = me
        self.check()

    def _pass_on(self, me: SimThread | None, carrier: Carrier) -> None:
        """Give the baton to the next thread, and wait until it comes back if `me` is still running."""
        following = self._next()
        if following is me and me is not None:
            return
        self.switches += 1
        if me is None:
            Carrier.idle.append(carrier)
        if following is None:
            self._ended.set()
        else:
            self.running = following
            following.carrier.go.release()
        if me is not None:
            carrier.go.acquire()

    def _next(self) -> SimThread | None:
        """Return the thread whose turn it is; None at the end."""
        while self._events:
            at, _, _, what, turn = heapq.heappop(self._events)
            if isinstance(what, SimThread):
                if what.done or what.turn != turn:
                    continue
                if what.process.alive and what.process.paused_until > at:
                    self._push(what.process.paused_until, what, turn)
                    continue
                self.now = max(self.now, at)
                if self.problem is not None:
                    self._end()
                what.turn += 1
                return what
            self.now = max(self.now, at)
            try:
                what()
            except Exception as error:
                self.fail(error)
        return None

    def _end(self) -> None:
        for thread in self._threads:
            if not thread.done:
                thread.process.kill()

    def run(self, process: SimProcess, main: Callable[[], None]) -> None:
        """Run `main`, and everything that it starts; raise what has gone wrong."""

        def whole() -> None:
            try:
                main()
            finally:
                self._end()

        self.spawn(process, whole, "main")
        first = self._next()
        assert first is not None
        self.running = first
        first.carrier.go.release()
        if not self._ended.wait(HANG_S):
            raise TimeoutError(f"at {self.now:.3f} s {self.running.process.name}/{self.running.name} waits for real")
        if self.problem is not None:
            raise self.problem


# ------------------------------------------------------------------------------------------ what a process is given


class SimClock(Clock):
    """The clock of a simulated process."""

    def __init__(self, process: SimProcess) -> None:
        self.process, self.simulation = process, process.simulation

    def time(self) -> float:
        return 1e9 + self.monotonic() + self.process.host.skew

    def monotonic(self) -> float:
        return self.simulation.now * (1 + self.process.host.drift)

    def sleep(self, seconds: float) -> None:
        self.simulation.wait(self.virtual(seconds))

    def virtual(self, seconds: float | None) -> float | None:
        """Return how long it takes until this clock has gone on by so much."""
        return None if seconds is None else seconds / (1 + self.process.host.drift)

    def condition(self) -> Any:
        return SimCondition(self)

    def event(self) -> Any:
        return SimEvent(self)

    def start_thread(self, target: Callable[[], None], name: str) -> Any:
        return self.simulation.spawn(self.process, target, name)


class SimCondition:
    """threading.Condition in virtual time."""

    def __init__(self, clock: SimClock) -> None:
        self.clock, self.simulation = clock, clock.simulation
        self.owner: SimThread | None = None
        self.depth = 0
        self.waiting: list[SimThread] = []
        self.blocked: list[SimThread] = []

    def __enter__(self) -> None:
        me = self.simulation.running
        self.simulation.check()
        while self.owner not in (None, me):
            self.blocked.append(me)
            self.simulation.wait(None)
        self.owner, self.depth = me, self.depth + 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._free()

    def _free(self) -> None:
        self.owner = None
        for thread in self.blocked:
            self.simulation.wake(thread)
        self.blocked.clear()

    def wait(self, timeout: float | None = None) -> bool:
        me, depth = self.simulation.running, self.depth
        self.depth = 0
        self._free()
        self.waiting.append(me)
        self.simulation.wait(self.clock.virtual(timeout))
        woken = me not in self.waiting
        if not woken:
            self.waiting.remove(me)
        self.__enter__()
        self.depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        end = None if timeout is None else self.clock.monotonic() + timeout
        while not (found := predicate()):
            left = None if end is None else end - self.clock.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify_all(self) -> None:
        for thread in self.waiting:
            self.simulation.wake(thread)
        self.waiting.clear()


class SimEvent:
    """threading.Event in virtual time."""

    def __init__(self, clock: SimClock) -> None:
        self._condition, self._set = SimCondition(clock), False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._set, timeout)


# ------------------------------------------------------------------------------------------ event loops


class SimSelector(selectors.BaseSelector):
    """Waits in virtual time; there are no files to wait for."""

    def __init__(self) -> None:
        self.loop: SimLoop = None  # type: ignore[assignment]

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.wait(timeout)
        return []

    def register(self, *_: Any) -> Any:
        raise NotImplementedError

    unregister = register

    def get_map(self) -> Any:
        return {}

    def close(self) -> None:
        pass


class SimLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop of a simulated process."""

    def __init__(self, clock: SimClock) -> None:
        self.clock, self.simulation = clock, clock.simulation
        self._thread, self._called, self._idle = self.simulation.running, False, False
        selector = SimSelector()
        selector.loop = self
        super().__init__(selector)
        self.set_exception_handler(lambda *_: None)

    def _make_self_pipe(self) -> None:
        self._internal_fds = 0

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        self._called = True
        if self._idle:
            self._idle = False
            self.simulation.wake(self._thread)

    def time(self) -> float:
        return self.clock.monotonic()

    def wait(self, timeout: float | None) -> None:
        if timeout == 0:
            self.simulation.check()
        elif not self._called:
            self._idle = True
            self.simulation.wait(self.clock.virtual(timeout))
        self._called = self._idle = False

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        future = self.create_future()

        def run() -> None:
            try:
                result, error = function(*arguments), None
            except Exception as problem:
                result, error = None, problem
            self.simulation.check()
            self.call_soon_threadsafe(give, result, error)

        def give(result: Any, error: Exception | None) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)

        self.clock.start_thread(run, getattr(function, "__name__", "executor"))
        return future


def run_async(clock: SimClock, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as asyncio.run does; the tasks of a process that is killed do not go on."""
    loop = SimLoop(clock)
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
        for task in sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name())):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        return result
    finally:
        for task in sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name())):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            for _ in range(50):  # through everything that would wait while it ends
                with contextlib.suppress(BaseException):
                    coroutine.throw(Killed())  # type: ignore[union-attr]
                if getattr(coroutine, "cr_frame", None) is None:
                    break
        asyncio.set_event_loop(None)
        loop.close()
