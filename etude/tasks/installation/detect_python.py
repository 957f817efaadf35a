"""Detect how a Python project is installed and tested, from its files alone. Pure functions; nothing is executed."""

import ast
import configparser
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from etude.syntax import parse_tree
from etude.tasks.generators.source import NOT_PACKAGES, requirement_name
from etude.tasks.installation.proposal import Proposal, SetupStep, TestProposal, unique
from etude.tasks.installation.script import PIP
from etude.tasks.installation.shell_text import apt_packages, find_test_commands, pip_installs

EXTRAS = ("tests", "test", "testing", "dev", "all")  # in the order in which they are tried
OTHER_EXTRAS = ("doc", "docs", "lint")
REQUIREMENT_FILE = re.compile(
    r"((requirements|reqs)[-_/.](dev[-_])?(tests?|testing|dev|ci|all)|(tests?|testing|dev|ci)[-_/](requirements|reqs?)"
    r"|requirements[-_/](tests?|dev)[-_a-z]*)(\.(txt|in|pip))?$"
)
TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_tests?|tests)\.py$")
TEST_DIRECTORIES = ("tests", "test", "testing")
CI_FILES = re.compile(
    r"^(\.github/workflows/[^/]+\.ya?ml|\.travis\.yml|\.gitlab-ci\.yml|\.circleci/config\.yml|azure-pipelines\.yml"
    r"|\.cirrus\.yml|appveyor\.yml|\.appveyor\.yml|\.azure-pipelines/[^/]+\.yml)$"
)
SCRIPT_FILES = re.compile(
    r"^(Makefile|makefile|noxfile\.py|(\.devcontainer/)?Dockerfile|\.devcontainer/devcontainer\.json)$"
)
# Tools that check or publish a project and run none of its tests.
OTHER_TOOLS = frozenset(
    {
        "tox",
        "nox",
        "pre-commit",
        "prek",
        "build",
        "twine",
        "wheel",
        "pip",
        "setuptools",
        "black",
        "isort",
        "flake8",
        "ruff",
    }
    | {
        "pylint",
        "codecov",
        "coveralls",
        "check-manifest",
        "bumpversion",
        "bump2version",
        "cibuildwheel",
        "sphinx",
        "mkdocs",
    }
    | {"virtualenv", "pipenv", "poetry", "pdm", "hatch", "uv", "pip-tools", "mypy", "pyright", "check-wheel-contents"}
    | {
        "tox-gh-actions",
        "tox-uv",
        "codespell",
        "bandit",
        "towncrier",
        "zest.releaser",
        "auditwheel",
        "furo",
        "pyupgrade",
    }
)
# Build tools that take the version from git, which the workspace does not have, and the variable that replaces it.
VERSION_VARIABLES = {
    "setuptools_scm": "SETUPTOOLS_SCM_PRETEND_VERSION",
    "setuptools-scm": "SETUPTOOLS_SCM_PRETEND_VERSION",
    "hatch-vcs": "SETUPTOOLS_SCM_PRETEND_VERSION",
    "vcs-versioning": "SETUPTOOLS_SCM_PRETEND_VERSION",
    "pbr": "PBR_VERSION",
    "pdm": "PDM_BUILD_SCM_VERSION",
    "poetry-dynamic-versioning": "POETRY_DYNAMIC_VERSIONING_BYPASS",
}


@dataclass
class PythonProject:
    """What the files of a Python project declare."""

    files: Mapping[str, str]  # texts of the files that are read, relative to the project
    paths: Sequence[str]  # of all files
    name: str = ""
    requires_python: str = ""
    installable: bool = False
    dependencies: list[str] = field(default_factory=list)
    extras: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    test_requirements: list[str] = field(default_factory=list)  # tests_require, poetry groups
    build: str = ""  # text that names the build tools
    sources: list[str] = field(default_factory=list)

    @cached_property
    def tox(self) -> "ToxTests":
        return _tox_tests(self.files.get("tox.ini", ""), self.paths)


def detect_python(files: Mapping[str, str], paths: Sequence[str], version: str, pythons: Sequence[str]) -> Proposal:
    """Return the proposal for a Python project; `pythons` are the versions of this host, preferred first."""
    project = read_python_project(files, paths)
    steps = [*_install_steps(project), *_requirement_steps(project), *_tool_steps(project)]
    variables = {
        variable: version or "0" for tool, variable in VERSION_VARIABLES.items() if tool in project.build and version
    }
    python = next((each for each in pythons if accepts(project.requires_python, each)), "")
    return Proposal(
        "python",
        base=f"python:{python}" if python else "",
        apt=unique([name for text in _scripts(files) for name in apt_packages(text)]),
        steps=tuple(steps),
        tests=tuple(_tests(project)),
        env=variables,
        sources=unique(project.sources),
    )


# ------------------------------------------------------------------------------------------------- reading


def read_python_project(files: Mapping[str, str], paths: Sequence[str]) -> PythonProject:
    """Return what pyproject.toml, setup.cfg and setup.py declare."""
    project = PythonProject(files, paths)
    if "pyproject.toml" in files:
        _read_pyproject(project, files["pyproject.toml"])
    if "setup.cfg" in files:
        _read_setup_cfg(project, files["setup.cfg"])
    if "setup.py" in files:
        _read_setup_py(project, files["setup.py"])
    return project


def _read_pyproject(project: PythonProject, text: str) -> None:
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    table, tool = value.get("project", {}), value.get("tool", {})
    poetry = tool.get("poetry", {})
    project.sources.append("pyproject.toml")
    project.installable |= "build-system" in value or "project" in value or bool(poetry.get("name"))
    project.name = str(table.get("name") or poetry.get("name") or "")
    project.requires_python = str(table.get("requires-python") or "")
    project.dependencies += _strings(table.get("dependencies"))
    project.extras |= {str(name): _strings(each) for name, each in table.get("optional-dependencies", {}).items()}
    project.extras |= {str(name): [] for name in poetry.get("extras", {})}
    groups = value.get("dependency-groups", {})
    project.groups |= {str(name): _group(groups, str(name)) for name in groups}
    for name, each in tool.get("pdm", {}).get("dev-dependencies", {}).items():
        project.groups.setdefault(str(name), _strings(each))
    if legacy := _strings(tool.get("uv", {}).get("dev-dependencies")):
        project.groups.setdefault("dev", legacy)
    tables = {"dev": poetry.get("dev-dependencies", {})}
    tables |= {name: each.get("dependencies", {}) for name, each in poetry.get("group", {}).items()}
    for name, each in tables.items():
        if each:
            project.groups.setdefault(name, [_poetry_requirement(key, given) for key, given in each.items()])
    for environment in tool.get("hatch", {}).get("envs", {}).values():
        if isinstance(environment, dict):
            project.test_requirements += _strings(environment.get("dependencies"))
            project.test_requirements += _strings(environment.get("extra-dependencies"))
    project.build += text


def _strings(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _group(groups: Mapping[str, Any], name: str, depth: int = 0) -> list[str]:
    found: list[str] = []
    for item in groups.get(name, ()) if depth < 5 else ():
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict) and "include-group" in item:
            found += _group(groups, str(item["include-group"]), depth + 1)
    return found


def _poetry_requirement(name: str, given: object) -> str:
    """Return a poetry dependency in the form of pip; carets and tildes become lower bounds."""
    version = given.get("version", "*") if isinstance(given, dict) else given
    extras = given.get("extras", ()) if isinstance(given, dict) else ()
    if name == "python" or (isinstance(given, dict) and ("git" in given or "path" in given)):
        return ""
    text = str(version) if isinstance(version, str) else "*"
    text = "" if text == "*" else re.sub(r"^[\^~]\s*", ">=", text)
    bound = text if not text or text[0] in "<>=!~" else f"=={text}"
    return f"{name}[{','.join(extras)}]{bound}" if extras else f"{name}{bound}"


def _read_setup_cfg(project: PythonProject, text: str) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    if parser.has_option("metadata", "name") or parser.has_section("options"):
        project.sources.append("setup.cfg")
        project.installable |= "setup.py" in project.files or "pyproject.toml" in project.files
        project.installable |= parser.has_option("metadata", "name")
    project.name = project.name or parser.get("metadata", "name", fallback="")
    project.requires_python = project.requires_python or parser.get("options", "python_requires", fallback="")
    project.dependencies += _lines(parser.get("options", "install_requires", fallback=""))
    project.test_requirements += _lines(parser.get("options", "tests_require", fallback=""))
    if parser.has_section("options.extras_require"):
        project.extras |= {name: _lines(each) for name, each in parser.items("options.extras_require")}
    project.build += text


def _lines(text: str) -> list[str]:
    """Return the requirements in the lines of a text, without comments, options and environment markers of files."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if re.match(r"[A-Za-z0-9]", line)]


def _read_setup_py(project: PythonProject, text: str) -> None:
    """Read the literal arguments of setup(), also those that are names of literals."""
    project.sources.append("setup.py")
    project.installable = True
    project.build += text
    try:
        tree = parse_tree(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "setup"):
            continue
        given = {each.arg: _literal(each.value, known) for each in node.keywords if each.arg}
        project.name = project.name or str(given.get("name") or "")
        project.requires_python = project.requires_python or str(given.get("python_requires") or "")
        project.dependencies += _strings(given.get("install_requires"))
        project.test_requirements += _strings(given.get("tests_require"))
        extras = given.get("extras_require")
        if isinstance(extras, dict):
            project.extras |= {str(name): _strings(each) for name, each in extras.items()}


def _literal(node: ast.expr, known: Mapping[str, ast.expr], depth: int = 0) -> object:
    """Return the value of a literal expression, with names and sums of lists; None for anything else."""
    if depth > 6:
        return None
    if isinstance(node, ast.Name) and node.id in known:
        return _literal(known[node.id], known, depth + 1)
    if isinstance(node, ast.Dict):
        keys = [_literal(key, known, depth + 1) if key else None for key in node.keys]
        pairs = zip(keys, (_literal(each, known, depth + 1) for each in node.values), strict=True)
        return {str(key): value for key, value in pairs if key is not None}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each, known, depth + 1) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left, known, depth + 1), _literal(node.right, known, depth + 1)
        return [*left, *right] if isinstance(left, list) and isinstance(right, list) else left or right
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value


def accepts(specifier: str, version: str) -> bool:
    """Return whether a Requires-Python accepts a version such as 3.11; what is not understood accepts it."""
    have = _numbers(version)
    for part in specifier.split(","):
        found = re.fullmatch(r"\s*(>=|<=|==|!=|~=|>|<|\^|~)\s*(\d+(?:\.\d+)*)(\.\*)?\s*", part)
        if found is None:
            continue
        bound = _numbers(found[2])
        cut = have[: len(bound)]
        padded = bound[:2]
        checks = {
            ">=": have >= padded,
            ">": have >= padded if len(bound) > 2 else have > padded,
            "<": have < bound if len(bound) <= 2 else have <= padded,
            "<=": have <= padded,
            "==": cut == padded,
            "!=": cut != bound,
            "~=": have >= padded and have[: max(1, len(bound) - 1)] == bound[: max(1, len(bound) - 1)][:2],
            "^": have >= padded and have[0] == bound[0],
            "~": have >= padded and have[0] == bound[0],
        }
        if not checks[found[1]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# ------------------------------------------------------------------------------------------------- set-up


def _install_steps(project: PythonProject) -> Iterator[SetupStep]:
    """Yield the installation of the project itself, with the first of its test extras that can be installed."""
    if not project.installable:
        if "requirements.txt" in project.files:
            yield SetupStep("requirements.txt", (f"{PIP} -r requirements.txt",), True)
        return
    extras = [name for name in EXTRAS if name in project.extras] or _named_in_ci(project)
    tox = [name for name in project.tox.extras if name in project.extras and name not in OTHER_EXTRAS]
    together = [",".join(dict.fromkeys([*extras[:1], *tox]))] if tox else []
    editable = [f"{PIP} -e {shlex.quote(f'.[{name}]')}" for name in unique([*together, *extras])]
    # Without isolation the build uses the packages of the environment: for setup.py that imports its dependencies.
    late = f"{PIP} 'setuptools<70' wheel && {PIP} --no-build-isolation -e ."
    if project.dependencies:
        late = f"{PIP} {' '.join(map(shlex.quote, [*project.dependencies, 'setuptools<70', 'wheel']))} && "
        late += f"{PIP} --no-build-isolation -e ."
    yield SetupStep("project", (*editable, f"{PIP} -e .", late), True, "build")
    if "requirements.txt" in project.files and not project.dependencies:
        yield SetupStep("requirements.txt", (f"{PIP} -r requirements.txt",))


def _named_in_ci(project: PythonProject) -> list[str]:
    """Return the extras that CI installs, of those that the project declares."""
    named = [name for text in _scripts(project.files) for name in pip_installs(text)[2]]
    return [name for name in dict.fromkeys(named) if name in project.extras and name not in OTHER_EXTRAS][:2]


def _requirement_steps(project: PythonProject) -> Iterator[SetupStep]:
    """Yield the requirements of the tests: groups, requirement files, tests_require, tox, nox, CI."""
    group = next((name for name in EXTRAS if project.groups.get(name)), "")
    if group:
        wanted = [line for line in project.groups[group] if line]
        reduced = [line for line in wanted if requirement_name(line) not in OTHER_TOOLS]
        yield SetupStep(f"group {group}", _pip_alternatives(wanted, reduced))
    depth = {path: path.count("/") for path in project.paths}
    files = [path for path in project.paths if depth[path] <= 2 and REQUIREMENT_FILE.search(path)]
    files = [
        path for path in files if "doc" not in path and "lint" not in path and path.endswith((".txt", ".in", ".pip"))
    ]
    best = sorted(files, key=lambda path: (not re.search("test", path), depth[path], len(path)))[:2]
    for path in best:
        yield SetupStep(path, (f"{PIP} -r {shlex.quote(path)}",))
    if wanted := _kept(project, project.test_requirements):
        yield SetupStep("tests_require", _pip_alternatives(wanted, wanted))
    if wanted := _kept(project, project.tox.requirements):
        yield SetupStep("tox.ini", _pip_alternatives(wanted, wanted))
    for path in project.tox.files:
        if path not in best:
            yield SetupStep(f"tox.ini: {path}", (f"{PIP} -r {shlex.quote(path)}",))
    found = [*_nox_requirements(project.files.get("noxfile.py", ""))]
    for text in _scripts(project.files):
        found += pip_installs(text)[0]
    if wanted := _kept(project, found):
        yield SetupStep("CI", _pip_alternatives(wanted, wanted))


def _kept(project: PythonProject, lines: Sequence[str]) -> list[str]:
    """Return requirements that tests may need: not the project itself, no linter, no variable."""
    own = requirement_name(project.name)
    names = ((line, requirement_name(line)) for line in unique(lines))
    kept = [line for line, name in names if name and name != own and name not in OTHER_TOOLS]
    return [line for line in kept if not re.search(r"[{}$]|^X$|^https?:|/", line)]


def _pip_alternatives(wanted: Sequence[str], reduced: Sequence[str]) -> tuple[str, ...]:
    """Return the commands that install all of these, or only the reduced ones, or one after the other what works."""
    alternatives = [f"{PIP} {' '.join(map(shlex.quote, each))}" for each in (wanted, reduced) if each]
    return unique(alternatives)


@dataclass(frozen=True)
class ToxTests:
    """What the test environments of a tox.ini install, those of some environments included."""

    requirements: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # requirement files
    extras: list[str] = field(default_factory=list)  # of the project


def _tox_tests(text: str, paths: Sequence[str]) -> ToxTests:
    found = ToxTests()
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return found
    for section in parser.sections():
        name = section.partition(":")[2]
        if section != "testenv" and not (section.startswith("testenv:") and re.search(r"test|^py|unit", name)):
            continue
        for line in _tox_lines(parser, section, "deps"):
            if named := re.match(r"^(?:-r|--requirement[= ])\s*(.+)$", line):
                path = re.sub(r"^\{(toxinidir|tox_root)\}/|^\./", "", named[1].strip())
                found.files.extend([path] if path in paths else [])
            elif re.match(r"[A-Za-z0-9]", line):
                found.requirements.append(line)
        for line in _tox_lines(parser, section, "extras"):
            found.extras.extend(re.findall(r"[\w.-]+", line))
    return found


def _tox_lines(parser: configparser.ConfigParser, section: str, key: str) -> Iterator[str]:
    """Yield the lines of a setting without comments, and without the factor of those for some environments."""
    for line in parser.get(section, key, fallback="").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        factor = re.match(r"^[\w.,!{}-]+:\s+", line)
        yield line if factor is None else line[factor.end() :]


def _nox_requirements(text: str) -> Iterator[str]:
    """Yield the literal requirements of session.install in sessions whose name contains "test"."""
    try:
        tree = parse_tree(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and "test" in function.name:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "session.install":
                    words = [each.value for each in node.args if isinstance(each, ast.Constant)]
                    yield from (word for word in words if isinstance(word, str) and re.match(r"[A-Za-z0-9]", word))


def _tool_steps(project: PythonProject) -> Iterator[SetupStep]:
    yield SetupStep("pytest", (f"{PIP} pytest",), True)


def _scripts(files: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts of CI workflows and scripts."""
    for path in sorted(files):
        if CI_FILES.match(path) or SCRIPT_FILES.match(path):
            yield files[path]


# ------------------------------------------------------------------------------------------------- tests


def _tests(project: PythonProject) -> Iterator[TestProposal]:
    """Yield test commands, best first: pytest as configured, on the directories of tests, then those of tox and CI."""
    texts = [project.files.get("tox.ini", ""), *_scripts(project.files)]
    named = [command for text in texts for command in find_test_commands(text)]
    files = [path for path in project.paths if TEST_FILE.search(path) and not path.startswith((".", "docs/"))]
    tops = unique([_test_directory(path) for path in files])
    if any(top.split("/")[-1] in TEST_DIRECTORIES for top in tops):
        tops = tuple(top for top in tops if top.split("/")[0] not in NOT_PACKAGES or top in TEST_DIRECTORIES)
    bare = "python -m pytest -q"
    on_directories = [f"{bare} {shlex.join(tops)}"] if tops and "" not in tops and len(tops) <= 6 else []
    configured = bool(re.search(r"\btestpaths\b", _pytest_settings(project)))
    candidates = [bare, *on_directories] if configured or not on_directories else [*on_directories, bare]
    if files or named:
        for command in unique([*candidates, *(each for each in named if "pytest" in each)])[:5]:
            yield TestProposal(command, "pytest")
        for command in unique([*(each for each in named if "unittest" in each), "python -m unittest discover -v"])[:2]:
            yield TestProposal(command, "unittest")


def _test_directory(path: str) -> str:
    """Return the outermost test directory above a test file, or its own directory."""
    parts = path.split("/")[:-1]
    depth = next((depth for depth, part in enumerate(parts) if part in TEST_DIRECTORIES), None)
    return "/".join(parts) if depth is None else "/".join(parts[: depth + 1])


def _pytest_settings(project: PythonProject) -> str:
    """Return the text that configures pytest, of the first file that does."""
    files = project.files
    for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"):
        if name in files:
            return files[name]
    sections = {"pyproject.toml": r"\[tool\.pytest", "tox.ini": r"^\[pytest\]", "setup.cfg": r"^\[tool:pytest\]"}
    for name, start in sections.items():
        if found := re.search(rf"{start}.*?(?=^\[(?!tool\.pytest)|\Z)", files.get(name, ""), re.M | re.S):
            return found[0]
    return ""
