"""Nano experts in real pods: they solve what they are given, in few tokens, and nobody is paid who does not."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.tokenizer import train_tokenizer
from etude.data.conversations import Chat, ChatFormat
from etude.pods import open_fleet
from etude.tasks.environment import Ground, open_ground
from etude.tasks.harbor import read_task, write_task
from etude.tasks.task import Task
from etude.tasks.verifier import grade_ground
from etude_nano.demonstrator import Manner, expert, read_files
from etude_nano.pod_sessions import Demonstration, render_experts, vocabulary_texts
from etude_nano.simulated_sessions import rehearse
from etude_nano.source import FAMILIES, nano_task, nano_tasks

SEED = 21
CAREFUL, CARELESS = Manner(mistakes=0.0), Manner(mistakes=1.0)
MOST = {1: 1000, 2: 1100, 3: 1150, 4: 1250, 5: 1250}  # tokens of a session, by difficulty
MOST_ANSWER = 150


@cache
def dialect() -> Dialect:
    """Our dialect over the vocabulary of a nano model."""
    return dialect_for(train_tokenizer(vocabulary_texts(400), 4096))


def written(directory: Path, files: Mapping[str, Mapping[str, str]]) -> list[Task]:
    return [write_task(directory / name, texts) for name, texts in files.items()]


def play(tasks: list[Task], manner: Manner | None = None, *, graded: bool = True) -> list[Demonstration]:
    async def all_of_them() -> list[Demonstration]:
        async with open_fleet() as fleet:
            shown = render_experts(tasks, dialect(), fleet, manner=manner, seed=SEED, at_once=4, graded=graded)
            return [demonstration async for demonstration in shown]

    return asyncio.run(all_of_them())


# ------------------------------------------------------------------------------------------- experts


def test_experts_of_every_family_solve_their_tasks_in_pods_and_keep_within_a_small_window(tmp_path: Path) -> None:
    chosen = {
        f"{name}-{level}": nano_task(SEED, "train", level, name)
        for name, family in FAMILIES.items()
        for level in {family.difficulties[0], family.difficulties[-1]}
    }
    shown = play(written(tmp_path, chosen))
    assert len(shown) == len(chosen)
    for demonstration in shown:
        task, facts, tokens = demonstration.task, demonstration.facts, demonstration.tokens
        where = f"{facts['family']} {facts['difficulty']} ({task}, seed {SEED})"
        assert not demonstration.odd, f"{where}: {demonstration.odd}"
        assert demonstration.grade is not None
        assert demonstration.grade.score == 1.0, where
        assert len(tokens) <= MOST[facts["difficulty"]], where
        turns = [step for step in demonstration.trace.steps if step.kind == "turn"]
        assert max(step.span[1] - step.span[0] for step in turns) <= MOST_ANSWER, where


def test_a_mistake_is_shown_and_mended_but_not_taught(tmp_path: Path) -> None:
    tasks = written(tmp_path, {f"t{seed}": nano_task(seed, "train", 2, "debugging") for seed in range(6)})
    shown = [demonstration for demonstration in play(tasks, CARELESS) if not demonstration.odd]
    assert len(shown) >= 3
    for demonstration in shown:
        made = demonstration.trace.segments[0].made
        taught = demonstration.taught
        assert not (taught & ~made).any()
        weights = [message.get("weight") for message in demonstration.row()["messages"]]
        assert (taught.sum() < made.sum()) == (0 in weights)
    assert any(0 in [message.get("weight") for message in each.row()["messages"]] for each in shown)


def test_a_rehearsed_session_has_the_tokens_of_one_in_a_pod(tmp_path: Path) -> None:
    files = dict(nano_tasks(16, "held-out", seed=SEED))
    real = play(written(tmp_path, files), graded=False)
    for demonstration, texts in zip(real, files.values(), strict=True):
        assert not demonstration.odd, f"{demonstration.task}: {demonstration.odd}"
        told = asyncio.run(rehearse(texts, dialect(), seed=SEED))
        if told is None:
            continue
        assert dialect().tokenizer.decode(told.tokens.tolist()) == dialect().tokenizer.decode(
            demonstration.tokens.tolist()
        )
        assert told.tokens.tolist() == demonstration.tokens.tolist()
        assert told.taught.tolist() == demonstration.taught.tolist()


def test_a_row_renders_to_the_tokens_of_its_session() -> None:
    chats = ChatFormat(dialect().tokenizer)
    for _, files in nano_tasks(12, seed=SEED):
        told = asyncio.run(rehearse(files, dialect(), manner=CAREFUL))
        if told is None:
            continue
        row = json.loads(json.dumps(told.row()))
        segments = chats.segments(Chat("nano", "row", row["messages"], row["tools"], 0))
        assert not isinstance(segments, str), segments
        tokens = [token for part in segments for token in dialect().tokenizer.encode(part.text, special=True)]
        assert tokens[: len(told.tokens)] == told.tokens.tolist()


def test_experts_differ_between_seeds_and_never_read_what_they_have_not_come_upon() -> None:
    ways = set()
    for seed in range(30):
        files = nano_task(4, "train", 4, "debugging")
        turns = expert(files, seed, CAREFUL)
        calls = [call for turn in turns for call in turn.message.calls]
        ways.add(json.dumps([[call.name, call.arguments] for call in calls]))
        first = calls[0]
        assert first.name != "read_file" or str((first.arguments or {})["target_file"]) in files["instruction.md"]
    assert len(ways) >= 3


# ------------------------------------------------------------------------------------------- cheats


def graded_after(task: Task, act: Callable[[Ground], Awaitable[object]]) -> float:
    async def run() -> float:
        async with open_fleet() as fleet, open_ground(fleet, task) as ground:
            await act(ground)
            return (await grade_ground(ground)).score

    return asyncio.run(run())


CHEATS = {
    "exits at once": "import os\nos._exit(0)\n",
    "prints": "print('passed')\nprint(1)\nraise SystemExit(0)\n",
    "writes the reward and kills the verifier": (
        "import os\n"
        "for place in ('reward.txt', 'reward.json'):\n"
        "    try:\n        open('/logs/verifier/' + place, 'w').write('1')\n    except OSError:\n        pass\n"
        "os.kill(os.getppid(), 9)\nos.kill(-1, 9)\n"
    ),
    "looks for the answers": (
        "import json\nWANTS = iter(json.load(open('/tests/wants.json'))['calls'])\n"
        "class Answer:\n    def __repr__(self):\n        return next(WANTS)\n"
        "def __getattr__(name):\n    return lambda *a, **k: Answer()\n"
    ),
    "is equal to everything": (
        "class Any:\n    def __eq__(self, other):\n        return True\n"
        "    def __repr__(self):\n        return ''\n"
        "def __getattr__(name):\n    return lambda *a, **k: Any()\n"
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_are_not_paid(cheat: str, tmp_path: Path) -> None:
    (task,) = written(tmp_path, {"task": nano_task(SEED, "train", 1, "debugging")})
    files = read_files(task.directory)
    (path,) = [name.removeprefix("solution/repo/") for name in files if name.startswith("solution/repo/")]

    async def act(ground: Ground) -> None:
        await ground.pod.write(f"{ground.workspace}/{path}", CHEATS[cheat])
        for planted in ("json.py", "sitecustomize.py", "resource.py"):
            await ground.pod.write(f"{ground.workspace}/{planted}", "import os\nos._exit(0)\n")

    assert graded_after(task, act) == 0.0


def test_the_check_made_to_pass_is_not_paid_and_the_solution_is(tmp_path: Path) -> None:
    (task,) = written(tmp_path, {"task": nano_task(SEED, "train", 3, "debugging")})

    async def weaken(ground: Ground) -> None:
        (check,) = task.protected
        await ground.pod.write(f"{ground.workspace}/{check}", "print('ok')\n")

    async def solve(ground: Ground) -> None:
        await ground.pod.upload(task.directory / "solution", "/solution")
        assert (await ground.pod.exec(["sh", "/solution/solve.sh"])).ok

    assert graded_after(task, weaken) == 0.0
    assert graded_after(task, solve) == 1.0
    assert read_task(task.directory).may_edit
