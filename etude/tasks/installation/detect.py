"""Stage 0: propose set-up and test commands from the files of a repository, without a model and without running it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from etude.errors import InputError
from etude.tasks.installation.detect_other import detect_go, detect_node, detect_rust
from etude.tasks.installation.detect_python import TEST_FILE, detect_python
from etude.tasks.installation.proposal import Proposal
from etude.tasks.installation.result import InstallationFailed
from etude.tasks.installation.snapshot import RepositorySnapshot

MAX_TEXT = 1 << 20  # characters of a file that is read
PYTHON_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
PROJECT_FILES = (*PYTHON_FILES[:2], "package.json", "go.mod", "Cargo.toml")
READ = re.compile(
    r"^(pyproject\.toml|setup\.(py|cfg)|tox\.ini|noxfile\.py|\.?pytest\.(ini|toml)|[Mm]akefile|package(-lock)?\.json|go\.mod"
    r"|Cargo\.toml|Pipfile|requirements[^/]*\.(txt|in)|environment\.ya?ml|(\.devcontainer/)?Dockerfile|PKG-INFO"
    r"|\.devcontainer/devcontainer\.json|\.github/workflows/[^/]+\.ya?ml|\.travis\.yml|\.gitlab-ci\.yml"
    r"|\.circleci/config\.yml|azure-pipelines\.yml|\.azure-pipelines/[^/]+\.yml|\.cirrus\.yml|\.?appveyor\.yml)$"
)


def propose(snapshot: RepositorySnapshot, pythons: Sequence[str], project: str = "") -> Proposal:
    """Return the proposal for a project of a repository: the one at its top, or in the directory `project`."""
    project = project.strip("/")
    top = f"{project}/" if project else ""
    paths = [path.removeprefix(top) for path in sorted(snapshot.files) if path.startswith(top)]
    if not paths:
        raise InputError(
            f"{snapshot.label}: there is no directory {project!r} in it; --project names one with a project"
        )
    files = {path: snapshot.text(top + path)[:MAX_TEXT] for path in paths if READ.match(path)}
    if project:  # CI is configured at the top of a repository
        files |= {
            path: snapshot.text(path)[:MAX_TEXT] for path in snapshot.files if path.startswith(".github/workflows/")
        }
    found = _detect(files, paths, snapshot.version, pythons)
    if found is None:
        _explain(snapshot, project, paths)
    if not found.tests:
        raise InstallationFailed(
            "no-tests", f"{snapshot.label}: no tests were found; expected files such as tests/test_*.py"
        )
    return replace(found, project=project)


def _detect(files: Mapping[str, str], paths: Sequence[str], version: str, pythons: Sequence[str]) -> Proposal | None:
    """Return the first proposal that has tests, or else the first one."""
    found: list[Proposal] = []
    if any(name in files for name in PYTHON_FILES) or _has_python_tests(paths):
        found.append(detect_python(files, paths, version or _stated_version(files), pythons))
    if "package.json" in files and (node := detect_node(files, paths)) is not None:
        found.append(node)
    if "go.mod" in files:
        found.append(detect_go(files, paths))
    if "Cargo.toml" in files:
        found.append(detect_rust(files, paths))
    return next((each for each in found if each.tests), found[0] if found else None)


def _stated_version(files: Mapping[str, str]) -> str:
    found = re.search(r"^Version: *(\S+)", files.get("PKG-INFO", ""), re.M)
    return found[1] if found else ""


def _has_python_tests(paths: Sequence[str]) -> bool:
    """Return whether there are test files outside other projects; scripts without any metadata have no set-up."""
    others = {path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] in PROJECT_FILES}
    return any(TEST_FILE.search(path) and not any(path.startswith(f"{each}/") for each in others) for path in paths)


def _explain(snapshot: RepositorySnapshot, project: str, paths: Sequence[str]) -> NoReturn:
    """Raise InstallationFailed with the reason why nothing was found."""
    parts = [path.split("/") for path in paths]
    inside = sorted({"/".join(each[:-1]) for each in parts if each[-1] in PROJECT_FILES and 1 < len(each) <= 4})
    where = f"{snapshot.label}/{project}" if project else snapshot.label
    if inside:
        shown = ", ".join(inside[:5]) + (f" and {len(inside) - 5} more" if len(inside) > 5 else "")
        raise InstallationFailed(
            "several-projects", f"{where}: no project at the top, but in {shown}; name one with --project DIRECTORY"
        )
    raise InstallationFailed(
        "unsupported-language",
        f"{where}: no project that can be installed; expected one of {', '.join(PROJECT_FILES)} or requirements.txt",
    )
