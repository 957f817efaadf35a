"""Publish the trainer's weights in the background, without delaying a training step.

One thread encodes and uploads. While it is busy only the newest weights wait; a version that was overtaken is skipped,
unless it is pinned, and the next delta is against the last uploaded version. A store that is away is tried again until
it is back, with the newest weights; `problem` says what is wrong meanwhile. After a failure the next upload is a full
one, because it is uncertain what reached the store, and a full version depends on nothing before it.

Several processes may publish together, each its part of every version (`Part`). Which versions they publish is agreed
by their main threads, while none is `busy`; a part that could not be written is written again, because the others
wait for it.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import EtudeError, InputError
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.weights.hashed import with_digests
from etude.weights.object_store import ObjectStore
from etude.weights.owner import check_owner
from etude.weights.versions import (
    SHARD_BYTES,
    WHOLE,
    Part,
    Version,
    WeightState,
    commit_version,
    keep_latest,
    latest,
    prune,
    write_version,
)

POLL_S, MAX_POLL_S = 0.05, 1.0  # between two looks for the other parts of a version
CLOSE_S = 60.0  # for the other processes to finish their parts, at the end
WAIT_S = 0.5  # before the second attempt; doubled for each further ...
MAX_WAIT_S = 15.0  # ... up to this
RECHECK_S = 10.0  # between two looks, while there is nothing to publish, whether the newest version is still named


@dataclass(frozen=True)
class Published:
    """One uploaded version."""

    version: Version
    seconds: float
    skipped: int  # versions that were overtaken since the last


@dataclass(frozen=True)
class WaitingWeights:
    """A version that waits for its upload."""

    number: int
    weights: WeightState
    pinned: bool


class PublishingFailed(EtudeError):
    """The store does not accept new weights; samplers stay on old ones."""


class Publisher:
    """Publishes versions to a store. Use it as a context manager: leaving it waits for pending uploads."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        full_every: int = 20,
        keep: int = 2,
        shard_bytes: int = SHARD_BYTES,
        run: str = "",
        part: Part = WHOLE,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        if full_every < 1 or keep < 1:
            raise InputError(f"weights: full_every {full_every} and keep {keep} must be at least 1")
        self.store, self.full_every, self.keep, self.shard_bytes = store, full_every, keep, shard_bytes
        self.run = run  # id of the run that owns the store; "": any
        self.part, self.clock = part, clock
        self.history: list[Published] = []
        self.problem = ""  # why the newest weights are not in the store yet, if that is so
        self._newest: int | None = None
        self._given: int | None = None  # the newest that was to be published
        self._first: int | None = None  # number of the first version
        self._last: tuple[Version, WeightState] | None = None
        self._since_full = 0
        self.pinned: Collection[int] = ()  # versions that are not removed from the store
        self._waiting: list[WaitingWeights] = []  # oldest first: pinned ones, and the newest
        self._skipped = 0
        self._error: Exception | None = None
        self._change = clock.condition()
        self._working = self._closing = False
        self._checked = False  # that no earlier process has published newer versions
        self._thread = clock.start_thread(self._run, "publisher")

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def publish_soon(
        self, number: int, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, pinned: bool = False
    ) -> None:
        """Copy the weights and return. Raise PublishingFailed if an earlier upload failed for good.

        A `pinned` version is uploaded even if newer ones overtake it.
        """
        if self._given is not None and number <= self._given:
            raise InputError(f"weights: version {number} is not newer than {self._given}")
        copy = copied(weights)
        with self._change:
            self._raise_failure()
            if self._closing:
                raise InputError("weights: the publisher is closed")
            if self.part.count > 1 and (self._waiting or self._working):
                raise InputError(f"weights: version {number} while another is published by several processes")
            overtaken = bool(self._waiting) and not self._waiting[-1].pinned
            passed = self._newest is not None and self._newest != self._given and self._newest < number
            self._skipped += overtaken or passed
            earlier = self._waiting[:-1] if overtaken else self._waiting
            self._waiting = [*earlier, WaitingWeights(number, copy, pinned)]
            self._newest, self._given = max(number, self._newest or 0), number
            self._first = number if self._first is None else self._first
            self._change.notify_all()

    def skip(self, number: int) -> None:
        """Record newer weights that wait to be published, because a process is still busy with older ones."""
        with self._change:
            self._raise_failure()
            self._skipped += self._newest not in (self._given, number)
            self._newest = number

    def check(self) -> None:
        """Raise PublishingFailed if an upload has failed for good."""
        with self._change:
            self._raise_failure()

    @property
    def busy(self) -> bool:
        """Whether weights are still being written."""
        with self._change:
            return bool(self._waiting or self._working)

    @property
    def behind(self) -> int:
        """How many versions the store is behind the newest weights."""
        if self._newest is None or self._first is None:
            return 0
        return self._newest - (self.history[-1].version.number if self.history else self._first)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all published weights are in the store."""
        with self._change:
            done = self._change.wait_for(lambda: self._error or not (self._waiting or self._working), timeout)
            self._raise_failure()
            if not done:
                problem = self.problem or "the upload is slow"
                raise PublishingFailed(f"{self.store.url}: not written after {timeout} s: {problem}")

    def close(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()
        with self._change:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise PublishingFailed(f"{self.store.url}: cannot be written: {error}") from error

    def _run(self) -> None:
        wait_s = WAIT_S
        while True:
            with self._change:
                self._working = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._waiting or self._closing, RECHECK_S)
                if not self._waiting and self._closing:
                    return
                next_up = self._waiting.pop(0) if self._waiting else None
                if next_up is not None:
                    skipped, self._skipped, self._working = self._skipped, 0, True
            if next_up is None:
                self._keep_latest()
                continue
            try:
                self._publish(next_up.number, next_up.weights, skipped)
                self.problem, wait_s = "", WAIT_S
            except OSError as error:  # the store is away: again, with newer weights if there are any by then
                self._last = None if self.part.count == 1 else self._last
                self.problem = f"{type(error).__name__}: {error}"
                with self._change:
                    overtaken = bool(self._waiting) and not next_up.pinned
                    self._waiting = self._waiting if overtaken else [next_up, *self._waiting]
                    self._skipped += skipped + overtaken
                    if self._closing:
                        self._waiting, self._error = [], error
                    self._change.wait_for(lambda: self._closing, wait_s)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
            except Exception as error:  # raised in the trainer at its next step
                self._last = None
                with self._change:
                    self._error = error

    def _publish(self, number: int, state: WeightState, skipped: int) -> None:
        started = self.clock.monotonic()
        if self.run:
            check_owner(self.store, self.run)
        if not self._checked:  # once: what a first attempt has left is of this process
            # Another process may have made this version visible before this one has looked.
            if (newest := latest(self.store)) is not None and number < newest + (self.part.count == 1):
                raise InputError(f"version {number} is not newer than {newest}")  # of an earlier process
            self._checked = True
        state = with_digests(state)  # the next delta needs them too
        parent = self._last if self._since_full < self.full_every - 1 else None
        version = written = write_version(self.store, number, state, parent, self.shard_bytes, self.part)
        if self.part.number == 0 and self.part.count > 1:
            version = self._commit(number)
        self._last = written, state
        self._since_full = 0 if version.full else self._since_full + 1
        self.history.append(Published(version, self.clock.monotonic() - started, skipped))
        if version.full and self.part.number == 0:
            with suppress(OSError):  # the next full version prunes again
                prune(self.store, self.keep, self.pinned)

    def _keep_latest(self) -> None:
        if self.history and self.part.number == 0:
            with suppress(OSError):  # the next look may succeed
                keep_latest(self.store, self.history[-1].version.number)

    def _commit(self, number: int) -> Version:
        """Make a version visible as soon as every process has written its part."""
        wait_s, closing_s = POLL_S, 0.0
        while (found := commit_version(self.store, number, self.part.count)) is None:
            with self._change:
                self._change.wait(wait_s)
                closing_s += wait_s if self._closing else 0.0
            if closing_s > CLOSE_S:
                raise PublishingFailed(
                    f"{self.store.url}: version {number} is incomplete: a process has not written its part"
                )
            wait_s = min(2 * wait_s, MAX_POLL_S)
            if wait_s == MAX_POLL_S:
                self.problem = f"version {number} waits for the part of another process"
        return found


def copied(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return a copy of the weights on the CPU."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    with torch.no_grad():
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in pairs}
