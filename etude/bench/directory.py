"""The directory of a comparison and its specification, which is written before the first trial and does not change.

    bench.json           policies, tasks (with their digests), samples, and what produced the results; resuming with
                         other policies, tasks or settings is refused
    slots/NAME.sqlite    the rollout queue of a policy: one slot per trial
    traces/NAME/TASK/    the trace of every trial
    usage.jsonl          the tokens of every reply of an endpoint, also of trials that failed
    trials.jsonl, summary.json, report.html

A policy may be added later: it is run on the same tasks under the same settings.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude import __version__
from etude.bench.policies import BenchPolicy, PolicyProfile, TokenPrice, probe_policy
from etude.bench.provenance import harness_digest, merge_harness, provenance
from etude.bench.results import PolicyResults, read_results
from etude.config import differing_keys
from etude.errors import InputError
from etude.evaluation.held_out import choose_tasks
from etude.files import take_lock, write_atomically
from etude.harness.trace_store import SUFFIX
from etude.tasks.base_images import HostSettings
from etude.tasks.harbor import find_tasks, read_task, task_digest
from etude.tasks.task import Task

FORMAT = 3
OWN_NAMES = ("lock", "slots", "traces", "usage.jsonl")  # may exist before bench.json if a run was killed


class BenchDirectory:
    """The paths of one comparison."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spec_file, self.lock = root / "bench.json", root / "lock"
        self.all_slots, self.all_traces = root / "slots", root / "traces"
        self.usage = root / "usage.jsonl"  # the tokens of every reply of an endpoint
        self.trials, self.summary, self.report = root / "trials.jsonl", root / "summary.json", root / "report.html"

    def slots(self, policy: str) -> Path:
        return self.all_slots / f"{policy}.sqlite"

    def trace(self, policy: str, task: str, sample: int) -> Path:
        return self.all_traces / policy / task / f"{sample:02d}{SUFFIX}"


@dataclass(frozen=True)
class BenchSpec:
    """The specification of a comparison: policies, tasks, trials per task (`samples`) and settings."""

    policies: tuple[BenchPolicy, ...]
    profiles: Mapping[str, PolicyProfile]  # by policy
    tasks: Mapping[str, Task]
    samples: int
    host_settings: HostSettings
    seed: int = 0
    prices: Mapping[str, TokenPrice] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of bench.json. It contains neither API keys nor the names of their variables."""
        return {
            "format": FORMAT,
            "etude": __version__,
            "harness": [harness_digest()],
            "policies": [
                {
                    "name": each.name,
                    "kind": each.kind,
                    "where": each.where,
                    "model": each.model or each.name,
                    **self.profiles[each.name].to_json(),
                    **provenance(each, self.profiles[each.name]),
                }
                for each in self.policies
            ],
            "tasks": {name: task_digest(task.directory) for name, task in self.tasks.items()},
            "samples": self.samples,
            "seed": self.seed,
            "prices": {name: asdict(price) for name, price in self.prices.items()},
        }


def read_spec(bench: BenchDirectory) -> dict[str, Any]:
    """Read bench.json."""
    try:
        found = json.loads(bench.spec_file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise InputError(f"{bench.spec_file}: format {found['format']}, but this version reads format {FORMAT}")
        return dict(found)
    except FileNotFoundError:
        raise InputError(f"{bench.root}: no comparison there; name a directory made by `etude bench run`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{bench.spec_file}: cannot be read ({error!r})") from None


def find_named_tasks(directories: Sequence[Path], limit: int | None = None) -> dict[str, Task]:
    """Return the tasks by their path below the directories; with a limit, that many of them, evenly chosen."""
    found: dict[str, Path] = {}
    for top in directories:
        for path in find_tasks(top):
            name = path.relative_to(top).as_posix() if path != top else path.resolve().name
            if found.setdefault(name, path) != path:
                raise InputError(
                    f"--tasks: {found[name]} and {path} are both called {name}; put them under one parent directory"
                )
    if not found:
        shown = ", ".join(map(str, directories))
        raise InputError(f"--tasks {shown}: no task found (a directory with a task.toml)")
    tasks = {name: read_task(found[name]) for name in choose_tasks(found, limit)}
    if steps := [task.directory for task in tasks.values() if task.steps]:
        raise InputError(f"{steps[0]}: a task with steps, each with its own session; a trial is one session")
    return tasks


async def probe_policies(
    bench: BenchDirectory, policies: Sequence[BenchPolicy], changes: Mapping[str, Any]
) -> dict[str, PolicyProfile]:
    """Check that all policies are usable. An endpoint whose trials are all finished need not be reachable any more."""
    recorded, done = {}, set[str]()
    if bench.spec_file.exists():
        spec, found = read_all_results(bench)
        recorded = {policy["name"]: policy for policy in spec["policies"]}
        done = {results.name for results in found if results.finished and not results.evaluation.dropped}

    async def probe(policy: BenchPolicy) -> PolicyProfile:
        if policy.kind == "endpoint" and policy.name in done:
            return PolicyProfile.from_json(recorded[policy.name], changes)
        return await probe_policy(policy, changes)

    profiles = await asyncio.gather(*map(probe, policies))
    return {policy.name: profile for policy, profile in zip(policies, profiles, strict=True)}


# ------------------------------------------------------------------------------------------- opening


def check_directory(bench: BenchDirectory, resume: bool) -> None:
    """Raise InputError for a directory that holds something else, before anything is run or written."""
    root = bench.root
    if root.exists() and not root.is_dir():
        raise InputError(f"--out {root} is a file; name a directory")
    if bench.spec_file.exists():
        if not resume:
            raise InputError(f"{root} already holds a comparison; add --resume to continue it, or name another --out")
    elif root.is_dir() and (foreign := [name for name in sorted(os.listdir(root)) if name not in OWN_NAMES]):
        raise InputError(f"{root} is neither a comparison nor empty (it has {foreign[0]}); name another --out")


@contextmanager
def lock_directory(bench: BenchDirectory, spec: BenchSpec, resume: bool) -> Iterator[None]:
    """Lock the directory and write the specification; refuse one that differs from the recorded one."""
    check_directory(bench, resume)
    bench.root.mkdir(parents=True, exist_ok=True)
    lock = take_lock(bench.lock, f"the comparison {bench.root}")
    try:
        form = spec.to_json()
        if bench.spec_file.exists():
            recorded = read_spec(bench)
            check_same_spec(recorded, form, bench.root)
            form["harness"] = merge_harness(recorded)
        for directory in (bench.all_slots, bench.all_traces):
            directory.mkdir(exist_ok=True)
        write_atomically(bench.spec_file, json.dumps(form, indent=1) + "\n")
        yield
    finally:
        os.ftruncate(lock, 0)
        os.close(lock)


def check_same_spec(recorded: Mapping[str, Any], asked: Mapping[str, Any], root: Path) -> None:
    """Raise InputError if the specification differs from the recorded one, other than by further policies."""
    names = [policy["name"] for policy in recorded["policies"]]
    if [policy["name"] for policy in asked["policies"][: len(names)]] != names:
        raise InputError(
            f"{root}: its policies are {', '.join(names)}; name them in this order, and new ones after them"
        )
    changed = differing_keys(_compared(recorded, len(names)), _compared(asked, len(names)))
    if changed:
        lines = "\n".join(f"    {line}" for line in changed[:10])
        raise InputError(f"{root} was started with other settings; undo these changes, or name another --out\n{lines}")


def _compared(form: Mapping[str, Any], policies: int) -> dict[str, Any]:
    """Return the part of a specification that must not change. Prices may, and the code."""
    kept = {
        name: value for name, value in form.items() if name not in ("etude", "format", "harness", "prices", "policies")
    }
    for policy in form["policies"][:policies]:
        moved = ("where",) if policy["kind"] == "checkpoint" else ()  # it is identified by its digest
        kept[f"policy {policy['name']}"] = {name: value for name, value in policy.items() if name not in moved}
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]  # tuples become lists, as in the file


def read_all_results(bench: BenchDirectory) -> tuple[dict[str, Any], list[PolicyResults]]:
    """Return the specification of a comparison and the results of its policies so far."""
    spec = read_spec(bench)
    tasks, samples = len(spec["tasks"]), int(spec["samples"])
    names = [str(policy["name"]) for policy in spec["policies"]]
    return spec, [read_results(name, bench.slots(name), tasks, samples) for name in names]
