"""The commands `etude change` and `etude drain`, which act on a run while it goes on."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer
from rich.markup import escape
from rich.table import Table

from etude.errors import EtudeError, InputError
from etude.system.terminal import Console, say

if TYPE_CHECKING:
    from etude.rl.settings import RlSettings
    from etude.runs.client import RunClient
    from etude.runs.layout import RunLayout

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the table rl with their new values.", show_default=False),
]
Workers = Annotated[
    list[str] | None, typer.Argument(metavar="[WORKER]...", help="Default: all workers.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
POLL_S = 0.5
ANSWER_S = 5.0  # for the run service to answer


def change(run: RunDirectory, changes: Changes = None, as_json: AsJson = False) -> None:
    """Change settings of RL while the run goes on; without KEY=VALUE, list what was changed.

    Keys: rl.temperature, rl.budget.*, rl.rewards.*, rl.effort.*, rl.curriculum.*, rl.in_flight, rl.workers. A change is
    kept in RUN/live.toml, also when the run is resumed, and recorded with the policy step at which it takes effect.
    """
    from etude.rl.settings import RlSettings
    from etude.rollouts.live_settings import LIVE_KEYS, differing, recorded_changes
    from etude.runs.layout import RunLayout

    layout = RunLayout.of_run(run)
    if not changes:
        found = recorded_changes(layout)
        print(json.dumps(found)) if as_json else show_changes(run, found)
        return
    before, after = write_changes(layout, changes, RlSettings)
    found = [
        {"key": f"rl.{key}", "before": old, "value": new, "applies_to": LIVE_KEYS[key]}
        for key, (old, new) in differing(before, after).items()
    ]
    if as_json:
        print(json.dumps(found))
        return
    for each in found:
        say(f"{each['key']}: {shown(each['before'])} -> {shown(each['value'])}; applies to {each['applies_to']}")
    if not found:
        say("nothing differs from the settings in force")
    if not is_active(run):
        say("the run is not active: the changes take effect when it is resumed")


def write_changes(layout: RunLayout, changes: list[str], kind: type[RlSettings]) -> tuple[RlSettings, RlSettings]:
    """Write changes to the run's `live.toml`; return the settings before and after. InputError if they are invalid."""
    from etude.config import merged, override_values
    from etude.files import take_lock, write_atomically
    from etude.rollouts.live_settings import TABLE, changed_settings, check_changes, read_changes

    given = override_values(changes)
    wanted = check_changes(given, "etude change")
    lock = take_lock(layout.live.with_name("live.lock"), f"the settings of {layout.run}")
    try:
        now = read_changes(layout)
        before, after = changed_settings(layout, kind, now), changed_settings(layout, kind, merged(now, wanted))
        if "workers" in wanted and (table := cluster_workers(layout)):
            raise InputError(f"rl.workers would not be used: the recipe has cluster.workers_per_node = {table}")
        write_atomically(layout.live, tomli_w.dumps({TABLE: merged(now, wanted)}), durable=True)
    finally:
        os.close(lock)
    return before, after


def cluster_workers(layout: RunLayout) -> int:
    """Return the workers on each node that the recipe's table of the cluster asks for; 0 if it does not."""
    from etude.config import read_toml

    table = read_toml(layout.recipe).get("cluster") or {}
    return int(table.get("workers_per_node") or 0)


def show_changes(run: Path, found: list[dict[str, Any]]) -> None:
    """Print the recorded changes."""
    if not found:
        say(f"{run}: no setting was changed during the run")
        return
    table = Table(box=None, header_style="bold")
    for column in ("policy step", "key", "before", "after"):
        table.add_column(column, overflow="fold")
    for entry in found:
        table.add_row(str(entry["step"]), *map(escape, (entry["key"], shown(entry["before"]), shown(entry["value"]))))
    Console().print(table)


def shown(value: Any) -> str:
    """Return a value on one line; of a table what it contains."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items() if each is not None) or "none"
    return str(value)


def is_active(run: Path) -> bool:
    """Return whether a process runs this run."""
    from etude.files import lock_holder
    from etude.runs.layout import RunLayout

    return lock_holder(RunLayout(run).lock) is not None


# ------------------------------------------------------------------------------------------- draining


def drain(run: RunDirectory, workers: Workers = None) -> None:
    """Replace workers one after the other without losing a rollout: each claims no more, finishes its own and ends.

    A new process takes its place, with the code that is installed then. Interrupting the command leaves the workers
    that were not asked yet as they are.
    """
    from etude.rollouts.worker_client import drain_worker
    from etude.runs.client import RunClient
    from etude.runs.layout import RunLayout
    from etude.runs.service_status import WORKER

    layout = RunLayout.of_run(run)
    if not is_active(run):
        raise InputError(f"{run} is not running: its workers are started anew when it is resumed")
    with closing(RunClient.beside(layout, patience_s=ANSWER_S, timeout_s=ANSWER_S)) as client:
        client.check_beside(layout)
        known = [name for name, facts in client.statuses().items() if facts.get("kind") == WORKER]
        if unknown := sorted(set(workers or ()) - set(known)):
            raise InputError(f"{run} has no worker {unknown[0]}; its workers: {', '.join(known) or 'none yet'}")
        for name in workers or known:
            before = client.statuses()[name]
            say(f"{name}: finishes {before.get('rollouts', 0)} rollouts")
            drain_worker(client, name)
            after = wait_for_replacement(client, name, before)
            say(f"{name}: replaced" if after else f"{name}: ended, and not started again")


def wait_for_replacement(client: RunClient, name: str, before: dict[str, Any]) -> bool:
    """Wait until another process has taken the place of a worker; False if it is not started again."""
    from etude.rollouts.worker_client import drain_worker
    from etude.runs.client import RunServiceUnavailable

    gone_at: float | None = None
    while True:
        time.sleep(POLL_S)
        try:
            facts = client.statuses().get(name)
            if facts is not None and facts.get("session") == before["session"] and facts["state"] != "draining":
                drain_worker(client, name)  # the run service was restarted meanwhile
        except RunServiceUnavailable as error:
            raise EtudeError(
                f"{name} was asked to end, but the run service does not answer any more: {error}"
            ) from None
        if facts is not None and facts.get("session") not in (None, before["session"]):
            return True
        gone_at = (gone_at or time.monotonic()) if facts is None else None
        if gone_at is not None and time.monotonic() - gone_at > 60.0:
            return False
