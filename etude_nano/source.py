"""The nano task source: thousands of distinct miniature tasks, each a pure function of its seed.

Difficulty 1 names the file and the symptom, in one short file; 2 gives only the symptom; 3 has two files, the fault in
the callee's; 4 has three, and the fault shows only when the check runs; 5 needs changes in two places. No training task
has a function that a measured task is about, and tasks of the split `unseen` are of families, or have kinds of faults,
that no other has (see `sides.py`).
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
from etude.tasks.leaks import TaskAnswer, task_answer
from etude_nano import edit_tasks, readonly_tasks, repair_tasks
from etude_nano.sides import SPLITS, UNSEEN_FAMILIES, Split
from etude_nano.task_writer import NanoTaskDraft, task_files

DIFFICULTIES = (1, 2, 3, 4, 5)
MAX_DRAWS = 200  # attempts until a family draws a usable program
MAX_SAME_ANSWER = 2  # tasks of a measured set with the same answer up to names and numbers


@dataclass(frozen=True)
class TaskFamily:
    """One way of making tasks. `draw` returns None if the program it drew makes no task; the caller then retries."""

    draw: Callable[[Random, Split, int], NanoTaskDraft | None]
    difficulties: tuple[int, ...]
    weight: int


FAMILIES: Mapping[str, TaskFamily] = {
    "debugging": TaskFamily(repair_tasks.debugging, (1, 2, 3, 4, 5), 30),
    "implement": TaskFamily(repair_tasks.implement, (1, 2, 3, 4, 5), 14),
    "import": TaskFamily(repair_tasks.broken_import, (1, 2, 3, 4), 8),
    "config": TaskFamily(repair_tasks.broken_config, (1, 2, 3, 4), 8),
    "parameter": TaskFamily(edit_tasks.parameter, (1, 2, 3), 8),
    "rename": TaskFamily(edit_tasks.rename, (1, 2, 3, 4, 5), 8),
    "migrate": TaskFamily(edit_tasks.migrate, (1, 2, 3, 4, 5), 10),
    "docstring": TaskFamily(edit_tasks.docstring, (1, 2, 3), 6),
    "readme": TaskFamily(edit_tasks.readme, (1, 2, 3), 6),
    "testing": TaskFamily(edit_tasks.testing, (2, 3, 4), 6),
    "review": TaskFamily(readonly_tasks.review, (2, 3, 4), 6),
    "line": TaskFamily(readonly_tasks.faulty_line, (1, 2), 8),
    "value": TaskFamily(readonly_tasks.call_value, (1, 2, 3), 6),
    "where": TaskFamily(readonly_tasks.defining_file, (3, 4), 4),
    "all-well": TaskFamily(readonly_tasks.already_correct, (1, 2, 3, 4), 6),
}


ALSO_UNSEEN = ("debugging", "review", "testing")  # families with faults: those of the split unseen are of unseen kinds


def families_of(split: Split) -> dict[str, TaskFamily]:
    """Return the families that the tasks of a split are of."""
    unseen = split == "unseen"
    return {
        name: family
        for name, family in FAMILIES.items()
        if (name in UNSEEN_FAMILIES) == unseen or (unseen and name in ALSO_UNSEEN)
    }


def nano_task(
    seed: int, split: Split = "train", difficulty: int | None = None, family: str | None = None
) -> dict[str, str]:
    """Return the files of one task directory; the same arguments give the same files."""
    if split not in SPLITS:
        raise InputError(f"nano: split is {split!r}; expected one of {', '.join(SPLITS)}")
    if difficulty is not None and difficulty not in DIFFICULTIES:
        raise InputError(f"nano: difficulty is {difficulty}; expected one of 1 to 5")
    families = families_of(split)
    if family is not None and family not in families:
        raise InputError(f"nano: {family!r} is no family of the split {split}; expected one of {', '.join(families)}")
    rng = Random(f"nano/{split}/{seed}/{difficulty}/{family}")
    level = difficulty or rng.choice(families[family].difficulties if family else DIFFICULTIES)
    fitting = {name: each for name, each in families.items() if level in each.difficulties and family in (None, name)}
    if not fitting:
        raise InputError(f"nano: there are no tasks of family {family} at difficulty {difficulty}")
    (chosen,) = rng.choices(list(fitting.values()), [each.weight for each in fitting.values()])
    for _ in range(MAX_DRAWS):
        if (draft := chosen.draw(rng, split, level)) is not None:
            return task_files(draft, task_name(split, seed), split, seed, level)
    raise AssertionError(f"nano: no task from seed {seed} ({split}, {difficulty}, {family}) in {MAX_DRAWS} draws")


def task_name(split: Split, seed: int) -> str:
    return f"nano-{split}-{seed:06d}"


def text_digest(files: Mapping[str, str]) -> str:
    """Return the digest of the request and the environment; tasks with equal digests are duplicates."""
    visible = {
        path: text for path, text in files.items() if path == "instruction.md" or path.startswith("environment/")
    }
    return hashlib.sha256(json.dumps(visible, sort_keys=True).encode()).hexdigest()


def nano_tasks(
    count: int, split: Split = "train", seed: int = 0, difficulties: Sequence[int] = DIFFICULTIES
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield `count` distinct tasks with their names, cycling through the difficulties.

    Few tasks of a measured set have the same answer up to names and numbers: a set of copies would measure one thing.
    """
    seen: set[str] = set()
    answers: Counter[TaskAnswer] = Counter()
    number = seed
    while len(seen) < count:
        files = nano_task(number, split, difficulties[number % len(difficulties)])
        digest, answer = text_digest(files), task_answer("", files) if split != "train" else None
        if digest not in seen and (answer is None or answers[answer] < MAX_SAME_ANSWER):
            seen.add(digest)
            answers.update([answer] if answer else [])
            yield task_name(split, number), files
        number += 1


def generate_nano(
    out: Path, count: int, split: Split = "train", seed: int = 0, difficulties: Sequence[int] = DIFFICULTIES
) -> Counter[str]:
    """Write a set of task directories with its dataset.toml; return the number of tasks of each category."""
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; name a directory that does not exist yet")
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
