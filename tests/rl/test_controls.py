"""Controls: the same loop with shuffled rewards, with solved rollouts only, or with demonstrations."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import tomli_w
from rl_runs import make_model, make_recipe, open_loop
from test_informative import ALIKE, SOLVED, SPLIT, facts_of, fill
from test_loop import plain_loop, prepare_run

from etude.data.mixture import DocumentSpan
from etude.model.config import ModelConfig
from etude.pipeline.stages import summarize_stage
from etude.rl.controls import rollout_advantages, used_rewards
from etude.rl.imitation import demonstration_steps, open_mixture
from etude.rl.loop import learn, trained_rollouts
from etude.rl.settings import RlSettings, open_rl_run
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.train.phase import STATE_FILE


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tasks=8, groups_per_step=2, warmup=0)


def group(id: int, *totals: float) -> ReadyGroup:
    slots = (Slot(n, id, "t", n, 1, "ready", reward={"total": x, "solved": x > 0.5}) for n, x in enumerate(totals))
    return ReadyGroup(id, "t", tuple(slots))


def test_a_placebo_gives_every_rollout_the_reward_of_a_random_member_of_its_group() -> None:
    settings = RlSettings(tasks="./t", steps=1, control="placebo")
    given = [tuple(used_rewards(group(id, 1.0, 2.0, 3.0), settings, seed=0)) for id in range(6000)]
    counts = Counter(given)
    assert counts.keys() == set(itertools.permutations((1.0, 2.0, 3.0)))
    assert all(abs(count - 1000) < 120 for count in counts.values()), counts  # four standard deviations
    again = [tuple(used_rewards(group(id, 1.0, 2.0, 3.0), settings, seed=0)) for id in range(20)]
    other = [tuple(used_rewards(group(id, 1.0, 2.0, 3.0), settings, seed=1)) for id in range(20)]
    assert again == given[:20] != other
    # The advantage is the true one of another member: on average it says nothing about the rollout.
    means = [sum(rollout_advantages(group(id, 1.0, 0.0), settings, 0)[0] for id in range(4000)) / 4000]
    assert abs(means[0]) < 0.035


def test_the_shuffled_rewards_of_a_placebo_are_recorded_and_the_true_ones_kept(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.steps=2", "rl.control=placebo")
    queue = fill(layout, [SPLIT, SPLIT, SPLIT, SPLIT])
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        learn(loop)
    found = [facts_of(layout, step)["placebo"] for step in (1, 2)]
    shuffled = {int(slot): reward for each in found if isinstance(each, dict) for slot, reward in each.items()}
    assert sorted(shuffled.values()) == [0.0] * 4 + [1.0] * 4
    true = {slot.id: slot.record["total"] for id in range(1, 5) for slot in queue.group(id).slots}
    assert [true[id] for id in sorted(true)] == [1.0, 0.0] * 4
    assert shuffled != true


def test_rejection_trains_on_all_solved_rollouts_of_a_step_and_on_nothing_else(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.control=rejection", "rl.max_groups_per_step=4")
    queue = fill(layout, [SPLIT, ALIKE, SOLVED, SPLIT])
    groups = queue.take(0, lambda each: each.id in (1, 4))
    assert groups is not None
    solved = [slot for each in groups for slot in each.slots if slot.record["solved"]]
    assert len(solved) == 4
    assert trained_rollouts(plain_loop(layout), groups) == [(slot.trace, 1.0) for slot in solved]


# ------------------------------------------------------------------------------------------- imitation


def imitation_recipe(directory: Path) -> Path:
    """Write a recipe with demonstrations, a short SFT, and RL beside a control, on a tiny model."""
    rl = make_recipe(directory, tasks=4, held_out=2, steps=6, evaluation={"every": 2})
    made = tomllib.loads(rl.read_text())
    table = made["rl"]
    del table["model"]
    make_model(directory / "start")
    train = {"name": "train", "source": "nano", "count": 12, "difficulties": [1], "demonstrations": 12}
    recipe = {
        "name": "imitation",
        "stages": ["base", "tasks", "corpus", "sft", "control", "rl", "evaluation"],
        "base": {"source": "./start"},
        "tasks": {"build": [train]},
        "corpus": {"build": [{"name": "shown", "sources": ["demonstrations:train"], "chat": True}]},
        "sft": {"mix": [{"corpus": "shown"}], "length": 2048, "tokens": 8192, "rows": 2, "spike": 0.0},
        "control": {"kind": "imitation", "learning_rate": 1e-3},
        "rl": {**table, "tasks": "train", "learning_rate": 1e-5, "checkpoint_every": 4} | {"informative_groups": False},
        "evaluation": made["evaluation"],
    }
    (directory / "recipe.toml").write_text(tomli_w.dumps(recipe))
    return directory / "recipe.toml"


@pytest.mark.slow
def test_imitation_goes_on_with_the_demonstrations_and_evaluates_the_weights_of_each_due_step(tmp_path: Path) -> None:
    """A control beside RL, killed in the middle: no rollout of training, evaluations of exactly each step's weights."""
    recipe, whole = imitation_recipe(tmp_path), RunLayout(tmp_path / "run")
    layout = RunLayout(whole.control)
    command = [sys.executable, "-m", "etude.cli", "run", str(recipe), "--out", str(whole.run), "--json", "--resume"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not layout.step_file(3).exists():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)["stages"]
    facts = stages["control"]
    assert (facts["steps"], facts["control"]) == (6, "imitation")
    assert "a control, not reinforcement learning: more imitation" in summarize_stage("control", facts)
    assert (stages["rl"]["steps"], stages["rl"]["control"]) == (6, "none")
    assert list(stages["evaluation"]["models"]) == ["base", "sft", "control", "rl"]
    compared = [(gain["model"], gain["against"]) for gain in stages["evaluation"]["gains"]]
    assert ("rl", "control") in compared
    assert all("control" not in pair or pair in (("rl", "control"), ("control", pair[1])) for pair in compared)
    # The control and RL began with the same weights, and each looked at validation as often.
    starts = [json.loads(each.origin.read_text())["digest"] for each in (whole, layout)]
    assert starts[0] == starts[1]
    assert stages["evaluation"]["scored"]["held-out"] == 2 * 4 + 4
    run, settings = Run.read(layout.run), open_rl_run(layout.run)[1]
    records = run.metrics("rl")
    evaluations = {record["step"]: record for record in records if record.get("evaluation")}
    assert sorted(evaluations) == [0, 2, 4, 6]
    assert all(record["versions/oldest"] == record["versions/newest"] for record in evaluations.values())
    losses = [record["loss"] for record in records if not record.get("evaluation")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert not list(layout.traces.iterdir())
    # It began where sft had ended, and each step has at least as many demonstrations as RL has rollouts.
    mixture = open_mixture(layout, 0)
    state = json.loads((run.path / "checkpoints" / "sft-2" / STATE_FILE).read_text())["mixture"]
    assert mixture.state_dict()["cursors"] == state["cursors"]
    config = ModelConfig.load(layout.model)
    steps = [each for _, each in zip(range(6), demonstration_steps(mixture, settings, config, 0, 0), strict=False)]
    spans: list[list[DocumentSpan]] = [[span for batch in step for span in batch.spans] for step in steps]
    assert all(len(step) >= settings.groups_per_step * settings.group_size for step in spans)
    later = next(demonstration_steps(open_mixture(layout, 0), settings, config, 4, 0))
    assert [span for batch in later for span in batch.spans] == spans[4]
