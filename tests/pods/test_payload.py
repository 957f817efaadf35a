"""Our code as one zip file for a pod: the same bytes from the same sources, complete, and standard library only."""

import ast
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from etude.harness.toolserver import client
from etude.pods.payload import Payload, pack, source_files
from etude.tasks.checks import PROGRAM as VERIFIER

PAYLOADS = {
    "tool server": client.program(),
    "verifier": pack(*VERIFIER),
    "leak scan": pack("etude.tasks.leak_scan:main"),
}


IMAGE = {"pytest", "_pytest", "coverage"}  # packages of the image, imported only where tests run


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_imports_only_the_standard_library_and_its_own_modules(name: str) -> None:
    archive = zipfile.ZipFile(io.BytesIO(PAYLOADS[name].data))
    own = {path[:-3].replace("/", ".").removesuffix(".__init__") for path in archive.namelist() if path.endswith(".py")}
    for path in archive.namelist():
        tree = ast.parse(archive.read(path) if path.endswith(".py") else b"", feature_version=(3, 8))
        for node in ast.walk(tree):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in found:
                top = module.split(".")[0]
                assert top in sys.stdlib_module_names or top in IMAGE or module in own, f"{path} imports {module}"


def test_the_bytes_are_the_same_from_the_same_sources() -> None:
    first = client.program()
    pack.cache_clear()
    assert client.program() == first
    assert len(first.data) < 500_000
    sources = source_files(*VERIFIER)
    assert [path for path in sources if not path.endswith(".py")] == []
    packed = zipfile.ZipFile(io.BytesIO(pack(*VERIFIER).data))
    assert {name: packed.read(name).decode() for name in packed.namelist() if name.endswith(".py")} == sources


PROGRAM = """import sys
from packed.part import NUMBER
def main():
    print(__name__, sys.argv[1])
    return NUMBER
"""


def run(payload: Payload, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.pyz").write_bytes(payload.data)
    command = [sys.executable, "-I", "-S", str(tmp_path / "program.pyz"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_it_runs_the_function_under_its_own_name_and_exits_with_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("NUMBER = 3\n")
    program = (
        "import sys\nfrom packed.part import NUMBER\ndef main():\n    print(__name__, sys.argv[1])\n    return NUMBER\n"
    )
    (package / "program.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    payload = pack("packed.program:main", "packed.part")
    done = run(payload, tmp_path, "x")
    assert (done.stdout, done.returncode) == ("packed.program x\n", 3), done.stderr


def test_a_module_without_source_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"etude\.missing"):
        pack("etude.missing:main")
