"""What the pages ask for, as JSON: the same answers for the server and for the self-contained file.

    run                                     everything the first page shows
    rollouts                                all rollouts in columns, and all groups
    group/SET/ID                            one prompt, its rollouts side by side
    rollout/SET/GROUP/NUMBER/ATTEMPT        one session
    tokens/SET/GROUP/NUMBER/ATTEMPT/SEGMENT/START
    tasks, task/NAME                        what there is to do, and how it went over time
    changes                                 small: what a page compares to know whether to ask again

SET is training or evaluation. Names are looked up, never opened: nothing but the run and its tasks can be asked for.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from etude.errors import EtudeError, InputError
from etude.harness.trace import Trace
from etude.harness.trace_store import load_trace
from etude.rollouts.queue import Slot
from etude.runs.layout import Place, read_status
from etude.viewer import chart_data, overview
from etude.viewer.catalogue import SETS, Catalogue, Group, SetName, in_columns, rows_of, stamp, task_of
from etude.viewer.run_reader import Complain, Facts, JsonLines, life, number, read_recipe, read_stages
from etude.viewer.session_view import Cut, Spelling, strip, tell, tell_tokens
from etude.viewer.tasks import Known, known_tasks, tell_task

SILENT_S = 10.0  # services write every second; a busy machine is late


class NotHere(InputError):
    """There is nothing under this address."""


class Answers:
    """The answers about one run."""

    def __init__(self, path: Path, cut: Cut | None = None) -> None:
        self.path = Path(path).resolve()
        self.place = Place(self.path)
        self.cut = cut or Cut()
        self._metrics = JsonLines(self.path / "metrics.jsonl")
        self._lineage = JsonLines(self.path / "lineage.jsonl")
        self._catalogue = Catalogue(self.place)
        self._tasks: tuple[list[float], dict[str, Known], list[str]] | None = None
        self._lock = threading.Lock()  # what is remembered is shared by all who ask

    def answer(self, address: str) -> Facts:
        """What there is under an address; NotHere when that is nothing."""
        what, *rest = address.split("/")
        answers: dict[str, Callable[..., Facts]] = {
            "run": self.run,
            "rollouts": self.rollouts,
            "changes": self.changes,
            "tasks": self.tasks,
        }
        if not rest and what in answers:
            return answers[what]()
        if what == "task" and rest:
            return self.task("/".join(rest))
        places: dict[str, tuple[int, Callable[..., Facts]]] = {
            "group": (1, self.group),
            "rollout": (3, self.rollout),
            "tokens": (5, self.tokens),
        }
        if what in places and len(rest) == 1 + places[what][0]:
            numbers = [int(part) for part in rest[1:] if part.isascii() and part.isdigit() and len(part) < 10]
            if rest[0] in SETS and len(numbers) == places[what][0]:
                return places[what][1](rest[0], *numbers)
        raise NotHere(f"there is nothing under {address!r}")

    # --------------------------------------------------------------------------------------- the run

    def run(self) -> Facts:
        """Everything the first page shows."""
        problems: list[str] = []
        with self._lock:
            text, recipe = read_recipe(self.path, problems.append)
            stages = read_stages(self.path, recipe, problems.append)
            records = list(self._metrics.read(problems.append))
            lineage = list(self._lineage.read(problems.append))
            now = life(self.path, stages)
            curves = chart_data.training_curves(records, [stage["name"] for stage in stages])
            rl = self._rl(recipe, records, problems)
            facts: Facts = next((stage["facts"] for stage in stages if stage["name"] == "rl"), {})
            outcome = overview.outcome(rl["evaluations"], facts, recipe) if rl else None
            told: Facts = {
                "name": str(recipe.get("name") or self.path.name),
                "directory": self.path.name,
                "life": {"state": now.state, "words": now.words},
                "recipe": text,
                "model": overview.read_model(self.path, lineage),
                "outcome": outcome,
                "stages": self._stages(stages, recipe, records, lineage, curves, outcome),
                "training": curves,
                "measures": _measures(records),
                "rl": rl,
                "newest": number(records[-1].get("time")) if records else None,
            }
        return told | {"problems": problems}

    def _stages(
        self,
        stages: Sequence[Facts],
        recipe: Facts,
        records: Sequence[Facts],
        lineage: Sequence[Facts],
        curves: Sequence[Facts],
        outcome: Facts | None,
    ) -> list[Facts]:
        """The stages with how far each is, what it did and how long that took."""
        times = overview.stage_times(stages, records, lineage)
        results = overview.stage_results(stages, recipe, curves, outcome)
        found = []
        for stage, result in zip(stages, results, strict=True):
            lines = [record for record in records if record.get("stage") == stage["name"]]
            section = recipe.get(stage["name"])
            steps = number(section.get("steps")) if isinstance(section, dict) else None
            last = max((step for line in lines if (step := number(line.get("step"))) is not None), default=None)
            found.append({**stage, "step": last, "steps": steps, **result, **times.get(stage["name"], {})})
        return found

    def _rl(self, recipe: Facts, records: Sequence[Facts], problems: list[str]) -> Facts | None:
        if not self.place.root.is_dir() and not any(record.get("stage") == "rl" for record in records):
            return None
        groups = self._groups(recipe, problems)
        section = recipe.get("rl") if isinstance(recipe.get("rl"), dict) else {}
        assert isinstance(section, dict)
        deaths = JsonLines(self.place.logs / "deaths.jsonl").read(problems.append)
        weights = JsonLines(self.path / "rewards.jsonl").read(problems.append)
        states: dict[str, int] = {}
        for group in groups:
            name = "dropped" if group.standing.dropped else "trained" if group.standing.step is not None else "open"
            key = f"{group.set}/{name}"
            states[key] = states.get(key, 0) + 1
        return {
            "plan": {name: section.get(name) for name in ("steps", "group_size", "groups_per_step", "max_staleness")},
            "steps": chart_data.step_columns(records, groups),
            "evaluations": chart_data.evaluations(records),
            "rollouts": {table: sum(len(group.rows) for group in groups if group.set == table) for table in SETS},
            "groups": states,
            "services": self.services(problems),
            "deaths": deaths[-100:],
            "troubles": self._catalogue.troubles(problems.append),
            "weights": weights[-20:],
        }

    def _groups(self, recipe: Facts, problems: list[str]) -> list[Group]:
        section = recipe.get("rl")
        estimator = section.get("estimator") if isinstance(section, dict) else None
        self._catalogue.divide_by_std = bool(estimator.get("divide_by_std")) if isinstance(estimator, dict) else False
        return self._catalogue.groups(problems.append)

    def groups(self) -> list[Group]:
        """All groups with their rollouts, as far as they can be read."""
        with self._lock:
            return self._groups(read_recipe(self.path, lambda problem: None)[1], [])

    def services(self, problems: list[str]) -> list[Facts]:
        """What every process of the run last said of itself."""
        found = []
        for path in sorted(self.place.services.glob("*.json")):
            try:
                told = read_status(self.place, path.stem)
            except (EtudeError, OSError, UnicodeError, TypeError, ValueError) as error:
                problems.append(f"rl/services/{path.name} cannot be read: {error}")
                continue
            if told is not None:
                heard = number(told.get("time")) or 0.0
                silent = time.time() - heard > SILENT_S and told.get("state") != "ended"
                numbers = {name: told[name] for name in FIGURES if number(told.get(name)) is not None}
                held = told.get("held")
                numbers |= {"rollouts": len(held)} if isinstance(held, list | dict) else {}
                found.append(
                    {
                        "name": path.stem,
                        "state": "silent" if silent else str(told.get("state", "")),
                        "heard": heard,
                        "waiting_for": str(told.get("waiting_for") or ""),
                        "figures": numbers,
                    }
                )
        return found

    def changes(self) -> Facts:
        """What tells a page that it shows something old."""
        problems: list[str] = []
        _, recipe = read_recipe(self.path, problems.append)
        now = life(self.path, read_stages(self.path, recipe, problems.append))
        return {
            "life": {"state": now.state, "words": now.words},
            "metrics": _stamp(self.path / "metrics.jsonl") + _stamp(self.path / "state.json"),
            "rollouts": stamp(self.place),
            "services": self.services(problems),
            "now": time.time(),
        }

    # --------------------------------------------------------------------------------------- rollouts

    def rollouts(self) -> Facts:
        """All of them, in columns, and the groups they belong to."""
        problems: list[str] = []
        with self._lock:
            _, recipe = read_recipe(self.path, problems.append)
            groups = self._groups(recipe, problems)
        told = [
            [g.set, g.standing.id, g.task, g.step, g.standing.size, g.standing.ready, g.standing.failures]
            + ([g.standing.dropped] if g.standing.dropped else [])
            for g in groups
        ]
        return {"rollouts": in_columns(rows_of(groups)), "groups": told, "problems": problems}

    def group(self, table: SetName, id: int) -> Facts:
        """One prompt, its rollouts side by side."""
        standing, group = self._catalogue.group(table, id)
        task, measured = task_of(table, standing.task)
        above = self._catalogue.advantages(table, group)
        slots = []
        for slot in group.slots:
            path = self._catalogue.trace(table, slot, slot.attempt) if slot.reward is not None else None
            slots.append(
                {
                    "number": slot.number,
                    "attempt": slot.attempt,
                    "state": slot.state,
                    "note": slot.note,
                    "reward": _in_short(slot.reward),
                    "advantage": above.get(slot.number),
                    "versions": [slot.oldest, slot.newest],
                    "others": [each for each in self._catalogue.attempts(table, slot) if each != slot.attempt],
                    **(_glance(path, path.stat().st_mtime_ns) if path else {}),
                }
            )
        return {
            "set": table,
            "id": id,
            "task": task,
            "step": measured if table == "evaluation" else standing.step,
            "dropped": standing.dropped,
            "failures": standing.failures,
            "slots": slots,
            "instruction": self._instruction(task),
        }

    def rollout(self, table: SetName, group: int, number: int, attempt: int) -> Facts:
        """One session, with what it was paid."""
        standing, found = self._catalogue.group(table, group)
        slot, trace = self._session(table, found.slots, number, attempt)
        counts = attempt == slot.attempt and slot.reward is not None
        task, measured = task_of(table, standing.task)
        above = self._catalogue.advantages(table, found)
        paid = trace.facts.get("reward")
        return {
            "set": table,
            "group": group,
            "number": number,
            "attempt": attempt,
            "task": task,
            "step": (measured if table == "evaluation" else standing.step) if counts else None,
            "counts": counts,  # False: it was sampled again, and nobody learned from it
            "reward": slot.reward if counts else paid if isinstance(paid, dict) else None,
            "advantage": above.get(number) if counts else None,
            "weights": [slot.oldest, slot.newest] if counts else None,
            "note": slot.note,
            "instruction": self._instruction(task),
            "siblings": [
                [each.number, each.attempt, (each.reward or {}).get("total"), (each.reward or {}).get("solved")]
                for each in found.slots
                if each.reward is not None
            ],
            "story": tell(trace, self.cut),
        }

    def tokens(self, table: SetName, group: int, number: int, attempt: int, segment: int, start: int) -> Facts:
        """A page of a session's tokens."""
        _, found = self._catalogue.group(table, group)
        _, trace = self._session(table, found.slots, number, attempt)
        return tell_tokens(trace, segment, start, Spelling(self.place.model))

    def _session(self, table: SetName, slots: Sequence[Slot], number: int, attempt: int) -> tuple[Slot, Trace]:
        slot = next((slot for slot in slots if slot.number == number), None)
        path = self._catalogue.trace(table, slot, attempt) if slot else None
        if slot is None or path is None:
            raise NotHere(
                f"there is no file of attempt {attempt} of rollout {number}; it was not kept, or not finished"
            )
        return slot, _trace(path, path.stat().st_mtime_ns)

    # --------------------------------------------------------------------------------------- tasks

    def tasks(self) -> Facts:
        """Every task of the run, and how it went each time."""
        problems: list[str] = []
        with self._lock:
            _, recipe = read_recipe(self.path, problems.append)
            groups = self._groups(recipe, problems)
            tries = chart_data.solve_rates(groups)
        known = self._known_tasks(problems.append)
        category = {row.task: row.category for row in rows_of(groups)}
        names = [*known, *(name for name in tries if name not in known)]
        told = [
            {
                "name": name,
                "split": known[name].split if name in known else "",
                "category": category.get(name, ""),
                "tries": tries.get(name, []),
            }
            for name in names
        ]
        return {"tasks": told, "problems": problems}

    def task(self, name: str) -> Facts:
        """One task: what is asked, its files, what validation found, and how it went."""
        problems: list[str] = []
        with self._lock:
            _, recipe = read_recipe(self.path, problems.append)
            tries = chart_data.solve_rates(self._groups(recipe, problems)).get(name, [])
        known = self._known_tasks(problems.append).get(name)
        if known is None and not tries:
            raise NotHere(f"this run has no task {name!r}")
        told: Facts = {"name": name, "tries": tries, "split": known.split if known else ""}
        return told | (tell_task(known, self.cut) if known else {}) | {"problems": problems}

    def _instruction(self, task: str) -> str:
        known = self._known_tasks(lambda problem: None).get(task)
        return self.cut(known.instruction) if known else ""

    def _known_tasks(self, complain: Complain) -> dict[str, Known]:
        """The tasks the run lists; read again only when the list has changed."""
        stamp = _stamp(self.place.tasks)
        if self._tasks is None or self._tasks[0] != stamp:
            problems: list[str] = []
            self._tasks = stamp, known_tasks(self.place, problems.append), problems
        for problem in self._tasks[2]:
            complain(problem)
        return self._tasks[1]


ON_A_CARD = ("total", "solved", "hack", "ending", "cost", "made", "seconds")
FIGURES = ("step", "version", "running", "waiting", "tokens_s", "cpu_s")  # of a service, worth a look


@lru_cache(maxsize=8)  # they may be large; whoever looks at tokens asks for one again and again
def _trace(path: Path, changed: int) -> Trace:
    return load_trace(path)


@lru_cache(maxsize=4096)
def _glance(path: Path, changed: int) -> Facts:
    """What a session looks like from afar."""
    try:
        trace = load_trace(path)
    except EtudeError as error:
        return {"problem": str(error)}
    return {"strip": strip(trace), "final": Cut(600)(trace.final)}


def _in_short(reward: Facts | None) -> Facts | None:
    """What a card shows of a reward; its evidence stands with the rollout."""
    return None if reward is None else {name: reward[name] for name in ON_A_CARD if name in reward}


def _stamp(path: Path) -> list[float]:
    try:
        about = path.stat()
    except OSError:
        return [0, 0]
    return [about.st_mtime, about.st_size]


def _measures(records: Sequence[Facts]) -> list[Facts]:
    """Stages that measure once and learn nothing: bits per byte, say."""
    lines = [record for record in records if record.get("stage") == "nll"]
    return [{name: number(value) for name, value in line.items() if number(value) is not None} for line in lines]


def tell_runs(runs: dict[str, Path]) -> Facts:
    """A directory of runs: each with how far it is, and what came of it."""
    told = []
    for name, path in runs.items():
        problems: list[str] = []
        _, recipe = read_recipe(path, problems.append)
        stages = read_stages(path, recipe, problems.append)
        now = life(path, stages)
        facts = {stage["name"]: stage["facts"] for stage in stages}
        told.append(
            {
                "directory": name,
                "name": str(recipe.get("name") or name),
                "life": {"state": now.state, "words": now.words},
                "stages": [{"name": stage["name"], "done": stage["done"]} for stage in stages],
                "before": facts.get("rl", {}).get("before"),
                "after": facts.get("rl", {}).get("after"),
                "changed": max(_stamp(path / "metrics.jsonl")[0], _stamp(path / "state.json")[0]),
                "problems": problems,
            }
        )
    return {"runs": told}
