"""The digest of what an installation depends on: two commits with the same digest can share an image.

It covers what is declared (dependencies, build system, entry points, lock files, compiled sources), not versions of the
project or settings of tools, so that most commits of a history share a few images.
"""

import configparser
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.tasks.installation.snapshot import RepositorySnapshot

# Files whose whole content counts.
WHOLE_FILES = re.compile(
    r"(^|/)(setup\.py|requirements[^/]*\.(txt|in|pip)|constraints[^/]*\.txt|Pipfile|Pipfile\.lock|poetry\.lock|uv\.lock"
    r"|pdm\.lock|environment\.ya?ml|package-lock\.json|npm-shrinkwrap\.json|yarn\.lock|pnpm-lock\.yaml|go\.mod|go\.sum"
    r"|Cargo\.lock|\.npmrc|\.python-version|MANIFEST\.in)$|(^|/)requirements/[^/]*\.(txt|in)$"
)
# Requirements that detectors do not install; they count if another dependency file names them.
UNUSED_REQUIREMENTS = re.compile(r"(^|/)requirements[^/]*$|(^|/)requirements/[^/]*$|(^|/)constraints[^/]*$")
UNUSED_PURPOSE = re.compile(r"docs?([^a-z]|$)|rtd|sphinx|lint|mypy|typing|typecheck|flake8|release|packaging")
COMPILED_SOURCES = re.compile(r"\.(c|cc|cpp|cxx|h|hpp|pyx|pxd|pxi|rs|f90|ts|tsx)$")
TEST_PARTS = frozenset({"tests", "test", "testing", "docs", "doc", "examples"})
PROJECT_KEYS = ("dependencies", "optional-dependencies", "requires-python", "scripts", "gui-scripts", "entry-points")
PACKAGE_KEYS = (
    *("dependencies", "devDependencies", "peerDependencies", "optionalDependencies", "engines", "packageManager"),
    *("workspaces", "overrides", "resolutions", "type"),
)
SETUP_SECTIONS = ("options",)


def dependency_digest(snapshot: RepositorySnapshot, project: str = "") -> str:
    """Return the digest of the dependency files of a project in a revision."""
    running = hashlib.sha256(b"etude dependencies 1\0")
    texts = list(_dependency_texts(snapshot, f"{project}/" if project else ""))
    for path, text in texts:
        if _is_unused(path, texts):
            continue
        running.update(f"{path}\0{len(text)}\0{text}".encode("utf-8", "surrogateescape"))
    return running.hexdigest()[:40]


def _dependency_texts(snapshot: RepositorySnapshot, top: str) -> Iterator[tuple[str, str]]:
    for path in sorted(snapshot.files):
        inside = path.removeprefix(top)
        parts = inside.split("/")
        if not path.startswith(top) or snapshot.files[path].kind != "file":
            continue
        text = snapshot.text(path) if len(parts) <= 3 or COMPILED_SOURCES.search(inside) else ""
        if inside == "pyproject.toml":
            yield inside, _pyproject(text)
        elif inside == "setup.cfg":
            yield inside, _setup_cfg(text)
        elif parts[-1] == "package.json" and len(parts) <= 3:
            yield inside, _keys(text, PACKAGE_KEYS)
        elif inside == "Cargo.toml":
            yield inside, re.sub(r'(?m)^version\s*=\s*".*"\s*$', "", text)
        elif len(parts) <= 3 and WHOLE_FILES.search(inside):
            yield inside, text
        elif COMPILED_SOURCES.search(inside) and not inside.endswith((".ts", ".tsx")) and not {*parts} & TEST_PARTS:
            yield inside, snapshot.files[path].digest


def _is_unused(path: str, texts: Sequence[tuple[str, str]]) -> bool:
    """Return whether a file has requirements of documentation or linters only, which no other file includes."""
    if not UNUSED_REQUIREMENTS.search(path) or not UNUSED_PURPOSE.search(path):
        return False
    name = path.rpartition("/")[2].rpartition(".")[0]
    others = (text for other, text in texts if other != path and not UNUSED_PURPOSE.search(other))
    return not any(re.search(rf"\b{re.escape(name)}\.(txt|in|pip)\b", text) for text in others)


def _pyproject(text: str) -> str:
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return text
    project, tool = value.get("project", {}), value.get("tool", {})
    kept: dict[str, Any] = {"build-system": value.get("build-system"), "groups": value.get("dependency-groups")}
    kept |= {key: project.get(key) for key in ("name", *PROJECT_KEYS)}
    for name in ("poetry", "pdm", "flit", "uv", "hatch", "setuptools", "setuptools_scm"):
        table = tool.get(name, {})
        kept[name] = (
            {key: each for key, each in table.items() if key != "version"} if isinstance(table, dict) else table
        )
    return json.dumps(kept, sort_keys=True, default=str)


def _setup_cfg(text: str) -> str:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return text
    kept = {name: dict(parser[name]) for name in parser.sections() if name.startswith(SETUP_SECTIONS)}
    return json.dumps(kept, sort_keys=True)


def _keys(text: str, keys: tuple[str, ...]) -> str:
    try:
        value: Mapping[str, Any] = json.loads(text)
    except ValueError:
        return text
    return json.dumps({key: value.get(key) for key in keys}, sort_keys=True) if isinstance(value, dict) else text
