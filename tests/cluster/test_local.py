"""A supervisor over processes of this machine: which services are restarted, and which end the run."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from etude.cluster.cluster import Node, Resources, ServiceSpec
from etude.cluster.local import LocalCluster, LocalProcess
from etude.cluster.supervisor import MAX_DEATHS, SILENCE_S, ServiceFailed, ServiceSupervisor
from etude.errors import InputError
from etude.runs.service_status import ServiceStatus
from etude.system.clock import Clock

PROGRAMS = {
    "ends": "print('done')",
    "stays": "import time; print('up', flush=True); time.sleep(600)",
    "drains": """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
time.sleep(600)
""",
    "gives_up": "import sys; print('nothing moves'); sys.exit(4)",
    "rejects": "import sys; sys.exit(2)",
    "meets": """
import os, torch.distributed as dist
from etude.parallel.launch import open_store
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=open_store(os.environ), rank=rank, world_size=world)
dist.barrier()
print("met", rank, flush=True)
""",
    # Each rank ends as its argument says, "-": it waits for the others, as in a collective.
    "ranks": """
import os, sys, time
code = sys.argv[1 + int(os.environ["RANK"])]
print("code", code, flush=True)
time.sleep(600) if code == "-" else sys.exit(int(code))
""",
}


@dataclass
class StoppedClock(Clock):
    """A clock that stands still unless a test moves it, or the supervisor waits."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.now += seconds


@dataclass
class Reported:
    """The statuses of a run."""

    statuses: dict[str, ServiceStatus] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)

    def get(self, name: str, *, fresh: bool = False) -> ServiceStatus | None:
        return self.statuses.get(name)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)


@dataclass
class Rig:
    """A supervisor with a clock of its own, and what it has told."""

    supervisor: ServiceSupervisor
    clock: StoppedClock
    reported: Reported
    deaths: list[tuple[str, str]]

    def tick_until(self, condition: Callable[[], bool], step: float = 1.0) -> None:
        """Tick, with `step` seconds of the supervisor's clock between ticks."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.clock.now += step
            self.supervisor.tick()
            time.sleep(0.02)

    def pid(self, name: str) -> int:
        (process,) = self.supervisor.services[name].processes
        assert isinstance(process, LocalProcess)
        return process.process.pid

    def is_up(self, name: str) -> bool:
        """Return whether every process of a service that was started has said so."""
        log = self.supervisor.logs / f"{name}.log"
        return log.exists() and log.read_text().count("up\n") == self.starts(name)

    def drain(self, name: str) -> None:
        """End a process as one that was asked to end does."""
        self.reported.statuses[name] = ServiceStatus({"state": "drained"}, 0.0)
        os.kill(self.pid(name), signal.SIGTERM)

    def starts(self, name: str) -> int:
        return self.supervisor.services[name].starts


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    (tmp_path / "modules").mkdir()
    for name, program in PROGRAMS.items():
        (tmp_path / f"modules/etude_test_{name}.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    clock, reported, deaths = StoppedClock(), Reported(), []
    supervisor = ServiceSupervisor(
        LocalCluster(), tmp_path / "logs", reported, lambda *death: deaths.append(death), clock=clock
    )
    return Rig(supervisor, clock, reported, deaths)


def service(name: str, program: str, *arguments: str, finishes: bool = False, ranks: int = 1) -> ServiceSpec:
    return ServiceSpec(name, f"etude_test_{program}", arguments, finishes=finishes, ranks=ranks)


def test_a_service_that_should_not_finish_is_restarted(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("worker-0", "ends"))
        supervisor.add(service("trainer", "ends", finishes=True))
        rig.tick_until(lambda: rig.starts("worker-0") > 1 and supervisor.services["trainer"].finished)
        assert rig.starts("trainer") == 1
        assert supervisor.restarts().keys() == {"worker-0"}
    assert set(rig.deaths) == {("worker-0", "ended with exit code 0")}
    assert rig.reported.forgotten[:2] == ["worker-0", "trainer"], "the status of an earlier process is kept"


def test_a_service_that_gives_up_ends_the_run_with_its_log(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("trainer", "gives_up", finishes=True))
        with pytest.raises(ServiceFailed, match=r"trainer ended with exit code 4; its log ends:\n  nothing moves"):
            rig.tick_until(lambda: False)
        assert rig.starts("trainer") == 1


def test_an_input_error_ends_the_run_in_the_words_of_the_service(rig: Rig) -> None:
    rig.reported.statuses["worker-0"] = ServiceStatus({"state": "failed", "problem": "no such task"}, 0.0)
    with rig.supervisor as supervisor:
        supervisor.add(service("worker-0", "rejects"))
        with pytest.raises(InputError, match=r"^no such task$"):
            rig.tick_until(lambda: False)


def test_pauses_grow_and_the_eighth_death_in_five_minutes_ends_the_run(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("sampler-0", "ends"))
        sampler, pauses = supervisor.services["sampler-0"], []
        while len(rig.deaths) < MAX_DEATHS - 1:
            known = len(rig.deaths)
            rig.tick_until(lambda: len(rig.deaths) > known, step=0.0)  # noqa: B023
            pauses.append(sampler.restart_at - rig.clock.now)
            supervisor.tick()
            assert not sampler.processes, "it was restarted before its pause"
            rig.clock.now = sampler.restart_at
        with pytest.raises(ServiceFailed, match="for the 8th time in 5 minutes; its log ends:\n  done"):
            rig.tick_until(lambda: False, step=0.0)
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8])


def test_old_deaths_do_not_count(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("sampler-0", "ends"))
        rig.tick_until(lambda: len(rig.deaths) > MAX_DEATHS, step=20.0)
        assert supervisor.services["sampler-0"].restart_at < rig.clock.now + 20.0


def test_a_silent_service_is_killed(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("worker-0", "stays"))
        supervisor.add(service("worker-1", "stays"))
        rig.reported.statuses["worker-0"] = ServiceStatus({}, 500.0)  # of an earlier process
        rig.reported.statuses["worker-1"] = ServiceStatus({}, 1.0)
        supervisor.tick()
        supervisor.tick()
        pid = rig.pid("worker-0")
        rig.clock.now += SILENCE_S
        supervisor.tick()
        assert not rig.deaths
        rig.clock.now += 1.0
        supervisor.tick()
        assert rig.deaths == [("worker-0", "reported nothing for 120 s and was killed")]
        assert not Path(f"/proc/{pid}").exists()
        rig.clock.now += 1.0
        supervisor.tick()
        assert rig.starts("worker-0") == 2


def test_stopping_ends_all_services(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("worker-0", "stays"))
        supervisor.tick()
        pid = rig.pid("worker-0")
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_process_is_named_with_its_signal(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("worker-0", "stays"))
        supervisor.tick()
        os.kill(rig.pid("worker-0"), signal.SIGTERM)
        rig.tick_until(lambda: bool(rig.deaths))
    assert rig.deaths == [("worker-0", "ended with signal 15")]


class TwoNodes(LocalCluster):
    """This machine as several nodes, which come and go."""

    ids = ("a", "b")

    def nodes(self, resources: Resources) -> list[Node]:
        return [Node(id, id) for id in self.ids]


def test_every_node_gets_its_services_and_names_are_not_used_twice(rig: Rig) -> None:
    cluster = rig.supervisor.cluster = TwoNodes()

    def worker(name: str, node: Node) -> ServiceSpec:
        return ServiceSpec(name, "etude_test_stays", node=node.id)

    def nodes() -> dict[str, str]:
        return {name: each.spec.node for name, each in rig.supervisor.services.items()}

    with rig.supervisor as supervisor:
        supervisor.add_on_nodes("worker", 2, Resources(), worker)
        first = nodes()
        assert sorted(first.values()) == ["a", "a", "b", "b"]
        assert supervisor.count("worker") == 4
        cluster.ids = ("a", "c")
        supervisor.tick()
        assert [name for name, node in nodes().items() if node == "c"] == ["worker-4", "worker-5"]
        assert supervisor.count("worker") == 4


def test_another_number_of_services_on_every_node(rig: Rig) -> None:
    rig.supervisor.cluster = TwoNodes()

    def worker(name: str, node: Node) -> ServiceSpec:
        return ServiceSpec(name, "etude_test_drains", node=node.id)

    with rig.supervisor as supervisor:
        supervisor.add_on_nodes("worker", 1, Resources(), worker)
        supervisor.set_per_node("worker", 2)
        assert sorted(supervisor.services) == ["worker-0", "worker-1", "worker-2", "worker-3"]
        rig.tick_until(lambda: all(each.processes for each in supervisor.services.values()), step=0.0)
        supervisor.set_per_node("worker", 1)
        assert supervisor.count("worker") == 2
        assert supervisor.retiring() == ["worker-2", "worker-3"]  # the newest of each node
        assert len(supervisor.services) == 4, "they go on until they end by themselves"
        rig.tick_until(lambda: all(rig.is_up(name) for name in supervisor.services), step=0.0)
        for name in supervisor.retiring():
            rig.drain(name)
        rig.tick_until(lambda: sorted(supervisor.services) == ["worker-0", "worker-1"], step=0.0)
    assert rig.deaths == []


def test_a_service_that_was_drained_is_replaced_at_once_and_has_not_died(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("worker-0", "drains"))
        rig.tick_until(lambda: rig.is_up("worker-0"), step=0.0)
        for starts in range(2, 2 + MAX_DEATHS):
            rig.drain("worker-0")
            rig.tick_until(lambda starts=starts: rig.starts("worker-0") == starts and rig.is_up("worker-0"), step=0.0)
    assert rig.deaths == []


# ------------------------------------------------------------------------------------------- ranks


def test_ranks_meet_and_finish_together(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("trainer", "meets", finishes=True, ranks=2))
        rig.tick_until(lambda: supervisor.services["trainer"].finished, step=0.0)
    assert not rig.deaths
    assert (supervisor.logs / "trainer.log").read_text() == "met 0\n"
    assert (supervisor.logs / "trainer-rank-1.log").read_text() == "met 1\n"


@pytest.mark.parametrize("codes", [("-", "1"), ("1", "2"), ("0", "1")])
def test_a_rank_that_dies_ends_its_job(codes: tuple[str, str], rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("trainer", "ranks", *codes, finishes=True, ranks=2))
        if codes[1] == "2":  # a rank whose partner has rejected its input fails in a collective
            with pytest.raises(ServiceFailed, match="rank 1 of 2 ended with exit code 2; its log ends:\n  code 2"):
                rig.tick_until(lambda: False, step=0.01)
        else:
            rig.tick_until(lambda: rig.starts("trainer") > 1, step=1.0)
            assert rig.deaths == [("trainer", "rank 1 of 2 ended with exit code 1")]


def test_a_killed_rank_is_the_reason(rig: Rig) -> None:
    with rig.supervisor as supervisor:
        supervisor.add(service("trainer", "stays", finishes=True, ranks=2))
        supervisor.tick()
        processes = supervisor.services["trainer"].processes
        assert isinstance(processes[1], LocalProcess)
        processes[1].process.kill()
        rig.tick_until(lambda: bool(rig.deaths))
        assert rig.deaths == [("trainer", "rank 1 of 2 ended with signal 9")]
        assert processes[0].poll() is not None
