"""What goes wrong in a simulated run, and whether its services come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim_cluster import SimNode, SimServiceProcess
from sim_network import STORE

from etude.rl.services import SAMPLER, TRAINER, WORKER
from etude.runs.service_status import RUN_SERVICE

if TYPE_CHECKING:
    from sim_run import SimulatedRun

DETECTION_S = (1.0, 8.0)  # until the cluster knows that a node is gone
DOWN_S = 60.0  # for which a service that died may be missing
MAX_KILLS = 5  # of a service: more in five minutes end a run, as they should


@dataclass
class Chaos:
    """What goes wrong."""

    world: SimulatedRun
    missing: dict[str, float] = field(default_factory=dict)  # services that are not running, and since when

    def run(self) -> None:
        world, simulation, rng = self.world, self.world.simulation, self.world.rng
        self.everywhere()
        acts = {name: getattr(self, name) for name in sorted(world.plan.faults) if hasattr(self, name)}
        while simulation.now < world.plan.until:
            simulation.wait(rng.expovariate(1 / world.plan.fault_s))
            if acts and simulation.now < world.plan.until:
                name = rng.choice(list(acts))
                acts[name]()
        self.stop()
        while True:
            simulation.wait(5.0)
            self.watch()

    def say(self, what: str) -> None:
        self.world.simulation.say("faults", what)

    def everywhere(self) -> None:
        """Faults that are there all the time."""
        world, kinds, rng = self.world, self.world.plan.faults, self.world.rng
        network = world.network
        network.loss = rng.choice([0.01, 0.05]) if "losses" in kinds else 0.0
        if "repeats" in kinds:
            network.repeats, network.late = rng.choice([0.02, 0.1]), rng.choice([0.0, 0.02])
        for bucket in world.buckets.values():
            if "store" in kinds:
                bucket.errors, bucket.late = rng.choice([0.01, 0.1]), 0.3
            if "slow" in kinds:
                bucket.rate = rng.choice([200.0, 1000.0, 1e5])

    def stop(self) -> None:
        world = self.world
        world.network.heal()
        for bucket in world.buckets.values():
            bucket.errors = bucket.late = 0.0
        self.say("no more faults")

    # -- one fault each

    def alive(self) -> list[SimServiceProcess]:
        return [each for each in self.world.started if each.process is not None and each.process.alive]

    def victims(self) -> list[SimServiceProcess]:
        return [each for each in self.alive() if self.world.killed[each.spec.name] < MAX_KILLS]

    def do_kill(self, each: SimServiceProcess) -> None:
        assert each.process is not None
        self.world.killed[each.spec.name] += 1
        self.say(f"kills {each.process.name}")
        each.process.kill()

    def kills(self) -> None:
        if found := self.victims():
            name = self.world.rng.choice(sorted({each.spec.name for each in found}))
            self.do_kill(next(each for each in reversed(found) if each.spec.name == name))

    def pauses(self) -> None:
        rng, found = self.world.rng, self.alive()
        if rng.random() < 0.5:
            found = [each for each in found if each.spec.name.startswith(WORKER)]
        if found:
            each, seconds = rng.choice(found), rng.uniform(1, 45)
            assert each.process is not None
            self.say(f"stops {each.process.name} for {seconds:.0f} s")
            each.process.paused_until = self.world.simulation.now + seconds

    def nodes(self) -> None:
        """A node dies; another joins later."""
        world = self.world
        found = [node for node in world.nodes[1:] if node.gone_at is None]
        if not found:
            return
        node = world.rng.choice(found)
        self.say(f"node {node.id} dies")
        node.host.up = False
        node.gone_at = world.simulation.now + world.rng.uniform(*DETECTION_S)
        for each in self.alive():
            if each.place is node and each.process is not None:
                each.process.kill()
        world.simulation.later(world.rng.uniform(2, 40), lambda: self.replace(node))

    def replace(self, node: SimNode) -> None:
        self.say(f"node {self.world.join(node.sees_run).id} joins")

    def isolation(self) -> None:
        """A node is cut off for so long that the cluster gives it up; it ends what it runs when it is back."""
        if (lost := self.lose("is cut off")) is not None:
            node, seconds = lost
            self.world.network.isolated(node.host, self.world.home, seconds)

    def freezes(self) -> None:
        """The same, by a node that stands still for a while."""
        if (lost := self.lose("stands still")) is not None:
            node, seconds = lost
            for each in self.alive():
                if each.place is node and each.process is not None:
                    each.process.paused_until = self.world.simulation.now + seconds

    def lose(self, how: str) -> tuple[SimNode, float] | None:
        """Have the cluster give up a node that is back later; return it, and for how many seconds it is away."""
        world, rng = self.world, self.world.rng
        found = [node for node in world.nodes[1:] if node.gone_at is None]
        if not found:
            return None
        node, seconds = rng.choice(found), rng.uniform(5, 40)
        self.say(f"node {node.id} {how} for {seconds:.0f} s")
        node.gone_at = world.simulation.now + rng.uniform(*DETECTION_S)

        def back() -> None:
            for each in world.started:
                if each.place is node and each.process is not None:
                    each.process.kill()
            self.replace(node)

        world.simulation.later(seconds + rng.uniform(0, 4), back)
        return node, seconds

    def head(self) -> None:
        """The process that holds the run is killed, and all services with it."""
        world = self.world
        if world.head is not None and world.head.alive and self.world.killed["head"] < 2:
            self.world.killed["head"] += 1
            self.say("kills the process that holds the run")
            world.head.kill()

    def partitions(self) -> None:
        world, rng = self.world, self.world.rng
        hosts = [node.host for node in world.nodes[1:] if node.host.up]
        if hosts:
            one, other, seconds = rng.choice([world.home, STORE]), rng.choice(hosts), rng.uniform(1, 40)
            self.say(f"{one.name} and {other.name} do not reach each other for {seconds:.0f} s")
            world.network.isolated(one, other, seconds)

    def slow(self) -> None:
        world, rng = self.world, self.world.rng
        host = rng.choice([node.host for node in world.nodes] + [STORE])
        factor = rng.choice([1.0, 30.0, 300.0])
        self.say(f"the link of {host.name} is {factor:.0f} times slower")
        world.network.slow[host.name] = factor

    def clocks(self) -> None:
        """The clock of a host is set."""
        host = self.world.rng.choice(self.world.nodes).host
        host.skew += self.world.rng.uniform(-15, 15)
        self.say(f"the clock of {host.name} is set to {host.skew:+.1f} s")

    def damage(self) -> None:
        """The trainer is killed, and its newest checkpoint damaged, as by a power cut."""
        trainers = [each for each in self.victims() if each.spec.name == TRAINER]
        found = sorted(self.world.layout.trainer.glob("[0-9]*"))
        if trainers and len(found) > 1:
            self.do_kill(trainers[-1])
            self.say(f"damages the checkpoint {found[-1].name}")
            file = found[-1] / "updates.json"
            file.write_bytes(file.read_bytes()[:-1])

    # -- what must be there

    def watch(self) -> None:
        """Services that have died run again; those of dead nodes elsewhere."""
        world, now = self.world, self.world.simulation.now
        if world.finished or world.head is None or not world.head.alive or world.supervisor is None:
            self.missing.clear()
            return
        services = world.supervisor.services
        running = Counter(each.spec.name for each in self.alive() if each.place and each.place.gone_at is None)
        expected = {RUN_SERVICE, TRAINER, *(f"{SAMPLER}-{number}" for number in range(world.plan.samplers))}
        if TRAINER in services and services[TRAINER].finished:
            expected.discard(TRAINER)
        lacking = {name for name in expected if not running[name]}
        for node in world.nodes:
            if node.gone_at is None:
                here = [e for e in self.alive() if e.place is node and e.spec.name.startswith(WORKER)]
                if len(here) < world.plan.workers_per_node:
                    lacking.add(f"a worker on {node.id}")
        self.missing = {name: self.missing.get(name, now) for name in lacking}
        for name, since in self.missing.items():
            if now - since > DOWN_S:
                world.simulation.fail(f"{name} has not run for {now - since:.0f} s")
