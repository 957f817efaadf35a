"""RL over two hosts without Ray, whose processes are killed and whose cables are pulled at random; then the account.

    python benchmarks/two_hosts.py                             # ten minutes, as root
    python benchmarks/two_hosts.py --minutes 3 --seed 7

The hosts are network namespaces, wired to a switch. One has the command with its run service, trainer and sampler. The
other has two workers with their pods; it does not see the run directory, and what starts the workers there starts
them again when they die. Weights and traces go through an S3 server (moto) at the switch. The model is tiny and random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))  # for the small run of the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.s3_server import BUCKET, s3_server
from etude.harness.trace_store import load_trace
from etude.pods import open_fleet
from etude.runs.address import read_address, run_token
from etude.runs.layout import RunLayout
from etude.runs.service_status import read_copy
from etude.weights.object_store import ObjectStore
from tests.rl.rl_runs import make_recipe

HOSTS = ("trainer", "workers")
ADDRESSES = {"trainer": "10.77.0.1", "workers": "10.77.0.2", "switch": "10.77.0.3"}
SERVICES = {  # of the first host, as their command lines show them
    "trainer": "etude.rl.trainer_process",
    "sampler-0": "etude.inference.sampler_process",
    "run-service": "etude.rollouts.run_service",
}
WORKERS = ("worker-0", "worker-1")
MIN_STEPS = 2  # that must be taken after the last fault
GROUPS, GROUP_SIZE, MAX_STALENESS = 4, 2, 4
STEPS = 300  # more than are taken
START_S, END_S = 300.0, 300.0


# ------------------------------------------------------------------------------------------- two hosts and a switch


class Network:
    """The namespaces of two hosts and a switch with a bridge; a cable can be pulled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Network:
        ip("netns", "add", self.space("switch"))
        self._in("switch", "ip", "link", "add", "bridge", "type", "bridge")
        for number, host in enumerate(HOSTS):
            space, port = self.space(host), f"port{number}"
            ip("netns", "add", space)
            ip("link", "add", f"{self.name}{number}", "type", "veth", "peer", "name", port)
            ip("link", "set", f"{self.name}{number}", "netns", space, "name", "eth0")
            ip("link", "set", port, "netns", self.space("switch"))
            self._in("switch", "ip", "link", "set", port, "master", "bridge", "up")
            self._up(host, "eth0")
        self._up("switch", "bridge")
        return self

    def __exit__(self, *exc: object) -> None:
        for space in ("switch", *HOSTS):
            subprocess.run(["ip", "netns", "del", self.space(space)], check=False, capture_output=True)

    def space(self, host: str) -> str:
        return f"{self.name}-{host}"

    def prefix(self, host: str) -> list[str]:
        """Return what is put before a command that runs on a host. (`ip netns exec` would hide the cgroups.)"""
        return ["nsenter", f"--net=/run/netns/{self.space(host)}"]

    def pull(self, host: str) -> None:
        """Pull the cable of a host out of the switch: packets are lost without a word."""
        self._in("switch", "ip", "link", "set", f"port{HOSTS.index(host)}", "down")

    def plug(self, host: str) -> None:
        self._in("switch", "ip", "link", "set", f"port{HOSTS.index(host)}", "up")

    def _up(self, host: str, device: str) -> None:
        self._in(host, "ip", "link", "set", "lo", "up")
        self._in(host, "ip", "address", "add", f"{ADDRESSES[host]}/24", "dev", device)
        self._in(host, "ip", "link", "set", device, "up")

    def _in(self, host: str, *command: str) -> None:
        run_checked([*self.prefix(host), *command])


def ip(*arguments: str) -> None:
    run_checked(["ip", *arguments])


def run_checked(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def why_not() -> str:
    """Return why this machine cannot run the drill; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed (packages iproute2 and util-linux)"
    try:
        with Network(f"et{os.getpid() % 100000}x"):
            return ""
    except RuntimeError as error:
        return f"no network namespaces here: {error}"


# ------------------------------------------------------------------------------------------- the run


class TwoHosts:
    """A run over two hosts: its command on the first, two workers on the second; what dies is started again."""

    def __init__(self, network: Network, directory: Path, s3: Mapping[str, str]) -> None:
        self.network, self.directory = network, directory
        store = f"s3://{BUCKET}/{directory.name}"
        recipe = make_recipe(
            directory / "here",
            tasks=STEPS * GROUPS // 3,
            steps=STEPS,
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS,
            max_staleness=MAX_STALENESS,
            in_flight=12,
            workers=0,
            lease_s=30.0,
            checkpoint_rollouts_s=1.0,
            checkpoint_every=3,
            max_attempts=100,
            traces=f"{store}/traces",
            weights={"store": f"{store}/weights", "full_every": 5},
            curriculum={"order": "solve_rate", "reuse": 6, "rest_steps": 1, "retire_after": 100},
        )
        with open(recipe, "a") as file:
            file.write(f'\n[service]\nhost = "{ADDRESSES["trainer"]}"\n')
        self.layout = RunLayout(directory / "here/run", f"{store}/weights")
        self.environment = {**os.environ, **s3}
        self.command = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(self.layout.run), "--json"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ending = False

    def tend(self) -> None:
        """Start what does not run; RuntimeError if something ended by itself."""
        for name in ("command", *WORKERS):
            process = self.processes.get(name)
            if process is not None and (code := process.poll()) not in (None, -signal.SIGKILL):
                raise RuntimeError(f"{name} ended with {code}: {self.log(name)[-2000:]}")
            if process is None or process.returncode is not None:
                self._start(name)

    def _start(self, name: str) -> None:
        if name == "command":
            command = [*self.network.prefix("trainer"), *self.command, "--resume"]
            environment = self.environment
        else:
            address = read_address(self.layout)
            if address is None:
                return  # the first start of the command is not so far
            command = [sys.executable, "-m", "etude.rollouts.worker", "--service", address.url, "--name", name]
            hide = f'mount -t tmpfs none "{self.directory}/here" && exec "$@"'
            private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "sh"]
            command = [*self.network.prefix("workers"), *private, *command]
            cache = str(self.directory / "there")
            environment = {**self.environment, "XDG_CACHE_HOME": cache, "ETUDE_RUN_TOKEN": run_token(self.layout)}
        with open(self.directory / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def running(self) -> dict[str, int]:
        """Return the processes that can be killed, by name."""
        found = {name: each.pid for name, each in self.processes.items() if each.poll() is None}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = path.read_bytes().decode(errors="replace").split("\0")
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == found.get("command"):
                    found |= {name: int(path.parent.name) for name, module in SERVICES.items() if module in words}
        return found

    def steps(self) -> int:
        return max((int(path.stem) for path in self.layout.steps.glob("[0-9]*.json")), default=0)

    def wait_for_steps(self, count: int, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.steps() < count:
            self.tend()
            if time.monotonic() > deadline:
                statuses = {name: each.facts for name, each in read_copy(self.layout).items()}
                raise RuntimeError(f"step {count} was not reached in {limit_s:.0f} s: {json.dumps(statuses)[:3000]}")
            time.sleep(0.2)

    def end(self) -> None:
        """End everything as a user would: the command first, then the workers."""
        for name in ("command", *WORKERS):
            process = self.processes.pop(name, None)
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()
                process.wait()


# ------------------------------------------------------------------------------------------- the watcher


class FinishedRollouts:
    """Every finished rollout that was ever seen in the queue, looked up several times a second."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.seen: dict[tuple[int, int], str] = {}  # slot and attempt: its trace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> FinishedRollouts:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            with suppress(sqlite3.Error):
                self.seen |= {(id, attempt): trace for id, attempt, trace in rows(self.layout, READY)}


READY = "SELECT id, attempt, trace FROM slots WHERE state = 'ready'"


def rows(layout: RunLayout, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"{layout.slots.as_uri()}?mode=ro", uri=True, timeout=10.0)) as db:
        return db.execute(query).fetchall()


# ------------------------------------------------------------------------------------------- the drill


@dataclass
class Account:
    """What happened, and what was found wrong afterwards."""

    seed: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    cut_s: float = 0.0
    longest_cut_s: float = 0.0
    steps: int = 0
    trained: int = 0  # rollouts
    finished: int = 0  # that were seen
    incidents: Counter[str] = field(default_factory=Counter)
    staleness: int = 0  # the largest of a trained rollout
    load: float = 0.0  # of the machine
    wrong: list[str] = field(default_factory=list)


def drill(directory: Path, seconds: float, seed: int) -> Account:
    """Run the drill; `wrong` of the account is empty if all went well."""
    account, rng = Account(seed), random.Random(seed)
    name = f"et{os.getpid() % 100000}"
    with ExitStack() as stack:
        network = stack.enter_context(Network(name))
        s3 = stack.enter_context(s3_server(ADDRESSES["switch"], network.prefix("switch")))
        hosts = TwoHosts(network, directory, s3)
        stack.callback(hosts.end)
        hosts.wait_for_steps(1, START_S)
        with FinishedRollouts(hosts.layout) as finished:
            started = time.monotonic()
            while (left := started + seconds - time.monotonic()) > 0:
                fault(network, hosts, account, rng, left)
            account.seconds, account.load = time.monotonic() - started, os.getloadavg()[0]
            hosts.wait_for_steps(hosts.steps() + MIN_STEPS, END_S)
            hosts.end()
        check(hosts, network, s3, finished.seen, account)
        stack.callback(stop_pods, network, directory)
    check_nothing_is_left(name, directory, account)
    return account


def fault(network: Network, hosts: TwoHosts, account: Account, rng: random.Random, left: float) -> None:
    """Wait a while, then kill a process or pull a cable for some seconds."""
    rest(hosts, min(left, rng.uniform(3.0, 12.0)))
    if rng.random() < 0.5:
        host, seconds = rng.choice(HOSTS), min(left, rng.choice((rng.uniform(1, 5), rng.uniform(5, 40))))
        network.pull(host)
        try:
            rest(hosts, seconds)
        finally:
            network.plug(host)
        account.cuts[host] += 1
        account.cut_s += seconds
        account.longest_cut_s = max(account.longest_cut_s, seconds)
        return
    running = hosts.running()
    victim = rng.choice(sorted(running))
    with suppress(ProcessLookupError):
        os.kill(running[victim], signal.SIGKILL)
        account.kills[victim] += 1


def rest(hosts: TwoHosts, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(0.5, left))
        hosts.tend()


# ------------------------------------------------------------------------------------------- the account


def check(
    hosts: TwoHosts, network: Network, s3: Mapping[str, str], seen: Mapping[tuple[int, int], str], account: Account
) -> None:
    """Compare the queue, the steps of the trainer and the traces in the store."""
    layout, wrong = hosts.layout, account.wrong
    steps = {int(path.stem): json.loads(path.read_text())["groups"] for path in layout.steps.glob("[0-9]*.json")}
    account.steps, account.finished = len(steps), len(seen)
    if sorted(steps) != list(range(1, len(steps) + 1)):
        wrong.append(f"the steps are {sorted(steps)}")
    taken = Counter(group for groups in steps.values() for group in groups)
    wrong += [f"group {group} was trained on in {count} steps" for group, count in taken.items() if count > 1]
    groups = rows(layout, "SELECT id, step, informative, dropped FROM groups")
    recorded = {id: step for id, step, _, _ in groups if step in steps}
    if recorded != {group: step for step, found in steps.items() for group in found}:
        wrong.append("the queue and the trainer disagree on what was trained in which step")
    informative = Counter(step for _, step, informative, _ in groups if step is not None and informative)
    wrong += [
        f"step {step} has {informative[step]} informative groups" for step in steps if informative[step] != GROUPS
    ]
    wrong += [f"group {id} was dropped: {dropped}" for id, _, _, dropped in groups if dropped is not None]
    slots = rows(
        layout, "SELECT slots.id, attempt, state, trace, oldest, step FROM slots JOIN groups ON grp = groups.id"
    )
    ready = {(id, attempt): trace for id, attempt, state, trace, _, _ in slots if state == "ready"}
    account.incidents = Counter(str(kind) for (kind,) in rows(layout, "SELECT kind FROM troubles"))
    gone = {each for each in seen if ready.get(each) != seen[each]}
    if len(gone) > account.incidents["stale"]:
        stale = account.incidents["stale"]
        wrong.append(
            f"{len(gone)} finished rollouts are gone, of which {stale} had become too stale: {sorted(gone)[:5]}"
        )
    trained = [step - 1 - oldest for *_, oldest, step in slots if step in steps]
    account.trained, account.staleness = len(trained), max(trained, default=0)
    if account.staleness > MAX_STALENESS:
        wrong.append(f"a rollout of staleness {account.staleness} was trained on")
    if len(trained) != GROUP_SIZE * len(recorded):
        wrong.append(f"{len(trained)} rollouts were trained on in {len(recorded)} groups of {GROUP_SIZE}")
    names = json.dumps([str(trace) for trace in ready.values()])
    command = [*network.prefix("switch"), sys.executable, __file__, "--missing-traces", str(layout.run)]
    done = subprocess.run(
        command, input=names, env={**os.environ, **s3}, capture_output=True, text=True, timeout=END_S, check=False
    )
    wrong += [done.stderr[-500:]] if done.returncode else json.loads(done.stdout)


def missing_traces(run: Path) -> list[str]:
    """Return which of the traces named on the input are not in the store of a run, or cannot be read."""
    from etude.rollouts.settings import rollout_store

    store, wrong = ObjectStore(rollout_store(RunLayout.of_run(run))), []
    with tempfile.TemporaryDirectory() as directory:
        for name in json.load(sys.stdin):
            data = store.get(name)
            if data is None:
                wrong.append(f"{name} is not in the store")
                continue
            (file := Path(directory) / Path(name).name).write_bytes(data)
            if not load_trace(file).segments:
                wrong.append(f"{name} is empty")
    return wrong


def stop_pods(network: Network, directory: Path) -> None:
    """Stop the zygotes of the second host; they serve whoever comes next on a machine."""
    import asyncio

    async def stop(state: Path) -> None:
        async with open_fleet(state=state) as fleet:
            assert fleet.local is not None
            await fleet.local.backend.shutdown()

    for state in (directory / "there").rglob("rl/pods"):
        asyncio.run(stop(state))


def check_nothing_is_left(name: str, directory: Path, account: Account) -> None:
    """Look for processes, namespaces and mounts of the drill."""
    deadline = time.monotonic() + 15.0
    while left := list(leftovers(name, directory)):
        if time.monotonic() > deadline:
            account.wrong += [f"left: {each}" for each in left]
            return
        time.sleep(0.5)


def leftovers(name: str, directory: Path) -> Iterator[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    yield from (line for line in listed.splitlines() if line.startswith(f"{name}-"))
    yield from (line for line in Path("/proc/mounts").read_text().splitlines() if str(directory) in line)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in line and Path(__file__).name not in line:
                yield f"process {path.parent.name}: {line[:200]}"


# ------------------------------------------------------------------------------------------- the program


@contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """Give an empty directory, removed afterwards unless it was named."""
    if given is not None:
        given.mkdir(parents=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="etude-hosts-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def report(account: Account) -> str:
    kills = ", ".join(f"{name} {count}" for name, count in sorted(account.kills.items()))
    cuts = ", ".join(f"{name} {count}" for name, count in sorted(account.cuts.items()))
    cuts += f"; {account.cut_s:.0f} s in all, up to {account.longest_cut_s:.0f} s"
    requeued = ", ".join(f"{kind} {count}" for kind, count in sorted(account.incidents.items())) or "none"
    lines = [
        f"seed {account.seed}, {account.seconds / 60:.1f} minutes of faults, load of the machine {account.load:.1f}",
        f"kills: {account.kills.total()} ({kills})",
        f"cables pulled: {account.cuts.total()} ({cuts})",
        f"steps: {account.steps}; rollouts finished {account.finished}, trained {account.trained}",
        f"rollouts queued again: {requeued}; staleness at most {account.staleness} of {MAX_STALENESS}",
        *([f"WRONG: {each}" for each in account.wrong] or ["nothing was found wrong"]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--out", type=Path, help="new directory for the run and the logs; default: a temporary one")
    parser.add_argument("--missing-traces", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.missing_traces:
        print(json.dumps(missing_traces(given.missing_traces)))
        return
    if reason := why_not():
        parser.error(reason)
    print(f"seed {given.seed}", flush=True)
    with work_directory(given.out) as directory:
        account = drill(directory.absolute(), 60.0 * given.minutes, given.seed)
    print(report(account))
    sys.exit(bool(account.wrong))


if __name__ == "__main__":
    main()
