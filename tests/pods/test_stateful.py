"""A fleet behaves like a model of it, for any order of operations and with processes killed in between.

The model is a dictionary of files for every pod and snapshot. The fleet runs in a child process, so that it can be
killed; detached pods outlive it, and nothing but durable snapshots outlives the zygote.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from etude.pods.runtime.probe import probe
from tests.pods import inventory

ROOT = Path(__file__).resolve().parents[2]
MOST = 8  # pods alive at once
NAMES = st.sampled_from(["a", "b", "c"])
PICKS = st.integers(0, 1000)
Files = dict[str, str]


class Service:
    """The child process that runs the fleet, and requests to it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        command = [sys.executable, "-m", "tests.pods.fleet_child", str(state)]
        self.child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "ready"

    def ask(self, *command: Any) -> Any:
        assert self.child.stdin
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.child.stdout
        line = self.child.stdout.readline()
        assert line, f"the service ended with {self.child.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(f"{answer['error']}: {answer['text']}")
        return answer["ok"]

    def end(self, number: int) -> None:
        if number:
            self.child.send_signal(number)
        assert self.child.stdin
        assert self.child.stdout
        self.child.stdin.close()
        self.child.wait(60)
        self.child.stdout.close()


class Refused(Exception):
    """The service returned an error."""


class FleetMachine(RuleBasedStateMachine):
    """Operations in any order, compared with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="etude-stateful-")
        self.state = Path(self.directory) / "state"
        self.pods: dict[str, Files] = {}
        self.detached: set[str] = set()
        self.snapshots: dict[str, tuple[Files, bool]] = {}
        self.orphaned = False  # the zygote was killed

    @initialize()
    def start(self) -> None:
        self.service = Service(self.state)

    def teardown(self) -> None:
        if hasattr(self, "service") and sys.exc_info()[0] is None:
            for id in [*self.pods]:
                self.service.ask("call", id, "close")
            left = inventory.zygote_of(self.state)
            self.service.end(0)
            deadline = time.monotonic() + 60
            while left and inventory.zygote_of(self.state) and time.monotonic() < deadline:
                time.sleep(0.01)
            if self.orphaned:  # a service that ends at once may not have noticed which pods ended with their zygote
                self.service = Service(self.state)
                self.service.ask("gc")
                self.service.end(0)
            assert not list((self.state / "pods").iterdir())
        elif hasattr(self, "service"):
            self.service.end(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)

    def pick(self, n: int) -> str:
        return [*self.pods][n % len(self.pods)]

    def has_pods(self) -> bool:
        return bool(self.pods)

    def has_room(self) -> bool:
        return len(self.pods) < MOST

    # -- rules

    @precondition(has_room)
    @rule(attached=st.booleans())
    def create(self, attached: bool) -> None:
        id = self.service.ask("create", "host", attached)
        self.pods[id] = {}
        if not attached:
            self.detached.add(id)

    @precondition(has_pods)
    @rule(n=PICKS, name=NAMES, text=st.text(st.characters(codec="ascii", exclude_characters="'"), max_size=20))
    def write(self, n: int, name: str, text: str) -> None:
        id = self.pick(n)
        self.service.ask("call", id, "write", name, text)
        self.pods[id][name] = text

    @precondition(has_pods)
    @rule(n=PICKS, name=NAMES)
    def remove(self, n: int, name: str) -> None:
        id = self.pick(n)
        if self.pods[id].pop(name, None) is None:
            with pytest.raises(Refused):
                self.service.ask("call", id, "remove", name)
        else:
            self.service.ask("call", id, "remove", name)

    @precondition(has_pods)
    @rule(n=PICKS)
    def look(self, n: int) -> None:
        id = self.pick(n)
        assert sorted(self.service.ask("list", id)) == sorted(self.pods[id])
        for name, text in self.pods[id].items():
            assert self.service.ask("read", id, name) == text
            assert self.service.ask("exec", id, f"cat {name}; printf .") == text + "."

    @precondition(has_pods)
    @rule(n=PICKS, kind=st.sampled_from(["fs", "fs-live", None]))
    def snapshot(self, n: int, kind: str | None) -> None:
        id = self.pick(n)
        made, durable = self.service.ask("snapshot", id, kind)
        self.snapshots[made] = (dict(self.pods[id]), durable)

    @precondition(lambda self: self.snapshots)
    @rule(n=PICKS)
    def persist(self, n: int) -> None:
        id = sorted(self.snapshots)[n % len(self.snapshots)]
        self.service.ask("persist", id)
        self.snapshots[id] = (self.snapshots[id][0], True)

    @precondition(lambda self: self.snapshots and self.has_room())
    @rule(n=PICKS)
    def restore(self, n: int) -> None:
        id = sorted(self.snapshots)[n % len(self.snapshots)]
        self.pods[self.service.ask("create", id, True)] = dict(self.snapshots[id][0])

    @precondition(lambda self: self.snapshots)
    @rule(n=PICKS)
    def remove_snapshot(self, n: int) -> None:
        id = sorted(self.snapshots)[n % len(self.snapshots)]
        self.service.ask("remove-snapshot", id)
        del self.snapshots[id]

    @precondition(lambda self: self.has_pods() and self.has_room())
    @rule(n=PICKS)
    def fork(self, n: int) -> None:
        id = self.pick(n)
        (child,) = self.service.ask("fork", id, 1)
        self.pods[child] = dict(self.pods[id])
        if id in self.detached:
            self.detached.add(child)

    @precondition(lambda self: self.pods)
    @rule(n=PICKS)
    def close(self, n: int) -> None:
        self.gone(self.pick(n), ask=True)

    def gone(self, id: str, ask: bool = False) -> None:
        if ask:
            self.service.ask("call", id, "close")
        del self.pods[id]
        self.detached.discard(id)

    @rule()
    def collect_garbage(self) -> None:
        self.service.ask("gc")

    @rule()
    def kill_the_service(self) -> None:
        self.service.end(signal.SIGKILL)
        for id in set(self.pods) - self.detached:
            self.gone(id)
        self.service = Service(self.state)

    @rule()
    def kill_the_zygote(self) -> None:
        if zygote := inventory.zygote_of(self.state):
            os.kill(zygote, signal.SIGKILL)
            self.orphaned = True
            while inventory.zygote_of(self.state) == zygote:
                time.sleep(0.005)
        for id in list(self.pods):
            self.gone(id)
        for id in [id for id, (_, durable) in self.snapshots.items() if not durable]:
            self.service.ask("remove-snapshot", id)
            del self.snapshots[id]


def explore(examples: int, steps: int) -> None:
    verdict = asyncio.run(probe("namespace"))
    if not verdict.works:
        pytest.skip(f"no namespaces here: {verdict.reason}")
    if verdict.capabilities is not None and "fs-live" not in verdict.capabilities.snapshots:
        pytest.skip(f"no live snapshots here: {'; '.join(verdict.capabilities.notes)}")
    machine = FleetMachine.TestCase()
    machine.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # runs are not exactly repeatable: the steps are printed instead
    )
    machine.runTest()


def test_a_fleet_behaves_like_its_model() -> None:
    explore(examples=5, steps=20)


@pytest.mark.slow
def test_a_fleet_behaves_like_its_model_for_longer() -> None:
    explore(examples=60, steps=60)
