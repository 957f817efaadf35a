"""What is doubtful in a task directory, found by reading it: nothing is built or run.

An `error` means that the task does not load or cannot run here, a `warning` that its grade may not mean what it should,
a `note` that something is worth knowing.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from etude.errors import InputError
from etude.pods.images.instructions import Dockerfile, Instruction, parse
from etude.tasks.base_images import mapped, plain_name
from etude.tasks.environment import carried
from etude.tasks.harbor import read_task
from etude.tasks.schema import SCHEMA, unknown_keys
from etude.tasks.task import Task
from etude.tasks.trial import has_solution
from etude.tasks.verifier import graded_in_place
from etude.tasks.workspace import Globs

Level = Literal["error", "warning", "note"]
CATEGORIES = (*("debugging", "feature", "refactor", "docs", "testing", "review", "devops", "migration", "question"),)
_INSTALL = re.compile(r"\b(pip3?|uv|uvx|conda|poetry|npm|apt-get|apt|apk)\b[^\n;&|]*\b(install|add|sync|run|tool)\b")
_PIP = re.compile(r"\b(?:pip3?|uv pip)\s+install\s+([^;&|\n]*)")
_FETCH = re.compile(r"\b(curl|wget|git clone)\b|https?://")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


@dataclass(frozen=True)
class Doubt:
    """One thing that lint found."""

    rule: str
    level: Level
    message: str
    where: str = ""


def lint_task(directory: Path) -> list[Doubt]:
    """Everything doubtful in a task."""
    try:
        task = read_task(directory)
        carried(task)
        graded_in_place(task)
    except InputError as error:
        rule = "invalid-task-config" if "task.toml" in str(error) else "invalid-task-files"
        return [Doubt(rule, "error", str(error), str(directory))]
    found = [doubt for rule in RULES for doubt in rule(task)]
    return sorted(found, key=lambda doubt: (("error", "warning", "note").index(doubt.level), doubt.rule, doubt.where))


def _config(task: Task) -> Iterator[Doubt]:
    for key in unknown_keys(task.config):
        yield Doubt("unknown-config-field", "warning", f"{key} is not a field of the format", "task.toml")
    environment = task.config.get("environment", {})
    old = {
        "version": "schema_version",
        "memory": "memory_mb",
        "storage": "storage_mb",
        "allow_internet": "network_mode",
    }
    for name in ("version", *environment):
        if name in old and (name in environment or (name == "version" and "version" in task.config)):
            yield Doubt("old-config-field", "note", f"{name} is the old name of {old[name]}", "task.toml")
    version = str(task.config.get("schema_version", task.config.get("version", SCHEMA)))
    if not re.fullmatch(r"1\.[0-4]", version):
        yield Doubt("schema-version", "note", f"{version} is not a version of the format known here", "task.toml")
    for name in ("mcp_servers", "gpus", "tpu"):
        if environment.get(name):
            yield Doubt("unsupported", "error", f"environment.{name}: pods have none", "task.toml")
    if (task.directory / "trajectory.json").exists():
        yield Doubt("unsupported", "warning", "the session it should go on from is not seeded", "trajectory.json")
    if not task.steps and not task.instruction.strip():
        yield Doubt("empty-instruction", "error", "there is nothing that the agent is told", "instruction.md")


def _ours(task: Task) -> Iterator[Doubt]:
    """What our own metadata should say, where it says anything."""
    category = task.metadata.get("category")
    if category is not None and task.metadata.get("source") and category not in CATEGORIES:
        yield Doubt("unknown-category", "note", f"{category!r} is none of {', '.join(CATEGORIES)}", "task.toml")
    if task.protected and not task.asks_for_tests:
        globs = Globs(task.protected)
        context = task.directory / "environment"
        tests = [
            path for path in context.rglob("*") if path.is_file() and re.match(r"(test_.*|.*_test)\.py$", path.name)
        ]
        for path in tests:
            inside = path.relative_to(context).as_posix()
            if not any(globs.cover(inside[at:]) for at in _starts(inside)):
                yield Doubt("unprotected-test", "warning", "a test that the agent may change", f"environment/{inside}")


def _starts(path: str) -> Iterator[int]:
    yield 0
    yield from (at + 1 for at, char in enumerate(path) if char == "/")


def _isolation(task: Task) -> Iterator[Doubt]:
    if (task.agent.user or "root") in ("root", "0"):
        yield Doubt("root-agent", "note", "the agent is root in its pod", "task.toml")
    if task.separate is None and graded_in_place(task):
        yield Doubt(
            "shared-verifier", "warning", "graded in the pod the agent had: what it left there counts", "task.toml"
        )
    network = task.agent.network or task.machine.network
    if network.mode == "public":
        yield Doubt("public-network", "note", "a pod gives it only what --allow names", "task.toml")
    elif network.mode == "allowlist":
        yield Doubt("network-answer", "warning", f"the answer may be found at {', '.join(network.hosts)}", "task.toml")
    if not all(has_solution(task, step) for step in task.steps or (None,)):
        yield Doubt("no-solution", "warning", "without solve.sh it cannot be validated", "solution")


def _artifacts(task: Task) -> Iterator[Doubt]:
    sources = [str(entry["source"]).rstrip("/") for entry in task.artifacts]
    for number, one in enumerate(sources):
        if any(one != other and one.startswith(f"{other}/") for other in sources) or one in sources[:number]:
            yield Doubt("overlapping-artifacts", "warning", f"{one} is collected twice", "task.toml")
        if one.startswith("/logs") and one != "/logs/artifacts":
            yield Doubt("artifact-log-overlap", "warning", f"{one} holds logs of the run itself", "task.toml")


def _dockerfile(task: Task) -> Iterator[Doubt]:
    for place in ("environment", "tests"):
        file = task.directory / place / "Dockerfile"
        if not file.exists():
            continue
        where = f"{place}/Dockerfile"
        try:
            recipe = parse(file.read_text(encoding="utf-8-sig"), where)
        except (InputError, UnicodeError) as error:
            yield Doubt("invalid-dockerfile", "error", str(error), where)
            continue
        yield from _images(recipe)
        for stage in recipe.stages:
            for step in stage.steps:
                yield from _step(step, agent=place == "environment")
    if (task.directory / "environment/docker-compose.yaml").exists():
        yield Doubt("unsupported", "error", "pods are single machines", "environment/docker-compose.yaml")


def _images(recipe: Dockerfile) -> Iterator[Doubt]:
    names = {stage.name for stage in recipe.stages}
    for stage in recipe.stages:
        name = stage.base.text.split()[0]
        if name.lower() in names or name in ("scratch", "host") or "$" in name:
            continue
        tag = plain_name(name).partition(":")[2]
        if not _DIGEST.search(name) and tag in ("", "latest"):
            yield Doubt("unpinned-image", "warning", f"FROM {name} is another image tomorrow", stage.base.where)
        known = plain_name(name).partition(":")[0] in ("python", "debian", "ubuntu")
        if not known and mapped(name, {}) is None:
            yield Doubt("unmapped-image", "note", f"FROM {name} needs --map {name}=IMAGE", stage.base.where)


def _step(step: Instruction, agent: bool) -> Iterator[Doubt]:
    if step.name == "RUN":
        for packages in _PIP.findall(step.text):
            for package in packages.split():
                if re.fullmatch(r"[A-Za-z0-9._-]+(\[.*\])?", package) and not package.startswith("-"):
                    message = f"{package} has no version"
                    yield Doubt("unpinned-python-dependency", "warning", message, step.where)
    elif step.name in ("COPY", "ADD") and agent:
        sources = (step.json or tuple(step.text.split()))[:-1]
        if any(re.match(r"(\./)?(\.\./)*(tests|solution)(/|$)", source) for source in sources):
            message = f"{' '.join(sources)}: tests or solution in the agent's image"
            yield Doubt("agent-image-test-leak", "error", message, step.where)


def _verifier(task: Task) -> Iterator[Doubt]:
    scripts = [task.directory / "tests/test.sh"]
    scripts += [task.directory / "steps" / step.name / "tests/test.sh" for step in task.steps]
    for script in scripts:
        if not script.is_file():
            continue
        where = script.relative_to(task.directory).as_posix()
        text = "\n".join(
            line for line in script.read_text(errors="replace").splitlines() if not line.lstrip().startswith("#")
        )
        if found := _INSTALL.search(text):
            yield Doubt("verifier-runtime-install", "warning", f"`{found[0].strip()}` at grading time", where)
        if found := _FETCH.search(text):
            yield Doubt("verifier-network-download", "warning", f"`{found[0].strip()}` at grading time", where)
        if "/logs/verifier/reward" not in text and not any(
            "/logs/verifier" in path.read_text(errors="replace")
            for path in script.parent.rglob("*")
            if path.is_file() and path.suffix in (".py", ".sh")
        ):
            yield Doubt("no-reward-written", "warning", "nothing in tests/ names /logs/verifier", where)


RULES: tuple[Callable[[Task], Iterator[Doubt]], ...] = (
    _config,
    _ours,
    _isolation,
    _artifacts,
    _dockerfile,
    _verifier,
)


def doubt_json(doubt: Doubt) -> dict[str, Any]:
    return {"rule": doubt.rule, "level": doubt.level, "message": doubt.message, "where": doubt.where}
