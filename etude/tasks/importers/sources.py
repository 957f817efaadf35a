"""Where issues come from: SWE-bench task directories, and rows of SWE-smith, SWE-Gym and SWE-rebench."""

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.data.documents import Limits
from etude.data.rows import read_rows
from etude.errors import EtudeError, InputError
from etude.tasks.importers.instance import Instance, parser_for

MAX_ROW = 64 << 20  # bytes of a row
SMITH_COMMAND = "pytest --disable-warnings --color=no --tb=no --verbose"
# the issues of a source: the id of each, and how to read it, which may fail for one without ending the rest
Read = Callable[[Path], Iterator[tuple[str, Callable[[], Instance]]]]


def read_swebench(source: Path) -> Iterator[tuple[str, Callable[[], Instance]]]:
    """Task directories of SWE-bench 5: source/tasks/<id>/, or source/<id>/, or one of them."""
    tops = [source / "tasks"] if (source / "tasks").is_dir() else [source]
    directories = [path.parent for top in tops for path in sorted(top.glob("*/task.yaml"))]
    if (source / "task.yaml").is_file():
        directories = [source]
    if not directories:
        raise InputError(f"{source}: no task.yaml there; expected task directories of SWE-bench 5")
    for directory in directories:
        yield directory.name, lambda directory=directory: _from_directory(directory)  # type: ignore[misc]


def _from_directory(directory: Path) -> Instance:
    facts = _yaml(directory / "task.yaml")
    tests = json.loads(_text(directory / "tests.json"))
    known = ("task.yaml", "tests.json", "problem_statement.md", "hints.md", "gold.patch", "test.patch", "Dockerfile")
    context = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.relative_to(directory).parts[0] not in (*known, "eval.sh")
    }
    passing = tests.get("PASS_TO_PASS", []) if facts.get("eval_type") != "fail_only" else []
    return Instance(
        id=str(facts.get("instance_id", directory.name)),
        source="swebench",
        repo=str(facts.get("repo", "")),
        statement=_text(directory / "problem_statement.md"),
        gold=_text(directory / "gold.patch", ""),
        test_patch=_text(directory / "test.patch", ""),
        fail_to_pass=tuple(tests.get("FAIL_TO_PASS", [])),
        pass_to_pass=tuple(passing),
        base_commit=str(facts.get("base_commit", "")),
        image=str(facts.get("image", "")),
        dockerfile=_text(directory / "Dockerfile", ""),
        context=context,
        eval_script=_text(directory / "eval.sh", ""),
        parser=parser_for(str(facts.get("log_parser", ""))),
        metadata={key: str(facts[key]) for key in ("difficulty", "version", "created_at") if key in facts},
    )


def _yaml(file: Path) -> dict[str, Any]:
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError:
        raise EtudeError(
            "task.yaml of SWE-bench needs the Python module yaml (PyYAML), which is not installed"
        ) from None
    try:
        found = yaml.safe_load(_text(file))
    except yaml.YAMLError as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise InputError(f"{file}: expected a mapping")
    return found


def _text(file: Path, default: str | None = None) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if default is not None:
            return default
        raise InputError(f"{file}: is not there") from None


# ------------------------------------------------------------------------------------------------- rows


def read_smith(source: Path) -> Iterator[tuple[str, Callable[[], Instance]]]:
    """SWE-smith: the patch is the bug, and undoing it the answer."""
    return _rows(source, _smith)


def read_gym(source: Path) -> Iterator[tuple[str, Callable[[], Instance]]]:
    """SWE-Gym: SWE-bench's row form."""
    return _rows(source, _gym)


def read_rebench(source: Path) -> Iterator[tuple[str, Callable[[], Instance]]]:
    """SWE-rebench: the same, and how to install it."""
    return _rows(source, _rebench)


def _rows(source: Path, read: Callable[[Mapping[str, Any]], Instance]) -> Iterator[tuple[str, Callable[[], Instance]]]:
    if not source.is_file():
        raise InputError(f"{source}: not a file; expected rows in JSON lines or Parquet")
    for number, row, _ in read_rows(source, Limits(member=MAX_ROW), columns=None):
        if row is None:
            raise InputError(f"{source}: row {number} is over {MAX_ROW:,} bytes")
        name = str(row.get("instance_id") or f"row-{number}")
        yield name, lambda row=row: read(row)  # type: ignore[misc]


def _listed(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of test ids, which some sets keep as JSON in a string."""
    value = row.get(key, row.get(key.lower()))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise InputError(f"{key} is neither a list nor JSON") from None
    if value is None:
        return ()
    return tuple(str(item) for item in value)


def _said(row: Mapping[str, Any], key: str, needed: bool = False) -> str:
    value = row.get(key)
    if needed and not isinstance(value, str):
        raise InputError(f"{key} is {type(value).__name__}; expected text")
    return value if isinstance(value, str) else ""


def _common(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {
        "id": _said(row, "instance_id", needed=True),
        "source": source,
        "repo": _said(row, "repo", needed=True),
        "statement": _said(row, "problem_statement"),
        "fail_to_pass": _listed(row, "FAIL_TO_PASS"),
        "pass_to_pass": _listed(row, "PASS_TO_PASS"),
        "base_commit": _said(row, "base_commit"),
        "image": _said(row, "image_name") or _said(row, "docker_image"),
    }


def _smith(row: Mapping[str, Any]) -> Instance:
    common = _common(row, "swe-smith")
    if not common["fail_to_pass"] or not common["pass_to_pass"]:
        raise InputError("it has no FAIL_TO_PASS or no PASS_TO_PASS; such rows are not valid in SWE-smith either")
    if not common["statement"].strip():
        raise InputError("it has no problem_statement")
    return Instance(**common, bug=_said(row, "patch", needed=True), test_command=SMITH_COMMAND)


def _gym(row: Mapping[str, Any]) -> Instance:
    return Instance(
        **_common(row, "swe-gym"),
        gold=_said(row, "patch", needed=True),
        test_patch=_said(row, "test_patch", needed=True),
        metadata={"version": _said(row, "version")},
    )


def _rebench(row: Mapping[str, Any]) -> Instance:
    how = row.get("install_config") or {}
    if isinstance(how, str):
        how = json.loads(how)
    install: list[str] = [str(line) for line in how.get("pre_install") or []]
    if packages := how.get("pip_packages"):
        install.append("pip install " + " ".join(f"'{package}'" for package in packages))
    if how.get("install"):
        install.append(str(how["install"]))
    context = {"requirements": row["requirements"].encode()} if isinstance(row.get("requirements"), str) else {}
    return Instance(
        **_common(row, "swe-rebench"),
        gold=_said(row, "patch", needed=True),
        test_patch=_said(row, "test_patch", needed=True),
        install=tuple(install),
        context=context,
        python=str(how.get("python") or ""),
        test_command=str(how.get("test_cmd") or "pytest -rA"),
        parser=parser_for(str(how.get("log_parser") or "")),
        metadata={"meta": json.dumps(row["meta"], default=str)} if row.get("meta") else {},
    )


SOURCES: Mapping[str, Read] = {
    "swebench": read_swebench,
    "swe-smith": read_smith,
    "swe-gym": read_gym,
    "swe-rebench": read_rebench,
}
