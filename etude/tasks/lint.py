"""Lint a task directory by reading it; nothing is built or run.

An `error` means that the task does not load or cannot run here, a `warning` that its verifier result may be
misleading, a `note` is for information.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from etude.errors import InputError
from etude.globs import Globs
from etude.pods.images.instructions import Dockerfile, Instruction, parse
from etude.tasks.base_images import mapped_image, short_image_name
from etude.tasks.environment import carried_paths
from etude.tasks.harbor import read_task
from etude.tasks.schema import SCHEMA_VERSION, unknown_keys
from etude.tasks.task import Task
from etude.tasks.trial import has_solution
from etude.tasks.verifier import verified_in_place

Level = Literal["error", "warning", "note"]
CATEGORIES = (*("debugging", "feature", "refactor", "docs", "testing", "review", "devops", "migration", "question"),)
_INSTALL = re.compile(r"\b(pip3?|uv|uvx|conda|poetry|npm|apt-get|apt|apk)\b[^\n;&|]*\b(install|add|sync|run|tool)\b")
_PIP = re.compile(r"\b(?:pip3?|uv pip)\s+install\s+([^;&|\n]*)")
_FETCH = re.compile(r"\b(curl|wget|git clone)\b|https?://")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


@dataclass(frozen=True)
class LintFinding:
    """One violation of a lint rule."""

    rule: str
    level: Level
    message: str
    where: str = ""


def lint_task(directory: Path) -> list[LintFinding]:
    """Return all lint findings of a task, errors first."""
    try:
        task = read_task(directory)
        carried_paths(task)
        verified_in_place(task)
    except InputError as error:
        rule = "invalid-task-config" if "task.toml" in str(error) else "invalid-task-files"
        return [LintFinding(rule, "error", str(error), str(directory))]
    found = [finding for rule in RULES for finding in rule(task)]
    levels = ("error", "warning", "note")
    return sorted(found, key=lambda finding: (levels.index(finding.level), finding.rule, finding.where))


def _config(task: Task) -> Iterator[LintFinding]:
    for key in unknown_keys(task.config):
        yield LintFinding("unknown-config-field", "warning", f"{key} is not a field of the format", "task.toml")
    environment = task.config.get("environment", {})
    legacy = {
        "version": "schema_version",
        "memory": "memory_mb",
        "storage": "storage_mb",
        "allow_internet": "network_mode",
    }
    for name in ("version", *environment):
        if name in legacy and (name in environment or (name == "version" and "version" in task.config)):
            yield LintFinding("old-config-field", "note", f"{name} is the legacy name of {legacy[name]}", "task.toml")
    version = str(task.config.get("schema_version", task.config.get("version", SCHEMA_VERSION)))
    if not re.fullmatch(r"1\.[0-4]", version):
        yield LintFinding("schema-version", "note", f"{version} is not a known version of the format", "task.toml")
    for name in ("mcp_servers", "skills_dir", "gpus", "tpu"):
        if environment.get(name):
            yield LintFinding("unsupported", "error", f"environment.{name}: not supported by pods", "task.toml")
    if (task.directory / "trajectory.json").exists():
        message = "the trajectory is ignored: a session starts from the instruction only"
        yield LintFinding("unsupported", "warning", message, "trajectory.json")
    if not task.steps and not task.instruction.strip():
        yield LintFinding("empty-instruction", "error", "the instruction is empty", "instruction.md")


def _metadata(task: Task) -> Iterator[LintFinding]:
    """Check Etude's own metadata keys, where they are set."""
    category = task.metadata.get("category")
    if category is not None and task.metadata.get("source") and category not in CATEGORIES:
        message = f"{category!r} is not one of {', '.join(CATEGORIES)}"
        yield LintFinding("unknown-category", "note", message, "task.toml")
    if task.protected and not task.asks_for_tests:
        globs = Globs(task.protected)
        context = task.directory / "environment"
        tests = [
            path for path in context.rglob("*") if path.is_file() and re.match(r"(test_.*|.*_test)\.py$", path.name)
        ]
        for path in tests:
            inside = path.relative_to(context).as_posix()
            if not any(globs.matches(inside[at:]) for at in _starts(inside)):
                where = f"environment/{inside}"
                yield LintFinding("unprotected-test", "warning", "the agent may change this test", where)


def _starts(path: str) -> Iterator[int]:
    yield 0
    yield from (at + 1 for at, char in enumerate(path) if char == "/")


def _isolation(task: Task) -> Iterator[LintFinding]:
    if (task.agent.user or "root") in ("root", "0"):
        yield LintFinding("root-agent", "note", "the agent runs as root in its pod", "task.toml")
    if task.verifier_machine is None and verified_in_place(task):
        yield LintFinding(
            "shared-verifier",
            "warning",
            "the verifier runs in the agent's pod, with everything left there",
            "task.toml",
        )
    network = task.agent.network or task.machine.network
    if network.mode == "public":
        yield LintFinding("public-network", "note", "pods allow only the hosts given with --allow", "task.toml")
    elif network.mode == "allowlist":
        message = f"the agent may find the solution at {', '.join(network.hosts)}"
        yield LintFinding("network-answer", "warning", message, "task.toml")
    if not all(has_solution(task, step) for step in task.steps or (None,)):
        yield LintFinding("no-solution", "warning", "a task without solve.sh cannot be validated", "solution")


def _artifacts(task: Task) -> Iterator[LintFinding]:
    sources = [entry.source.rstrip("/") for entry in task.artifacts]
    for number, one in enumerate(sources):
        if any(one != other and one.startswith(f"{other}/") for other in sources) or one in sources[:number]:
            yield LintFinding("overlapping-artifacts", "warning", f"{one} is collected twice", "task.toml")
        if one.startswith("/logs") and one != "/logs/artifacts":
            yield LintFinding(
                "artifact-log-overlap", "warning", f"{one} contains logs of the trial itself", "task.toml"
            )


def _dockerfile(task: Task) -> Iterator[LintFinding]:
    for directory in ("environment", "tests"):
        file = task.directory / directory / "Dockerfile"
        if not file.exists():
            continue
        where = f"{directory}/Dockerfile"
        try:
            dockerfile = parse(file.read_text(encoding="utf-8-sig"), where)
        except (InputError, UnicodeError) as error:
            yield LintFinding("invalid-dockerfile", "error", str(error), where)
            continue
        yield from _images(dockerfile)
        for stage in dockerfile.stages:
            for step in stage.steps:
                yield from _instruction(step, agent=directory == "environment")
    if (task.directory / "environment/docker-compose.yaml").exists():
        yield LintFinding("unsupported", "error", "a pod is a single machine", "environment/docker-compose.yaml")


def _images(dockerfile: Dockerfile) -> Iterator[LintFinding]:
    names = {stage.name for stage in dockerfile.stages}
    for stage in dockerfile.stages:
        name = stage.base.text.split()[0]
        if name.lower() in names or name in ("scratch", "host") or "$" in name:
            continue
        tag = short_image_name(name).partition(":")[2]
        if not _DIGEST.search(name) and tag in ("", "latest"):
            yield LintFinding("unpinned-image", "warning", f"FROM {name} is not a fixed version", stage.base.where)
        known = short_image_name(name).partition(":")[0] in ("python", "debian", "ubuntu")
        if not known and mapped_image(name, {}) is None:
            yield LintFinding("unmapped-image", "note", f"FROM {name} needs --map {name}=IMAGE", stage.base.where)


def _instruction(step: Instruction, agent: bool) -> Iterator[LintFinding]:
    if step.name == "RUN":
        for packages in _PIP.findall(step.text):
            for package in packages.split():
                if re.fullmatch(r"[A-Za-z0-9._-]+(\[.*\])?", package) and not package.startswith("-"):
                    message = f"{package} has no pinned version"
                    yield LintFinding("unpinned-python-dependency", "warning", message, step.where)
    elif step.name in ("COPY", "ADD") and agent:
        sources = (step.json or tuple(step.text.split()))[:-1]
        if any(re.match(r"(\./)?(\.\./)*(tests|solution)(/|$)", source) for source in sources):
            message = f"{' '.join(sources)}: copies tests or solution into the agent's image"
            yield LintFinding("agent-image-test-leak", "error", message, step.where)


def _verifier(task: Task) -> Iterator[LintFinding]:
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
            message = f"`{found[0].strip()}` installs while the verifier runs"
            yield LintFinding("verifier-runtime-install", "warning", message, where)
        if found := _FETCH.search(text):
            message = f"`{found[0].strip()}` downloads while the verifier runs"
            yield LintFinding("verifier-network-download", "warning", message, where)
        if "/logs/verifier/reward" not in text and not any(
            "/logs/verifier" in path.read_text(errors="replace")
            for path in script.parent.rglob("*")
            if path.is_file() and path.suffix in (".py", ".sh")
        ):
            yield LintFinding("no-reward-written", "warning", "no file in tests/ mentions /logs/verifier", where)


RULES: tuple[Callable[[Task], Iterator[LintFinding]], ...] = (
    _config,
    _metadata,
    _isolation,
    _artifacts,
    _dockerfile,
    _verifier,
)


def finding_json(finding: LintFinding) -> dict[str, Any]:
    return {"rule": finding.rule, "level": finding.level, "message": finding.message, "where": finding.where}
