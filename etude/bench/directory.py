"""Where a comparison lies, and what it was asked: written down before the first trial, and not changed under it.

    bench.json           policies, tasks (with their digests), samples, settings; a resume with others is refused
    slots/NAME.sqlite    the trials of a policy: what every slot came to
    traces/NAME/TASK/    the session of every trial
    trials.jsonl, summary.json, report.html

A policy may be added later: it meets the same tasks under the same settings.
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
from etude.bench.candidates import Candidate, Known, Price, look_at
from etude.bench.results import Results, read_results
from etude.errors import InputError
from etude.evaluation.held_out import choose_tasks
from etude.files import take_lock
from etude.harness.trace_store import SUFFIX
from etude.rollouts.rollout import Settings
from etude.runs.layout import write_whole
from etude.tasks.harbor import find_tasks, read_task, task_digest
from etude.tasks.task import Task

FORMAT = 1
OURS = ("lock", "slots", "traces")  # there before the question is: a beginning that was killed


@dataclass(frozen=True)
class Place:
    """The paths of one comparison."""

    root: Path

    @property
    def questions(self) -> Path:
        return self.root / "bench.json"

    def slots(self, policy: str) -> Path:
        return self.root / "slots" / f"{policy}.sqlite"

    def trace(self, policy: str, task: str, sample: int) -> Path:
        return self.root / "traces" / policy / task / f"{sample:02d}{SUFFIX}"

    @property
    def trials(self) -> Path:
        return self.root / "trials.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"


@dataclass(frozen=True)
class Question:
    """What a comparison asks: who, on what, how often, and how."""

    candidates: tuple[Candidate, ...]
    known: Mapping[str, Known]  # of each candidate
    tasks: Mapping[str, Task]
    samples: int
    settings: Settings
    seed: int = 0
    prices: Mapping[str, Price] = field(default_factory=dict)

    def form(self) -> dict[str, Any]:
        """As it is written down. Keys are not in it, nor the names of their variables."""
        settings = self.settings
        return {
            "format": FORMAT,
            "etude": __version__,
            "policies": [
                {
                    "name": each.name,
                    "kind": each.kind,
                    "where": each.where,
                    "model": each.model or each.name,
                    **asdict(self.known[each.name]),
                }
                for each in self.candidates
            ],
            "tasks": {name: task_digest(task.directory) for name, task in self.tasks.items()},
            "samples": self.samples,
            "seed": self.seed,
            "temperature": settings.temperature,
            "environment": asdict(settings.environment),
            "budget": asdict(settings.budget),
            "summaries": asdict(settings.summaries),
            "prices": {name: asdict(price) for name, price in self.prices.items()},
        }


def read_questions(place: Place) -> dict[str, Any]:
    """What was asked, as it was written down."""
    try:
        found = json.loads(place.questions.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise InputError(f"{place.questions}: of format {found['format']}; this program reads {FORMAT}")
        return dict(found)
    except FileNotFoundError:
        raise InputError(f"{place.root}: no comparison there; name a directory made by `etude bench run`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{place.questions}: cannot be read ({error!r})") from None


def find_named_tasks(directories: Sequence[Path], limit: int | None = None) -> dict[str, Task]:
    """Tasks by their places below the directories; with a limit, so many of them, evenly chosen."""
    found: dict[str, Path] = {}
    for top in directories:
        for path in find_tasks(top):
            name = path.relative_to(top).as_posix() if path != top else path.resolve().name
            if found.setdefault(name, path) != path:
                raise InputError(f"--tasks: {found[name]} and {path} are both called {name}; give them one parent")
    if not found:
        shown = ", ".join(map(str, directories))
        raise InputError(f"--tasks {shown}: no task there (a directory with a task.toml)")
    tasks = {name: read_task(found[name]) for name in choose_tasks(found, limit)}
    if steps := [task.directory for task in tasks.values() if task.steps]:
        raise InputError(f"{steps[0]}: a task with steps, each a session of its own; a trial is one session")
    return tasks


async def look_at_all(place: Place, candidates: Sequence[Candidate], dialect: str, window: int) -> dict[str, Known]:
    """See that all candidates can be had. An endpoint that has given all its answers need not be there any more."""
    recorded, done = {}, set[str]()
    if place.questions.exists():
        form, found = all_results(place)
        recorded = {policy["name"]: policy for policy in form["policies"]}
        done = {results.name for results in found if results.over and not results.evaluation.given_up}

    async def look(candidate: Candidate) -> Known:
        if candidate.kind == "endpoint" and candidate.name in done:
            facts = recorded[candidate.name]
            return Known(facts["window"], facts["dialect"], facts["digest"])
        return await look_at(candidate, dialect, window)

    looks = await asyncio.gather(*map(look, candidates))
    return {candidate.name: known for candidate, known in zip(candidates, looks, strict=True)}


# ------------------------------------------------------------------------------------------- opening it


def check_place(place: Place, resume: bool) -> None:
    """Refuse a directory that holds something else, before anything is asked or written."""
    root = place.root
    if root.exists() and not root.is_dir():
        raise InputError(f"--out {root} is a file; name a directory")
    if place.questions.exists():
        if not resume:
            raise InputError(f"{root} already holds a comparison; add --resume to go on with it, or name another --out")
    elif root.is_dir() and (foreign := [name for name in sorted(os.listdir(root)) if name not in OURS]):
        raise InputError(f"{root} is not a comparison and not empty (it has {foreign[0]}); name another --out")


@contextmanager
def open_place(place: Place, question: Question, resume: bool) -> Iterator[None]:
    """Hold the directory for writing, with the question written down; refuse to mix two."""
    check_place(place, resume)
    place.root.mkdir(parents=True, exist_ok=True)
    lock = take_lock(place.root / "lock", f"the comparison {place.root}")
    try:
        form = question.form()
        if place.questions.exists():
            check_same(read_questions(place), form, place.root)
        for name in ("slots", "traces"):
            (place.root / name).mkdir(exist_ok=True)
        write_whole(place.questions, json.dumps(form, indent=1) + "\n")
        yield
    finally:
        os.ftruncate(lock, 0)
        os.close(lock)


def check_same(recorded: Mapping[str, Any], asked: Mapping[str, Any], root: Path) -> None:
    """A comparison goes on as it was begun; policies may be added after those that are there."""
    names = [policy["name"] for policy in recorded["policies"]]
    if [policy["name"] for policy in asked["policies"][: len(names)]] != names:
        raise InputError(f"{root}: its policies are {', '.join(names)}; name them in this order, and new ones after")
    changed = list(_differing(_compared(recorded, len(names)), _compared(asked, len(names))))
    if changed:
        about = "\n".join(f"    {line}" for line in changed[:10])
        raise InputError(f"{root} was begun otherwise; undo this, or name another --out\n{about}")


def _compared(form: Mapping[str, Any], policies: int) -> dict[str, Any]:
    """What makes two comparisons the same. What tokens cost is no part of it."""
    kept = {name: value for name, value in form.items() if name not in ("etude", "format", "prices", "policies")}
    for policy in form["policies"][:policies]:
        moved = ("where",) if policy["kind"] == "checkpoint" else ()  # one in another place is the same one
        kept[f"policy {policy['name']}"] = {name: value for name, value in policy.items() if name not in moved}
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]  # tuples become lists, as in the file


def _differing(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            yield from _differing(before.get(name), now.get(name), f"{where}.{name}" if where else name)
    elif before != now:
        yield f"{where}: {_word(before)} then, {_word(now)} now"


def _word(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def all_results(place: Place) -> tuple[dict[str, Any], list[Results]]:
    """The question of a comparison, and the results of its policies up to now."""
    form = read_questions(place)
    tasks, samples = len(form["tasks"]), int(form["samples"])
    names = [str(policy["name"]) for policy in form["policies"]]
    return form, [read_results(name, place.slots(name), tasks, samples) for name in names]
