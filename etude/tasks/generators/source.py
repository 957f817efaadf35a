"""Read a Python repository from a source archive or directory: its files without build products, and its metadata.

This module only reads; no code of a repository is ever run on the host.
"""

import configparser
import hashlib
import os
import re
import shlex
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import InputError
from etude.system.git import run_git
from etude.tasks.generators.version_files import UNKNOWN_VERSION, add_version_files, tagged_version

MAX_FILE_BYTES = 512 << 10  # larger files are images and data that no task is about
MAX_TOTAL_BYTES = 64 << 20
MAX_FILES = 5_000
ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
# products of builds, test runs and linters: each has been seen to contain code that a task removed
LEAKING_PATHS = re.compile(
    r"(^|/)(\.git|\.hg|\.svn|__pycache__|\.(mypy|pytest|ruff|hypothesis|pyre|tox|nox|eggs|cache)[^/]*|\.venv"
    r"|node_modules|[^/]*\.(egg-info|dist-info))/|^(build|dist|venv|env)/|\.(pyc|pyo|so|whl|egg|orig|rej)$|(^|/)\.coverage$"
)
NOT_PACKAGES = frozenset({"tests", "test", "testing", "docs", "doc", "examples", "example", "bench", "benchmarks"})
SCRIPTS = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "manage.py"})
TEST_GROUPS = ("tests", "test", "testing")
TEST_REQUIREMENT_FILES = (
    "requirements/tests.in",
    "requirements/test.in",
    "requirements/tests.txt",
    "requirements/test.txt",
    "requirements-tests.txt",
    "requirements-test.txt",
    "tests/requirements.txt",
    "test-requirements.txt",
)
# pytest settings that can change the result of a test; the others only change its output
KEPT_INI = frozenset(
    {"filterwarnings", "markers", "python_files", "python_classes", "python_functions", "usefixtures", "xfail_strict"}
    | {"asyncio_mode", "asyncio_default_fixture_loop_scope", "doctest_optionflags", "norecursedirs", "testpaths"}
)
KEPT_OPTIONS = ("-m", "-k", "-W", "--import-mode", "--strict-markers")


@dataclass(frozen=True)
class RepositorySource:
    """A repository's files and what is known without running it. Paths are relative to its top directory."""

    name: str
    version: str
    digest: str
    files: Mapping[str, bytes] = field(repr=False)
    roots: tuple[str, ...]  # directories that modules are imported from
    modules: tuple[str, ...]  # Python files outside the tests
    tests: tuple[str, ...]  # files that contain tests
    test_directories: tuple[str, ...]
    requirements: tuple[str, ...]  # to run it and its tests
    backend: tuple[str, ...]  # to build it
    ini: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}" if self.version else self.name

    def text(self, path: str) -> str:
        return self.files[path].decode("utf-8", "replace")

    def is_test_path(self, path: str) -> bool:
        """Return whether a file is a test or a test helper."""
        inside = any(path.startswith(f"{directory}/") for directory in self.test_directories)
        return inside or path in self.tests or path.rpartition("/")[2] == "conftest.py"

    def module_name(self, path: str) -> str:
        """Return the dotted name under which a module is imported."""
        for root in self.roots:
            prefix = "" if root == "." else f"{root}/"
            if path.startswith(prefix):
                parts = path[len(prefix) :].removesuffix(".py").split("/")
                return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        raise InputError(f"{self.label}: {path} is not below {', '.join(self.roots)}")


def read_source(given: Path | str) -> RepositorySource:
    """Read the repository in a directory or a source archive."""
    path = Path(given)
    version = ""
    if path.is_dir():
        raw = dict(_read_directory(path))
        version = tagged_version(path) if (path / ".git").exists() else ""
    elif path.is_file() and path.name.endswith(ARCHIVES):
        raw = dict(archive_files(path))
    else:
        raise InputError(f"{path}: expected a directory or a source archive ({', '.join(ARCHIVES)})")
    fallback = path.resolve().name.removesuffix(next((end for end in ARCHIVES if path.name.endswith(end)), ""))
    return make_source(raw, fallback, version)


def make_source(raw: Mapping[str, bytes], fallback: str = "repository", tagged: str = "") -> RepositorySource:
    """Build the source from its files; `fallback` is its name if the metadata has none, `tagged` the version of git."""
    files = without_build_products(raw)
    project = read_toml(files.get("pyproject.toml"), "pyproject.toml")
    if "PKG-INFO" not in raw:
        add_version_files(files, project, tagged)
    project_table = project.get("project", {})
    name, version = _identity(project_table, raw.get("PKG-INFO", b""), fallback, tagged)
    if "PKG-INFO" in raw:  # the archive's PKG-INFO repeats the README; build backends read the version from it
        files["PKG-INFO"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    roots = _roots(files)
    ini, arguments = _pytest_settings(files, project)
    tests, directories = _tests(files, roots, ini.get("testpaths", "").split())
    modules = tuple(sorted(path for path in files if _is_module(path, roots, tests, directories)))
    if not modules:
        raise InputError(f"{name}: no Python package below {' or '.join(roots)}; expected one at the top or in src/")
    if not tests:
        raise InputError(
            f"{name}: no test files (test_*.py) found; tasks can only be generated from a repository with tests"
        )
    return RepositorySource(
        name=name,
        version=version,
        digest=_digest(files),
        files=files,
        roots=roots,
        modules=modules,
        tests=tests,
        test_directories=directories,
        requirements=_requirements(files, project, name),
        backend=tuple(project.get("build-system", {}).get("requires", ("setuptools", "wheel"))),
        ini=ini,
        arguments=arguments,
    )


# ------------------------------------------------------------------------------------------------- files


def _read_directory(top: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a directory; of a git checkout those that git tracks or does not ignore."""
    total = 0
    if (top / ".git").exists():  # ignored files are products, local settings and secrets
        listed = run_git(top, "ls-files", "-z", "-co", "--exclude-standard").split(b"\0")
        paths = sorted({top / os.fsdecode(name) for name in listed if name})
    else:
        paths = sorted(top.rglob("*"))
    for path in paths:
        inside = path.relative_to(top).as_posix()
        plain = not LEAKING_PATHS.search(inside) and not path.is_symlink() and path.is_file()
        if plain and path.stat().st_size <= MAX_FILE_BYTES:
            total += path.stat().st_size
            if total > MAX_TOTAL_BYTES:
                limit = f"{MAX_TOTAL_BYTES >> 20} MiB"
                raise InputError(f"{top}: more than {limit} of files; expected the repository of one package")
            yield inside, path.read_bytes()


def archive_files(
    path: Path, max_file: int = MAX_FILE_BYTES, max_total: int = MAX_TOTAL_BYTES
) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files of an archive, relative to its single top directory; nothing is extracted to disk.

    Files of more than `max_file` bytes are left out.
    """
    try:
        found = dict(_read_members(path, max_file, max_total))
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path}: cannot be unpacked ({error})") from None
    tops = {name.partition("/")[0] for name in found}
    if len(tops) == 1 and all("/" in name for name in found):
        found = {name.partition("/")[2]: data for name, data in found.items()}
    for name in sorted(found):
        yield name, found[name]


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield the regular files of an archive: name, size and a function that reads it."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                link = (entry.external_attr >> 16) & 0o170000 == 0o120000
                if not entry.is_dir() and not link:
                    yield entry.filename, entry.file_size, partial(archive.read, entry)
        return
    with tarfile.open(path) as tar:
        for item in tar:
            if item.isfile() and (content := tar.extractfile(item)) is not None:
                yield item.name, item.size, content.read


def _read_members(path: Path, max_file: int, max_total: int) -> Iterator[tuple[str, bytes]]:
    total = 0
    for name, size, read in _members(path):
        if size > max_file or not (safe := _safe_path(name)):
            continue
        total += size
        if total > max_total:
            limit = f"{max_total >> 20} MiB"
            raise InputError(f"{path}: more than {limit} of files; expected the sources of one package")
        yield safe, read()


def _safe_path(name: str) -> str:
    """Return a member's name as a relative path, or "" if it points outside the archive."""
    path = PurePosixPath(name)
    return "" if path.is_absolute() or ".." in path.parts or "\\" in name else str(path)


def without_build_products(raw: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files without products of builds and test runs, and without the archive's PKG-INFO."""
    files = {path: data for path, data in raw.items() if not LEAKING_PATHS.search(path) and path != "PKG-INFO"}
    if len(files) > MAX_FILES:
        raise InputError(f"{len(files)} files are more than {MAX_FILES}; expected the repository of one package")
    return files


def _digest(files: Mapping[str, bytes]) -> str:
    running = hashlib.sha256(b"etude source 1\0")
    for path in sorted(files):
        running.update(f"{path}\0{len(files[path])}\0".encode())
        running.update(files[path])
    return running.hexdigest()


# ------------------------------------------------------------------------------------------------- metadata


def read_toml(data: bytes | None, name: str) -> dict[str, Any]:
    """Parse a TOML file of a repository; a missing file gives an empty table."""
    try:
        return tomllib.loads((data or b"").decode())
    except (UnicodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{name}: cannot be read ({error})") from None


def _identity(project_table: Mapping[str, Any], info: bytes, fallback: str, tagged: str) -> tuple[str, str]:
    headers = dict(re.findall(r"^(Name|Version): *(\S+)", info.decode("utf-8", "replace"), re.MULTILINE))
    guess = re.fullmatch(r"(.+?)-(\d[^-]*)", fallback)
    name = project_table.get("name") or headers.get("Name") or (guess[1] if guess else fallback)
    version = (
        project_table.get("version") or headers.get("Version") or tagged or (guess[2] if guess else UNKNOWN_VERSION)
    )
    return re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-"), str(version)


def _roots(files: Mapping[str, bytes]) -> tuple[str, ...]:
    source = any(re.match(r"src/[^/]+(/__init__)?\.py$", path) for path in files)
    return ("src",) if source else (".",)


def _tests(
    files: Mapping[str, bytes], roots: tuple[str, ...], paths: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the test files and the outermost test directories."""
    test_file = re.compile(r"(.*/)?(test_[^/]*|[^/]*_test)\.py$")
    found = [path for path in sorted(files) if test_file.match(path)]
    if paths:
        tops = [path.strip("/") for path in paths]
        found = [path for path in found if any(path == top or path.startswith(f"{top}/") for top in tops)]
    directories = set[str]()
    tests = []
    for path in found:
        parts = path.split("/")[:-1]
        depth = next((depth for depth, part in enumerate(parts) if part in ("tests", "test")), None)
        if depth is not None:
            directories.add("/".join(parts[: depth + 1]))
        if depth is not None or not ({*parts} & NOT_PACKAGES or path.startswith("src/")):
            tests.append(path)
    return tuple(tests), tuple(sorted(directories))


def _is_module(path: str, roots: tuple[str, ...], tests: tuple[str, ...], directories: tuple[str, ...]) -> bool:
    if not path.endswith(".py") or path in tests or any(path.startswith(f"{each}/") for each in directories):
        return False
    if roots == ("src",):
        return path.startswith("src/")
    top, _, rest = path.partition("/")
    return top not in NOT_PACKAGES if rest else path not in SCRIPTS


def _requirements(files: Mapping[str, bytes], project: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the declared requirements of the tests: dependencies, test groups and extras, test requirement files."""
    project_table = project.get("project", {})
    extras = project_table.get("optional-dependencies", {})
    groups = project.get("dependency-groups", {})
    found = [*project_table.get("dependencies", ()), "pytest"]
    for each in TEST_GROUPS:
        found += _group(groups, each)
        found += extras.get(each, ())
    for each in TEST_REQUIREMENT_FILES:
        if each in files:
            lines = (line.partition("#")[0].strip() for line in files[each].decode("utf-8", "replace").splitlines())
            found += [line for line in lines if re.match(r"[A-Za-z0-9]", line)]
            break
    return tuple(dict.fromkeys(line for line in found if requirement_name(line) != name))


def _group(groups: Mapping[str, Any], name: str, depth: int = 0) -> list[str]:
    found: list[str] = []
    for item in groups.get(name, ()) if depth < 5 else ():
        if isinstance(item, str):
            found.append(item)
        elif "include-group" in item:
            found += _group(groups, item["include-group"], depth + 1)
    return found


def requirement_name(line: str) -> str:
    """Return the normalized package name of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", line.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _pytest_settings(files: Mapping[str, bytes], project: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the pytest settings and the command-line options that can change test results."""
    given = project.get("tool", {}).get("pytest", {}).get("ini_options", {})
    for name, section in (("pytest.ini", "pytest"), ("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")):
        if not given and name in files:
            parser = configparser.ConfigParser(interpolation=None)
            try:
                parser.read_string(files[name].decode("utf-8", "replace"))
            except configparser.Error:
                continue
            given = dict(parser[section]) if section in parser else {}
    lines = {key: "\n".join(value) if isinstance(value, list) else str(value) for key, value in given.items()}
    options = lines.get("addopts", "").replace("\n", " ")
    return {key: value for key, value in lines.items() if key in KEPT_INI}, tuple(_kept_options(options))


def _kept_options(text: str) -> Iterator[str]:
    words = iter(shlex.split(text))
    for word in words:
        if word in ("-m", "-k", "-W"):
            yield from (word, next(words, ""))
        elif word.startswith(KEPT_OPTIONS) and not word.startswith(("-m", "-k", "-W")):
            yield word
