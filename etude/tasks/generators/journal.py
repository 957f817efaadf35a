"""Journals of candidates, one JSON line each, and the summary of each generator's yield."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from etude.errors import InputError


@dataclass(frozen=True)
class JournalEntry:
    """The fate of one candidate: the name of its task, or the reason for its rejection."""

    site: str
    family: str
    task: str
    reason: str
    detail: str
    seconds: float
    pod_seconds: float


@dataclass
class Journal:
    """The entries of one generator run."""

    path: Path
    generator: str
    entries: dict[str, JournalEntry] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, generator: str) -> "Journal":
        """Read the journal from a file; an incomplete last line is dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path, generator)
        lines = path.read_text().split("\n") if path.exists() else []
        for number, line in enumerate(lines):
            try:
                entry = JournalEntry(**json.loads(line)) if line else None
            except (ValueError, TypeError):
                if number < len(lines) - 1:
                    raise InputError(
                        f"{path}: line {number + 1} is not a journal entry; remove the file to start over"
                    ) from None
                path.write_text("\n".join(lines[:-1]) + "\n")
                break
            if entry is not None:
                journal.entries[entry.site] = entry
        return journal

    def get(self, site: str) -> JournalEntry | None:
        return self.entries.get(site)

    def add(self, entry: JournalEntry) -> None:
        self.entries[entry.site] = entry
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


@dataclass(frozen=True)
class GeneratorYield:
    """Candidates tried and tasks made by one generator over all repositories."""

    generator: str
    tried: int
    made: int
    reasons: dict[str, int]
    seconds: float
    pod_seconds: float


def summarize_journals(journals: Sequence[Journal]) -> list[GeneratorYield]:
    """Return one summary row per generator."""
    rows = []
    for name in dict.fromkeys(journal.generator for journal in journals):
        entries = [entry for journal in journals if journal.generator == name for entry in journal.entries.values()]
        reasons = Counter(entry.reason for entry in entries if entry.reason)
        rows.append(
            GeneratorYield(
                generator=name,
                tried=len(entries),
                made=sum(bool(entry.task) for entry in entries),
                reasons=dict(reasons.most_common()),
                seconds=sum(entry.seconds for entry in entries),
                pod_seconds=sum(entry.pod_seconds for entry in entries),
            )
        )
    return rows
