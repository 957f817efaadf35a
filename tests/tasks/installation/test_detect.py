"""Stage 0 proposes set-up and tests from files alone; nothing runs here."""

import json

import pytest

from etude.errors import InputError
from etude.pods.workspace import FileState
from etude.tasks.installation.dependencies import dependency_digest
from etude.tasks.installation.detect import propose
from etude.tasks.installation.detect_python import accepts
from etude.tasks.installation.proposal import Proposal
from etude.tasks.installation.repairs import missing_header, missing_packages
from etude.tasks.installation.result import InstallationFailed
from etude.tasks.installation.shell_text import apt_packages, find_test_commands, pip_installs
from etude.tasks.installation.snapshot import RepositorySnapshot

TEST = {"tests/test_a.py": "def test_a(): pass\n"}
PYPROJECT = '[build-system]\nrequires = ["setuptools"]\n[project]\nname = "a"\nversion = "1"\n'


def snapshot(files: dict[str, str], version: str = "") -> RepositorySnapshot:
    states = {path: FileState.file(text.encode()) for path, text in files.items()}
    return RepositorySnapshot("a", "", "", states, version)


def proposal(files: dict[str, str], **options: str) -> Proposal:
    return propose(snapshot(files, options.pop("version", "")), ["3.11"], **options)


def commands(files: dict[str, str]) -> list[str]:
    return [step.alternatives[0] for step in proposal({**files, **TEST}).steps]


@pytest.mark.parametrize(
    ("extras", "first"),
    [
        ("dev=['x']\ntests=['y']", "'.[tests]'"),
        ("dev=['x']\ntest=['y']\nall=[]", "'.[test]'"),
        ("all=['x']\ndev=['y']", "'.[dev]'"),
        ("docs=['x']", "."),
    ],
)
def test_test_extras_are_tried_in_order_and_then_none(extras: str, first: str) -> None:
    text = f"{PYPROJECT}[project.optional-dependencies]\n{extras}\n"
    (step, *_) = proposal({"pyproject.toml": text, **TEST}).steps
    assert step.alternatives[0] == f"python -m pip install -e {first}"
    assert "python -m pip install -e ." in step.alternatives
    assert step.required


def test_extras_that_tox_tests_with_are_installed_together_with_those_of_the_tests() -> None:
    extras = "[project.optional-dependencies]\ncrypto = ['x']\ntests = ['y']\ndocs = ['z']\n"
    tox = "[testenv]\nextras =\n    crypto: crypto\n    docs, missing\n[testenv:lint]\nextras = other\n"
    (step, *_) = proposal({"pyproject.toml": PYPROJECT + extras, "tox.ini": tox, **TEST}).steps
    assert [line.rpartition(" ")[2] for line in step.alternatives[:3]] == ["'.[tests,crypto]'", "'.[tests]'", "."]


def test_dependency_groups_are_expanded_and_linters_are_the_first_to_go() -> None:
    text = PYPROJECT + '[dependency-groups]\nlib = ["hypothesis"]\ntests = [{include-group = "lib"}, "mypy", "tox"]\n'
    (step,) = (each for each in proposal({"pyproject.toml": text, **TEST}).steps if each.name == "group tests")
    assert step.alternatives == ("python -m pip install hypothesis mypy tox", "python -m pip install hypothesis")


def test_setup_py_is_read_without_running_it() -> None:
    text = (
        "import os\nos.mkdir('/tmp/never')\nfrom setuptools import setup\ntests = ['mock']\n"
        "setup(name='a', python_requires='>=3.6', install_requires=['six'],\n"
        "      extras_require={'test': tests + ['nose']})\n"
    )
    found = proposal({"setup.py": text, **TEST})
    assert found.steps[0].alternatives[0] == "python -m pip install -e '.[test]'"
    assert "six" in found.steps[0].alternatives[-1]
    assert found.base == "python:3.11"


def test_requirements_of_tox_nox_ci_and_files_are_found() -> None:
    files = {
        "pyproject.toml": PYPROJECT,
        "requirements-test.txt": "responses\n",
        "tox.ini": "[testenv]\ndeps =\n    pytest-mock\n    py37: old\n    -r{toxinidir}/requirements-test.txt\n"
        "[testenv:lint]\ndeps = flake8\n",
        "noxfile.py": "import nox\n@nox.session\ndef tests(session):\n    session.install('.', 'freezegun')\n",
        ".github/workflows/ci.yml": "jobs:\n  t:\n    steps:\n      - run: sudo apt-get install -y libxml2-dev\n"
        "      - run: |\n          pip install -U wheel tox\n          python -m pip install 'attrs>=20' \\\n"
        "            -r requirements-test.txt ${{ matrix.extra }}\n",
    }
    found = commands(files)
    assert "python -m pip install -r requirements-test.txt" in found
    assert "python -m pip install pytest-mock old" in found
    assert "python -m pip install freezegun 'attrs>=20'" in found
    assert proposal({**files, **TEST}).apt == ("libxml2-dev",)


def test_a_version_from_git_is_given_by_a_variable() -> None:
    text = '[build-system]\nrequires = ["hatchling", "hatch-vcs"]\n[project]\nname = "a"\ndynamic = ["version"]\n'
    found = proposal({"pyproject.toml": text, **TEST}, version="1.4.post2")
    assert found.env == {"SETUPTOOLS_SCM_PRETEND_VERSION": "1.4.post2"}


def test_test_commands_prefer_the_configured_paths_and_know_those_of_tox() -> None:
    files = {"pyproject.toml": PYPROJECT, "a/test_in.py": "", "tests/test_b.py": ""}
    assert proposal(files).tests[0].command == "python -m pytest -q a tests"
    configured = {**files, "pytest.ini": "[pytest]\ntestpaths = tests\n"}
    assert proposal(configured).tests[0].command == "python -m pytest -q"
    tox = {**files, "tox.ini": "[testenv]\ncommands = pytest --cov a --cov-report=xml -k fast {posargs}\n"}
    assert find_test_commands("commands = python -m pytest -n auto -k fast tests") == [
        "python -m pytest -q -k fast tests"
    ]
    assert proposal(tox).ecosystem == "python"


@pytest.mark.parametrize(
    ("specifier", "version", "accepted"),
    [
        (">=3.8", "3.11", True), (">=3.12", "3.11", False), ("<4,>=3.6", "3.11", True), ("<3.11", "3.11", False),
        ("~=3.6", "3.11", True), ("^3.8", "3.11", True), ("==3.9.*", "3.11", False), ("!=3.11.*,>=3", "3.11", False),
        (">3.11", "3.11", False), ("", "3.11", True), ("something", "3.11", True), (">=3.11.2", "3.11", True),
        ("<3.11.5", "3.11", True), ("<=3.10", "3.11", False),
    ],
)  # fmt: skip
def test_requires_python(specifier: str, version: str, accepted: bool) -> None:
    assert accepts(specifier, version) is accepted


def test_shell_commands_are_found_in_any_file() -> None:
    text = "RUN apt-get update && apt-get install -y --no-install-recommends git libpq-dev && rm -rf /var\n"
    text += '- run: "pip install -e .[test,dev]"'
    assert apt_packages(text) == ["git", "libpq-dev"]
    assert pip_installs(text) == ([], [], ["test", "dev"])
    assert pip_installs("uv pip install a>=1 -c c.txt -r r.txt") == (["a>=1"], ["r.txt"], [])


def test_node_go_and_rust_projects() -> None:
    package = {"scripts": {"test": "xo && node --import=tsx/esm --test test/*.ts && tsd"}}
    node = proposal({"package.json": json.dumps(package), "package-lock.json": "{}"})
    assert node.tests[0].command == "node --import=tsx/esm --test --test-reporter=tap test/*.ts"
    assert node.steps[0].alternatives[0].startswith("npm ci")
    runners = {"jest --coverage": "jest", "vitest": "jest", "mocha -R dot spec": "mocha", "c8 ava": "tap"}
    for script, framework in runners.items():
        found = proposal({"package.json": json.dumps({"scripts": {"test": script}})})
        assert [each.framework for each in found.tests] == [framework], script
    assert proposal({"go.mod": "module a", "a_test.go": ""}).tests[0].command == "go test -json ./..."
    assert proposal({"Cargo.toml": "[package]", "Cargo.lock": ""}).steps[0].alternatives[0].endswith("--locked")


def test_bad_repositories_give_one_line_with_the_reason() -> None:
    cases = {
        "no-tests": {"pyproject.toml": PYPROJECT, "a.py": ""},
        "several-projects": {"x/pyproject.toml": PYPROJECT, "y/package.json": "{}", "y/tests/test_a.py": ""},
        "unsupported-language": {"main.f90": "", "README": ""},
    }
    for reason, files in cases.items():
        with pytest.raises(InstallationFailed) as caught:
            proposal(files)
        assert caught.value.reason == reason
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no directory 'z'"):
        proposal(cases["several-projects"], project="z")
    files = {"x/pyproject.toml": PYPROJECT, "x/tests/test_a.py": "", "y/package.json": "{}"}
    assert proposal(files, project="x").project == "x"


def test_broken_files_are_no_tracebacks() -> None:
    for name in ("pyproject.toml", "setup.cfg", "setup.py", "tox.ini", "noxfile.py"):
        for text in ("[", "\0\x01", "(" * 500, "[project]\nname = 3\ndependencies = 5\n[tool]\npoetry = {}\n"):
            assert proposal({name: text, "requirements.txt": "", **TEST}).ecosystem == "python", (name, text[:5])
    with pytest.raises(InstallationFailed):
        proposal({"package.json": "[1"})


def test_repairs_name_what_is_missing_and_never_the_repository_itself() -> None:
    output = (
        "E   ModuleNotFoundError: No module named 'yaml'\nE   ModuleNotFoundError: No module named 'mine.sub'\n"
        "error: unrecognized arguments: --cov=a --cov-report=xml\nE       fixture 'mocker' not found\n"
        "ModuleNotFoundError: No module named 'json.nothing'\n"
    )
    assert missing_packages(output, {"mine"}) == ["PyYAML", "pytest-cov", "pytest-mock"]
    assert missing_header("x.c:1: fatal error: libpq-fe.h: No such file or directory") == "libpq-fe.h"
    assert missing_header("Error: pg_config executable not found.") == "pg_config"


def test_commits_with_the_same_dependencies_share_a_digest() -> None:
    first = snapshot({"pyproject.toml": PYPROJECT, "a.py": "1"})
    assert dependency_digest(first) == dependency_digest(
        snapshot({"pyproject.toml": PYPROJECT.replace('"1"', '"2"') + "[tool.ruff]\nx = 1\n", "a.py": "2", "b.py": ""})
    )
    other = snapshot({"pyproject.toml": PYPROJECT + 'dependencies = ["six"]\n', "a.py": "1"})
    assert dependency_digest(first) != dependency_digest(other)
    assert dependency_digest(first) != dependency_digest(snapshot({"pyproject.toml": PYPROJECT, "a/x.pyx": ""}))


def test_requirements_of_documentation_count_only_where_they_are_included() -> None:
    def digest(docs: str, **more: str) -> str:
        tests = {"requirements/tests.txt": "pytest\n"} | {name.replace("__", "/"): text for name, text in more.items()}
        return dependency_digest(snapshot({"pyproject.toml": PYPROJECT, "requirements/docs.txt": docs, **tests}))

    assert digest("sphinx==1") == digest("sphinx==2")
    included = {"requirements__dev.txt": "-r docs.txt\n"}
    assert digest("sphinx==1", **included) != digest("sphinx==2", **included)
    assert digest("sphinx==1", **{"requirements__tests.txt": "pytest<9\n"}) != digest("sphinx==1")
