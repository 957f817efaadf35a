"""The architecture that docs/architecture.md describes: who may import whom, one class per name, plain words."""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import etude

ROOT = Path(__file__).parents[1]
# A package imports only what is listed before it. Imports inside functions and for type checking count.
ORDER = (
    *(
        "__init__",
        "errors",
        "files",
        "globs",
        "syntax",
        "lazy",
        "system",
        "config",
        "runs",
        "kernels",
        "parallel",
        "chat",
        "model",
        "data",
    ),
    *("train", "weights", "inference", "pods", "harness", "tasks", "rewards", "rollouts", "evaluation", "cluster"),
    *("rl", "bench", "agent", "viewer", "recipe", "pipeline", "cli"),
)
NO_RL = ("bench", "viewer")  # further than the order demands
PRODUCTS = ("etude", "etude_nano", "studies")
# The text of a task, which models read, and the Unix user of that name.
ALLOWED = {"etude/tasks/generators/devops.py": "Nobody can install", "etude/pods/images/host_image.py": "nobody"}


def sources(*roots: str) -> Iterator[tuple[Path, ast.Module]]:
    for root in roots:
        for path in sorted((ROOT / root).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import of a product."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] in PRODUCTS)


def package_of(name: str) -> str:
    """`etude.pods.pod.Pod` is of pods; `etude.__version__` of the root."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "__init__"


def test_a_package_imports_only_packages_listed_before_it() -> None:
    wrong = []
    for path, tree in sources("etude"):
        here = package_of(".".join(path.with_suffix("").parts))
        for line, name in imported(tree):
            there = package_of(name)
            backwards = ORDER.index(there) > ORDER.index(here)
            if not name.startswith("etude.") and name != "etude":
                wrong.append(f"{path}:{line} imports {name}: the core knows no plugin and no study")
            elif backwards or (here in NO_RL and there == "rl"):
                wrong.append(f"{path}:{line} imports {name}: {here} may not know {there}")
    assert not wrong, "\n".join(wrong)


def test_only_the_cluster_package_knows_ray() -> None:
    """Nothing else knows which cluster its services run on; an import would also need the extra."""
    users = set()
    for path, tree in sources(*PRODUCTS, "benchmarks"):
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            users |= {path.parent for name in names if name.split(".")[0] == "ray"}
    assert users == {Path("etude/cluster")}


def test_every_package_is_in_the_order_and_in_dir() -> None:
    packages = {path.parent.name for path in (ROOT / "etude").glob("*/__init__.py")}
    assert packages <= set(ORDER)
    assert packages - {"system"} == set(etude.__all__) == {name for name in dir(etude) if not name.startswith("_")}
    assert list(etude.__all__) == sorted(etude.__all__, key=ORDER.index)


@pytest.mark.parametrize("package", list(etude.__all__))
def test_a_package_says_what_it_is_and_exports_only_names_in_use(package: str) -> None:
    module = importlib.import_module(f"etude.{package}")
    assert module.__doc__
    imported = re.findall(rf"from etude\.{package} import (\([^)]*\)|[^\n#;]*)", texts())
    used = {word for names in imported for word in re.findall(r"\w+", names)}
    used |= set(re.findall(rf"\betude\.{package}\.(\w+)", texts()))
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
        assert name in used, f"etude.{package} exports {name}, which nothing imports from there"


@cache
def texts() -> str:
    """Return all code and documentation in one text."""
    files = [path for root in (*PRODUCTS, "tests", "benchmarks") for path in sorted((ROOT / root).rglob("*.py"))]
    files += [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_a_class_name_is_defined_once() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path, tree in sources(*PRODUCTS):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(f"{path}:{node.lineno}")
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_functions_fit_a_screen_and_files_are_short() -> None:
    long = []
    for path, tree in sources(*PRODUCTS):
        lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
        long += [f"{path}: {lines} lines"] if lines > 600 else []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno
                long += [f"{path}:{node.lineno} {node.name}: {size} lines"] if size > 80 else []
    assert not long, "\n".join(long)


def test_programs_are_not_spoken_of_as_persons() -> None:
    pattern = re.compile(r"\b(whoever|whomever|somebody|nobody|anybody)\b", re.IGNORECASE)
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    files += [path for root in PRODUCTS for path in (ROOT / root).rglob("*.py")]
    files += [*(ROOT / "etude").rglob("*.js"), *(ROOT / "etude").rglob("*.c"), *(ROOT / "etude").rglob("*.h")]
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            name = str(path.relative_to(ROOT))
            if pattern.search(line) and ALLOWED.get(name, line + ".") not in line:
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_no_test_asserts_on_a_clock() -> None:
    """A busy machine makes any time long. Rates and times belong in benchmarks/, limits of waiting in deadlines."""
    clock = re.compile(r"\btime\.(monotonic|perf_counter|process_time|time)\(\) - ")
    found = []
    for path, tree in sources("tests"):
        times: set[str] = set()  # names that hold a measured time
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and clock.search(ast.unparse(node.value)):
                times |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
                if clock.search(ast.unparse(node.test)) or names & times:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)
