"""Import Harbor tasks from public sets of repository issues: SWE-bench, SWE-smith, SWE-Gym, SWE-rebench.

`import_tasks` reads a source, converts each instance, and returns the new task directories and the failures.
"""

import re
from pathlib import Path

from etude.errors import InputError
from etude.tasks.harbor import write_task
from etude.tasks.importers.instance import Instance, task_files
from etude.tasks.importers.sources import SOURCES

__all__ = ["Instance", "find_clone", "import_tasks"]


def import_tasks(
    kind: str, source: Path, out: Path, *, repositories: Path | None = None, limit: int | None = None
) -> tuple[list[Path], dict[str, str]]:
    """Convert every instance of a source to a task; return the task directories, and errors by instance id."""
    if kind not in SOURCES:
        raise InputError(f"{kind}: unknown kind of task set; expected one of {', '.join(SOURCES)}")
    if repositories is not None and not repositories.is_dir():
        raise InputError(f"--repositories {repositories}: not a directory; expected a directory of clones")
    made: list[Path] = []
    failed: dict[str, str] = {}
    for name, read in SOURCES[kind](source):
        if limit is not None and len(made) + len(failed) >= limit:
            break
        try:
            instance = read()
            target = out / re.sub(r"[^A-Za-z0-9._-]", "_", instance.id)
            clone = find_clone(repositories, instance) if repositories else None
            write_task(target, task_files(instance, clone))
            made.append(target)
        except (InputError, ValueError, KeyError, TypeError) as error:
            failed[name] = str(error)
    return made, failed


def find_clone(repositories: Path, instance: Instance) -> Path:
    """Return the clone of an instance's repository: OWNER__NAME, OWNER/NAME or NAME."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?", instance.repo) or ".." in instance.repo:
        raise InputError(f"repo is {instance.repo!r}; expected OWNER/NAME")
    name = instance.repo.rpartition("/")[2]
    names = (instance.repo.replace("/", "__"), instance.repo, name, name.partition(".")[0])
    for each in names:
        if each and (repositories / each).is_dir():
            return repositories / each
    raise InputError(f"{repositories}: has no clone of {instance.repo} (as {instance.repo.replace('/', '__')})")
