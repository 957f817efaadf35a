"""The tool server as one file: what is in `inside/`, as a zip that Python runs. Same sources, same bytes."""

import hashlib
import io
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
    files = {f"{package}/__init__.py": b"" for package in PACKAGES}
    files["__main__.py"] = START.encode()
    for source in sorted((Path(__file__).parent / "inside").glob("*.py")):
        files[f"{INSIDE}/{source.name}"] = source.read_bytes()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name])  # dated 1980, whenever it is packed
    return out.getvalue()


@cache
def digest() -> str:
    """What distinguishes this version of the file."""
    return hashlib.sha256(pack()).hexdigest()[:16]
