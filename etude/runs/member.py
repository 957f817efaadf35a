"""A process that takes part in a run, beside the run directory or on another machine.

    member = open_member("http://host:29110", "worker-0")
    member.layout       # the run directory, or a mirror of what this process needs of it
    member.client       # the run service

A process that sees the run directory of the service reads and writes files there; any other has a mirror with the same
names in its cache, whose files it fetches from the service by digest.
"""

import contextlib
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from etude.errors import EtudeError
from etude.files import user_cache, write_atomically
from etude.runs.client import RunClient, RunInfo, RunServiceUnavailable
from etude.runs.layout import RunLayout
from etude.runs.trees import unpack_tree
from etude.system.terminal import say

FETCH_ATTEMPTS = 5  # of an archive that breaks off


@dataclass(frozen=True)
class RunMember:
    """A process of a run: its client, and the run directory as it sees it."""

    name: str
    client: RunClient
    info: RunInfo
    layout: RunLayout
    sees_run: bool  # the run directory itself
    same_machine: bool  # as the run service, so that its other paths mean the same here

    def reaches(self, path: str) -> bool:
        """Return whether a path of the run service's machine is the same file here."""
        return self.same_machine or (self.sees_run and Path(path).is_relative_to(self.info.directory))

    @property
    def pods_owner(self) -> str:
        """The name under which the processes of this run take snapshots on pod hosts."""
        return f"{self.info.name}/{self.info.root}/{self.info.run}"

    def model(self, *, weights: bool) -> Path:
        """Return the directory of the model that the run starts from, with its weights or with all else."""
        return self.layout.model if self.sees_run else self._fetch("model" if weights else "tokenizer")

    def task_directory(self, set_name: str, task: str) -> Path | None:
        """Return the directory of a task; None if the run has no task of that name in this set."""
        found = self.client.call("GET", f"/tasks/{set_name}", query={"name": task})
        if found is None:
            return None
        if self.reaches(found["path"]):
            return Path(found["path"])
        return self._fetch(f"task/{set_name}", name=task)

    def task_names(self, set_name: str, count: int) -> list[str]:
        """Return at most `count` names of tasks of a set."""
        names: list[str] = self.client.call("GET", f"/tasks/{set_name}/names", query={"count": str(count)})
        return names

    def report_failure(self, problem: str) -> None:
        """Report that this process ends with an error, if the run service answers."""
        with contextlib.suppress(EtudeError):
            self.client.twin(patience_s=0).report_status(self.name, state="failed", problem=problem)

    def _fetch(self, kind: str, **query: str) -> Path:
        """Return the directory of a tree in the cache; it is fetched if it is not there."""
        digest = str(self.client.call("GET", f"/trees/{kind}", query=query)["digest"])
        cache = user_cache("trees")
        for attempt in range(1, FETCH_ATTEMPTS + 1):
            if (cache / digest).is_dir():
                break
            try:
                with self.client.stream(f"/trees/{kind}", {**query, "digest": digest}) as response:
                    return unpack_tree(response, digest, cache)
            except (RunServiceUnavailable, OSError) as error:
                if attempt == FETCH_ATTEMPTS:
                    raise EtudeError(f"{self.name}: the files of {kind} could not be fetched: {error}") from error
        return cache / digest


def open_member(url: str, name: str, **options: Any) -> RunMember:
    """Return this process as a member of the run whose service has this URL; the token is in the environment."""

    def say_problem(problem: str) -> None:
        say(f"{name}: {problem or 'the run service answers again'}", file=sys.stderr)

    client = RunClient.of_environment(url, on_problem=say_problem, **options)
    info = client.connect()
    layout = RunLayout(Path(info.directory), service_root=info.root)
    sees_run, same_machine = _reads(layout.instance) == info.instance, machine_id() == info.machine
    if not sees_run:
        layout = mirror(info)
    return RunMember(name, client, info, layout, sees_run, sees_run and same_machine)


def mirror(info: RunInfo) -> RunLayout:
    """Make a directory with the recipe and the plugins of a run, named as in the run directory."""
    layout = RunLayout(user_cache("runs") / info.run / info.name, service_root=info.root)
    recipe = tomllib.loads(info.recipe)
    renamed: dict[str, str] = {}
    for path, content in info.plugin_files.items():
        file = layout.run / "plugins" / Path(path).name
        write_atomically(file, content)
        renamed[path] = str(file)
    if renamed:  # their digests are checked when they are imported
        recipe["plugins"] = [renamed.get(plugin, plugin) for plugin in recipe["plugins"]]
        digests = recipe.get("plugin_digests", {})
        recipe["plugin_digests"] = {renamed.get(plugin, plugin): digest for plugin, digest in digests.items()}
    write_atomically(layout.recipe, tomli_w.dumps(recipe))
    layout.root.mkdir(exist_ok=True, parents=True)
    return layout


def machine_id() -> str:
    """Return an id of this machine since it was started."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return os.uname().nodename


def _reads(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeError):
        return file.read_text(encoding="ascii")
    return ""
