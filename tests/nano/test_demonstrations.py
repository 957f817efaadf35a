"""Nano demonstrations in real pods: they solve their tasks in few tokens, and cheats get no reward."""

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
from etude.tasks.environment import TaskEnvironment
from etude.tasks.harbor import read_task, write_task
from etude.tasks.task import Task
from etude.tasks.trial import run_trial
from etude_nano.demonstrator import DemonstratorStyle, demonstration_turns, read_files
from etude_nano.pod_sessions import Demonstration, run_demonstrations, vocabulary_texts
from etude_nano.sides import UNSEEN_FAMILIES
from etude_nano.simulated_sessions import simulate_demonstration
from etude_nano.source import FAMILIES, nano_task, nano_tasks

SEED = 21
CAREFUL, CARELESS = DemonstratorStyle(mistakes=0.0), DemonstratorStyle(mistakes=1.0)
MAX_TOKENS = {1: 1000, 2: 1100, 3: 1150, 4: 1250, 5: 1250}  # tokens of a session, by difficulty
MAX_TURN_TOKENS = 150


@cache
def dialect() -> Dialect:
    """Return our dialect over the vocabulary of a nano model."""
    return dialect_for(train_tokenizer(vocabulary_texts(400), 4096))


def written(directory: Path, files: Mapping[str, Mapping[str, str]]) -> list[Task]:
    return [write_task(directory / name, texts) for name, texts in files.items()]


def run_all(tasks: list[Task], style: DemonstratorStyle | None = None, *, verify: bool = True) -> list[Demonstration]:
    async def run() -> list[Demonstration]:
        async with open_fleet() as fleet:
            found = run_demonstrations(tasks, dialect(), fleet, style=style, seed=SEED, concurrency=4, verify=verify)
            return [demonstration async for demonstration in found]

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------- demonstrations


def test_demonstrations_of_every_family_solve_their_tasks_in_pods_within_a_small_window(tmp_path: Path) -> None:
    chosen = {
        f"{name}-{level}": nano_task(SEED, split, level, name)
        for name, family in FAMILIES.items()
        for level in {family.difficulties[0], family.difficulties[-1]}
        for split in (("unseen" if name in UNSEEN_FAMILIES else "train"),)
    }
    demonstrations = run_all(written(tmp_path, chosen))
    assert len(demonstrations) == len(chosen)
    for demonstration in demonstrations:
        task, metadata, tokens = demonstration.task, demonstration.metadata, demonstration.tokens
        where = f"{metadata['family']} {metadata['difficulty']} ({task}, seed {SEED})"
        assert not demonstration.deviation, f"{where}: {demonstration.deviation}"
        assert demonstration.verifier_result is not None
        assert demonstration.verifier_result.score == 1.0, where
        assert len(tokens) <= MAX_TOKENS[metadata["difficulty"]], where
        turns = [step for step in demonstration.trace.steps if step.kind == "turn"]
        assert max(step.span[1] - step.span[0] for step in turns) <= MAX_TURN_TOKENS, where


def test_a_mistake_is_shown_and_corrected_but_masked(tmp_path: Path) -> None:
    tasks = written(tmp_path, {f"t{seed}": nano_task(seed, "train", 2, "debugging") for seed in range(6)})
    demonstrations = [each for each in run_all(tasks, CARELESS) if not each.deviation]
    assert len(demonstrations) >= 3
    for demonstration in demonstrations:
        sampled = demonstration.trace.segments[0].sampled
        loss_mask = demonstration.loss_mask
        assert not (loss_mask & ~sampled).any()
        weights = [message.get("weight") for message in demonstration.row()["messages"]]
        assert (loss_mask.sum() < sampled.sum()) == (0 in weights)
    assert any(0 in [message.get("weight") for message in each.row()["messages"]] for each in demonstrations)


def test_a_simulated_session_has_the_tokens_of_one_in_a_pod(tmp_path: Path) -> None:
    files = dict(nano_tasks(16, "unseen", seed=SEED))
    real = run_all(written(tmp_path, files), verify=False)
    for demonstration, texts in zip(real, files.values(), strict=True):
        assert not demonstration.deviation, f"{demonstration.task}: {demonstration.deviation}"
        simulated = asyncio.run(simulate_demonstration(texts, dialect(), seed=SEED))
        if simulated is None:
            continue
        assert dialect().tokenizer.decode(simulated.tokens.tolist()) == dialect().tokenizer.decode(
            demonstration.tokens.tolist()
        )
        assert simulated.tokens.tolist() == demonstration.tokens.tolist()
        assert simulated.loss_mask.tolist() == demonstration.loss_mask.tolist()


def test_a_row_renders_to_the_tokens_of_its_session() -> None:
    chats = ChatFormat(dialect().tokenizer)
    for _, files in nano_tasks(12, seed=SEED):
        simulated = asyncio.run(simulate_demonstration(files, dialect(), style=CAREFUL))
        if simulated is None:
            continue
        row = json.loads(json.dumps(simulated.row()))
        segments = chats.segments(Chat("nano", "row", row["messages"], row["tools"], 0))
        assert not isinstance(segments, str), segments
        tokens = [token for part in segments for token in dialect().tokenizer.encode(part.text, special=True)]
        assert tokens[: len(simulated.tokens)] == simulated.tokens.tolist()


def test_demonstrations_differ_between_seeds_and_first_read_only_files_that_the_request_names() -> None:
    transcripts = set()
    for seed in range(30):
        files = nano_task(4, "train", 4, "debugging")
        turns = demonstration_turns(files, seed, CAREFUL)
        calls = [call for turn in turns for call in turn.message.calls]
        transcripts.add(json.dumps([[call.name, call.arguments] for call in calls]))
        first = calls[0]
        assert first.name != "read_file" or str((first.arguments or {})["target_file"]) in files["instruction.md"]
    assert len(transcripts) >= 3


# ------------------------------------------------------------------------------------------- cheats


def score_after(task: Task, act: Callable[[TaskEnvironment], Awaitable[None]]) -> float:
    async def run() -> float:
        async with open_fleet() as fleet:
            return (await run_trial(fleet, task, lambda environment, step: act(environment))).result.score

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
        "import json\nWANTS = iter(json.load(open('/tests/expected.json'))[0]['results'].values())\n"
        "def __getattr__(name):\n    return lambda *a, **k: eval(next(WANTS)['returns'])\n"
    ),
    "is equal to everything": (
        "class Any:\n    def __eq__(self, other):\n        return True\n"
        "    def __repr__(self):\n        return ''\n"
        "def __getattr__(name):\n    return lambda *a, **k: Any()\n"
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_get_no_reward(cheat: str, tmp_path: Path) -> None:
    (task,) = written(tmp_path, {"task": nano_task(SEED, "train", 1, "debugging")})
    files = read_files(task.directory)
    (path,) = [name.removeprefix("solution/repo/") for name in files if name.startswith("solution/repo/")]

    async def act(environment: TaskEnvironment) -> None:
        await environment.pod.write(f"{environment.workspace}/{path}", CHEATS[cheat])
        for planted in ("json.py", "sitecustomize.py", "resource.py"):
            await environment.pod.write(f"{environment.workspace}/{planted}", "import os\nos._exit(0)\n")

    assert score_after(task, act) == 0.0


def test_a_weakened_check_gets_no_reward_and_the_solution_does(tmp_path: Path) -> None:
    (task,) = written(tmp_path, {"task": nano_task(SEED, "train", 3, "debugging")})

    async def weaken(environment: TaskEnvironment) -> None:
        (check,) = task.protected
        await environment.pod.write(f"{environment.workspace}/{check}", "print('ok')\n")

    async def solve(environment: TaskEnvironment) -> None:
        await environment.pod.upload(task.directory / "solution", "/solution")
        assert (await environment.pod.exec(["sh", "/solution/solve.sh"])).ok

    assert score_after(task, weaken) == 0.0
    assert score_after(task, solve) == 1.0
    assert read_task(task.directory).may_edit
