"""Read instances from SWE-bench task directories and from rows of SWE-smith, SWE-Gym and SWE-rebench."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.data.documents import ReadLimits
from etude.data.rows import read_rows
from etude.errors import EtudeError, InputError
from etude.tasks.importers.instance import Instance, parser_for

MAX_ROW = 64 << 20  # bytes
SMITH_COMMAND = "pytest --disable-warnings --color=no --tb=no --verbose"
# yields the id of each instance and a function that reads it, so that one may fail without ending the rest
ReadInstances = Callable[[Path], Iterator[tuple[str, Callable[[], Instance]]]]


def read_swebench(source: Path) -> Iterator[tuple[str, Callable[[], Instance]]]:
    """Read task directories of SWE-bench 5: source/tasks/<id>/, source/<id>/, or a single one."""
    tops = [source / "tasks"] if (source / "tasks").is_dir() else [source]
    directories = [path.parent for top in tops for path in sorted(top.glob("*/task.yaml"))]
    if (source / "task.yaml").is_file():
        directories = [source]
    if not directories:
        raise InputError(f"{source}: has no task.yaml; expected task directories of SWE-bench 5")
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
            "reading task.yaml of SWE-bench needs PyYAML, which is not installed; install the package PyYAML"
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
        raise InputError(f"{file}: does not exist") from None


# ------------------------------------------------------------------------------------------------- rows


def _rows(source: Path, read: Callable[[Mapping[str, Any]], Instance]) -> Iterator[tuple[str, Callable[[], Instance]]]:
    """Read rows of a file in JSON lines or Parquet."""
    if not source.is_file():
        raise InputError(f"{source}: not a file; expected rows in JSON lines or Parquet")
    for number, row, _ in read_rows(source, ReadLimits(max_item_bytes=MAX_ROW), columns=None):
        if row is None:
            raise InputError(f"{source}: row {number} is over {MAX_ROW:,} bytes")
        name = str(row.get("instance_id") or f"row-{number}")
        yield name, lambda row=row: read(row)  # type: ignore[misc]


def _test_ids(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of test ids, which some sets store as a JSON string."""
    value = row.get(key, row.get(key.lower()))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise InputError(f"{key} is neither a list nor a JSON string") from None
    if value is None:
        return ()
    return tuple(str(item) for item in value)


def _string(row: Mapping[str, Any], key: str, required: bool = False) -> str:
    value = row.get(key)
    if required and not isinstance(value, str):
        raise InputError(f"{key} is {type(value).__name__}; expected a string")
    return value if isinstance(value, str) else ""


def _common(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {
        "id": _string(row, "instance_id", required=True),
        "source": source,
        "repo": _string(row, "repo", required=True),
        "statement": _string(row, "problem_statement"),
        "fail_to_pass": _test_ids(row, "FAIL_TO_PASS"),
        "pass_to_pass": _test_ids(row, "PASS_TO_PASS"),
        "base_commit": _string(row, "base_commit"),
        "image": _string(row, "image_name") or _string(row, "docker_image"),
    }


def _smith(row: Mapping[str, Any]) -> Instance:
    """Read a row of SWE-smith: the patch introduces the bug, and reverting it is the solution."""
    common = _common(row, "swe-smith")
    if not common["fail_to_pass"] or not common["pass_to_pass"]:
        raise InputError("has no FAIL_TO_PASS or no PASS_TO_PASS; such rows are invalid in SWE-smith too")
    if not common["statement"].strip():
        raise InputError("has no problem_statement")
    return Instance(**common, bug=_string(row, "patch", required=True), test_command=SMITH_COMMAND)


def _gym(row: Mapping[str, Any]) -> Instance:
    """Read a row of SWE-Gym, which has the form of a SWE-bench row."""
    return Instance(
        **_common(row, "swe-gym"),
        gold=_string(row, "patch", required=True),
        test_patch=_string(row, "test_patch", required=True),
        metadata={"version": _string(row, "version")},
    )


def _rebench(row: Mapping[str, Any]) -> Instance:
    """Read a row of SWE-rebench: a SWE-bench row with installation instructions."""
    config = row.get("install_config") or {}
    if isinstance(config, str):
        config = json.loads(config)
    install: list[str] = [str(line) for line in config.get("pre_install") or []]
    if packages := config.get("pip_packages"):
        install.append("pip install " + " ".join(f"'{package}'" for package in packages))
    if config.get("install"):
        install.append(str(config["install"]))
    context = {"requirements": row["requirements"].encode()} if isinstance(row.get("requirements"), str) else {}
    return Instance(
        **_common(row, "swe-rebench"),
        gold=_string(row, "patch", required=True),
        test_patch=_string(row, "test_patch", required=True),
        install=tuple(install),
        context=context,
        python=str(config.get("python") or ""),
        test_command=str(config.get("test_cmd") or "pytest -rA"),
        parser=parser_for(str(config.get("log_parser") or "")),
        metadata={"meta": json.dumps(row["meta"], default=str)} if row.get("meta") else {},
    )


SOURCES: Mapping[str, ReadInstances] = {
    "swebench": read_swebench,
    "swe-smith": partial(_rows, read=_smith),
    "swe-gym": partial(_rows, read=_gym),
    "swe-rebench": partial(_rows, read=_rebench),
}
