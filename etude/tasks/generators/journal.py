"""What became of every candidate: one line each, written when it is known; and the table of what generators gave."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from etude.errors import InputError


@dataclass(frozen=True)
class Entry:
    """One candidate: the task it became, or the reason why it did not."""

    site: str
    family: str
    task: str
    reason: str
    detail: str
    seconds: float
    pod_seconds: float


@dataclass
class Journal:
    """The entries of one lane."""

    path: Path
    generator: str
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, generator: str) -> "Journal":
        """The journal in a file; a last line that was not finished does not count."""
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path, generator)
        lines = path.read_text().split("\n") if path.exists() else []
        for number, line in enumerate(lines):
            try:
                entry = Entry(**json.loads(line)) if line else None
            except (ValueError, TypeError):
                if number < len(lines) - 1:
                    raise InputError(
                        f"{path}: line {number + 1} cannot be read; remove the file to start anew"
                    ) from None
                path.write_text("\n".join(lines[:-1]) + "\n")
                break
            if entry is not None:
                journal.entries[entry.site] = entry
        return journal

    def recall(self, site: str) -> Entry | None:
        return self.entries.get(site)

    def add(self, entry: Entry) -> None:
        self.entries[entry.site] = entry
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


@dataclass(frozen=True)
class Yield:
    """What one generator gave over all repositories."""

    generator: str
    tried: int
    made: int
    reasons: dict[str, int]
    seconds: float
    pod_seconds: float


def yields(journals: Sequence[Journal]) -> list[Yield]:
    """The table, one row for each generator."""
    found = []
    for name in dict.fromkeys(journal.generator for journal in journals):
        entries = [entry for journal in journals if journal.generator == name for entry in journal.entries.values()]
        reasons = Counter(entry.reason for entry in entries if entry.reason)
        found.append(
            Yield(
                generator=name,
                tried=len(entries),
                made=sum(bool(entry.task) for entry in entries),
                reasons=dict(reasons.most_common()),
                seconds=sum(entry.seconds for entry in entries),
                pod_seconds=sum(entry.pod_seconds for entry in entries),
            )
        )
    return found
