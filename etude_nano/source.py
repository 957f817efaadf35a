"""The nano source: thousands of distinct tasks in miniature, each a pure function of its seed.

Difficulty: 1 names the file and the symptom, in one short file; 2 gives the symptom only; 3 has two files and is wrong
in the deeper one; 4 has three, and one has to run the check to see; 5 takes changes in two places. Held-out tasks have
shapes of code, or faults in known shapes, that no training task has (see `shapes.py`).
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import tomli_w

from etude.errors import InputError
from etude_nano import edit_tasks, readonly_tasks, repair_tasks
from etude_nano.task_writer import Draft, task_files
from etude_nano.templates import Split

DIFFICULTIES = (1, 2, 3, 4, 5)
ATTEMPTS = 200  # draws until a program shows what its task is about


@dataclass(frozen=True)
class Family:
    """One way of making tasks; it gives none where what it drew does not do."""

    draw: Callable[[Random, Split, int], Draft | None]
    difficulties: tuple[int, ...]
    weight: int


FAMILIES: Mapping[str, Family] = {
    "debugging": Family(repair_tasks.debugging, (1, 2, 3, 4, 5), 36),
    "implement": Family(repair_tasks.implement, (1, 2, 3, 4, 5), 10),
    "import": Family(repair_tasks.broken_import, (1, 2, 3, 4), 5),
    "config": Family(repair_tasks.broken_config, (1, 2, 3, 4), 4),
    "parameter": Family(edit_tasks.parameter, (1, 2, 3), 5),
    "rename": Family(edit_tasks.rename, (1, 2, 3, 4, 5), 7),
    "migrate": Family(edit_tasks.migrate, (1, 2, 3, 4, 5), 7),
    "docstring": Family(edit_tasks.docstring, (1, 2, 3), 4),
    "readme": Family(edit_tasks.readme, (1, 2, 3), 3),
    "testing": Family(edit_tasks.testing, (2, 3, 4), 4),
    "review": Family(readonly_tasks.review, (2, 3, 4), 4),
    "line": Family(readonly_tasks.which_line, (1, 2), 3),
    "value": Family(readonly_tasks.value, (1, 2, 3), 3),
    "where": Family(readonly_tasks.where, (3, 4), 2),
    "all-well": Family(readonly_tasks.all_well, (1, 2, 3, 4), 5),
}


def nano_task(
    seed: int, split: Split = "train", difficulty: int | None = None, family: str | None = None
) -> dict[str, str]:
    """The files of one task directory; the same arguments give the same files."""
    if split not in ("train", "held-out"):
        raise InputError(f"nano: split is {split!r}; expected train or held-out")
    if difficulty is not None and difficulty not in DIFFICULTIES:
        raise InputError(f"nano: difficulty is {difficulty}; expected one of 1 to 5")
    if family is not None and family not in FAMILIES:
        raise InputError(f"nano: {family!r} is not a family; there are {', '.join(FAMILIES)}")
    chance = Random(f"nano/{split}/{seed}/{difficulty}/{family}")
    level = difficulty or chance.choice(FAMILIES[family].difficulties if family else DIFFICULTIES)
    fitting = {name: each for name, each in FAMILIES.items() if level in each.difficulties and family in (None, name)}
    if not fitting:
        raise InputError(f"nano: there are no tasks of family {family} at difficulty {difficulty}")
    (chosen,) = chance.choices(list(fitting.values()), [each.weight for each in fitting.values()])
    for _ in range(ATTEMPTS):
        if (draft := chosen.draw(chance, split, level)) is not None:
            return task_files(draft, task_name(split, seed), split, seed, level)
    raise AssertionError(f"nano: no task from seed {seed} ({split}, {difficulty}, {family}) in {ATTEMPTS} draws")


def task_name(split: Split, seed: int) -> str:
    return f"nano-{split}-{seed:06d}"


def text_digest(files: Mapping[str, str]) -> str:
    """Of what the agent sees: two tasks with the same are one task."""
    seen = {path: text for path, text in files.items() if path == "instruction.md" or path.startswith("environment/")}
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def nano_tasks(
    count: int, split: Split = "train", seed: int = 0, difficulties: Sequence[int] = DIFFICULTIES
) -> Iterator[tuple[str, dict[str, str]]]:
    """Distinct tasks with their names, the difficulties in turn."""
    seen: set[str] = set()
    number = seed
    while len(seen) < count:
        files = nano_task(number, split, difficulties[number % len(difficulties)])
        if (digest := text_digest(files)) not in seen:
            seen.add(digest)
            yield task_name(split, number), files
        number += 1


def generate_nano(
    out: Path, count: int, split: Split = "train", seed: int = 0, difficulties: Sequence[int] = DIFFICULTIES
) -> Counter[str]:
    """Write a set of task directories and its dataset.toml; how many there are of each category."""
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; name a directory that is not there yet")
    making = out.with_name(out.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    categories: Counter[str] = Counter()
    names = []
    for name, files in nano_tasks(count, split, seed, difficulties):
        for path, text in files.items():
            target = making / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            if path.endswith(".sh"):
                target.chmod(0o755)
        names.append(name)
        categories[_category(files)] += 1
    facts = {"name": f"nano-{split}", "source": "nano", "split": split, "seed": seed, "count": count}
    table = {"dataset": {**facts, "difficulties": list(difficulties), "categories": dict(categories)}, "tasks": names}
    (making / "dataset.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    if out.exists():
        out.rmdir()
    making.rename(out)
    return categories


def _category(files: Mapping[str, str]) -> str:
    line = next(line for line in files["task.toml"].splitlines() if line.startswith("category = "))
    return line.partition('"')[2].rstrip('"')
