"""Harbor tasks from sets of issues of real repositories. `etude tasks import` is the verb."""

import re
from pathlib import Path

from etude.errors import InputError
from etude.tasks.harbor import write_task
from etude.tasks.importers.instance import Instance, task_files
from etude.tasks.importers.sources import SOURCES


def import_tasks(
    kind: str, source: Path, out: Path, *, repositories: Path | None = None, limit: int | None = None
) -> tuple[list[Path], dict[str, str]]:
    """Make a task of every issue; those made, and why the others could not be."""
    if kind not in SOURCES:
        raise InputError(f"{kind}: not a kind of set; there are: {', '.join(SOURCES)}")
    if repositories is not None and not repositories.is_dir():
        raise InputError(f"--repositories {repositories}: not a directory")
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
    """The clone of an issue's repository: OWNER__NAME, OWNER/NAME or NAME."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?", instance.repo) or ".." in instance.repo:
        raise InputError(f"its repository {instance.repo!r} is not a name")
    name = instance.repo.rpartition("/")[2]
    names = (instance.repo.replace("/", "__"), instance.repo, name, name.partition(".")[0])
    for each in names:
        if each and (repositories / each).is_dir():
            return repositories / each
    raise InputError(f"{repositories}: there is no clone of {instance.repo} (as {instance.repo.replace('/', '__')})")
