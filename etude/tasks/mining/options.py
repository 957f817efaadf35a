"""Options of a build, and the texts of issues that requests are taken from."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from etude.errors import InputError
from etude.files import write_atomically
from etude.tasks.mining.classify import MiningLimits
from etude.tasks.mining.session_logs import SessionLog
from etude.tasks.mining.time_split import TimeSplit
from etude.tasks.validate import RERUNS

MIN_NOTICED = 0.75  # least share of the mutations of a reference that tests notice
MIN_FULLY_NOTICED = 0.8  # least share of the tasks in which every mutation is noticed
WORK_DIR = ".build"  # in the output directory: journal, environments, tasks before the split


@dataclass(frozen=True)
class MiningOptions:
    """How many tasks to mine, from which changes, and how they ask."""

    out: Path
    count: int = 50
    since: str = ""  # ISO date; older changes are not looked at
    limit_commits: int | None = None
    limits: MiningLimits = field(default_factory=MiningLimits)
    min_noticed: float = MIN_NOTICED
    min_fully_noticed: float = MIN_FULLY_NOTICED
    prompts: str = "terse"  # or "full"
    logs: bool = False
    jobs: int = 2
    reruns: int = RERUNS
    issues: Mapping[str, str] = field(default_factory=dict)  # number -> text
    sessions: Sequence[SessionLog] = ()
    split: TimeSplit | None = None

    @property
    def work_dir(self) -> Path:
        return self.out / WORK_DIR


def read_issues(directory: Path) -> dict[str, str]:
    """Return the texts of issues by number, from files NUMBER.md or NUMBER.txt."""
    if not directory.is_dir():
        raise InputError(f"--issues {directory}: not a directory; expected one with files NUMBER.md")
    found = {}
    for path in sorted(directory.iterdir()):
        if re.fullmatch(r"\d+", path.stem) and path.suffix in (".md", ".txt"):
            found[path.stem] = path.read_text(encoding="utf-8", errors="replace")
    if not found:
        raise InputError(f"--issues {directory}: has no file NUMBER.md or NUMBER.txt")
    return found


def check_same_options(options: MiningOptions) -> None:
    """Record the options that tasks depend on; raise InputError if tasks in the directory were made with others."""
    texts = json.dumps([dict(options.issues), [[each.request, sorted(each.written)] for each in options.sessions]])
    given = {
        "prompts": options.prompts,
        "logs": options.logs,
        "min_noticed": options.min_noticed,
        "limits": asdict(options.limits),
        "texts": hashlib.sha256(texts.encode()).hexdigest()[:16],
    }
    file = options.work_dir / "options.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(given))
        return
    found = json.loads(file.read_text())
    if differing := [key for key, value in given.items() if found.get(key) != value]:
        raise InputError(f"{options.out}: its tasks were made with other {', '.join(differing)}; choose another --out")
