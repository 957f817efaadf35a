"""The run service over real HTTP: who is admitted, requests that arrive twice or late, kills, a full disk, TLS."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from run_services import ServiceProcess, member_of, service_url, threaded_service

from etude.errors import InputError
from etude.files import write_atomically
from etude.inference import sampler_process
from etude.rollouts import worker
from etude.rollouts.queue import RolloutQueue, StaleClaim, SupersededWorker
from etude.rollouts.queue_client import QueueClient, call
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.rollouts.run_service import RunService
from etude.rollouts.settings import QueueName, QueueSettings
from etude.runs.address import TOKEN_VARIABLE, run_token
from etude.runs.client import PROTOCOL, RunClient, RunServiceError, RunServiceUnavailable
from etude.runs.layout import RunLayout
from etude.runs.service_status import read_statuses
from etude.weights.object_store import ROLLOUTS, ServedObjectStore

SETTINGS = QueueSettings(group_size=2, groups_per_step=2, max_staleness=1, in_flight=100, lease_s=60.0)
QUEUES: dict[QueueName, QueueSettings] = {"training": SETTINGS, "evaluation": SETTINGS}


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
        yield found


@pytest.fixture
def queue(client: RunClient) -> QueueClient:
    return QueueClient(client, "training", SETTINGS)


def enlist(client: RunClient, worker: str = "w", session: str = "one") -> None:
    call(client, f"/workers/{worker}/enlist", {"session": session})


def claim(client: RunClient, count: int = 1, request: int = 1, session: str = "one", wait_s: float = 0.0) -> list[Any]:
    body = {"session": session, "request": request, "count": count, "wait_s": wait_s}
    return [Slot(**slot) for _, slot in call(client, "/workers/w/claim", body, wait_s=wait_s)]


def heartbeat(client: RunClient, held: list[Slot], answered: int, session: str = "one") -> dict[str, Any]:
    rows = {"training": [(slot.id, slot.attempt, "running") for slot in held]}
    body = {"session": session, "answered": answered, "held": rows, "status": {"state": "working"}}
    found: dict[str, Any] = call(client, "/workers/w/heartbeat", body)
    return found


def report(client: RunClient, slot: Slot, kind: str, **facts: Any) -> None:
    body = {"slot": slot.id, "task": slot.task, "attempt": slot.attempt, "facts": facts}
    call(client, f"/queues/training/report/{kind}", body)


def finish(client: RunClient, slot: Slot, trace: str = "t") -> None:
    report(client, slot, "finish", reward={"total": float(slot.number)}, trace=trace, versions=(0, 0))


# ------------------------------------------------------------------------------------------- the protocol


def test_the_queue_is_the_same_through_the_service(queue: QueueClient, client: RunClient, layout: RunLayout) -> None:
    enlist(client)
    assert queue.groups_to_start() == 3
    assert queue.add([("a", 1.0), ("b", 2.0)]) == 2
    slots = claim(client, 4)
    assert [slot.task for slot in slots] == ["b", "b", "a", "a"]
    assert queue.counts() == {"starting": 4}
    report(client, slots[0], "checkpoint", resume={"snapshot": "s-1"})
    report(client, slots[0], "note", note="it goes on")
    assert client.call("POST", "/snapshots", {"snapshots": ["s-0", "s-1", "s-2"]}) == ["s-1"]
    for slot in slots:
        finish(client, slot)
    judged: list[ReadyGroup] = []
    groups = queue.take(0, lambda group: not judged.append(group))
    assert groups is not None
    assert [group.task for group in judged] == [group.task for group in groups]
    queue.mark_trained(groups, 1)
    queue.mark_trained(groups, 1)  # a response was lost
    with pytest.raises(RunServiceError, match="was trained or dropped before"):
        queue.mark_trained(groups, 2)
    queue.record_version(1, 1)
    with closing(RolloutQueue.open_read_only(layout.slots)) as plain:
        assert plain.trained() == [("a", 1), ("b", 1)]
        assert (queue.state().counts, queue.last_step()) == (plain.counts(), 1)
        assert queue.groups([1]) == plain.groups([1])
        assert queue.progress("a") == plain.progress("a")
        assert queue.changed_groups(0) == plain.changed_groups(0)
        assert queue.trained_rewards(1, 9) == plain.trained_rewards(1, 9)
        assert queue.incidents() == plain.incidents() == []
    assert (queue.newest_version(), queue.step_of(1), queue.alike_groups(), queue.rewind(0)) == (1, 1, 0, 2)


def test_strangers_are_refused_in_one_line_each(client: RunClient, layout: RunLayout) -> None:
    with pytest.raises(InputError, match="the token is wrong, or the run service of another run answers there"):
        RunClient(client.url, "x" * 48).connect()
    with pytest.raises(InputError, match=r"expected a URL such as http://HOST:PORT"):
        RunClient("localhost", "x" * 48)
    other = client.twin(run="b" * 32)
    with pytest.raises(InputError, match=r"service of another run \(aaaaaaaa, not bbbbbbbb\)"):
        other.statuses()
    old = client.twin(_headers={**client._headers, "etude-protocol": "0"})
    with pytest.raises(InputError, match="speaks protocol 2, this client protocol 0: both need the same Etude"):
        old.statuses()
    with httpx.Client(base_url=client.url, headers={"authorization": f"Bearer {run_token(layout)}"}) as plain:
        assert "no protocol" in plain.get("/run").json()["error"]["message"]
        plain.headers["etude-protocol"] = "2"
        assert plain.get("/run").status_code == 200
        assert plain.get("/run", headers={"origin": "http://elsewhere.example"}).status_code == 403
        assert plain.post("/status/a", content="{}", headers={"content-type": "text/plain"}).status_code == 415
        for path, body in (
            ("/queues/training/__init__", {}),
            ("/queues/training/take", {}),
            ("/queues/unknown/state", {}),
            ("/queues/training/add", {"tasks": 1}),
            ("/queues/training/add", {"tasks": [["a", "b"]]}),
            ("/queues/training/add", {"unknown": 1}),
            ("/queues/training/report/praise", {"slot": 1, "task": "a", "attempt": 1, "facts": {}}),
            ("/workers/w/claim", {}),
        ):
            answer = plain.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "input"), (path, answer.text)
        as_json = {"content-type": "application/json"}
        assert plain.post("/workers/w/claim", content="{", headers=as_json).status_code == 400
    with httpx.Client(base_url=client.url) as open_client:
        assert open_client.get("/health").json() == {"state": "ready"}
        assert open_client.get("/metrics").status_code == 401
    assert QueueClient(client, "training", SETTINGS).counts() == {}


@pytest.mark.parametrize("program", [worker, sampler_process])
def test_a_process_that_does_not_belong_to_a_run_ends_with_one_line_and_changes_nothing(
    program: ModuleType,
    queue: QueueClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, token = queue.client.url, run_token(RunLayout(Path(queue.client.connect().directory)))
    queue.add([("a", 1.0)])
    monkeypatch.setattr(program, "die_with_parent", lambda parent: None)
    for given, protocol, expected in (
        ({TOKEN_VARIABLE: "x" * 48}, PROTOCOL, "the token is wrong, or the run service of another run answers there"),
        ({TOKEN_VARIABLE: ""}, PROTOCOL, f"${TOKEN_VARIABLE} is not set"),
        ({TOKEN_VARIABLE: token}, PROTOCOL - 1, f"this client protocol {PROTOCOL - 1}: both need the same Etude"),
    ):
        monkeypatch.setattr("etude.runs.client.PROTOCOL", protocol)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert program.main(["--service", url, "--name", "stranger-0"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("stranger-0: ")
        assert error.count("\n") == 1
        assert expected in error
    assert queue.counts() == {"queued": 2}
    assert "stranger-0" not in queue.client.statuses()


def test_when_another_run_has_taken_the_address_a_worker_ends_and_its_rollouts_are_kept(
    layout: RunLayout, tmp_path: Path
) -> None:
    with threaded_service(layout, QUEUES), closing(RunClient.beside(layout, patience_s=60)) as client:
        client.connect()
        enlist(client)
        QueueClient(client, "training", SETTINGS).add([("a", 1.0)])
        slots = claim(client, 2)
        finish(client, slots[0])
    other = RunLayout(tmp_path / "other")
    other.make()
    write_atomically(other.id, "b" * 32)
    for path in (layout.service_address, layout.service_token):
        shutil.copy(path, other.root / path.name)
    with threaded_service(other, QUEUES), closing(client.twin()) as late:
        for request in (lambda: finish(late, slots[1]), lambda: heartbeat(late, slots[1:], answered=1)):
            with pytest.raises(
                InputError, match=r"service of another run \(bbbbbbbb, not aaaaaaaa\): its own has ended"
            ):
                request()
        found = late.twin(run="")
        assert QueueClient(found, "training", SETTINGS).counts() == {}
        found.close()
    with closing(RolloutQueue.open_read_only(layout.slots)) as kept:
        assert kept.counts() == {"ready": 1, "starting": 1}


def test_objects_can_be_written_below_the_traces_only(client: RunClient, layout: RunLayout) -> None:
    store = ServedObjectStore(client, ROLLOUTS)
    store.put("traces/000001/00-1.trace", b"one")
    assert (layout.traces / "000001/00-1.trace").read_bytes() == b"one"
    assert store.get("traces/000001/00-1.trace") == b"one"
    assert store.get("traces/000001/00-2.trace") is None
    assert store.names("traces/000001") == ["00-1.trace"]
    for name in (
        "recipe.toml",
        "slots.sqlite",
        "traces/../slots.sqlite",
        "traces/.hidden",
        "model/config.json",
        "traces",
    ):
        with pytest.raises(OSError, match=r"only objects below|is not the name of an object"):
            store.put(name, b"evil")
    with pytest.raises(OSError, match="is not the name of an object"):
        store.get("../recipe.toml")
    store.remove("traces/000001/00-1.trace")
    assert store.get("traces/000001/00-1.trace") is None


# ------------------------------------------------------------------------------------------- requests again, or late


def test_a_claim_whose_response_was_lost_is_the_same_claim_again(queue: QueueClient, client: RunClient) -> None:
    enlist(client)
    queue.add([("a", 1.0), ("b", 1.0)])
    first = claim(client, 2)
    assert claim(client, 2) == first  # sent again
    assert claim(client, 1, request=2) != first
    assert queue.counts() == {"queued": 1, "starting": 3}


def test_slots_that_did_not_reach_their_worker_are_queued_again_at_once(queue: QueueClient, client: RunClient) -> None:
    enlist(client)
    queue.add([("a", 1.0), ("b", 1.0)])
    kept, lost, late = claim(client, 1), claim(client, 1, request=2), claim(client, 1, request=3)
    reply = heartbeat(client, kept, answered=2)  # the response to the third request may still be on its way
    assert reply["lost"] == {"training": [], "evaluation": []}
    assert queue.counts() == {"queued": 2, "starting": 1, "running": 1}
    assert sum(group.failures for group in queue.progress()) == 0
    assert heartbeat(client, [*kept, *late], answered=3)["lost"]["training"] == []
    with pytest.raises(StaleClaim):
        finish(client, lost[0])
    again = claim(client, 1, request=4)
    assert (again[0].id, again[0].attempt) == (lost[0].id, 2)
    assert heartbeat(client, [*kept, *late, *lost], answered=4)["lost"]["training"] == [[lost[0].id, 1]]


def test_a_report_counts_once_and_one_of_an_old_claim_never(queue: QueueClient, client: RunClient) -> None:
    enlist(client)
    queue.add([("a", 1.0)])
    (slot,) = claim(client)
    finish(client, slot, "mine")
    finish(client, slot, "mine")  # its response was lost
    with pytest.raises(StaleClaim):
        finish(client, slot, "another")
    (second,) = claim(client, request=2)
    report(client, second, "fail", why="its pod died", keep_resume=False)
    with pytest.raises(StaleClaim):
        report(client, second, "fail", why="its pod died", keep_resume=False)
    assert [incident.kind for incident in queue.incidents()] == ["failed"]


def test_a_late_request_of_an_ended_process_changes_nothing(queue: QueueClient, client: RunClient) -> None:
    enlist(client)
    queue.add([("a", 1.0)])
    claim(client)
    enlist(client, session="two")  # the worker was restarted
    assert queue.counts() == {"queued": 2}
    new = claim(client, session="two")
    call(client, "/workers/w/leave", {"session": "one"})
    assert queue.counts() == {"queued": 1, "starting": 1}
    for late in (lambda: claim(client, request=2), lambda: heartbeat(client, [], answered=2)):
        with pytest.raises(SupersededWorker, match="another process has its name"):
            late()
    enlist(client, session="two")  # sent again
    assert heartbeat(client, new, answered=1, session="two")["lost"]["training"] == []
    call(client, "/workers/w/leave", {"session": "two"})
    assert queue.counts() == {"queued": 2}
    with pytest.raises(SupersededWorker, match="has ended"):
        claim(client, session="two", request=2)


def test_idle_workers_wait_in_the_service_and_the_longest_waiting_is_served_first(
    service: RunService, queue: QueueClient, client: RunClient
) -> None:
    order: list[str] = []

    def wait(name: str) -> None:
        with closing(client.twin()) as own:
            enlist(own, name)
            body = {"session": "one", "request": 1, "count": 1, "wait_s": 60.0}
            if call(own, f"/workers/{name}/claim", body, wait_s=60.0):
                order.append(name)

    threads = []
    for number in range(3):
        threads.append(threading.Thread(target=wait, args=(f"w-{number}",)))
        threads[-1].start()
        while len(service.work) <= number:
            time.sleep(0.01)
    before = service.requests["claim"]
    queue.add([("a", 1.0)])
    for thread in threads[:2]:
        thread.join(60)
    assert order in (["w-0", "w-1"], ["w-1", "w-0"])
    assert (service.requests["claim"], len(service.work)) == (before + 2, 1)
    queue.add([("b", 1.0)])
    threads[2].join(60)
    assert "w-2" in order


def test_workers_that_the_run_has_not_started_share_the_rollouts(
    service: RunService, client: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.rollouts.run_service.LOOKUP_S", -1.0)
    service.workers = 0
    shares = []
    for name in ("w-0", "w-1", "w-2", "w-0"):
        body = {"session": "one", "answered": 0, "held": {}, "status": {"state": "waiting"}}
        shares.append(call(client, f"/workers/{name}/heartbeat", body)["max_rollouts"])
    assert shares == [100, 50, 34, 34]
    monkeypatch.setattr("etude.rollouts.run_service.ABSENT_S", -1.0)  # all are gone
    assert service.share() == 100


# ------------------------------------------------------------------------------------------- kills


def test_nothing_that_was_acknowledged_is_lost_when_the_service_is_killed(layout: RunLayout) -> None:
    """Threads claim and finish slots; the service is killed with SIGKILL and started again in the middle of it."""
    groups, kills = 60, 3
    with ServiceProcess(layout) as process, closing(process.client(patience_s=60)) as client:
        settings = QueueSettings()
        queue = QueueClient(client, "training", settings)
        queue.add((f"task-{number}", 0.0) for number in range(groups))
        total, acknowledged = groups * settings.group_size, list[tuple[int, int]]()
        problems: list[BaseException] = []

        def work(name: str) -> None:
            try:
                with closing(client.twin()) as own:
                    call(own, f"/workers/{name}/enlist", {"session": name})
                    for request in range(1, 10_000):
                        body = {"session": name, "request": request, "count": 2, "wait_s": 0.5}
                        found = call(own, f"/workers/{name}/claim", body, wait_s=1.0)
                        if not found and len(acknowledged) >= total:
                            return
                        for slot in (Slot(**slot) for _, slot in found):
                            finish(own, slot, f"{name}/{slot.id}/{slot.attempt}")
                            acknowledged.append((slot.id, slot.attempt))
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(f"w-{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for number in range(kills):
            while len(acknowledged) < (number + 1) * total // (kills + 2) and not problems:
                time.sleep(0.001)
            assert process.end(signal.SIGKILL) == -signal.SIGKILL
            process.start()
        for thread in threads:
            thread.join(300)
        assert not problems, problems
        assert queue.counts() == {"ready": total}
    with closing(RolloutQueue.open_read_only(layout.slots)) as ended:
        assert len(acknowledged) == len(set(acknowledged)) == total
        for id, attempt in acknowledged:
            slot = ended.slot(id)
            assert (slot.attempt, slot.trace.split("/")[1:]) == (attempt, [str(id), str(attempt)])
        assert sum(each.failures for each in ended.progress()) == 0
    assert {status.state for status in read_statuses(layout).values()} == {"ended"}


def test_a_client_gives_up_a_service_that_is_gone(layout: RunLayout) -> None:
    with ServiceProcess(layout) as process:
        client = process.client(patience_s=60)
        process.end(signal.SIGKILL)
        problems: list[str] = []
        with pytest.raises(RunServiceUnavailable, match=r"did not answer: .*Connection refused"):
            client.twin(on_problem=problems.append, patience_s=0).statuses()
        assert "Connection refused" in problems[0]
        process.start()
        assert client.statuses()["run-service"]["state"] == "ready"
        client.close()


def test_a_damaged_queue_ends_the_service_with_one_line(layout: RunLayout) -> None:
    with threaded_service(layout, {}):
        pass
    layout.slots.write_bytes(b"no table" * 1000)
    command = ["python", "-m", "etude.rollouts.run_service", str(layout.run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "slots.sqlite: file is not a database; restore it" in done.stderr
    assert read_statuses(layout)["run-service"].facts["problem"] in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_on_a_full_disk_reports_are_refused_until_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", disk], check=False).returncode:
        pytest.skip("mounting is not permitted")
    layout = RunLayout(disk / "run")
    layout.make()
    with ExitStack() as stack:
        stack.callback(lambda: subprocess.run(["umount", "-l", disk], check=True))
        stack.enter_context(threaded_service(layout, QUEUES))
        client = stack.enter_context(closing(RunClient.beside(layout, patience_s=60)))
        queue = QueueClient(client, "training", SETTINGS)
        enlist(client)
        queue.add([("a", 1.0)])
        (slot,) = claim(client)
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            fill(filler)
        impatient = stack.enter_context(closing(client.twin(patience_s=0)))
        with pytest.raises(RunServiceUnavailable, match=r"the disk of the run directory is full .*; free some space"):
            call(impatient, "/queues/training/report/finish", finish_body(slot, "x" * 200_000))
        with pytest.raises(OSError, match="is full"):
            ServedObjectStore(impatient, ROLLOUTS).put("traces/1/1.trace", bytes(300_000))
        waiting = threading.Thread(target=finish, args=(client, slot, "x" * 200_000))
        waiting.start()
        while not client.problem:
            time.sleep(0.01)
        filler.unlink()
        waiting.join(60)
        assert queue.counts() == {"queued": 1, "ready": 1}
        assert len(queue.group(1).slots[0].trace) == 200_000


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def finish_body(slot: Slot, trace: str) -> dict[str, Any]:
    facts = {"reward": {"total": 1.0}, "trace": trace, "versions": (0, 0)}
    return {"slot": slot.id, "task": slot.task, "attempt": slot.attempt, "facts": facts}


# ------------------------------------------------------------------------------------------- TLS and figures


def test_tls_with_a_certificate_of_its_own(layout: RunLayout, tmp_path: Path) -> None:
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    new += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    if subprocess.run(new, cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("openssl makes no certificate here")
    table = f'[service]\ncertificate = "{tmp_path}/cert.pem"\nkey = "{tmp_path}/key.pem"\n'
    write_atomically(layout.recipe, 'name = "test"\nstages = ["rl"]\n[rl]\n' + table)
    with ServiceProcess(layout) as process, closing(process.client(patience_s=60)) as client:
        assert client.url.startswith("https://127.0.0.1:")
        QueueClient(client, "training", SETTINGS).add([("a", 1.0)])
        with pytest.raises(InputError, match="its certificate is not trusted: self-signed certificate"):
            RunClient(client.url, run_token(layout)).connect()
    (tmp_path / "key.pem").write_text("no key")
    command = ["python", "-m", "etude.rollouts.run_service", str(layout.run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "[service] certificate" in done.stderr


def test_metrics_and_statuses(service: RunService, queue: QueueClient, client: RunClient) -> None:
    enlist(client)
    queue.add([("a", 1.0)])
    slots = claim(client)
    heartbeat(client, slots, answered=1)
    client.report_status("sampler-0", kind="sampler", state="ready", url="http://127.0.0.1:1", version=3)
    text = client.send("GET", "/metrics").decode()
    for line in (
        'etude_run_training_slots{state="queued"} 1',
        'etude_run_training_slots{state="running"} 1',
        'etude_run_services{state="working"} 1',
        'etude_run_requests_total{endpoint="claim"} 1',
        "etude_run_workers_waiting 0",
        'etude_run_request_seconds_bucket{le="+Inf"}',
    ):
        assert line in text, text
    found = client.call("GET", "/samplers", query={"seen": "0"})
    assert found["samplers"]["sampler-0"]["version"] == 3
    assert client.statuses()["w"]["state"] == "working"
    assert client.statuses()["sampler-0"]["age_s"] >= 0
    with member_of(service.layout) as member:
        assert member.sees_run
        assert member.same_machine
        assert member.info.run == "a" * 32
    assert service_url(service.layout) == client.url
    json.dumps(client.statuses())
