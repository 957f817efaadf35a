"""A benchmark from the history of a small repository, end to end in pods without a network."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.bench.cli import app
from etude.errors import InputError
from etude.pods import Fleet, open_fleet
from etude.pods.host_system import host_system
from etude.pods.workspace import FileState
from etude.tasks.base_images import python_image
from etude.tasks.harbor import find_tasks, read_task, task_digest
from etude.tasks.installation.dependencies import dependency_digest
from etude.tasks.installation.result import Installation, InstallationFailed
from etude.tasks.installation.snapshot import RepositorySnapshot
from etude.tasks.installation.workspace import with_files
from etude.tasks.lint import lint_task
from etude.tasks.mining.classify import MiningLimits
from etude.tasks.mining.history import open_history
from etude.tasks.mining.install_parent import mining_host_settings
from etude.tasks.mining.options import MiningOptions
from etude.tasks.mining.report import MiningReport, build_benchmark
from etude.tasks.mining.time_split import TimeSplit
from etude.tasks.trial import commands_agent, run_trial
from tests.tasks.mined_history import FIXED, GitHistory, shop_history, text

LIMITS = MiningLimits(min_lines=1)


async def install_by_hand(fleet: Fleet, snapshot: RepositorySnapshot) -> Installation:
    """Install a repository without dependencies: the Python image with its files, and an ignored file of a build."""
    digest = dependency_digest(snapshot)
    image = with_files(fleet.store, await python_image(fleet), snapshot.files).named(f"by-hand-{digest[:16]}")
    await fleet.keep_image(image)
    return Installation(
        repository=snapshot.name,
        commit=snapshot.commit,
        script="",
        base=f"python:{host_system().python}",
        image=image.name,
        test_command="python -m pytest -q",
        framework="pytest",
        dependency_digest=digest,
    )


async def build(fleet: Fleet, repository: Path, options: MiningOptions) -> MiningReport:
    settings = await mining_host_settings(fleet, {})
    return await build_benchmark(fleet, open_history(str(repository)), options, install_by_hand, settings)


def run_build(repository: Path, out: Path, **more: object) -> MiningReport:
    async def work() -> MiningReport:
        async with open_fleet() as fleet:
            return await build(fleet, repository, MiningOptions(out, limits=LIMITS, **more))  # type: ignore[arg-type]

    return asyncio.run(work())


@pytest.fixture(scope="module")
def mined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], MiningReport]:
    """The tasks of the shop's history, split in two."""
    top = tmp_path_factory.mktemp("mined")
    made = shop_history(top / "shop")
    return top, made, run_build(top / "shop", top / "tasks", split=TimeSplit.parse("0.6"), logs=True)


@pytest.mark.slow
def test_every_change_has_a_fate(mined: tuple[Path, dict[str, str], MiningReport]) -> None:
    top, made, report = mined
    lines = (top / "tasks/.build/journal.jsonl").read_text().splitlines()
    entries = {entry["site"]: entry for entry in map(json.loads, lines)}
    fates = {kind: entries[id]["reason"] for kind, id in made.items()}
    assert fates == {
        "first": "first-commit",
        "fix": "",
        "formatting": "formatting",
        "bot": "bot",
        "feature": "",
        "untested": "no-tests",
        "release": "release",
        "merged": "",
        "docs": "no-source",
        "merge": "merge",
    }
    assert (report.bench, report.train, report.reasons["task"]) == (2, 1, 3)
    mutations = report.mutations
    assert mutations["tasks"] == 3
    assert 0 < mutations["noticed"] <= mutations["tried"]
    assert any("every dropped hunk" in line for line in report.sentences())


@pytest.mark.slow
def test_tasks_are_what_a_person_asked_and_nothing_more(mined: tuple[Path, dict[str, str], MiningReport]) -> None:
    top, made, _ = mined
    tasks = {path.name: read_task(path) for path in find_tasks(top / "tasks")}
    by_kind = {kind: next((task for name, task in tasks.items() if id[:10] in name), None) for kind, id in made.items()}
    fix, feature, merged = by_kind["fix"], by_kind["feature"], by_kind["merged"]
    assert fix is not None
    assert feature is not None
    assert merged is not None
    assert fix.directory.parent.name == "train"
    assert feature.directory.parent.name == "bench"
    assert fix.instruction.startswith("average() of an empty list divides by zero")
    assert "#1" not in fix.instruction
    assert "Signed-off" not in fix.instruction
    assert "discounted(items, percent=10)" in feature.instruction
    assert "rounded(value)" in feature.instruction
    assert "percent must be between 0 and 100" in feature.instruction
    assert feature.metadata["import_error_only"]
    assert not fix.metadata["import_error_only"]
    assert feature.metadata["changed_files"] == 2
    assert {feature.category, merged.category} <= {"feature", "debugging"}
    for task in tasks.values():
        assert not [each for each in lint_task(task.directory) if each.level == "error"]
        git = task.directory / "environment/repo/.git"
        listed = ["git", "--git-dir", str(git), "rev-list", "--all", "--count"]
        assert subprocess.run(listed, capture_output=True, text=True, check=True).stdout.strip() == "1"
        names = [path.name for path in task.directory.rglob("*") if "/environment/" in f"{path}/"]
        assert not [name for name in names if name.endswith((".pyc", ".egg-info")) or name == "__pycache__"]
        assert task.metadata["mutations_noticed"] > 0
    logged = [task for task in tasks.values() if "log" in task.metadata]
    assert logged
    for task in logged:
        assert "assert average([]) == 0" not in task.instruction


@pytest.mark.slow
def test_right_and_wrong_submissions_are_told_apart(mined: tuple[Path, dict[str, str], MiningReport]) -> None:
    top, made, _ = mined
    task = next(path for path in find_tasks(top / "tasks") if made["fix"][:10] in path.name)
    other = text(FIXED).replace("if not items:\n        return 0\n    return", "return 0 if not items else")
    assert other != text(FIXED)
    wrong = text(FIXED).replace("return 0\n", "return 1\n")

    async def work() -> list[float]:
        async with open_fleet() as fleet:
            settings = await mining_host_settings(fleet, {})
            scores = []
            for code in (other, wrong):
                agent = commands_agent(f"cat > shop/prices.py <<'END'\n{code}END\n")
                trial = await run_trial(fleet, read_task(task), agent, host_settings=settings)
                scores.append(trial.result.score)
            return scores

    assert asyncio.run(work()) == [1.0, 0.0]


@pytest.mark.slow
def test_a_build_resumes_to_the_same_tasks(mined: tuple[Path, dict[str, str], MiningReport], tmp_path: Path) -> None:
    top, _, report = mined
    out = tmp_path / "tasks"
    shutil.copytree(top / "tasks", out, symlinks=True)
    before = {path.name: task_digest(path) for path in find_tasks(out)}
    journal = out / ".build/journal.jsonl"
    lines = journal.read_text().splitlines()
    kept = [line for line in lines if '"reason": ""' not in line]  # as if it was killed before any task
    journal.write_text("\n".join(kept) + "\n" + '{"site": "torn')
    shutil.rmtree(out / "bench")
    shutil.rmtree(out / ".build/tasks")
    again = run_build(top / "shop", out, split=TimeSplit.parse("0.6"), logs=True)
    assert {path.name: task_digest(path) for path in find_tasks(out)} == before
    assert dict(again.reasons) == dict(report.reasons)


@pytest.mark.slow
def test_flaky_unnoticed_and_uninstallable_changes_are_no_tasks(tmp_path: Path) -> None:
    history = GitHistory(tmp_path / "dice")
    roll, shake = "def roll():\n    return 4\n", "\n\ndef shake():\n    pass\n"
    throw = "\n\ndef throw(count):\n    return [roll() for _ in range(count)]\n"
    history.commit("Start", {"dice.py": roll, "tests/test_dice.py": "def test_old():\n    assert True\n"})
    flaky = (
        "import os\nfrom dice import roll\n\n\ndef test_roll():\n    assert os.urandom(1)[0] % 2 == 0 or roll() == 9\n"
    )
    history.commit("Shake the dice before rolling", {"dice.py": roll + shake, "tests/test_flaky.py": flaky})
    idle = "import dice\n\n\ndef test_two():\n    assert dice\n"
    history.commit("Throw several dice at once", {"dice.py": roll + shake + throw, "tests/test_two.py": idle})
    report = run_build(tmp_path / "dice", tmp_path / "tasks")
    assert report.bench == 0
    assert sum(report.reasons.get(reason, 0) for reason in ("flaky", "no-pass-to-pass", "no-fail-to-pass")) == 2

    async def fail(fleet: Fleet, snapshot: RepositorySnapshot) -> Installation:
        raise InstallationFailed("dependency", f"{snapshot.name}: no such package")

    async def work() -> MiningReport:
        async with open_fleet() as fleet:
            settings = await mining_host_settings(fleet, {})
            history = open_history(str(tmp_path / "dice"))
            options = MiningOptions(tmp_path / "other", limits=LIMITS)
            return await build_benchmark(fleet, history, options, fail, settings)

    assert asyncio.run(work()).reasons["install-dependency"] == 2


@pytest.mark.slow
def test_tests_of_other_languages_run_with_their_own_command(tmp_path: Path) -> None:
    if shutil.which("node", path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip("pods have no node")
    code = "export function total(items) {\n  return items.reduce((a, b) => a + b);\n}\n"
    fixed = code.replace("a + b)", "a + b, 0)") + "\nexport function mean(items, empty = 0) {\n  return empty;\n}\n"
    head = "import test from 'node:test';\nimport assert from 'node:assert';\n"
    old = head + "import {total} from '../lib/price.js';\ntest('adds', () => assert.equal(total([1, 2]), 3));\n"
    new = old.replace("{total}", "{total, mean}") + "test('nothing', () => assert.equal(total([]) + mean([]), 0));\n"
    history = GitHistory(tmp_path / "price")
    package = '{"name": "price", "version": "1.0.0", "type": "module", "scripts": {"test": "node --test"}}\n'
    other = head + "test('never ends', () => new Promise(() => setInterval(() => {}, 1000)));\n"
    start = {"package.json": package, "lib/price.js": code, "test/price.test.js": old, "test/other.test.js": other}
    history.commit("Start", start)
    history.commit("total() of nothing is 0", {"lib/price.js": fixed, "test/price.test.js": new})

    async def install_node(fleet: Fleet, snapshot: RepositorySnapshot) -> Installation:
        assert fleet.local is not None
        image = with_files(fleet.local.store, fleet.local.resolve("host"), snapshot.files).named("by-hand-node")
        fleet.local.store.add_image(image)
        return Installation(
            repository=snapshot.name,
            commit=snapshot.commit,
            script="",
            base="host",
            image=image.name,
            test_command="node --test --test-reporter=tap",
            framework="node",
            dependency_digest=dependency_digest(snapshot),
        )

    async def work() -> MiningReport:
        async with open_fleet() as fleet:
            settings = await mining_host_settings(fleet, {})
            options = MiningOptions(tmp_path / "tasks", limits=LIMITS)
            return await build_benchmark(fleet, open_history(str(tmp_path / "price")), options, install_node, settings)

    report = asyncio.run(work())
    assert report.reasons["task"] == 1, (tmp_path / "tasks/.build/journal.jsonl").read_text()
    task = read_task(next(iter(find_tasks(tmp_path / "tasks"))))
    assert "mean(items, empty = 0)" in task.instruction
    assert "--test-reporter=tap test/price.test.js ) >" in (task.directory / "tests/test.sh").read_text()
    assert not [each for each in lint_task(task.directory) if each.level == "error"]


@pytest.mark.slow
def test_tests_of_unittest_run_by_their_command_where_pytest_does_not_start(tmp_path: Path) -> None:
    """As pytest of 2021 does not with Python 3.11."""
    old = "import unittest\n\nfrom prices import total\n\n\nclass TotalTest(unittest.TestCase):\n"
    old += "    def test_two(self):\n        self.assertEqual(total([1, 2]), 3)\n"
    new = old + "\n    def test_none(self):\n        self.assertEqual(total(None), 0)\n"
    code = "def total(items):\n    return sum(items)\n"
    history = GitHistory(tmp_path / "prices")
    history.commit("Start", {"prices.py": code, "tests/__init__.py": "", "tests/test_prices.py": old})
    fixed = {"prices.py": code.replace("(items)\n", "(items or ())\n"), "tests/test_prices.py": new}
    history.commit("The total of no list is 0", fixed)

    async def install_unittest(fleet: Fleet, snapshot: RepositorySnapshot) -> Installation:
        assert fleet.local is not None
        store, base = fleet.local.store, await python_image(fleet, ("pip",))
        broken = 'raise AttributeError("__spec__")\n'
        files = {"pytest.py": FileState.file(broken.encode()), **snapshot.files}
        image = with_files(store, base, files).named("by-hand-unittest")
        store.add_image(image)
        return Installation(
            repository=snapshot.name,
            commit=snapshot.commit,
            script="",
            base=f"python:{host_system().python}",
            image=image.name,
            test_command="python -m unittest -v tests.test_prices",
            framework="unittest",
            dependency_digest=dependency_digest(snapshot),
        )

    async def work() -> MiningReport:
        async with open_fleet() as fleet:
            settings = await mining_host_settings(fleet, {})
            options = MiningOptions(tmp_path / "tasks", limits=LIMITS)
            history = open_history(str(tmp_path / "prices"))
            return await build_benchmark(fleet, history, options, install_unittest, settings)

    report = asyncio.run(work())
    assert report.reasons["task"] == 1, (tmp_path / "tasks/.build/journal.jsonl").read_text()
    task = read_task(next(iter(find_tasks(tmp_path / "tasks"))))
    assert "python -m unittest -v tests.test_prices" in (task.directory / "tests/test.sh").read_text()


def test_the_command_refuses_bad_input_in_one_line(tmp_path: Path) -> None:
    history = GitHistory(tmp_path / "untested")
    history.commit("one", {"a.py": "x = 1"})
    history.commit("two", {"a.py": "x = 2"})
    mono = GitHistory(tmp_path / "mono")
    for name in ("api", "web"):
        setup = "import setuptools\nsetuptools.setup()"
        mono.commit(name, {f"{name}/setup.py": setup, f"{name}/tests/test_a.py": "def test_a(): pass"})
    runner = CliRunner()
    for arguments, words in (
        ([str(tmp_path / "nowhere")], "no such repository"),
        ([str(tmp_path)], "no git history"),
        ([str(tmp_path / "untested"), "--split", "2"], "--split 2"),
        ([str(tmp_path / "untested"), "--issues", str(tmp_path)], "NUMBER.md"),
        ([str(tmp_path / "untested"), "--session-logs", str(tmp_path)], "no ATIF log"),
        ([str(tmp_path / "untested")], "no test files"),
        ([str(tmp_path / "mono")], "a monorepo"),
    ):
        done = runner.invoke(app, ["build", *arguments, "--out", str(tmp_path / "out")])
        assert isinstance(done.exception, InputError), (arguments, done.exception)
        assert words in str(done.exception)
        assert "\n" not in str(done.exception)
