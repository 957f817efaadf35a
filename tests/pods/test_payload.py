"""Our code as one program for a pod: complete, standard library only, and out of the reach of its directory."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import interpreters

from etude.harness.toolserver import client
from etude.pods.payload import START, pack, source_files
from etude.tasks.checks import PROGRAM as VERIFIER

PAYLOADS = {
    "tool server": client.PROGRAM,
    "verifier": VERIFIER,
    "leak scan": ("etude.tasks.leak_scan:main",),
}


IMAGE = {"pytest", "_pytest", "coverage"}  # packages of the image, imported only where tests run


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_imports_only_the_standard_library_and_its_own_modules(name: str) -> None:
    sources = source_files(*PAYLOADS[name])
    own = {path[:-3].replace("/", ".").removesuffix(".__init__") for path in sources}
    for path, source in sources.items():
        tree = ast.parse(source, feature_version=(3, 8))
        for node in ast.walk(tree):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in found:
                top = module.split(".")[0]
                assert top in sys.stdlib_module_names or top in IMAGE or module in own, f"{path} imports {module}"


PROGRAM = """import json, os, sys
from packed.part import NUMBER
def main():
    print(__name__, sys.argv, sys.stdin.read())
    return NUMBER
"""


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    package = tmp_path / "packed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("NUMBER = 3\n")
    (package / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return pack("packed.program:main", "packed.part")


@pytest.mark.parametrize("python", interpreters())
def test_it_runs_under_its_own_name_and_reads_what_follows(python: str, packed: bytes, tmp_path: Path) -> None:
    for name in ("os", "packed", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    for flags in (["-I", "-S"], ["-s", "-S", "-B"]):
        command = [python, *flags, "-c", START, "/here/it", "x"]
        done = subprocess.run(command, input=packed + b"rest", capture_output=True, cwd=tmp_path)
        printed = b"packed.program ['/here/it', 'x'] rest\n"
        assert (done.stdout, done.returncode) == (printed, 3), done.stderr.decode()


def test_a_module_without_source_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"etude\.missing"):
        pack("etude.missing:main")
