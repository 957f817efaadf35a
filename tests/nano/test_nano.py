"""Nano tasks: deterministic, distinct, unsolved before the solution and solved after it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.tasks.checks.inside import judges
from etude.tasks.checks.inside.guard import VerifierBroken, check_readable
from etude.tasks.harbor import read_task
from etude.tasks.leaks import find_leaks, measured_answers
from etude_nano import word_lists
from etude_nano.demonstrator import edits_between, workspace_files
from etude_nano.sides import UNSEEN_FAMILIES
from etude_nano.source import (
    ALSO_UNSEEN,
    DIFFICULTIES,
    families_of,
    generate_nano,
    nano_task,
    nano_tasks,
    text_digest,
)
from etude_nano.templates import read_templates


def levels_of(split: str) -> list[tuple[str, int]]:
    """Return the families of a split with each of their difficulties."""
    families = families_of(split)  # type: ignore[arg-type]
    return [(name, level) for name, family in families.items() for level in family.difficulties]


def metadata(files: Mapping[str, str]) -> dict[str, object]:
    return tomllib.loads(files["task.toml"])["metadata"]


def below(files: Mapping[str, str], place: str) -> dict[str, str]:
    return {path.removeprefix(place): text for path, text in files.items() if path.startswith(place)}


def line_of(files: Mapping[str, str], key: str) -> str:
    """Return a value as it is written: parsing ten thousand TOML files would take longer than making them."""
    return next(line for line in files["task.toml"].splitlines() if line.startswith(f"{key} = ")).partition(" = ")[2]


def python_for_all_users() -> str:
    """Return an interpreter that the user of submitted code can read; that of the tests may be in a closed home."""
    try:
        check_readable(os.__file__)
    except VerifierBroken:
        return "/usr/bin/python3"
    return sys.executable


class LocalTask:
    """A task written to a local directory and verified there by its own verifier. Only for our own code."""

    def __init__(self, files: Mapping[str, str], directory: Path) -> None:
        self.work, self.logs, self.tests = directory / "work", directory / "logs", directory / "tests"
        for directory, texts in ((self.work, workspace_files(files)), (self.tests, below(files, "tests/"))):
            self.put(directory, texts)
        self.files = files

    def put(self, directory: Path, texts: Mapping[str, str]) -> None:
        for path, text in texts.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)

    def solve(self) -> None:
        self.put(self.work, below(self.files, "solution/repo/"))
        if "solution/final.txt" in self.files:
            self.say(self.files["solution/final.txt"])

    def say(self, text: str) -> None:
        self.put(self.logs, {"agent/final.txt": text})

    def reward(self) -> str:
        checks = json.loads((self.tests / "checks.json").read_text())["checks"]
        expected = json.loads((self.tests / "expected.json").read_text())
        final = self.logs / "agent/final.txt"
        files = {**judges.read_workspace(str(self.work)), judges.FINAL: final.read_bytes() if final.exists() else b""}
        executed, secrets = judges.prepare(checks, expected, lambda path: None)
        command = [python_for_all_users(), "-s", "-S", "-B", self.tests / "verifier", "observe"]
        given = json.dumps({"workspace": str(self.work), "checks": executed}).encode()
        done = subprocess.run(command, input=given, capture_output=True, timeout=30)
        assert done.returncode == 0, done.stderr
        observed = judges.parse_observations(done.stdout, len(executed))
        return f"{judges.judge(checks, expected, observed, secrets, files).rewards['reward']:g}"


@pytest.fixture
def task_directory() -> Path:
    with tempfile.TemporaryDirectory(prefix="nano-task-") as directory:
        os.chmod(directory, 0o755)  # the verifier's child runs as another user
        yield Path(directory)  # type: ignore[misc]


# ------------------------------------------------------------------------------------------- generation


def test_a_seed_gives_the_same_task_in_every_process() -> None:
    code = (
        "from etude_nano.source import *\n"
        "print(*[text_digest(nano_task(seed, split)) for seed in range(40) for split in ('train', 'unseen')])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0].split())) == 80


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.2])
def test_thousands_of_tasks_are_distinct_and_of_the_kinds_of_their_split(share: float) -> None:
    seen: Counter[str] = Counter()
    families: dict[str, Counter[str]] = {}
    for split, count in (("train", 1600), ("validation", 300), ("new", 300), ("unseen", 600)):
        families[split] = Counter()
        for seed in range(int(share * count)):
            files = nano_task(seed, split)  # type: ignore[arg-type]
            seen[text_digest(files)] += 1
            family = json.loads(line_of(files, "family"))
            families[split][family.partition("-")[0] if family.startswith("migrate") else family] += 1
    assert sum(count > 1 for count in seen.values()) <= 2, "nearly all tasks are distinct; a set drops the others"
    assert families["train"].keys() & families["unseen"].keys() <= set(ALSO_UNSEEN)
    assert not UNSEEN_FAMILIES & families["train"].keys()
    if share == 1.0:
        assert families["train"].keys() == families["validation"].keys() == families["new"].keys()
        assert families["train"].keys() & families["unseen"].keys() == set(ALSO_UNSEEN)
        assert families["unseen"].keys() >= UNSEEN_FAMILIES
        assert all(count >= 20 for count in families["train"].values()), families


def test_no_training_text_contains_the_answer_of_a_measured_task(tmp_path: Path) -> None:
    measured = {split: tmp_path / split for split in ("validation", "new", "unseen")}
    for split, directory in measured.items():
        generate_nano(directory, 60, split, seed=3)  # type: ignore[arg-type]
    generate_nano(tmp_path / "train", 200, seed=5)
    answers = measured_answers(measured.values())
    assert answers.tasks == 180
    assert list(find_leaks(answers, [tmp_path / "train"])) == []
    own = {leak.task for leak in find_leaks(measured_answers([measured["new"]]), [measured["new"]])}
    assert len(own) > 50, "the search finds answers where they are"


def test_no_name_in_a_program_shadows_another() -> None:
    templates = read_templates("numbers", "texts", "callers", "changes")
    code = " ".join(re.sub(r'"[^"\n]*"', "", each.text() + each.text_before_change()) for each in templates)
    spelt = set(re.findall(r"(?<![$\w])[a-z_]+", code))
    pools = (
        word_lists.TEXTS,
        word_lists.LIMITS,
        word_lists.AMOUNTS,
        word_lists.TOTALS,
        word_lists.TABLES,
        word_lists.INDEX_NAMES,
        word_lists.LETTERS,
    )
    slots = {word for pool in pools for word in pool} | {
        word for pair in word_lists.NOUNS + word_lists.NAMED for word in pair
    }
    names = {name for template in templates for name in template.names if "$" not in name}
    modules = {*word_lists.MODULES, *word_lists.TOP_MODULES}
    assert not modules & (spelt | slots | names | set(sys.stdlib_module_names) | set(word_lists.LABELS))
    assert len({template.id for template in templates}) == len(templates)


@pytest.mark.parametrize("split", ["train", "unseen"])
def test_from_difficulty_two_on_the_request_does_not_name_the_site(split: str) -> None:
    for family, level in levels_of(split):
        if level == 1 or family == "testing":  # there the file to change is the check itself
            continue
        for seed in range(12):
            files = nano_task(seed, split, level, family)  # type: ignore[arg-type]
            for path in below(files, "solution/repo/"):
                assert path not in files["instruction.md"], f"{family} {level} {seed}: {files['instruction.md']}"


def test_the_metadata_describe_the_task() -> None:
    for name, files in nano_tasks(60, "train", seed=7):
        found = metadata(files)
        assert found["source"] == "nano", name
        assert found["difficulty"] in DIFFICULTIES
        assert found["may_edit"] == bool(below(files, "solution/repo/"))
        assert found["may_edit"] or found["carry"] == ["/logs/agent/final.txt"]
        assert not set(found["protected"]) & set(below(files, "solution/repo/"))  # type: ignore[call-overload]


def test_impossible_arguments_are_refused() -> None:
    wrong = ({"split": "test"}, {"difficulty": 6}, {"family": "poetry"}, {"family": "where", "difficulty": 1})
    for arguments in wrong:
        with pytest.raises(InputError, match="nano: "):
            nano_task(0, **arguments)  # type: ignore[arg-type]


def test_a_set_is_written_whole_and_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "set"
    categories = generate_nano(out, 40, "unseen", seed=100, difficulties=(1, 3))
    assert sum(categories.values()) == 40
    table = tomllib.loads((out / "dataset.toml").read_text())
    tasks = [read_task(out / name) for name in table["tasks"]]
    assert {task.metadata["difficulty"] for task in tasks} == {1, 3}
    assert all(task.category in categories and task.instruction for task in tasks)
    assert os.access(tasks[0].directory / "tests/test.sh", os.X_OK)
    with pytest.raises(InputError, match="not empty"):
        generate_nano(out, 1)


# ------------------------------------------------------------------------------------------- verification


@pytest.mark.parametrize("split", ["train", "new", "unseen"])
def test_every_family_at_every_difficulty_fails_untouched_and_passes_solved(split: str, task_directory: Path) -> None:
    for number, (family, level) in enumerate(levels_of(split)):
        seed = number if split == "train" else number + 1000
        task = LocalTask(nano_task(seed, split, level, family), task_directory / f"{number}")  # type: ignore[arg-type]
        where = f"nano_task({seed}, {split!r}, {level}, {family!r})"
        if split == "train":  # for measured tasks the solved check is enough
            assert task.reward() == "0", where
        task.solve()
        assert task.reward() == "1", where


def test_an_answer_that_names_everything_or_comes_with_an_edit_gets_no_reward(task_directory: Path) -> None:
    task = LocalTask(nano_task(3, "train", 3, "review"), task_directory / "review")
    functions = re.findall(r"def (\w+)", "".join(workspace_files(task.files).values()))
    task.say(f"One of {', '.join(functions)}.")
    assert task.reward() == "0"
    task.solve()
    assert task.reward() == "1"
    path = next(iter(workspace_files(task.files)))
    (task.work / path).write_text(workspace_files(task.files)[path] + "\n")
    assert task.reward() == "0"

    task = LocalTask(nano_task(3, "train", 2, "all-well"), task_directory / "well")
    for answer, reward in (("Fixed the bug.", "0"), ("It is wrong.", "0"), ("", "0"), ("It is correct.", "1")):
        task.say(answer)
        assert task.reward() == reward, answer


def test_a_check_that_compares_the_text_of_the_code_gets_no_reward(task_directory: Path) -> None:
    task = LocalTask(nano_task(5, "train", 2, "testing"), task_directory)
    (source,) = [path for path in workspace_files(task.files) if path != "check.py"]
    text = workspace_files(task.files)[source]
    (task.work / "check.py").write_text(f"assert open({source!r}).read() == {text!r}\n")
    assert task.reward() == "0"
    (task.work / "check.py").write_text("assert False\n")
    assert task.reward() == "0"


def test_a_check_that_watches_its_argument_and_compares_no_result_gets_no_reward(task_directory: Path) -> None:
    task = LocalTask(nano_task(0, "train", 3, "testing"), task_directory)
    assert "def fetch_all_rooms(rooms, " in "".join(workspace_files(task.files).values())
    for argument in ("[Watched('noon')]", "map(Watched, ['noon'])"):
        watch = (
            "class Watched(str):\n    def __getitem__(self, index):\n        seen.append(index)\n"
            "        return str.__getitem__(self, index)\nseen = []\n"
            f"fetch_all_rooms({argument}, 9)\nassert 0 in seen\n"
        )
        (task.work / "check.py").write_text(workspace_files(task.files)["check.py"] + watch)
        assert task.reward() == "0", argument
    task.solve()
    assert task.reward() == "1"


def test_a_repair_for_small_arguments_or_few_calls_gets_no_reward(task_directory: Path) -> None:
    task = LocalTask(nano_task(0, "train", 2, "debugging"), task_directory)
    ((path, text),) = below(task.files, "solution/repo/").items()
    assert "(token - 5)" in text
    for condition, reward in (("len(tokens) < 100", "0"), ("next(turn) < 500", "0"), ("tokens is not None", "1")):
        changed = text.replace("(token - 5)", f"(token - (5 if {condition} else 4))")
        (task.work / path).write_text(f"import itertools\nturn = itertools.count()\n{changed}")
        assert task.reward() == reward, condition


def test_a_rename_that_serves_the_old_name_at_some_time_gets_no_reward(task_directory: Path) -> None:
    task = LocalTask(nano_task(0, "train", 3, "rename"), task_directory)
    task.solve()
    path = next(iter(below(task.files, "solution/repo/")))
    late = "\n\ndef __getattr__(name):\n    import time\n    if time.time() < 2e9:\n        raise AttributeError\n"
    (task.work / path).write_text((task.work / path).read_text() + late)
    assert task.reward() == "0"


def test_code_that_never_ends_or_takes_all_memory_gets_no_reward(task_directory: Path) -> None:
    for number, bomb in enumerate(("x = [0] * 10**10", "import os\nwhile True:\n    os.fork()")):
        task = LocalTask(nano_task(9, "train", 1, "debugging"), task_directory / str(number))
        (path,) = below(task.files, "solution/repo/")
        (task.work / path).write_text(bomb + "\n" + workspace_files(task.files)[path])
        assert task.reward() == "0", bomb


# ------------------------------------------------------------------------------------------- edits

LINES = st.lists(st.sampled_from(["a = 1", "b = 2", "    return a", "    return b", "", "x"]), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(LINES, LINES)
def test_edits_in_order_turn_one_text_into_the_other_and_each_fits_once(before: list[str], after: list[str]) -> None:
    text, wanted = "\n".join(["head", *before, "tail"]), "\n".join(["head", *after, "tail"])
    for edit in edits_between("a.py", text, wanted):
        assert text.find(edit.old) == text.rfind(edit.old) >= 0
        text = text.replace(edit.old, edit.new)
    assert text == wanted
