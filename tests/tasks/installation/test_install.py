"""Repositories are installed in pods from a package index on this machine: by detectors, and by scripted sessions."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_index import LocalIndex, serving_index, small_wheel, tools_index
from starlette.requests import Request
from starlette.responses import Response
from stub_endpoint import NAME, StubEndpoint, StubTurn, call, says, serving
from typer.testing import CliRunner

from etude.errors import InputError
from etude.harness.model_options import ModelOptions
from etude.pods.fleet import Fleet, open_fleet
from etude.pods.workspace import FileState
from etude.tasks.cli import app
from etude.tasks.installation.installer import InstallationFailed, InstallOptions, install
from etude.tasks.installation.result import Installation, load_installation, save_installation
from etude.tasks.installation.setup_pod import InstallLog
from etude.tasks.installation.snapshot import RepositorySnapshot
from etude.tasks.installation.test_run import TestCommand, run_tests
from etude.tasks.installation.workspace import commit_image

SECRET = "hunter2hunter2"
PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "mini"
version = "1.0"
dependencies = ["thing"]
[tool.setuptools]
py-modules = ["mini"]
"""
MINI = "import thing\n\n\ndef value():\n    return thing.VALUE\n\n\n"
MINI += "if __name__ == '__main__':\n    print('mini', value())\n"
TESTS = """\
import random

import pytest

import mini


@pytest.mark.parametrize("number", range(40))
def test_steady(number):
    assert mini.value() > 0


@pytest.mark.parametrize("number", range(8))
def test_shaky(number):
    assert random.random() < 0.5
"""
SETTINGS_TEST = "def test_settings():\n    assert open('settings.ini').read()\n\n\ndef test_mini():\n    import mini\n"


def repository(**files: str) -> RepositorySnapshot:
    found = {"pyproject.toml": PYPROJECT, "mini.py": MINI, "tests/test_mini.py": TESTS, **files}
    states = {path: FileState.file(text.encode()) for path, text in found.items() if text}
    return RepositorySnapshot("mini", "", "2021-06-01T00:00:00+00:00", states)


@pytest.fixture(scope="module")
def index() -> Iterator[LocalIndex]:
    made = tools_index()
    made.add(small_wheel("thing", "1.0", "VALUE = 1\n"), "2021-01-01T00:00:00Z")
    made.add(small_wheel("thing", "2.0", "VALUE = 2\n"), "2023-01-01T00:00:00Z")
    made.add(small_wheel("missing", "1.0", "VALUE = 3\n"))
    with serving_index(made):
        yield made


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("install") / "pods"


@pytest.fixture
def options(index: LocalIndex, tmp_path: Path) -> InstallOptions:
    return InstallOptions(index_url=index.url, cache=tmp_path / "cache", reruns=2)


def in_fleet(state: Path, work: Callable[[Fleet], Coroutine[Any, Any, Any]]) -> Any:
    async def inside() -> Any:
        async with open_fleet(state=state) as fleet:
            return await work(fleet)

    return asyncio.run(inside())


def test_a_repository_is_installed_with_packages_of_its_date_and_its_image_serves_another_commit(
    state: Path, options: InstallOptions, tmp_path: Path
) -> None:
    """That each of the eight shaky tests has one status in all three runs has a probability of 1 / 65,536."""
    log = InstallLog()
    options = replace(options, secrets={"TOKEN": SECRET}, reruns=3)

    async def work(fleet: Fleet) -> None:
        made = await install(fleet, repository(), options, log=log)
        save_installation(made, tmp_path / "out")
        assert load_installation(tmp_path / "out") == made
        assert made.facts["packages"] == "dated"
        assert "thing==1.0" in made.script
        assert (tmp_path / "out/setup.sh").read_text() == made.script
        steady = [test for test in made.passing if "steady" in test]
        assert len(steady) == 40
        assert [test for test, status in made.tests.items() if status == "flaky"] == made.facts["flaky"] != []
        assert set(made.tests.values()) <= {"passed", "failed", "flaky"}
        assert int(str(made.facts["egress_bytes"])) > 100_000

        changed = repository(**{"mini.py": MINI.replace("thing.VALUE", "thing.VALUE + 40"), "README": "new"})
        removed = replace(
            changed, files={path: each for path, each in changed.files.items() if path != "pyproject.toml"}
        )
        image = commit_image(fleet, made, repository(), removed)
        async with await fleet.create(image) as pod:
            assert (await pod.exec("python -m mini")).stdout == "mini 41\n"
            listed = [each.name for each in await pod.list("/work") if each.kind == "file"]
            assert sorted(listed) == ["README", "mini.py"]
            run = await run_tests(pod, TestCommand.of(made), [steady[0]], probes="tests")
            assert (run.statuses, run.probes["failing"]) == ({steady[0]: "passed"}, "failed")
            assert SECRET not in (await pod.exec("env; cat /srv/install/*")).stdout

    in_fleet(state, work)
    assert SECRET not in log.text


@pytest.mark.slow
def test_a_runner_that_reports_failures_as_passed_is_found_by_its_probes(state: Path, options: InstallOptions) -> None:
    conftest = (
        "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    report = (yield).get_result()\n    report.outcome = 'passed'\n"
    )
    with pytest.raises(InstallationFailed) as caught:
        in_fleet(state, lambda fleet: install(fleet, repository(**{"tests/conftest.py": conftest}), options))
    assert caught.value.reason == "stubbed-runner"


@pytest.mark.slow
def test_failures_have_reasons(state: Path, options: InstallOptions, tmp_path: Path) -> None:
    options = replace(options, as_of="none")
    leaking = "import os\nraise SystemExit('error: ' + os.environ['TOKEN'])\n"
    setup = "import os, setuptools\nopen('token.txt', 'w').write(os.environ['TOKEN'])\nsetuptools.setup(name='mini')\n"
    cases = {
        "dependency": {"pyproject.toml": PYPROJECT.replace('"thing"', '"thing>5"')},
        "build": {"pyproject.toml": PYPROJECT.partition("[project]")[0], "setup.py": leaking},
        "missing-module": {"tests/test_mini.py": "import nowhere_to_be_found\n"},
        "tests-fail": {"tests/test_mini.py": "def test_a():\n    assert False\n"},
        "no-tests": {"tests/test_mini.py": "import pytest\n@pytest.mark.skip\ndef test_a():\n    pass\n"},
        "network": {
            "tests/test_mini.py": "import socket\ndef test_a():\n    socket.create_connection(('example.org', 80))\n"
        },
        "secret": {
            "pyproject.toml": PYPROJECT.partition("[project]")[0],
            "setup.py": setup,
            "tests/test_mini.py": "def test_a():\n    pass\n",
        },
    }
    for reason, files in cases.items():
        chosen = replace(options, secrets={"TOKEN": SECRET})
        with pytest.raises(InstallationFailed) as caught:
            in_fleet(state, lambda fleet, files=files, chosen=chosen: install(fleet, repository(**files), chosen))
        assert caught.value.reason == reason, caught.value.log
        assert "\n" not in str(caught.value)
        assert SECRET not in caught.value.log + str(caught.value)


@pytest.mark.slow
def test_a_missing_module_of_the_tests_is_installed(state: Path, options: InstallOptions) -> None:
    files = {"tests/test_mini.py": "import missing\n\n\ndef test_a():\n    assert missing.VALUE == 3\n"}
    made: Installation = in_fleet(state, lambda fleet: install(fleet, repository(**files), options))
    assert made.script.endswith(" missing\n")
    assert made.passing == ["tests/test_mini.py::test_a"]


@pytest.mark.slow
def test_a_pytest_that_does_not_start_is_replaced_by_a_newer_one_though_the_project_excludes_it(
    state: Path, tmp_path: Path
) -> None:
    old = tools_index()
    old.files["pytest"] = [(*each[:2], "2026-01-01T00:00:00Z") for each in old.files["pytest"]]
    old.add(small_wheel("pytest", "0.9", "raise TypeError('required field')\n"))
    old.add(small_wheel("thing", "1.0", "VALUE = 1\n"))
    pinned = PYPROJECT.replace("[tool", '[project.optional-dependencies]\ntest = ["pytest==0.9"]\n[tool')
    with serving_index(old):
        options = InstallOptions(index_url=old.url, cache=tmp_path / "cache", reruns=2)
        made = in_fleet(state, lambda fleet: install(fleet, repository(**{"pyproject.toml": pinned}), options))
    assert (made.framework, made.facts["packages"]) == ("pytest", "tools")
    assert "pytest==0.9" not in made.script  # neither as a pin
    assert len(made.tests) == 48


@pytest.mark.slow
def test_the_reason_of_a_failure_is_that_of_the_newest_packages(state: Path, tmp_path: Path) -> None:
    """At the date of the commit there is no version of the dependency; today's lacks what the tests import."""
    index = tools_index()
    index.add(small_wheel("thing", "2.0", "OTHER = 2\n"), "2023-01-01T00:00:00Z")
    tests = "def test_a():\n    import mini\n    assert mini.value()\n"
    with serving_index(index):
        options = InstallOptions(index_url=index.url, cache=tmp_path / "cache", reruns=2)
        with pytest.raises(InstallationFailed) as caught:
            in_fleet(state, lambda fleet: install(fleet, repository(**{"tests/test_mini.py": tests}), options))
    assert "No matching distribution" in caught.value.log
    assert caught.value.reason == "tests-fail"


# ------------------------------------------------------------------------------------------------- stages 1 and 2

COMMANDS = [
    {"command": "python -m pytest -q tests", "kind": "test", "description": "all tests pass"},
    {"command": "python -m mini", "kind": "run", "description": "prints mini and a number", "pattern": r"^mini \d$"},
    {
        "command": "cd / && python -c 'import mini; print(mini.__name__)'",
        "kind": "import",
        "description": "prints mini",
        "pattern": "^mini$",
    },
    *({"command": f"echo {number}", "kind": "run", "description": "echoes", "pattern": "1"} for number in range(7)),
]
HONEST = """\
set -euo pipefail
cd /work
python -m pip install -e . pytest
printf '[a]\\n' > /srv/mocks/settings.ini
ln -sf /srv/mocks/settings.ini /work/settings.ini
"""
SITE = "/srv/python/lib/python3*/site-packages"
CHEATS = {
    "edited-files": f"{HONEST}rm tests/test_mini.py\n",
    "masked-failure": f"{HONEST}false || true\n",
    "no-report": f"{HONEST}echo 'print(\"2 passed\")' | tee {SITE}/pytest/__main__.py\n",
    "stubbed-runner": f'{HONEST}sed -i \'s/outcome = "failed"/outcome = "passed"/\' {SITE}/_pytest/reports.py\n',
    "wrong-output": f"{HONEST}echo 'print(\"nothing\")' > {SITE}/thing.py\n",
}


class InstallingEndpoint(StubEndpoint):
    """Explores with COMMANDS, and sets up with one script after the other, one for each session."""

    scripts: list[str]
    sessions = 0

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        said = sum(message["role"] == "assistant" for message in body["messages"])
        asked = "\n".join(str(message["content"]) for message in body["messages"] if message["role"] == "user")
        if "commands.json" in asked:
            self.lines = writes("/srv/install/commands.json", json.dumps(COMMANDS))
        elif not said:
            self.lines = writes("/srv/install/setup.sh", self.scripts[self.sessions])
            self.sessions += 1
        return await super().chat(request)


def writes(path: str, text: str) -> list[StubTurn]:
    command = f"cat > {path} <<'END_OF_FILE'\n{text}\nEND_OF_FILE"
    return [says("", call("run_terminal_cmd", command=command)), says("Done.")]


def by_sessions(scripts: list[str], state: Path, options: InstallOptions) -> tuple[Installation, InstallingEndpoint]:
    endpoint = InstallingEndpoint([])
    endpoint.scripts = scripts
    files = {"tests/test_mini.py": SETTINGS_TEST}
    with serving(endpoint):
        model = ModelOptions(NAME, endpoint.url)
        chosen = replace(options, model=model, skip_detectors=True, min_passing=1.0, secrets={"TOKEN": SECRET})
        made = in_fleet(state, lambda fleet: install(fleet, repository(**files), chosen))
    assert SECRET not in json.dumps(endpoint.asked)
    return made, endpoint


@pytest.mark.slow
def test_a_scripted_endpoint_sets_a_repository_up_after_a_failure_that_it_is_told(
    state: Path, options: InstallOptions
) -> None:
    made, endpoint = by_sessions(["cd /work\npip install nothing-of-this-name", HONEST], state, options)
    assert made.facts["attempt"] == 2
    assert made.script.endswith(f"{HONEST}\n")
    assert set(made.tests.values()) == {"passed"}
    proposals: Any = made.facts["proposals"]
    assert [(each["kind"], each["works untouched"]) for each in proposals][:3] == [
        ("test", False),
        ("run", False),
        ("import", False),
    ]
    last = endpoint.asked[-1]["messages"]
    assert "An earlier attempt started from here and failed" in str(last)
    assert "script-fails" in str(last)


@pytest.mark.slow
def test_cheating_set_ups_are_discarded_after_five_attempts_with_their_reasons(
    state: Path, options: InstallOptions
) -> None:
    with pytest.raises(InstallationFailed) as caught:
        by_sessions(list(CHEATS.values()), state, options)
    assert caught.value.reason == "attempts"
    log = caught.value.log
    found = [line.rpartition(" [")[2].rstrip("]") for line in log.splitlines() if line.startswith("failed: ")]
    assert found == list(CHEATS), log


def test_submodules_are_named_and_can_be_left_out() -> None:
    snapshot = replace(repository(), submodules=("vendor/x",))
    nothing: Any = None  # no pod is needed to say so
    with pytest.raises(InputError, match=r"vendor/x is a submodule.*--without-submodules"):
        asyncio.run(install(nothing, snapshot, InstallOptions()))


def test_the_command_reports_bad_input_in_one_line(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.txt").write_text("")
    cases = {
        (str(tmp_path / "none"),): "no such repository",
        (str(plain),): "no project that can be installed",
        (f"{plain}@main",): "not a git repository",
        (str(plain), "--as-of", "soon"): "expected a date",
        (str(plain), "--secret", "A"): "expected NAME=VARIABLE",
        (str(plain), "--secret", "A=NOT_SET_ANYWHERE"): "is not set",
        (str(plain), "--map", "x"): "expected BASE=IMAGE",
        (str(plain), "--index-url", "ftp://x"): "expected the http",
        (str(plain), "--skip-stage-0"): "give the model",
    }
    for arguments, message in cases.items():
        options = ["--state", str(tmp_path / "pods"), "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, ["install", *arguments, *options])
        assert message in str(result.exception), (arguments, result.output)


@pytest.mark.slow
def test_the_command_installs_a_commit(index: LocalIndex, state: Path, tmp_path: Path) -> None:
    top = tmp_path / "mini"
    for path, each in repository().files.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_bytes(each.contents)
    who = {f"GIT_{who}_{what}": "a@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    when = {"GIT_COMMITTER_DATE": "2022-01-01T00:00:00Z", "GIT_CONFIG_GLOBAL": "/dev/null"}
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        subprocess.run(["git", "-C", top, *words], check=True, env={**os.environ, **who, **when})
    options = ["--index-url", index.url, "--state", str(state), "--out", str(tmp_path / "out"), "--reruns", "2"]
    result = CliRunner().invoke(app, ["install", f"{top}@HEAD", *options], catch_exceptions=False)
    assert "packages as of 2022-01-01" in result.output
    assert "thing==1.0" in (tmp_path / "out/setup.sh").read_text()
    assert (tmp_path / "out/log.txt").exists()
