"""Leases of samplers to evaluations, over a real run service: who is given what, and how a lease ends."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from run_services import threaded_service

from etude.evaluation import held_out
from etude.files import write_atomically
from etude.rollouts import leases, queue
from etude.rollouts.leases import EvaluationLease
from etude.rollouts.queue_client import QueueClient, call
from etude.rollouts.queue_records import Slot
from etude.rollouts.run_service import RunService
from etude.rollouts.settings import QueueName, QueueSettings
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout

SETTINGS = QueueSettings(group_size=2, groups_per_step=2, in_flight=100)
QUEUES: dict[QueueName, QueueSettings] = {"training": SETTINGS, "evaluation": SETTINGS}
LEASE = EvaluationLease(20, 7, ("sampler-1",), shared=False, sessions=3)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    found = RunLayout(tmp_path / "run")
    found.make()
    write_atomically(found.id, "a" * 32)
    return found


@pytest.fixture
def service(layout: RunLayout) -> Iterator[RunService]:
    with threaded_service(layout, QUEUES) as found:
        yield found


@pytest.fixture
def client(service: RunService) -> Iterator[RunClient]:
    with closing(RunClient.beside(service.layout, patience_s=5)) as found:
        found.connect()
        call(found, "/workers/w/enlist", {"session": "one"})
        yield found


@pytest.fixture
def evaluations(client: RunClient) -> QueueClient:
    """Two evaluations of two tasks each, and the versions 6 and 7 of their steps 10 and 20."""
    found = QueueClient(client, "evaluation", SETTINGS)
    for version, step in ((6, 10), (7, 20), (8, 21)):
        found.record_version(version, step)
    for step in (10, 20):
        held_out.start(found, step, ["validation/a", "validation/b"])
    return found


def report_sampler(client: RunClient, name: str, version: int, **facts: Any) -> dict[str, Any] | None:
    return client.report_status(name, kind="sampler", state="ready", url="http://x", version=version, **facts)


def claim(client: RunClient, count: int, request: int) -> list[tuple[str, Slot]]:
    body = {"session": "one", "request": request, "count": count, "wait_s": 0.0}
    return [(name, Slot(**slot)) for name, slot in call(client, "/workers/w/claim", body)]


def finish(client: RunClient, slot: Slot, *versions: int) -> None:
    facts = {"reward": {"total": 1.0}, "trace": "t", "versions": versions}
    body = {"slot": slot.id, "task": slot.task, "attempt": slot.attempt, "facts": facts}
    call(client, "/queues/evaluation/report/finish", body)


def test_a_leased_sampler_is_told_and_gets_only_the_sessions_of_its_evaluation(
    client: RunClient, evaluations: QueueClient
) -> None:
    assert claim(client, 9, request=1) == [], "no sampler is leased"
    evaluations.set_lease(LEASE)
    assert report_sampler(client, "sampler-0", 8) is None
    told = report_sampler(client, "sampler-1", 8)
    assert told is not None
    assert (told["version"], told["shared"]) == (7, False)
    assert 0 < told["seconds"] <= leases.LEASE_S
    assert claim(client, 9, request=2) == [], "the sampler does not have the version yet"
    report_sampler(client, "sampler-1", 7)
    first = claim(client, 9, request=3)
    assert [(name, slot.task) for name, slot in first] == [
        ("evaluation", "000020/validation/a"),
        ("evaluation", "000020/validation/a"),
        ("evaluation", "000020/validation/b"),
    ]  # the step of the lease, and no more than it allows: others are for training
    assert claim(client, 9, request=3) == first, "the same request is the same claim"
    assert claim(client, 9, request=4) == []
    found = client.call("GET", "/samplers", query={"seen": "0"})["samplers"]
    assert (found["sampler-0"]["lease"], found["sampler-1"]["lease"]["step"]) == (None, 20)


def test_only_samples_of_the_weights_of_the_step_count(client: RunClient, evaluations: QueueClient) -> None:
    evaluations.set_lease(LEASE)
    report_sampler(client, "sampler-1", 7)
    slots = [slot for _, slot in claim(client, 3, request=1)]
    for slot, versions in zip(slots, ((7, 7), (7, 8), (-1, -1)), strict=True):
        finish(client, slot, *versions)
    progress = held_out.progress(evaluations, 20)
    assert (progress.ready, progress.wanted) == (2, 4)
    (again, other) = (slot for _, slot in claim(client, 3, request=2))
    assert (again.id, again.attempt) == (slots[1].id, 2)
    assert sum(group.failures for group in evaluations.progress("000020/")) == 0
    # Of a sampler that training shares, later versions count too.
    evaluations.set_lease(EvaluationLease(20, 7, ("sampler-1",), shared=True, sessions=3))
    finish(client, again, 7, 8)
    # After the lease, what is exact still counts.
    evaluations.set_lease(None)
    finish(client, other, 7, 7)
    assert held_out.is_finished(evaluations, 20)


def test_a_lease_outlives_the_run_service(layout: RunLayout) -> None:
    for number in range(2):
        with threaded_service(layout, QUEUES), closing(RunClient.beside(layout, patience_s=5)) as client:
            if number == 0:
                QueueClient(client, "evaluation", SETTINGS).set_lease(LEASE)
            told = report_sampler(client, "sampler-1", 8)
            assert told is not None
            assert told["version"] == 7


def test_a_lease_that_is_not_renewed_gives_the_sampler_back(
    client: RunClient, evaluations: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "LEASE_S", 0.3)
    evaluations.set_lease(LEASE)
    deadline = time.monotonic() + 60
    while report_sampler(client, "sampler-1", 7) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = client.call("GET", "/samplers", query={"seen": "0"})["samplers"]
    assert found["sampler-1"]["lease"] is None
    assert claim(client, 9, request=1) == []
