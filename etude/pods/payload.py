"""Packs modules of ours into one zip file that the `python3` of a pod runs: the only way our code gets into a pod.

    payload = pack("etude.tasks.leak_scan:main")
    await pod.write("/run/scan.pyz", payload.data)
    await pod.exec(["python3", "-I", "-S", "/run/scan.pyz"])

Modules keep their names, so a pod runs the same import statements as the host. They may import only the standard
library and each other; the packages around them are empty. `source_files` returns the same program as a directory of
texts, which `python3 DIRECTORY` runs on any machine.
"""

import hashlib
import importlib.util
import io
import marshal
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

START = """\
import sys
if sys.version_info < (3, 8):
    sys.exit("{module} needs Python 3.8 or newer; python3 in this image is %d.%d" % sys.version_info[:2])
from {module} import {function}
sys.exit({function}())
"""


@dataclass(frozen=True)
class Payload:
    """A zip file to run with `python3 FILE`, and the digest of what it contains."""

    data: bytes
    digest: str


@cache
def pack(entry: str, *modules: str) -> Payload:
    """Pack `entry` ("module:function"), which is called without arguments, and the modules that it needs.

    The name of a package stands for all its modules. Bytecode of the packing Python saves two thirds of the start time
    in a pod with the same version; other versions compile the sources.
    """
    out = io.BytesIO()
    hasher = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    with zipfile.ZipFile(out, "w") as archive:  # not compressed: a pod's Python may lack zlib
        for path, text in source_files(entry, *modules).items():
            source = text.encode()
            hasher.update(b"%b %d\0%b" % (path.encode(), len(source), source))
            for each, data in ((path, source), (f"{path}c", _compile(source, path))):
                archive.writestr(zipfile.ZipInfo(each), data)  # dated 1980: the same bytes at any time
    return Payload(out.getvalue(), hasher.hexdigest()[:16])


@cache
def source_files(entry: str, *modules: str) -> Mapping[str, str]:
    """Return the sources of a program by path, in path order: the same on every host, as files of a task must be."""
    module, _, function = entry.partition(":")
    files = {"__main__.py": START.format(module=module, function=function)}
    for name in (module, *modules):
        files |= _sources(name)
    for path in [path for path in files if "/" in path]:
        for end in (at for at, char in enumerate(path) if char == "/"):
            files.setdefault(f"{path[:end]}/__init__.py", "")
    return dict(sorted(files.items()))


def _sources(name: str) -> dict[str, str]:
    """Return the source files of a module, or of all modules directly in a package, by their paths in the zip."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name}: expected a module of which the source is installed")
    origin, path = Path(spec.origin), name.replace(".", "/")
    if spec.submodule_search_locations is None:
        return {f"{path}.py": origin.read_text(encoding="utf-8")}
    return {f"{path}/{file.name}": file.read_text(encoding="utf-8") for file in origin.parent.glob("*.py")}


def _compile(source: bytes, path: str) -> bytes:
    """Return an unchecked .pyc: Python does not compare times or hashes, as both files come from one zip."""
    code = compile(source, path, "exec", dont_inherit=True)
    unchecked = (1).to_bytes(4, "little")
    # marshal version 2 has no references, which depend on interpreter state: same sources, same bytes
    return importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(source) + marshal.dumps(code, 2)
