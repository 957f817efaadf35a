"""Task directories in the Harbor format: read, written, found, and told apart by a digest.

read_task(directory) -> Task            what is wrong is one InputError that names file and key
write_task(directory, files) -> Task    whole or not at all; checked by reading it back
find_tasks(root) -> Iterator[Path]      every directory with a task.toml, in order
"""

import hashlib
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import InputError
from etude.harness.toolserver.inside.ignore import Pattern, read_patterns
from etude.tasks import schema
from etude.tasks.task import Machine, Phase, Task, TaskStep

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_UPLOADED = re.compile(r"(steps/[^/]+/)?(tests|solution)/")  # where .harborignore counts


def read_task(directory: Path | str) -> Task:
    """The task in a directory."""
    top = Path(directory)
    config = _read_config(top)
    table = schema.Table(config, str(top / "task.toml"))
    schema.read_version(table)
    machine = schema.read_machine(table.table("environment"))
    if not machine.image and not (top / "environment").is_dir():
        raise InputError(f"{top}: there is neither environment/ nor environment.docker_image; expected one of them")
    _check_links(top)
    verifier, own = schema.read_verifier(table.table("verifier"))
    steps = _read_steps(top, table)
    if not steps:
        _require_test(top, "tests")
    separate = table.table("verifier").text("environment_mode") == "separate" or own is not None
    return Task(
        directory=top,
        name=schema.read_name(table, top.name),
        instruction="" if steps else read_instruction(top / "instruction.md"),
        machine=machine,
        agent=schema.read_agent(table.table("agent")),
        verifier=verifier,
        solution=Phase(env=table.table("solution").env()),
        steps=steps,
        step_rewards=schema.read_strategy(table),
        separate=(own or machine) if separate else None,
        artifacts=schema.read_artifacts(table),
        metadata=table.table("metadata").values,
        config=config,
    )


def _read_config(top: Path) -> dict[str, Any]:
    file = top / "task.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{top}: there is no task.toml; expected a task directory in the Harbor format") from None
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None


def read_instruction(file: Path) -> str:
    """An instruction as the agent is shown it: without the canary lines at its head."""
    try:
        return strip_canary(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); a task needs its instruction") from None


def strip_canary(text: str) -> str:
    """Without the leading lines that mark a benchmark's files, and the blank ones after them."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _read_steps(top: Path, config: schema.Table) -> tuple[TaskStep, ...]:
    steps, seen = [], set[str]()
    for table in config.tables("steps"):
        name = schema.read_step_name(table, seen)
        place = f"steps/{name}"
        if not (top / place / "tests/test.sh").is_file():
            _require_test(top, "tests", f"{place}/tests")
        verifier, _ = schema.read_verifier(table.table("verifier"), None)
        schema.read_artifacts(table)
        steps.append(
            TaskStep(
                name=name,
                instruction=read_instruction(top / place / "instruction.md"),
                agent=schema.read_agent(table.table("agent")),
                verifier=verifier,
                least=schema.read_least(table),
            )
        )
    return tuple(steps)


def _require_test(top: Path, *places: str) -> None:
    if any((top / place / "test.sh").is_file() for place in places):
        return
    if any((top / place / "test.bat").is_file() for place in places):
        raise InputError(f"{top}: its tests are test.bat, for Windows; pods run test.sh only")
    raise InputError(f"{top}: there is no {' or '.join(f'{place}/test.sh' for place in places)}; expected the verifier")


def _check_links(top: Path) -> None:
    """A symbolic link may not leave the task."""
    real = top.resolve()
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = Path(directory, name)
            if path.is_symlink() and not path.resolve().is_relative_to(real):
                raise InputError(f"{path}: the link leads out of the task to {path.resolve()}; copy the file into it")


def separate_machine(task: Task, step: TaskStep | None = None) -> Machine | None:
    """The verifier's own machine in a step (or the task): a step's word counts before the task's."""
    if step is None:
        return task.separate
    tables = {str(table.get("name")): table for table in task.config.get("steps", [])}
    verifier = schema.Table(tables[step.name].get("verifier", {}), f"{task.directory}/task.toml: steps.{step.name}")
    _, own = schema.read_verifier(verifier)
    mode = verifier.text("environment_mode")
    if mode == "shared":
        return None
    if own is not None:
        return own
    return task.separate or task.machine if mode == "separate" else task.separate


# ------------------------------------------------------------------------------------------------- files


def uploads(task: Task, place: str) -> dict[str, Path]:
    """The files below `place` (tests, solution, steps/x/tests) that go into a pod; .harborignore says which do not."""
    top = task.directory
    rules = read_patterns(str(top / ".harborignore"))
    found: dict[str, Path] = {}
    for directory, names, files in os.walk(top / place):
        names.sort()
        for name in sorted(files) + [name for name in names if Path(directory, name).is_symlink()]:
            path = Path(directory, name)
            if not _ignored(rules, path.relative_to(top).as_posix()):
                found[path.relative_to(top / place).as_posix()] = path
    return found


def _ignored(rules: list[Pattern], path: str) -> bool:
    """Whether a file of tests/ or solution/ is left out: the last rule that means it, or a directory above, decides."""
    if not rules or not _UPLOADED.match(path):
        return False
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        above, directory = "/".join(parts[:depth]), depth < len(parts)
        verdicts = [not rule.negated for rule in rules if rule.match(above, directory)]
        if verdicts and verdicts[-1]:
            return True
    return False


def task_digest(directory: Path | str) -> str:
    """What a task is: a digest over the names, kinds, executable bits and contents of its files."""
    top = Path(directory)
    running = hashlib.sha256(b"etude task 1\0")
    for path in sorted(_files(top), key=lambda path: path.relative_to(top).as_posix()):
        info = path.lstat()
        link = stat.S_ISLNK(info.st_mode)
        data = os.fsencode(os.readlink(path)) if link else path.read_bytes()
        kind = b"l" if link else b"x" if info.st_mode & 0o100 else b"f"
        name = os.fsencode(path.relative_to(top).as_posix())
        running.update(b"%d %b %b %d\0" % (len(name), name, kind, len(data)))
        running.update(data)
    return running.hexdigest()


def _files(top: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(top):
        for name in files + [name for name in names if Path(directory, name).is_symlink()]:
            yield Path(directory, name)


def find_tasks(root: Path | str) -> Iterator[Path]:
    """The task directories at and below a directory, in order of their paths; nothing inside a task is one."""
    top = Path(root)
    if not top.is_dir():
        raise InputError(f"{top}: not a directory; expected a task or a directory of tasks")
    for directory, names, files in os.walk(top):
        if "task.toml" in files:
            names.clear()
            yield Path(directory)
        names[:] = sorted(name for name in names if not name.startswith("."))


def write_task(directory: Path | str, files: Mapping[str, str | bytes]) -> Task:
    """Write a task directory from its files and read it back. One that is there and differs is replaced.

    A name that ends in `.sh` becomes executable. What fails leaves nothing behind.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    staging.mkdir()
    try:
        for name, data in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise InputError(f"{target}: {name!r} is not a path inside a task")
            file = staging / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data.encode() if isinstance(data, str) else data)
            file.chmod(0o755 if file.suffix == ".sh" else 0o644)
        try:
            read_task(staging)
        except InputError as error:
            raise InputError(str(error).replace(str(staging), str(target))) from None
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return read_task(target)
