"""What a repository needs beside itself, as wheels: fetched by pip on this side, installed in the image offline.

Only wheels: a source distribution would run its code here to say what it needs. The repository itself is never among
them; in its place stands a wheel without code, so that its name and version can be asked for.
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
from etude.tasks.base_images import host_python
from etude.tasks.generators.source import Source, requirement_name

# plugins of pytest that change how tests are run or shown, not what they come to
USELESS = frozenset(
    {"pytest-xdist", "pytest-cov", "pytest-randomly", "pytest-sugar", "pytest-codspeed", "pytest-benchmark"}
    | {"pytest-timeout", "pytest-rerunfailures", "pytest-mypy-plugins", "pytest-html", "psutil", "tox", "coverage"}
)


def fetch_wheels(source: Source, extra: Sequence[str] = (), wheels: Path | None = None) -> dict[str, bytes]:
    """Wheels for running the tests and building the package; from `wheels` alone where a directory is given."""
    wanted = [line for line in (*source.requirements, *extra) if requirement_name(line) not in USELESS]
    with tempfile.TemporaryDirectory(prefix="etude-wheels-") as directory:
        _download([*wanted, *source.backend], Path(directory), wheels, source.label)
        found = {path.name: path.read_bytes() for path in sorted(Path(directory).glob("*.whl"))}
    kept = {name: data for name, data in found.items() if requirement_name(name.split("-")[0]) != source.name}
    return {**kept, **own_metadata(source)}


def _download(wanted: Sequence[str], directory: Path, wheels: Path | None, label: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
    command += ["--dest", str(directory)]
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if host_python() not in ("", here):
        command += ["--python-version", host_python()]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"{label}: its packages cannot be had as wheels; give a directory that has them with --wheels\n"
            + done.stderr.strip()[-1500:]
        )


def own_metadata(source: Source) -> dict[str, bytes]:
    """A wheel with the repository's name and version and nothing else, for `importlib.metadata`."""
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
    """A wheel of these files, whose metadata is in `info`; the same files give the same bytes."""
    lines = []
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    record = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return held.getvalue()


def plugins_among(wheels: Mapping[str, bytes]) -> tuple[str, ...]:
    """The plugins of pytest among wheels, by the names they are loaded under."""
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
