"""Packs the tool server in `inside/` into one zip file that Python runs.

The zip also contains bytecode for the packing Python: compiling the sources took two thirds of the start time of a
pod's tools. A pod with another Python version ignores it and compiles the sources.
"""

import hashlib
import importlib.util
import io
import marshal
import zipfile
from functools import cache
from pathlib import Path

from etude import globs

INSIDE = "etude/harness/toolserver/inside"
PACKAGES = ("etude", "etude/harness", "etude/harness/toolserver")
START = """\
import sys
if sys.version_info < (3, 8):
    sys.exit("the tool server needs Python 3.8 or newer; python3 in this image is %d.%d" % sys.version_info[:2])
from etude.harness.toolserver.inside.server import main
main()
"""


@cache
def pack() -> bytes:
    """Return the zip file. Not compressed: a pod's Python may lack zlib."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, source in sources().items():
            for entry, data in ((name, source), (f"{name}c", bytecode(source, name))):
                archive.writestr(zipfile.ZipInfo(entry), data)  # dated 1980: the same bytes at any time
    return out.getvalue()


def sources() -> dict[str, bytes]:
    """Return the source files by their names in the zip, sorted."""
    files = {f"{package}/__init__.py": b"" for package in PACKAGES}
    files["__main__.py"] = START.encode()
    files["etude/globs.py"] = Path(globs.__file__).read_bytes()
    for source in sorted((Path(__file__).parent / "inside").glob("*.py")):
        files[f"{INSIDE}/{source.name}"] = source.read_bytes()
    return dict(sorted(files.items()))


def bytecode(source: bytes, name: str) -> bytes:
    """Return an unchecked .pyc: Python does not compare times or hashes, as both files come from one zip."""
    code = compile(source, name, "exec", dont_inherit=True)
    unchecked = (1).to_bytes(4, "little")
    # marshal version 2 has no references, which depend on interpreter state: same sources, same bytes
    return importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(source) + marshal.dumps(code, 2)


@cache
def digest() -> str:
    """Return the digest of this version: its sources, and the Python it is compiled for."""
    hasher = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name, source in sources().items():
        hasher.update(b"%b %d\0%b" % (name.encode(), len(source), source))
    return hasher.hexdigest()[:16]
