"""Devops tasks: broken packaging or configuration; the request is the error output, or a symptom that a user reports.

The verifier builds the wheel and compares its contents with those of the intact repository's wheel, or runs tests under
the repository's own pytest configuration.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from etude.tasks.checks import VerifierCheck, lines_check
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    WorkspaceState,
    apply_changes,
    generator,
    revert_changes,
)
from etude.tasks.generators.executor import WORKSPACE, ExecutionResult, program_command
from etude.tasks.generators.failure_report import test_name
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.source import read_toml, requirement_name
from etude.tasks.generators.task_writer import protected_globs, pytest_check, scope_check, suite_files

PYPROJECT = "pyproject.toml"
CONFIGURATION = ("*.toml", "*.cfg", "*.ini", "*.md", "*.rst", "*.txt", "MANIFEST.in", "setup.py")  # may change too
BUILD_COMMAND = "python3 -m pip wheel . --no-deps --no-build-isolation --no-index -w /tmp/wheels"
INSPECT_COMMAND = program_command("build", WORKSPACE)


@dataclass(frozen=True)
class Breakage:
    """One packaging fault: the changed files, and the reported symptom ("": the request is the command output)."""

    family: str
    changes: Mapping[str, bytes | None]
    symptom: str = ""


BreakageFunction = Callable[[str, Repository, random.Random], Iterator[Breakage]]
BREAKAGES: list[BreakageFunction] = []


def register_breakage(function: BreakageFunction) -> BreakageFunction:
    BREAKAGES.append(function)
    return function


def _changed(family: str, before: str, after: str, symptom: str = "") -> Iterator[Breakage]:
    if before != after:
        yield Breakage(family, {PYPROJECT: after.encode()}, symptom)


# ------------------------------------------------------------------------------------------------- packaging


@register_breakage
def backend(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    found = re.search(r'^build-backend\s*=\s*"([\w.]+)"', text, re.MULTILINE)
    if found:
        for wrong in (found[1] + "_meta", found[1].replace("_", "-"), found[1].rpartition(".")[0] + ".backend"):
            yield from _changed("backend", text, text.replace(f'"{found[1]}"', f'"{wrong}"', 1))


@register_breakage
def syntax(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    """Drop a closing quote or bracket."""
    lines = text.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if re.match(r'\s*[\w-]+\s*=\s*(".*"|\[.*\])\s*$', line)]
    rng.shuffle(places)
    for number in places[:3]:
        line = lines[number].rstrip("\n")
        yield from _changed("syntax", text, "".join([*lines[:number], line[:-1] + "\n", *lines[number + 1 :]]))


@register_breakage
def no_module(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    """Point the build at a wrong package directory."""
    for package in sorted({path.split("/")[1] for path in repository.source.modules if path.startswith("src/")}):
        for before, after in (
            (f'packages = ["src/{package}"', f'packages = ["{package}"'),
            (f'[tool.flit.module]\nname = "{package}"', f'[tool.flit.module]\nname = "{package}s"'),
            ('where = ["src"]', 'where = ["source"]'),
            (f'packages = ["{package}"]', f'packages = ["{package}.core"]'),
        ):
            yield from _changed("module", text, text.replace(before, after, 1))
    if "[tool.flit" in text and "[tool.flit.module]" not in text:
        yield from _changed("module", text, text + f'\n[tool.flit.module]\nname = "py{repository.source.name}"\n')


@register_breakage
def readme(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    for name in ("README.md", "README.rst"):
        other = "README.rst" if name.endswith("md") else "README.md"
        yield from _changed("readme", text, text.replace(f'readme = "{name}"', f'readme = "docs/{other}"', 1))


@register_breakage
def version(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    for wrong in ("-final.x", ".release"):
        yield from _changed(
            "version", text, re.sub(r'^(version = "[^"]+)"', rf'\g<1>{wrong}"', text, count=1, flags=re.M)
        )


@register_breakage
def python_bound(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    found = re.search(r'^requires-python = ">=(3\.\d+)"', text, re.MULTILINE)
    if found:
        after = text.replace(found[0], f'requires-python = "<{found[1]}"')
        symptom = prompts.choose(
            rng,
            f"pip on 3.11 says: `ERROR: Package '{repository.source.name}' requires a different Python: 3.11.2 not in "
            f"'<{found[1]}'`. We support {found[1]} and up.",
            f"Nobody can install the new release: requires a different Python (<{found[1]}). We mean {found[1]} on.",
        )
        yield from _changed("python-bound", text, after, symptom)


@register_breakage
def dependency(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    """Drop a dependency that the code imports."""
    for line in read_toml(text.encode(), PYPROJECT).get("project", {}).get("dependencies", []):
        after = re.sub(rf'\s*"{re.escape(line)}",?', "", text, count=1)
        name = requirement_name(line)
        symptom = prompts.choose(
            rng,
            f"Installed from the wheel into an empty environment: `ModuleNotFoundError: No module named '{name}'` on "
            f"import. At least {line} is what we need.",
            f"`pip install {repository.source.name}` does not bring {name} along any more ({line}).",
        )
        yield from _changed("dependency", text, after, symptom)


@register_breakage
def typed(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    for path in sorted(repository.files):
        if path.endswith("/py.typed") and not repository.source.is_test_path(path):
            package = repository.source.module_name(path.replace("py.typed", "__init__.py"))
            symptom = prompts.choose(
                rng,
                f"mypy: `module is installed, but missing library stubs or py.typed marker` for {package}.",
                f"The wheel of {repository.source.name} has lost its marker file for type checkers ({package}).",
            )
            yield Breakage("typed", {path: None}, symptom)


@register_breakage
def entry_point(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    found = re.search(r'^\[project\.(entry-points\.[^\]]+|scripts)\]\n([\w-]+) = "([^"]+)"\n', text, re.MULTILINE)
    if found:
        group = found[1].removeprefix("entry-points.").strip('"')
        symptom = (
            f"The entry point {found[2]} ({group}) is gone since the last release; it was {prompts.quoted(found[3])}."
        )
        yield from _changed("entry-point", text, text.replace(found[0], "", 1), symptom)


@register_breakage
def extra(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    table = read_toml(text.encode(), PYPROJECT).get("project", {}).get("optional-dependencies", {})
    for name, lines in table.items():
        after = re.sub(rf"^{re.escape(name)} = \[[^\]]*\]\n", "", text, count=1, flags=re.MULTILINE)
        if lines:
            warning = f"`pip install {repository.source.name}[{name}]` warns: does not provide the extra '{name}'."
            symptom = f"{warning} It was {', '.join(lines)}."
            yield from _changed("extra", text, after, symptom)


# ------------------------------------------------------------------------------------------------- pytest settings


@register_breakage
def settings(text: str, repository: Repository, rng: random.Random) -> Iterator[Breakage]:
    """Break the repository's pytest settings, so that pytest does not run."""
    head = "[tool.pytest.ini_options]\n"
    if head not in text:
        return
    for line in ('minversion = "12.0"\n', 'required_plugins = ["pytest-xdist>=3"]\n', 'addopts = "--cov-report=xml"\n'):
        if line.split(" =")[0] not in text:
            yield from _changed("pytest-settings", text, text.replace(head, head + line, 1))
    if "filterwarnings" in text:
        wrong = re.sub(r'(filterwarnings = \[\s*)"', r'\1"error::DeprecatedWarning",\n    "', text, count=1)
        yield from _changed("pytest-settings", text, wrong)
    if 'addopts = "' in text:
        yield from _changed(
            "pytest-settings", text, text.replace('addopts = "', 'addopts = "-n auto --dist=loadfile ', 1)
        )


# ------------------------------------------------------------------------------------------------- candidates


@generator("devops", "devops", weight=0.8, max_family_share=0.4)
def devops(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    text = repository.files.get(PYPROJECT, b"").decode()
    if not text:
        return
    found = [breakage for function in BREAKAGES for breakage in function(text, repository, rng)]
    rng.shuffle(found)
    for breakage in found:
        make = pytest_candidate if breakage.family == "pytest-settings" else wheel_candidate
        yield make(repository, breakage, rng.getrandbits(64))


def _site(breakage: Breakage) -> str:
    digests = (hashlib.sha256(data or b"").hexdigest()[:12] for data in breakage.changes.values())
    return f"{breakage.family}:{'+'.join(breakage.changes)}:{'+'.join(digests)}"


def wheel_candidate(repository: Repository, breakage: Breakage, seed: int) -> TaskCandidate:
    states = {
        "whole": WorkspaceState({}, command=INSPECT_COMMAND),
        "facts": WorkspaceState(breakage.changes, command=INSPECT_COMMAND),
        "build": WorkspaceState(breakage.changes, command=BUILD_COMMAND),
    }

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        intact, broken = (_wheel_contents(results[name]) for name in ("whole", "facts"))
        if "problem" in intact:
            raise CandidateRejected("not-built", "the intact repository does not build")
        if broken == intact:
            raise CandidateRejected("survives", "the wheel is the same")
        rng = random.Random(seed)
        request = breakage.symptom or _pasted_output(rng, BUILD_COMMAND.partition(" --no-deps")[0], results["build"])
        checks = (
            VerifierCheck(
                "wheel", {"env": _version_env(repository)}, {**intact, "roots": list(repository.source.roots)}
            ),
            *_configuration_checks(repository, breakage),
        )
        return _draft(repository, breakage, request, checks, {}, rng)

    return TaskCandidate(_site(breakage), breakage.family, states, finish)


def _configuration_checks(repository: Repository, breakage: Breakage) -> Iterator[VerifierCheck]:
    """Yield checks that the configuration is the intact one, but for lines that mean the same, and that no code or test
    changed."""
    files = apply_changes(repository.files, breakage.changes)
    scope = scope_check(files, (*(f"/{path}" for path in breakage.changes), *CONFIGURATION))
    yield VerifierCheck("scope", {}, {**scope.expected, "new": True})
    for path, data in breakage.changes.items():
        if data is not None:
            yield lines_check(path, data.decode(), repository.files[path].decode())


def _version_env(repository: Repository) -> dict[str, str]:
    """Return the variable that replaces the git tag for backends that read the version from git."""
    vcs = "vcs" in " ".join(repository.source.backend)
    return {"SETUPTOOLS_SCM_PRETEND_VERSION": repository.source.version} if vcs else {}


def _wheel_contents(result: ExecutionResult) -> dict[str, object]:
    try:
        found = json.loads(result.output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"problem": "no facts"}
    return dict(found)


def pytest_candidate(repository: Repository, breakage: Breakage, seed: int) -> TaskCandidate:
    rng = random.Random(seed)
    files = sorted({test_name(test)[0] for test in repository.durations})
    short = [
        path
        for path in files
        if repository.total_duration(_tests_in(repository, path)) < 1.5 and len(_tests_in(repository, path)) < 80
    ]
    rng.shuffle(short)
    chosen = sorted(short[:2])
    tests = [test for path in chosen for test in _tests_in(repository, path)]
    command = f"python3 -m pytest -q {' '.join(chosen)}"
    states = {"whole": WorkspaceState({}, command=command), "broken": WorkspaceState(breakage.changes, command=command)}

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        if results["whole"].exit_code or not chosen:
            raise CandidateRejected("not-run", "pytest does not run in the intact repository")
        if not results["broken"].exit_code:
            raise CandidateRejected("survives", "pytest runs")
        request = _pasted_output(rng, command, results["broken"])
        suite = suite_files(repository)
        check = pytest_check(repository, tests, suite)
        own = ["-c", f"{WORKSPACE}/{PYPROJECT}"]
        run = {**check.run, "run": chosen, "arguments": own}
        checks = (VerifierCheck("pytest", run, check.expected), *_configuration_checks(repository, breakage))
        return _draft(repository, breakage, request, checks, suite, rng)

    return TaskCandidate(_site(breakage), breakage.family, states, finish)


def _tests_in(repository: Repository, path: str) -> list[str]:
    return [test for test in repository.durations if test_name(test)[0] == path]


def _pasted_output(rng: random.Random, command: str, result: ExecutionResult) -> str:
    """Format a command with the relevant part of its output."""
    lines = [line.rstrip() for line in result.output.splitlines() if line.strip() and "[notice]" not in line]
    noise = re.compile(r"WARNING: (Running pip as|The directory)|\s*[\^~]+\s*$")
    lines = [line for line in lines if not noise.match(line)]
    if not lines:
        raise CandidateRejected("silent", "there is no output to show")
    notes = ("note:", "hint:", "╰", "×")  # pip's hints
    while lines[-1].strip().startswith(notes) and len(lines) > 1:
        lines.pop()
    shown = lines if len(lines) <= 14 else [*lines[:2], "...", *lines[-10:]]
    head = prompts.choose(
        rng,
        "",
        "",
        "Release job:",
        "What is wrong here?",
        "CI:",
        "Does not build any more:" if "pip" in command else "Cannot run the tests:",
    )
    return (f"{head}\n\n" if head else "") + prompts.fenced(f"$ {command}\n" + "\n".join(line[:240] for line in shown))


def _draft(
    repository: Repository,
    breakage: Breakage,
    request: str,
    checks: tuple[VerifierCheck, ...],
    suite: Mapping[str, bytes],
    rng: random.Random,
) -> TaskDraft:
    return TaskDraft(
        category="devops",
        family=breakage.family,
        register="symptom" if breakage.symptom else "log",
        request=request,
        difficulty=2 if breakage.symptom else 1,
        workspace=breakage.changes,
        solution=revert_changes(repository, breakage.changes),
        checks=checks,
        suite=suite,
        protected=protected_globs(repository),
    )
