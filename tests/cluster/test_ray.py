"""Services on a Ray cluster of several nodes, all on this machine: placed, watched, lost, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import add_node, blind_node, free_port, open_nodes

from etude.cluster.cluster import Node, Resources, ServiceSpec
from etude.cluster.launch import open_cluster
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceFailed, ServiceSupervisor
from etude.errors import InputError
from etude.runs.layout import RunLayout
from etude.runs.service_status import StatusReader

pytestmark = pytest.mark.slow
PROGRAMS = {
    "says": """
import os, sys
print(os.environ["ETUDE_NODE"], os.environ.get("GIVEN"), os.environ.get("SECRET"), *sys.argv[1:], flush=True)
sys.exit(4 if "fails" in sys.argv else 0)
""",
    "stays": """
import os, sys, time
from etude.system.processes import die_with_parent, parent_process
die_with_parent(parent_process())
print(os.getpid(), os.getpgid(0), flush=True)
time.sleep(600)
""",
    "meets": """
import os, torch.distributed as dist
from etude.parallel.launch import open_store
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=open_store(os.environ), rank=rank, world_size=world)
dist.barrier()
print(rank, os.environ["LOCAL_RANK"], os.environ["ETUDE_NODE"], flush=True)
""",
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("modules")
    for name, program in PROGRAMS.items():
        (directory / f"etude_test_{name}.py").write_text(program)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(directory)  # of the nodes, and so of their processes
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="module")
def nodes(modules: None) -> Iterator[Any]:
    with open_nodes(2, ray_client_server_port=free_port()) as found:
        yield found


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.make()
    return layout


@contextmanager
def supervised(layout: RunLayout, address: str, **options: Any) -> Iterator[tuple[ServiceSupervisor, list[str]]]:
    """Give a supervisor of a cluster, and the deaths that it tells."""
    deaths: list[str] = []
    with (
        open_cluster(ClusterSettings(address=address, **options), layout) as cluster,
        ServiceSupervisor(
            cluster, layout.logs, StatusReader(layout), lambda name, why: deaths.append(f"{name} {why}")
        ) as supervisor,
    ):
        yield supervisor, deaths


def tick_until(supervisor: ServiceSupervisor, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, supervisor.waiting_for()
        supervisor.tick()
        time.sleep(0.05)


def read(layout: RunLayout, name: str) -> list[str]:
    path = layout.logs / f"{name}.log"
    return path.read_text().splitlines() if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def spec(name: str, program: str, *arguments: str, **more: Any) -> ServiceSpec:
    return ServiceSpec(name, f"etude_test_{program}", arguments, **{"where": "anywhere", **more})


def test_services_run_on_nodes_and_their_logs_come_here(
    nodes: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "given")
    monkeypatch.setenv("SECRET", "secret")
    with supervised(layout, nodes.address, environment=("GIV*",)) as (supervisor, deaths):
        for name, where in (("near", "here"), ("beside", "run"), ("away", "anywhere")):
            supervisor.add(spec(name, "says", name, finishes=True, where=where))
        tick_until(supervisor, lambda: all(each.finished for each in supervisor.services.values()))
        assert not deaths
        assert [read(layout, name)[0].split()[1:] for name in ("near", "beside", "away")] == [
            ["given", "secret", "near"],
            ["given", "None", "beside"],
            ["given", "None", "away"],
        ]
        assert layout.cluster_probe.exists()
        supervisor.add(spec("worker", "says", "fails"))
        with pytest.raises(
            ServiceFailed, match=r"worker ended with exit code 4; its log ends:\n  \S+ given None fails"
        ):
            tick_until(supervisor, lambda: False)
    assert not layout.cluster_probe.exists()


def test_a_process_ends_with_its_actor_and_its_actor_outlives_it(nodes: Any, layout: RunLayout) -> None:
    with supervised(layout, nodes.address) as (supervisor, deaths):
        supervisor.add(spec("sampler-0", "stays"))
        tick_until(supervisor, lambda: read(layout, "sampler-0"))
        pid, group = map(int, read(layout, "sampler-0")[0].split())
        assert pid == group, "a crash may take a worker of Ray along"
        os.kill(pid, signal.SIGKILL)
        tick_until(supervisor, lambda: len(read(layout, "sampler-0")) == 2)
        assert deaths == ["sampler-0 ended with signal 9"]
        pid = int(read(layout, "sampler-0")[1].split()[0])
        actor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(actor, signal.SIGKILL)
        wait_until_dead(pid)
        tick_until(supervisor, lambda: len(read(layout, "sampler-0")) == 3)
        assert deaths[1].startswith("sampler-0 was lost with its Ray actor: ")
        pid = int(read(layout, "sampler-0")[2].split()[0])
    wait_until_dead(pid)


def test_every_node_has_its_workers_while_it_lives(nodes: Any, layout: RunLayout) -> None:
    def worker(name: str, node: Node) -> ServiceSpec:
        return spec(name, "stays", node=node.id)

    with supervised(layout, nodes.address) as (supervisor, deaths):
        supervisor.add_on_nodes("worker", 1, Resources(), worker)
        tick_until(supervisor, lambda: read(layout, "worker-0") and read(layout, "worker-1"))
        assert len({each.spec.node for each in supervisor.services.values()}) == 2
        third = add_node(nodes)
        tick_until(supervisor, lambda: read(layout, "worker-2"))
        pid = int(read(layout, "worker-2")[0].split()[0])
        nodes.remove_node(third, allow_graceful=False)
        tick_until(supervisor, lambda: "worker-2" not in supervisor.services)
        assert any(death.startswith("worker-2 was lost with its node ") for death in deaths)
        assert {death.split()[0] for death in deaths} == {"worker-2"}
        assert not is_alive(pid)


def test_ranks_on_two_nodes_meet(nodes: Any, layout: RunLayout) -> None:
    with supervised(layout, nodes.address) as (supervisor, deaths):
        trainer = spec("trainer", "meets", finishes=True, where="run", ranks=2, resources=Resources(cpus=3))
        supervisor.add(trainer)
        tick_until(supervisor, lambda: supervisor.services["trainer"].finished)
        assert not deaths
    found = [read(layout, name)[-1].split() for name in ("trainer", "trainer-rank-1")]
    assert [line[:2] for line in found] == [["0", "0"], ["1", "0"]]
    assert found[0][2] != found[1][2], "both ran on one node"


def test_a_service_waits_for_resources_and_gets_those_of_a_node_that_joins(nodes: Any, layout: RunLayout) -> None:
    with supervised(layout, nodes.address) as (supervisor, deaths):
        supervisor.add(spec("sampler-0", "says", "here", finishes=True, resources=Resources(having="rare")))
        for _ in range(20):
            supervisor.tick()
            time.sleep(0.05)
        assert supervisor.unplaced() == {"sampler-0"}
        assert supervisor.waiting_for() == "1 CPU, the resource rare for sampler-0"
        third = add_node(nodes, resources={"rare": 1})
        tick_until(supervisor, lambda: supervisor.services["sampler-0"].finished)
        assert not deaths
        nodes.remove_node(third, allow_graceful=False)


def test_a_trainer_that_no_node_beside_the_run_can_hold_is_refused(nodes: Any, layout: RunLayout) -> None:
    with supervised(layout, nodes.address) as (supervisor, _):
        supervisor.add(spec("trainer", "says", where="run", ranks=3, resources=Resources(cpus=3)))
        with pytest.raises(InputError, match=r"trainer needs 3 x \(3 CPUs\) on nodes that see .*/run, which are: "):
            supervisor.tick()


def test_ranks_are_not_placed_on_a_node_that_does_not_see_the_run(nodes: Any, layout: RunLayout) -> None:
    resources = Resources(having="rare")
    with blind_node(nodes, layout.run, rare=1), supervised(layout, nodes.address) as (supervisor, _):
        tick_until(supervisor, lambda: len(supervisor.cluster.nodes(Resources())) == 3)
        supervisor.add(spec("sampler-0", "says", "here", finishes=True, resources=resources))
        tick_until(supervisor, lambda: supervisor.services["sampler-0"].finished)
        supervisor.add(spec("trainer", "says", where="run", resources=resources))
        with pytest.raises(
            InputError, match=r"trainer needs 1 CPU, the resource rare on nodes that see .*/run, which are"
        ):
            supervisor.tick()


DRIVER = """
import sys, time
from pathlib import Path
from etude.cluster.cluster import ServiceSpec
from etude.cluster.launch import open_cluster
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceSupervisor
from etude.runs.layout import RunLayout
from etude.runs.service_status import StatusReader

layout = RunLayout(Path(sys.argv[1]))
with open_cluster(ClusterSettings(address=sys.argv[2]), layout) as cluster:
    supervisor = ServiceSupervisor(cluster, layout.logs, StatusReader(layout))
    supervisor.add(ServiceSpec("near", "etude_test_stays"))
    supervisor.add(ServiceSpec("away", "etude_test_stays", where="anywhere"))
    print(cluster.name, cluster.address, flush=True)
    while True:
        supervisor.tick()
        time.sleep(0.05)
"""


@pytest.mark.parametrize("client", [False, True], ids=["node", "client"])
def test_everything_ends_with_the_process_that_holds_the_run(client: bool, nodes: Any, layout: RunLayout) -> None:
    head = nodes.head_node
    address = f"ray://127.0.0.1:{head._ray_params.ray_client_server_port}" if client else nodes.address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(layout.run), address])
    deadline = time.monotonic() + 120
    while not (read(layout, "near") and read(layout, "away")):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    for name in ("near", "away"):
        wait_until_dead(int(read(layout, name)[0].split()[0]))


def test_an_address_without_a_cluster_is_refused_in_one_line(layout: RunLayout) -> None:
    with pytest.raises(
        InputError, match=r"^cluster.address is 127.0.0.1:\d+, but no Ray cluster can be joined there: .*$"
    ):
        open_cluster(ClusterSettings(address=f"127.0.0.1:{free_port()}"), layout)
