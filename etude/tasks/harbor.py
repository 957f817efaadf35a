"""Read, write, find and hash task directories in the Harbor format.

read_task(directory) -> Task            raises one InputError that names the file and key
write_task(directory, files) -> Task    atomic; validated by reading it back
find_tasks(root) -> Iterator[Path]      every directory with a task.toml, in path order
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
from etude.globs import Globs
from etude.harness.toolserver.inside.ignore import read_patterns
from etude.pods.images.context import FileToCopy
from etude.tasks import schema
from etude.tasks.task import MachineSpec, Task, TaskPhase, TaskStep

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_UPLOADED = re.compile(r"(steps/[^/]+/)?(tests|solution)/")  # where .harborignore applies


def read_task(directory: Path | str) -> Task:
    """Read and validate the task in a directory."""
    top = Path(directory)
    config = _read_config(top)
    table = schema.read_config(config, str(top / "task.toml"))
    machine = table.environment.spec()
    if not machine.image and not (top / "environment").is_dir():
        raise InputError(f"{top}: has neither environment/ nor environment.docker_image; expected one of them")
    _check_links(top)
    verifier_machine = table.verifier.machine(machine)
    steps = tuple(_read_step(top, step, machine, verifier_machine) for step in table.steps)
    if not steps:
        _require_test(top, "tests")
    return Task(
        directory=top,
        name=table.task.name if table.task else top.name,
        instruction="" if steps else read_instruction(top / "instruction.md"),
        machine=machine,
        agent=table.agent.phase(),
        verifier=table.verifier.verifier_phase(schema.DEFAULT_VERIFIER_TIMEOUT_S),
        solution=TaskPhase(env=table.solution.env),
        steps=steps,
        step_reward_strategy=table.multi_step_reward_strategy,
        verifier_machine=verifier_machine,
        artifacts=tuple(each.artifact() for each in table.artifacts),
        collect=tuple(each.hook() for each in table.verifier.collect),
        metadata=table.metadata,
        config=config,
    )


def _read_config(top: Path) -> dict[str, Any]:
    file = top / "task.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{top}: has no task.toml; expected a task directory in the Harbor format") from None
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None


def read_instruction(file: Path) -> str:
    """Return an instruction as the agent sees it, without the leading canary lines."""
    try:
        return strip_canary(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); every task needs an instruction") from None


def strip_canary(text: str) -> str:
    """Remove the leading benchmark canary lines and the blank lines after them."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _read_step(
    top: Path, table: schema.StepTable, machine: MachineSpec, verifier_machine: MachineSpec | None
) -> TaskStep:
    directory = f"steps/{table.name}"
    if not (top / directory / "tests/test.sh").is_file():
        _require_test(top, "tests", f"{directory}/tests")
    return TaskStep(
        name=table.name,
        instruction=read_instruction(top / directory / "instruction.md"),
        agent=table.agent.phase(),
        verifier=table.verifier.verifier_phase(None),
        min_rewards=table.min_reward,
        verifier_machine=table.verifier.machine(machine, verifier_machine),
        artifacts=tuple(each.artifact() for each in table.artifacts),
        collect=tuple(each.hook() for each in table.verifier.collect),
    )


def _require_test(top: Path, *directories: str) -> None:
    if any((top / directory / "test.sh").is_file() for directory in directories):
        return
    if any((top / directory / "test.bat").is_file() for directory in directories):
        raise InputError(f"{top}: has a test.bat for Windows; pods run test.sh only")
    scripts = " or ".join(f"{directory}/test.sh" for directory in directories)
    raise InputError(f"{top}: has no {scripts}; expected the verifier there")


def _check_links(top: Path) -> None:
    """Raise InputError for a symbolic link that leads out of the task."""
    real = top.resolve()
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = Path(directory, name)
            if path.is_symlink() and not path.resolve().is_relative_to(real):
                raise InputError(f"{path}: link leads out of the task to {path.resolve()}; copy the file into the task")


# ------------------------------------------------------------------------------------------------- files


def files_to_upload(task: Task, subdirectory: str, target: str, program: str = "") -> list[FileToCopy]:
    """Return the files below a subdirectory (tests, solution, steps/x/tests), less those .harborignore excludes.

    They are for the directory `target` of a pod, where `program` is made executable.
    """
    top = task.directory
    ignored = Globs(read_patterns(str(top / ".harborignore")))
    found: list[FileToCopy] = []
    base = os.path.join(top, subdirectory)
    for directory, names, files in os.walk(base):  # of texts: it runs for every trial, and objects of Path are slow
        names.sort()
        below = directory[len(base) :].lstrip("/")
        for each in sorted(files) + [name for name in names if os.path.islink(os.path.join(directory, name))]:
            name = f"{below}/{each}" if below else each
            inside = f"{subdirectory}/{name}"
            if not (_UPLOADED.match(inside) and ignored.matches(inside)):
                path = os.path.join(directory, each)
                mode = os.lstat(path).st_mode & 0o7777
                found.append(FileToCopy(Path(path), f"{target}/{name}", mode | 0o111 if name == program else mode))
    return found


def task_digest(directory: Path | str) -> str:
    """Return a digest over the names, kinds, executable bits and contents of a task's files."""
    top = Path(directory)
    hasher = hashlib.sha256(b"etude task 1\0")
    for path in sorted(_files(top), key=lambda path: path.relative_to(top).as_posix()):
        info = path.lstat()
        link = stat.S_ISLNK(info.st_mode)
        data = os.fsencode(os.readlink(path)) if link else path.read_bytes()
        kind = b"l" if link else b"x" if info.st_mode & 0o100 else b"f"
        name = os.fsencode(path.relative_to(top).as_posix())
        hasher.update(b"%d %b %b %d\0" % (len(name), name, kind, len(data)))
        hasher.update(data)
    return hasher.hexdigest()


def _files(top: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(top):
        for name in files + [name for name in names if Path(directory, name).is_symlink()]:
            yield Path(directory, name)


def find_tasks(root: Path | str) -> Iterator[Path]:
    """Yield the task directories at and below a directory in path order; tasks do not nest."""
    top = Path(root)
    if not top.is_dir():
        raise InputError(f"{top}: not a directory; expected a task or a directory of tasks")
    for directory, names, files in os.walk(top):
        if "task.toml" in files:
            names.clear()
            yield Path(directory)
        names[:] = sorted(name for name in names if not name.startswith("."))


def write_task(directory: Path | str, files: Mapping[str, str | bytes]) -> Task:
    """Write a task directory from its files, replacing an existing one, and read it back.

    Files whose name ends in `.sh` become executable. A failure leaves nothing behind.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    staging.mkdir()
    try:
        for name, data in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise InputError(
                    f"{target}: {name!r} is not a path inside the task; expected a relative one without .."
                )
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
