"""Build a benchmark and say what became of every change."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.tasks.base_images import HostSettings
from etude.tasks.generators.journal import JournalEntry
from etude.tasks.installation.detect import propose
from etude.tasks.installation.result import InstallationFailed
from etude.tasks.installation.snapshot import checkout
from etude.tasks.mining.build import STATIC_REASONS, ProgressCallback, mine
from etude.tasks.mining.classify import DROP_REASONS, is_test_path
from etude.tasks.mining.environments import Installer
from etude.tasks.mining.history import History
from etude.tasks.mining.options import MiningOptions
from etude.tasks.mining.time_split import SplitResult, split_names, task_metadata, write_split


@dataclass(frozen=True)
class MiningReport:
    """The yield of a build: changes by fate, and facts of the tasks."""

    repository: str
    out: str
    reasons: Mapping[str, int]  # fate -> number of changes, tasks first
    tasks: Sequence[Mapping[str, Any]] = field(default=(), repr=False)  # metadata
    bench: int = 0
    train: int = 0
    dropped: Mapping[str, str] = field(default_factory=dict)  # training task -> the benchmark task that it gives away
    requested: int = 0
    seconds: float = 0.0  # of this run
    pod_seconds: float = 0.0  # of all tried changes, in all runs
    split: bool = False

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "tasks": [dict(task) for task in self.tasks], "mutations": self.mutations}

    @property
    def mutations(self) -> dict[str, int]:
        """Mutations tried and noticed; tasks that were mutated, and those in which every mutation fails a test."""
        mutated = [task for task in self.tasks if task["mutations_tried"]]
        return {
            "tried": sum(task["mutations_tried"] for task in mutated),
            "noticed": sum(task["mutations_noticed"] for task in mutated),
            "tasks": len(mutated),
            "all_noticed": sum(task["mutations_tried"] == task["mutations_noticed"] for task in mutated),
        }

    def sentences(self) -> list[str]:
        """Return the summary as lines of text."""
        made, mutations = self.bench + self.train, self.mutations
        where = f"{self.bench} in bench/, {self.train} in train/" if self.split else f"{made} tasks"
        lines = [f"{self.out}: {where}" + ("" if made >= self.requested else f"; {self.requested} were requested")]
        if self.dropped:
            lines.append(f"{len(self.dropped)} older tasks are left out: they give away one of the benchmark")
        if mutations["tasks"]:
            every = _share(mutations["all_noticed"], mutations["tasks"])
            each = _share(mutations["noticed"], mutations["tried"])
            lines.append(f"tests notice every dropped hunk and stubbed function in {every} tasks, and {each} of these")
        if unimported := sum(bool(task["import_error_only"]) for task in self.tasks):
            lines.append(f"in {unimported} tasks the tests fail only because something cannot be imported")
        if flaky := sorted({test for task in self.tasks for test in task["quarantined"]}):
            lines.append(
                f"{len(flaky)} flaky tests are in no verifier: {', '.join(flaky[:3])}{' ...' if flaky[3:] else ''}"
            )
        several = sum(task["changed_files"] > 1 for task in self.tasks)
        lines.append(f"{several} of {len(self.tasks)} tasks change several source files; {self.seconds:.0f} s")
        return lines


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})"


async def build_benchmark(
    fleet: Fleet,
    history: History,
    options: MiningOptions,
    install: Installer,
    host_settings: HostSettings,
    progress: ProgressCallback = lambda done, total, text: None,
) -> MiningReport:
    """Mine tasks, split them, and report the yield."""
    started = time.monotonic()
    check_usable(history)
    mined = await mine(fleet, history, options, install, host_settings, progress)
    names = [each.task for each in mined.changes]
    result = SplitResult(tuple(names))
    if options.split is not None:
        dates = {each.task: each.change.commit.date for each in mined.changes}
        prints = {each.task: each.change.fingerprint for each in mined.changes}
        result = split_names(dates, options.split, prints)
    entries = [entry for entry in mined.journal.entries.values() if entry.site in mined.looked_at]
    entries = [replace(entry, reason="spare") if entry.task in mined.spare else entry for entry in entries]
    tasks = options.work_dir / "tasks"
    result = write_split(tasks, options.out, result, options.split is not None)
    kept = [*result.bench, *result.train]
    return MiningReport(
        repository=history.name,
        out=str(options.out),
        reasons=count_reasons(entries),
        tasks=[task_metadata(tasks / name) for name in kept],
        bench=len(result.bench),
        train=len(result.train),
        dropped=dict(result.dropped or {}),
        requested=options.count,
        seconds=time.monotonic() - started,
        pod_seconds=sum(entry.pod_seconds for entry in entries if entry.reason not in STATIC_REASONS),
        split=options.split is not None,
    )


def count_reasons(entries: Sequence[JournalEntry]) -> dict[str, int]:
    """Return the number of changes by fate: tasks, reasons found without a pod in their order, then the others."""
    counts = Counter(entry.reason or "task" for entry in entries)
    first = ["task", *DROP_REASONS, "duplicate"]
    others = [reason for reason, _ in counts.most_common() if reason not in first]
    return {reason: counts[reason] for reason in [*first, *others] if counts[reason]}


def check_usable(history: History) -> None:
    """Raise InputError if the newest revision has no test file, is too large, or has its projects in directories."""
    if not any(is_test_path(path) for path in history.paths()):
        raise InputError(
            f"{history.root}: no test files (test_*.py, *.test.ts, *_test.go ...); "
            "tasks are made from changes that come with tests"
        )
    newest = checkout(history.root, history.head)  # refuses files that are too large
    try:
        propose(newest, [])
    except InstallationFailed as error:  # others may not hold for older revisions
        if error.reason == "several-projects":
            raise InputError(
                f"{history.root}: a monorepo, with no project at the top; make a repository of one of its directories "
                "(`git subtree split --prefix=DIRECTORY`) and build from that"
            ) from None
