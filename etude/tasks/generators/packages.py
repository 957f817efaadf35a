"""The dependencies of a repository as wheels: downloaded by pip on the host, installed in the image without a network.

Only wheels: pip would run the code of a source distribution on the host to learn its dependencies. The repository
itself is never among them; a wheel without code replaces it, so that `importlib.metadata` finds its name and version.
"""

import base64
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.errors import InputError
from etude.pods.host_system import host_system
from etude.tasks.generators.source import RepositorySource, requirement_name

# packages that change how tests are run or reported, not their results
IGNORED_PACKAGES = frozenset(
    {"pytest-xdist", "pytest-cov", "pytest-randomly", "pytest-sugar", "pytest-codspeed", "pytest-benchmark"}
    | {"pytest-timeout", "pytest-rerunfailures", "pytest-mypy-plugins", "pytest-html", "psutil", "tox", "coverage"}
)


def fetch_wheels(source: RepositorySource, extra: Sequence[str] = (), wheels: Path | None = None) -> dict[str, bytes]:
    """Return the wheels for running the tests and building the package, only from directory `wheels` if given."""
    requirements = [line for line in (*source.requirements, *extra) if requirement_name(line) not in IGNORED_PACKAGES]
    with tempfile.TemporaryDirectory(prefix="etude-wheels-") as directory:
        _download([*requirements, *source.backend], Path(directory), wheels, source.label)
        found = {path.name: path.read_bytes() for path in sorted(Path(directory).glob("*.whl"))}
    kept = {name: data for name, data in found.items() if requirement_name(name.split("-")[0]) != source.name}
    return {**kept, **own_metadata(source)}


def _download(requirements: Sequence[str], directory: Path, wheels: Path | None, label: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
    command += ["--dest", str(directory)]
    own_version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if host_system().python not in ("", own_version):
        command += ["--python-version", host_system().python]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"{label}: pip cannot download its dependencies as wheels; pass a directory of wheels with --wheels\n"
            + done.stderr.strip()[-1500:]
        )


def own_metadata(source: RepositorySource) -> dict[str, bytes]:
    """Return a wheel that contains only the repository's name and version, for `importlib.metadata`."""
    name = source.name.replace("-", "_")
    version = re.sub(r"[^0-9A-Za-z.+!]", ".", source.version) or "0"
    info = f"{name}-{version}.dist-info"
    members = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {source.name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: etude\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return {
        f"{name}-{version}-py3-none-any.whl": pack_wheel({key: text.encode() for key, text in members.items()}, info)
    }


def pack_wheel(members: Mapping[str, bytes], info: str) -> bytes:
    """Return a wheel of these files with its metadata in `info`; the same files give the same bytes."""
    lines = []
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    record = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()


def pytest_plugin_names(wheels: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the names under which the pytest plugins among the wheels are loaded."""
    found = []
    for name, data in wheels.items():
        if requirement_name(name.split("-")[0]) in ("pytest", "hypothesis"):
            continue
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                if member.endswith(".dist-info/entry_points.txt"):
                    section = re.search(r"^\[pytest11\]\s*$([^\[]*)", archive.read(member).decode(), re.MULTILINE)
                    found += re.findall(r"^(\S+)\s*=", section[1], re.MULTILINE) if section else []
    return tuple(sorted(found))
