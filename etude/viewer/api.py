"""The JSON that the pages request, for the server and for the self-contained report.

    run                                     the first page
    rollouts                                all rollouts as columns, and all groups
    group/SET/ID                            one prompt with its rollouts
    rollout/SET/GROUP/NUMBER/ATTEMPT        one session
    tokens/SET/GROUP/NUMBER/ATTEMPT/SEGMENT/START
    tasks, task/NAME                        the tasks and their solve rates over time
    changes                                 small; a page polls it to know whether to request the rest again

SET is training or evaluation. Addresses are looked up, never opened as paths: only the run and its tasks are reachable.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from etude.errors import EtudeError, InputError
from etude.evaluation.stage_comparison import CONTROL
from etude.harness.trace import Trace
from etude.rollouts.queue_records import Slot
from etude.rollouts.stored_traces import StoredTrace, StoredTraces
from etude.runs.layout import RunLayout
from etude.runs.service_status import ServiceView, StatusReader
from etude.viewer import chart_data, overview
from etude.viewer.catalogue import (
    SETS,
    RolloutCatalogue,
    RolloutGroup,
    RolloutSet,
    all_rows,
    queue_stamp,
    split_task_name,
    to_columns,
)
from etude.viewer.run_reader import (
    JsonLines,
    JsonObject,
    ReportProblem,
    as_number,
    read_recipe,
    read_stages,
    run_status,
)
from etude.viewer.session_view import TextLimit, TokenTexts, activity_strip, describe_session, describe_tokens
from etude.viewer.stage_outcome import recorded_gains, stage_outcome
from etude.viewer.tasks import ListedTask, describe_task, read_listed_tasks


class NotFound(InputError):
    """No such address."""


class RunApi:
    """Answers the pages' requests about one run."""

    def __init__(self, path: Path, text_limit: TextLimit | None = None) -> None:
        self.path = Path(path).resolve()
        self.layout = RunLayout(self.path)
        self.text_limit = text_limit or TextLimit()
        self._metrics = JsonLines(self.layout.metrics)
        self._lineage = JsonLines(self.layout.lineage)
        self._catalogue = RolloutCatalogue(self.layout)
        self._statuses = StatusReader(self.layout)
        self._tasks: tuple[list[float], dict[str, ListedTask], list[str]] | None = None
        self._lock = threading.Lock()  # protects the caches, which all requests share

    def get(self, address: str) -> JsonObject:
        """Return the JSON of an address; raise NotFound if there is none."""
        what, *rest = address.split("/")
        plain: dict[str, Callable[..., JsonObject]] = {
            "run": self.run,
            "rollouts": self.rollouts,
            "changes": self.changes,
            "tasks": self.tasks,
        }
        if not rest and what in plain:
            return plain[what]()
        if what == "task" and rest:
            return self.task("/".join(rest))
        numbered: dict[str, tuple[int, Callable[..., JsonObject]]] = {  # by how many numbers follow the set
            "group": (1, self.group),
            "rollout": (3, self.rollout),
            "tokens": (5, self.tokens),
        }
        if what in numbered and len(rest) == 1 + numbered[what][0]:
            numbers = [int(part) for part in rest[1:] if part.isascii() and part.isdigit() and len(part) < 10]
            if rest[0] in SETS and len(numbers) == numbered[what][0]:
                return numbered[what][1](rest[0], *numbers)
        raise NotFound(f"no such address: {address!r}")

    # --------------------------------------------------------------------------------------- the run

    def run(self) -> JsonObject:
        """Return the data of the first page."""
        problems: list[str] = []
        with self._lock:
            text, recipe = read_recipe(self.layout, problems.append)
            stages = read_stages(self.layout, recipe, problems.append)
            records = list(self._metrics.read(problems.append))
            lineage = list(self._lineage.read(problems.append))
            status = run_status(self.layout, stages)
            curves = chart_data.training_curves(records, [stage["name"] for stage in stages])
            rl = self._rl(recipe, records, problems)
            facts: JsonObject = next((stage["facts"] for stage in stages if stage["name"] == "evaluation"), {})
            result: JsonObject = {
                "name": str(recipe.get("name") or self.path.name),
                "directory": self.path.name,
                "status": asdict(status),
                "recipe": text,
                "model": overview.read_model(self.path, lineage),
                "outcome": stage_outcome(self.layout, records, facts, recipe),
                "stages": self._stages(stages, recipe, records, lineage, curves, rl["evaluations"] if rl else []),
                "training": curves,
                "measures": _evaluation_stage_records(records),
                "rl": rl,
                "newest": as_number(records[-1].get("time")) if records else None,
            }
        return result | {"problems": problems}

    def _stages(
        self,
        stages: Sequence[JsonObject],
        recipe: JsonObject,
        records: Sequence[JsonObject],
        lineage: Sequence[JsonObject],
        curves: Sequence[JsonObject],
        validations: Sequence[JsonObject],
    ) -> list[JsonObject]:
        """Return the stages with their progress, results and times."""
        times = overview.stage_times(stages, records, lineage)
        results = overview.stage_results(stages, recipe, curves, validations)
        found = []
        for stage, result in zip(stages, results, strict=True):
            lines = [record for record in records if record.get("stage") == stage["name"]]
            section = recipe.get(stage["name"])
            steps = as_number(section.get("steps")) if isinstance(section, dict) else None
            last = max((step for line in lines if (step := as_number(line.get("step"))) is not None), default=None)
            found.append({**stage, "step": last, "steps": steps, **result, **times.get(stage["name"], {})})
        return found

    def _rl(self, recipe: JsonObject, records: Sequence[JsonObject], problems: list[str]) -> JsonObject | None:
        if not self.layout.root.is_dir() and not any(record.get("stage") == "rl" for record in records):
            return None
        groups = self._groups(recipe, problems)
        section = recipe.get("rl") if isinstance(recipe.get("rl"), dict) else {}
        assert isinstance(section, dict)
        deaths = JsonLines(self.layout.logs / "deaths.jsonl").read(problems.append)
        changes = JsonLines(self.layout.changes).read(problems.append)
        states: dict[str, int] = {}
        for group in groups:
            name = "dropped" if group.progress.dropped else "trained" if group.progress.step is not None else "open"
            key = f"{group.set}/{name}"
            states[key] = states.get(key, 0) + 1
        return {
            "plan": {name: section.get(name) for name in ("steps", "group_size", "groups_per_step", "max_staleness")},
            "steps": chart_data.step_columns(records, groups),
            "evaluations": chart_data.evaluations(records),
            "benchmarks": chart_data.benchmarks(records),
            "rollouts": {name: sum(len(group.rows) for group in groups if group.set == name) for name in SETS},
            "groups": states,
            "services": self.services(problems),
            "deaths": deaths[-100:],
            "incidents": self._catalogue.incidents(problems.append),
            "changes": changes[-20:],
        }

    def _groups(self, recipe: JsonObject, problems: list[str]) -> list[RolloutGroup]:
        section = recipe.get("rl")
        estimator = section.get("estimator") if isinstance(section, dict) else None
        self._catalogue.divide_by_std = bool(estimator.get("divide_by_std")) if isinstance(estimator, dict) else False
        return self._catalogue.groups(problems.append)

    def groups(self) -> list[RolloutGroup]:
        """Return all groups that can be read, with their rollouts."""
        with self._lock:
            return self._groups(read_recipe(self.layout, lambda problem: None)[1], [])

    def services(self, problems: list[str]) -> list[JsonObject]:
        """Return the last status of every process of the run."""
        try:
            views = [ServiceView.of(name, status) for name, status in self._statuses.all().items()]
        except EtudeError as error:
            problems.append(str(error))
            return []
        return [{**asdict(view), "heard": time.time() - view.age_s} for view in views]

    def changes(self) -> JsonObject:
        """Return what a page compares to know whether its data is out of date."""
        problems: list[str] = []
        _, recipe = read_recipe(self.layout, problems.append)
        status = run_status(self.layout, read_stages(self.layout, recipe, problems.append))
        return {
            "status": asdict(status),
            "metrics": _stamp(self.layout.metrics) + _stamp(self.layout.state),
            "rollouts": queue_stamp(self.layout),
            "services": self.services(problems),
            "now": time.time(),
        }

    # --------------------------------------------------------------------------------------- rollouts

    def rollouts(self) -> JsonObject:
        """Return all rollouts as columns, and their groups."""
        problems: list[str] = []
        with self._lock:
            _, recipe = read_recipe(self.layout, problems.append)
            groups = self._groups(recipe, problems)
        result = [
            [g.set, g.progress.id, g.task, g.step, g.progress.size, g.progress.ready, g.progress.failures]
            + ([g.progress.dropped] if g.progress.dropped else [])
            for g in groups
        ]
        return {"rollouts": to_columns(all_rows(groups)), "groups": result, "problems": problems}

    def group(self, rollout_set: RolloutSet, id: int) -> JsonObject:
        """Return one prompt with its rollouts."""
        progress, group = self._catalogue.group(rollout_set, id)
        task, measured = split_task_name(rollout_set, progress.task)
        advantages = self._catalogue.advantages(rollout_set, group)
        slots = []
        for slot in group.slots:
            stored = self._catalogue.trace(rollout_set, slot, slot.attempt) if slot.reward is not None else None
            slots.append(
                {
                    "number": slot.number,
                    "attempt": slot.attempt,
                    "state": slot.state,
                    "note": slot.note,
                    "reward": _card_reward(slot.reward),
                    "advantage": advantages.get(slot.number),
                    "versions": [slot.oldest_step, slot.newest_step],
                    "others": [each for each in self._catalogue.attempts(rollout_set, slot) if each != slot.attempt],
                    **(_session_preview(self._catalogue.traces, stored) if stored else {}),
                }
            )
        return {
            "set": rollout_set,
            "id": id,
            "task": task,
            "step": measured if rollout_set == "evaluation" else progress.step,
            "dropped": progress.dropped,
            "failures": progress.failures,
            "slots": slots,
            "instruction": self._instruction(task),
        }

    def rollout(self, rollout_set: RolloutSet, group: int, number: int, attempt: int) -> JsonObject:
        """Return one session with its reward."""
        progress, found = self._catalogue.group(rollout_set, group)
        slot, trace = self._session(rollout_set, found.slots, number, attempt)
        counts = attempt == slot.attempt and slot.reward is not None
        task, measured = split_task_name(rollout_set, progress.task)
        advantages = self._catalogue.advantages(rollout_set, found)
        recorded = trace.facts.get("reward")
        return {
            "set": rollout_set,
            "group": group,
            "number": number,
            "attempt": attempt,
            "task": task,
            "step": (measured if rollout_set == "evaluation" else progress.step) if counts else None,
            "counts": counts,  # False: the slot was sampled again, this attempt was not trained on
            "reward": slot.reward if counts else recorded if isinstance(recorded, dict) else None,
            "advantage": advantages.get(number) if counts else None,
            "weights": [slot.oldest_step, slot.newest_step] if counts else None,
            "note": slot.note,
            "instruction": self._instruction(task),
            "siblings": [
                [each.number, each.attempt, (each.reward or {}).get("total"), (each.reward or {}).get("solved")]
                for each in found.slots
                if each.reward is not None
            ],
            "session": describe_session(trace, self.text_limit),
        }

    def tokens(
        self, rollout_set: RolloutSet, group: int, number: int, attempt: int, segment: int, start: int
    ) -> JsonObject:
        """Return one page of a session's tokens."""
        _, found = self._catalogue.group(rollout_set, group)
        _, trace = self._session(rollout_set, found.slots, number, attempt)
        return describe_tokens(trace, segment, start, TokenTexts(self.layout.model))

    def _session(self, rollout_set: RolloutSet, slots: Sequence[Slot], number: int, attempt: int) -> tuple[Slot, Trace]:
        slot = next((slot for slot in slots if slot.number == number), None)
        stored = self._catalogue.trace(rollout_set, slot, attempt) if slot else None
        if slot is None or stored is None:
            raise NotFound(f"no trace of attempt {attempt} of rollout {number}: it was not kept, or is not finished")
        return slot, _load_trace(self._catalogue.traces, stored)

    # --------------------------------------------------------------------------------------- tasks

    def tasks(self) -> JsonObject:
        """Return every task of the run with its groups."""
        problems: list[str] = []
        with self._lock:
            _, recipe = read_recipe(self.layout, problems.append)
            groups = self._groups(recipe, problems)
            history = chart_data.task_histories(groups)
        listed = self._listed_tasks(problems.append)
        category = {row.task: row.category for row in all_rows(groups)}
        names = [*listed, *(name for name in history if name not in listed)]
        result = [
            {
                "name": name,
                "split": listed[name].split if name in listed else "",
                "category": category.get(name, ""),
                "groups": history.get(name, []),
            }
            for name in names
        ]
        return {"tasks": result, "problems": problems}

    def task(self, name: str) -> JsonObject:
        """Return one task: instruction, files, validation result, and its groups."""
        problems: list[str] = []
        with self._lock:
            _, recipe = read_recipe(self.layout, problems.append)
            history = chart_data.task_histories(self._groups(recipe, problems)).get(name, [])
        listed = self._listed_tasks(problems.append).get(name)
        if listed is None and not history:
            raise NotFound(f"this run has no task {name!r}")
        result: JsonObject = {"name": name, "groups": history, "split": listed.split if listed else ""}
        return result | (describe_task(listed, self.text_limit) if listed else {}) | {"problems": problems}

    def _instruction(self, task: str) -> str:
        listed = self._listed_tasks(lambda problem: None).get(task)
        return self.text_limit(listed.instruction) if listed else ""

    def _listed_tasks(self, report_problem: ReportProblem) -> dict[str, ListedTask]:
        """Return the tasks that the run lists, read again only if the list has changed."""
        stamp = _stamp(self.layout.tasks)
        if self._tasks is None or self._tasks[0] != stamp:
            problems: list[str] = []
            self._tasks = stamp, read_listed_tasks(self.layout, problems.append), problems
        for problem in self._tasks[2]:
            report_problem(problem)
        return self._tasks[1]


CARD_KEYS = ("total", "solved", "hack", "ending", "cost", "made", "seconds")


@lru_cache(maxsize=8)  # traces may be large, and the pages of one trace's tokens are requested one by one
def _load_trace(traces: StoredTraces, stored: StoredTrace) -> Trace:
    return traces.load(stored.name)


@lru_cache(maxsize=4096)
def _session_preview(traces: StoredTraces, stored: StoredTrace) -> JsonObject:
    """Return the activity strip and the final message of a session, for a card."""
    try:
        trace = traces.load(stored.name)
    except EtudeError as error:
        return {"problem": str(error)}
    return {"strip": activity_strip(trace), "final": TextLimit(600)(trace.final)}


def _card_reward(reward: JsonObject | None) -> JsonObject | None:
    """Return the part of a reward that a card shows."""
    return None if reward is None else {name: reward[name] for name in CARD_KEYS if name in reward}


def _stamp(path: Path) -> list[float]:
    try:
        info = path.stat()
    except OSError:
        return [0, 0]
    return [info.st_mtime, info.st_size]


def _evaluation_stage_records(records: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the records of stages that only evaluate a model, such as bits per byte."""
    lines = [record for record in records if record.get("stage") == "nll"]
    return [{name: as_number(value) for name, value in line.items() if as_number(value) is not None} for line in lines]


def last_gain(facts: JsonObject) -> JsonObject | None:
    """Return the gain of the last model over the best earlier one, on the first test set."""
    gains = [gain for gain in recorded_gains(facts) if gain["against"] != CONTROL]
    if not gains:
        return None
    gain = gains[-1]
    name, difference = list(gain["sets"].items())[min(1, len(gain["sets"]) - 1)]  # validation is the first
    return {"model": gain["model"], "against": gain["against"], "set": name} | {
        key: as_number(difference.get(f"solved{end}")) for key, end in (("at", ""), ("low", "_low"), ("high", "_high"))
    }


def list_runs(runs: dict[str, Path]) -> JsonObject:
    """Return the runs of a directory with their status and held-out results."""
    result = []
    for name, layout in ((name, RunLayout(path)) for name, path in runs.items()):
        problems: list[str] = []
        _, recipe = read_recipe(layout, problems.append)
        stages = read_stages(layout, recipe, problems.append)
        status = run_status(layout, stages)
        facts = {stage["name"]: stage["facts"] for stage in stages}
        result.append(
            {
                "directory": name,
                "name": str(recipe.get("name") or name),
                "status": asdict(status),
                "stages": [{"name": stage["name"], "done": stage["done"]} for stage in stages],
                "gain": last_gain(facts.get("evaluation", {})),
                "changed": max(_stamp(layout.metrics)[0], _stamp(layout.state)[0]),
                "problems": problems,
            }
        )
    return {"runs": result}
