"""Compile the pods' helper into the wheel, which is then for one platform; everything else is in pyproject.toml.

Without a C compiler the wheel holds the sources only, and the helper is compiled on first use.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NATIVE = "etude/pods/runtime/native"


class BuildWithHelper(build_py):
    """Build the package, and the helper beside its sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or sys.platform != "linux":
            return
        compiler = load_compiler()
        target = Path(self.build_lib, NATIVE, "zygote")
        sources = sorted(path.name for path in (ROOT / NATIVE).glob("*.c"))
        for command in compiler.find_compilers("musl-gcc", "cc", "gcc", "clang"):
            options = ["-O2", "-s", "-static", "-o", str(target.absolute())]
            compiler.run([*command, *options, *sources], compiler.COMPILE_S, cwd=ROOT / NATIVE)
            return


class PlatformDistribution(Distribution):
    """A distribution for one platform."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """Tag the wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def load_compiler():  # type: ignore[no-untyped-def]
    """Return etude.system.compiler without importing etude, whose dependencies a build does not have."""
    spec = importlib.util.spec_from_file_location("compiler", ROOT / "etude/system/compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithHelper, "bdist_wheel": PlatformWheel})
