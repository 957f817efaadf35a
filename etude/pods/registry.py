"""Records of the pods of a state directory, and of the processes that own them.

A pod's record is written before the pod is created. Every owner process holds a lock file while it lives, so that other
processes can tell which owners are dead.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.errors import BusyError
from etude.files import take_lock
from etude.pods.images.records import image_from_json, image_to_json
from etude.pods.pod import Egress, Limits
from etude.pods.runtime.backend import PodSpec


class PodRegistry:
    """The records of a state directory, and this process's owner lock in it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.lock = -1

    def open(self) -> None:
        """Create the directories and take this process's owner lock."""
        for name in ("pods", "owners", "trash"):
            (self.state / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = take_lock(self.owner_file(self.owner), f"owner {self.owner}")

    def close(self) -> None:
        """Release the owner lock."""
        if self.lock >= 0:
            self.owner_file(self.owner).unlink(missing_ok=True)
            os.close(self.lock)
            self.lock = -1

    def write(self, spec: PodSpec) -> None:
        """Write a pod's record, atomically."""
        directory = self.state / "pods" / spec.id
        directory.mkdir(mode=0o700, exist_ok=True)
        plain = {name: getattr(spec, name) for name in PodSpec.__dataclass_fields__}
        plain |= {"image": image_to_json(spec.image), "limits": asdict(spec.limits), "egress": asdict(spec.egress)}
        part = directory / ".pod.json"
        part.write_text(json.dumps(plain))
        part.rename(directory / "pod.json")

    def remove(self, id: str) -> None:
        """Remove a pod's record, and its directory if that is empty then."""
        directory = self.state / "pods" / id
        with contextlib.suppress(OSError):  # the backend has removed it already
            (directory / "pod.json").unlink()
            directory.rmdir()

    def records(self) -> list[PodSpec]:
        """Return the spec of every pod in the state directory."""
        found = (read_record(directory / "pod.json") for directory in (self.state / "pods").iterdir())
        return [spec for spec in found if spec is not None]

    def owner_file(self, owner: str) -> Path:
        return self.state / "owners" / f"{owner}.lock"

    def alive(self, owner: str) -> bool:
        """Return whether an owner process still runs, by its lock; remove the lock file of a dead one."""
        file = self.owner_file(owner)
        if not file.exists():
            return False
        try:
            os.close(take_lock(file, owner))
        except BusyError:
            return True
        file.unlink(missing_ok=True)
        return False

    def other_owners(self) -> list[str]:
        """Return the other live processes that have this state directory open."""
        owners = (file.stem for file in (self.state / "owners").glob("*.lock"))
        return [owner for owner in owners if owner != self.owner and self.alive(owner)]


def read_record(file: Path) -> PodSpec | None:
    """Return the pod spec in a record file; None if it cannot be read."""
    try:
        plain: Mapping[str, Any] = json.loads(file.read_text())
        image = image_from_json(plain["image"])
        egress = Egress(**{**plain["egress"], "allow": tuple(plain["egress"]["allow"])})
        return PodSpec(**{**plain, "image": image, "limits": Limits(**plain["limits"]), "egress": egress})
    except (OSError, ValueError, KeyError, TypeError):
        return None
