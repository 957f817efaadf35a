"""Settings that change while a run goes on: which may, how, when they take effect, and what is recorded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rl_runs import make_recipe
from run_services import FakeStatuses, threaded_service
from typer.testing import CliRunner

from etude.cli import app
from etude.cluster.cluster import Resources, ServiceSpec
from etude.cluster.local import LocalCluster
from etude.cluster.supervisor import ServiceSupervisor
from etude.errors import InputError
from etude.harness.session import SessionSpec
from etude.recipe.recipe import load_recipe
from etude.rl.orchestrator import Orchestrator, RlTaskSets, named_tasks
from etude.rl.settings import RlSettings, open_rl_run
from etude.rollouts.live_settings import LiveSettings, recorded_changes
from etude.rollouts.rollout import RolloutOptions
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import load_queues
from etude.rollouts.worker import WorkerConfig, changed_config
from etude.runs.layout import RunLayout
from etude.runs.run import Run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tasks=6)


@pytest.fixture
def layout(recipe: Path, tmp_path: Path) -> RunLayout:
    run = Run.create_or_resume(tmp_path / "run", load_recipe(recipe))
    run.layout.make()
    run.close()
    return run.layout


def change(layout: RunLayout, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["change", str(layout.run), *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_change_is_written_shown_and_laid_over_the_recipe(layout: RunLayout) -> None:
    live = LiveSettings(layout, RlSettings)
    assert live.current().temperature == 1.0
    (first,) = json.loads(change(layout, "rl.temperature=0.5", "--json"))
    assert (first["key"], first["before"], first["value"]) == ("rl.temperature", 1.0, 0.5)
    text = change(layout, "rl.rewards.effort_spent=0.25", "rl.budget.turns=1")
    assert "applies to the groups of the next policy step" in text
    assert "the run is not active" in text
    settings = live.current()
    assert settings.temperature == 0.5, "an earlier change stays"
    assert settings.rewards == {"correctness": 1.0, "effort_spent": 0.25}
    assert (settings.budget.turns, settings.budget.max_turn_tokens) == (1, 16)
    layout.live.unlink()
    assert live.current() == open_rl_run(layout.run)[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rl.learning_rate=1e-5", "rl.learning_rate cannot change while a run goes on; these can: temperature, "),
        ("sft.tokens=5", "sft: only keys of \\[rl\\] can change"),
        ("rl.curriculum.siblings=nano", "rl.curriculum.siblings cannot change"),
        ("rl.temperature=hot", "live.toml: temperature must be a number"),
        ("rl.temperature=-1", "live.toml: temperature"),
        ("rl.rewards.corectness=1", "corectness is not a term"),
        ("rl.in_flight", "rl.in_flight: expected KEY=VALUE"),
        ("rl.in_flight=0", "live.toml: in_flight"),
    ],
)
def test_what_cannot_change_is_refused_and_nothing_is_written(layout: RunLayout, given: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        CliRunner().invoke(app, ["change", str(layout.run), given], catch_exceptions=False)
    assert not layout.live.exists()


def test_an_invalid_file_changes_nothing_and_what_was_in_force_outlives_a_restart(layout: RunLayout) -> None:
    with orchestrated(layout) as (orchestrator, services):
        change(layout, "rl.curriculum.hard_weight=3.0", "rl.workers=2")
        orchestrator.apply_changes(services, 4)
        assert orchestrator.curriculum.settings.hard_weight == 3.0
        assert services.count("worker") == 2
        layout.live.write_text("[rl]\nworkers = 'many'\n")
        orchestrator.apply_changes(services, 5)
        assert services.count("worker") == 2
        assert "workers must be an integer" in orchestrator.live.problem
    assert [(entry["step"], entry["key"]) for entry in recorded_changes(layout)] == [
        (5, "rl.curriculum"),
        (5, "rl.workers"),
    ]
    with orchestrated(layout) as (orchestrator, services):
        orchestrator.apply_changes(services, 9)
        assert orchestrator.live.settings.workers == 2
        assert orchestrator.curriculum.settings.hard_weight == 3.0
    assert len(recorded_changes(layout)) == 2


def test_the_queue_and_the_shares_of_workers_follow_the_number_in_flight(layout: RunLayout) -> None:
    with threaded_service(layout, load_queues(layout)) as service:
        assert service.share() == 8
        change(layout, "rl.in_flight=3")
        assert service.share() == 3
        assert service.queues["training"].settings.in_flight == 3
        service.board.report("orchestrator", {"workers": 2}, 0.0)
        assert service.share() == 2, "rounded up: the queue keeps the total"
        layout.live.unlink()
        assert service.share() == 4
        service.workers = 2  # by the recipe
        service.board.report("orchestrator", {"workers": 0}, 0.0)
        assert service.share() == 8, "a run that was changed to start none leaves them to workers started by hand"


def test_a_worker_samples_new_rollouts_as_changed_but_not_those_of_evaluations(layout: RunLayout) -> None:
    options = RolloutOptions(SessionSpec(), temperature=1.0)
    evaluation = replace(options, temperature=0.7)
    config = WorkerConfig("run", {"training": options, "evaluation": evaluation}, {"correctness": 1.0}, seed=0)
    changes = {"temperature": 0.25, "budget": {"turns": 1}, "rewards": {"effort_spent": 0.125}}
    changed = changed_config(layout, config, changes)
    assert changed.options["training"].temperature == 0.25
    assert changed.options["training"].session.budget.turns == 1
    assert changed.options["evaluation"] is evaluation
    assert changed.rewards == {"correctness": 1.0, "effort_spent": 0.125}
    again = changed_config(layout, changed, {})
    assert again.options["training"].temperature == 1.0
    assert again.rewards == open_rl_run(layout.run)[1].rewards


class orchestrated:  # noqa: N801
    """An orchestrator with its queues, and a supervisor whose services are not started."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout

    def __enter__(self) -> tuple[Orchestrator, ServiceSupervisor]:
        layout, settings = open_rl_run(self.layout.run)
        self.run = Run.create_or_resume(layout.run, load_recipe(layout.recipe), resume=True)
        self.opened = open_queues(layout)
        queues = self.opened.__enter__()
        tasks = RlTaskSets(named_tasks(Path(settings.tasks)), {})
        both = queues["training"], queues["evaluation"]
        statuses = FakeStatuses()
        orchestrator = Orchestrator(self.run, settings, layout, *both, statuses, tasks, 0, lambda *_: None)
        services = ServiceSupervisor(LocalCluster(), layout.logs, statuses)
        workers = orchestrator.live.settings.workers
        services.add_on_nodes("worker", workers, Resources(), lambda name, node: ServiceSpec(name, "none"))
        return orchestrator, services

    def __exit__(self, *exc: object) -> None:
        self.opened.__exit__(None, None, None)
        self.run.close()
        shutil.rmtree(self.layout.pods, ignore_errors=True)
