"""The status that every process of a run reports: a state, what it waits for, and figures."""

import contextlib
import json
import os
import secrets
import time
from typing import Any

from etude.errors import EtudeError
from etude.files import write_atomically
from etude.runs.layout import RunLayout

SAMPLER = "sampler"  # the `kind` in the status of a sampler


def write_status(layout: RunLayout, name: str, **facts: Any) -> None:
    """Report the status of the service `name`: a `state`, what it is `waiting_for`, and figures."""
    known = {"pid": os.getpid(), "time": time.time(), "state": "working", "waiting_for": ""}
    write_atomically(layout.services / f"{name}.json", json.dumps({**known, **facts}))


def read_status(layout: RunLayout, name: str) -> dict[str, Any] | None:
    """Return the last status of a service; None if it has not reported any."""
    try:
        status = json.loads((layout.services / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:  # not written by us: we replace the file as a whole
        raise EtudeError(f"{layout.services / name}.json: damaged: {error}") from error
    return dict(status)


def read_statuses(layout: RunLayout) -> dict[str, dict[str, Any]]:
    """Return the last status of every service, by name."""
    names = sorted(path.stem for path in layout.services.glob("*.json"))
    found = {name: read_status(layout, name) for name in names}
    return {name: status for name, status in found.items() if status is not None}


def sampler_token(layout: RunLayout) -> str:
    """Return the bearer token of the run's samplers; the first process that asks creates it."""
    path = layout.sampler_token
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii")
    layout.root.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    part.touch(0o600)
    try:
        part.write_text(secrets.token_hex(24), encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # appears complete, and only once
    finally:
        part.unlink(missing_ok=True)
    return path.read_text(encoding="ascii")
