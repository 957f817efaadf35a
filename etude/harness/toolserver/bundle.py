"""The tool server as one file: what is in `inside/`, as a zip that Python runs.

Beside each source lies its bytecode for the Python that packs: compiling them took two thirds of the time that a pod's
tools needed to start. A pod with another version of Python passes over it and compiles the sources.
"""

import hashlib
import importlib.util
import io
import marshal
import zipfile
from functools import cache
from pathlib import Path

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
    """The file. Not compressed: a pod's Python may lack zlib."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, source in sources().items():
            for entry, data in ((name, source), (f"{name}c", bytecode(source, name))):
                archive.writestr(zipfile.ZipInfo(entry), data)  # dated 1980, whenever it is packed
    return out.getvalue()


def sources() -> dict[str, bytes]:
    """Its files by their names in the zip, in order."""
    files = {f"{package}/__init__.py": b"" for package in PACKAGES}
    files["__main__.py"] = START.encode()
    for source in sorted((Path(__file__).parent / "inside").glob("*.py")):
        files[f"{INSIDE}/{source.name}"] = source.read_bytes()
    return dict(sorted(files.items()))


def bytecode(source: bytes, name: str) -> bytes:
    """A .pyc that is believed without a look at times or hashes: both come out of one zip."""
    code = compile(source, name, "exec", dont_inherit=True)
    unchecked = (1).to_bytes(4, "little")
    # version 2 has no references, which would depend on what else is in memory: same sources, same bytes
    return importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(source) + marshal.dumps(code, 2)


@cache
def digest() -> str:
    """What distinguishes this version of the file: its sources, and the Python it is compiled for."""
    running = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name, source in sources().items():
        running.update(b"%b %d\0%b" % (name.encode(), len(source), source))
    return running.hexdigest()[:16]
