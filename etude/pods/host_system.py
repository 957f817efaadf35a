"""What a host's own programs are: an image that binds the host's /usr works on hosts with an equal system only."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class HostSystem:
    """The distribution, the Python and the processor of a host."""

    distributions: tuple[str, ...] = ()  # ID and ID_LIKE of /etc/os-release
    version: str = ""  # of the distribution
    python: str = ""  # version of /usr/bin/python3, such as 3.11; empty if there is none
    machine: str = ""

    def __str__(self) -> str:
        name = f"{self.distributions[0] if self.distributions else 'linux'} {self.version}".strip()
        return f"{name}, {f'Python {self.python}' if self.python else 'no Python'}, {self.machine}"


@cache
def host_system() -> HostSystem:
    """Return the system of this machine."""
    try:
        text = Path("/etc/os-release").read_text()
    except OSError:
        text = ""
    found = dict(re.findall(r"^(ID|ID_LIKE|VERSION_ID)=(.*)$", text, re.MULTILINE))
    names = [word for key in ("ID", "ID_LIKE") for word in found.get(key, "").strip("\"'").split()]
    version = found.get("VERSION_ID", "").strip("\"'")
    return HostSystem(tuple(dict.fromkeys(names)), version, _python_version(), platform.machine())


def _python_version() -> str:
    """Return the version (such as 3.11) of Python in the host image, or "" if it has none."""
    program = "/usr/bin/python3"
    if not os.path.exists(program):
        return ""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([program, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=30)
    return done.stdout.strip()
