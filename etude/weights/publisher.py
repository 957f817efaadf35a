"""Publish the trainer's weights in the background, without delaying a training step.

One thread encodes and uploads. While it is busy only the newest weights wait; a version that was overtaken is skipped,
and the next delta is against the last uploaded version. After a failure the next upload is a full one, because it is
uncertain what reached the store, and a full version depends on nothing before it.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import EtudeError, InputError
from etude.weights.hashed import with_digests
from etude.weights.object_store import ObjectStore
from etude.weights.versions import SHARD_BYTES, Version, WeightState, latest, prune, write_version

ATTEMPTS = 4
WAIT_S = 0.5  # before the second attempt; doubled for each further


@dataclass(frozen=True)
class Published:
    """One uploaded version."""

    version: Version
    seconds: float
    skipped: int  # versions that were overtaken since the last


class PublishingFailed(EtudeError):
    """The store does not accept new weights; samplers stay on old ones."""


class Publisher:
    """Publishes versions to a store. Use it as a context manager: leaving it waits for pending uploads."""

    def __init__(
        self, store: ObjectStore, *, full_every: int = 20, keep: int = 2, shard_bytes: int = SHARD_BYTES
    ) -> None:
        if full_every < 1 or keep < 1:
            raise InputError(f"weights: full_every {full_every} and keep {keep} must be at least 1")
        self.store, self.full_every, self.keep, self.shard_bytes = store, full_every, keep, shard_bytes
        self.history: list[Published] = []
        self._newest = latest(store)  # of an earlier run: version numbers only grow
        self._last: tuple[Version, WeightState] | None = None
        self._since_full = 0
        self._waiting: tuple[int, WeightState] | None = None
        self._skipped = 0
        self._error: Exception | None = None
        self._change = threading.Condition()
        self._working = self._closing = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def publish_soon(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights and return. Raise PublishingFailed if an earlier upload failed after all attempts."""
        if self._newest is not None and number <= self._newest:
            raise InputError(f"weights: version {number} is not newer than {self._newest}")
        with torch.no_grad():
            copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        with self._change:
            self._raise_failure()
            if self._closing:
                raise InputError("weights: the publisher is closed")
            self._skipped += self._waiting is not None
            self._waiting, self._newest = (number, copy), number
            self._change.notify_all()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all published weights are in the store."""
        with self._change:
            done = self._change.wait_for(lambda: self._error or not (self._waiting or self._working), timeout)
            self._raise_failure()
            if not done:
                raise PublishingFailed(f"{self.store.url}: not written after {timeout} s")

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
        while True:
            with self._change:
                self._working = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._waiting or self._closing)
                if self._waiting is None:
                    return
                (number, state), self._waiting = self._waiting, None
                skipped, self._skipped, self._working = self._skipped, 0, True
            try:
                self._publish(number, state, skipped)
            except Exception as error:  # of any store: raised in the trainer at its next step
                self._last = None
                with self._change:
                    self._error = error

    def _publish(self, number: int, state: WeightState, skipped: int) -> None:
        started = time.monotonic()
        state = with_digests(state)  # the next delta needs them too
        parent = self._last if self._since_full < self.full_every - 1 else None
        for attempt in range(ATTEMPTS):
            try:
                version = write_version(self.store, number, state, parent, self.shard_bytes)
                break
            except OSError:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(WAIT_S * 2**attempt)
        self._last = version, state
        self._since_full = 0 if version.full else self._since_full + 1
        self.history.append(Published(version, time.monotonic() - started, skipped))
        if version.full:
            prune(self.store, self.keep)
