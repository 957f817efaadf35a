"""Packs modules of ours into one program that the `python3` of a pod reads from standard input: the only way our code
gets into a pod.

    await pod.exec(["python3", "-I", "-S", "-c", START, "scan"], stdin=pack("etude.tasks.leak_scan:main") + request)

Modules keep their names, so a pod runs the same import statements as the host. They may import only the standard
library and each other; the packages around them are empty. What follows the program on standard input is its own input,
which it reads from `sys.stdin`. `source_files` returns the same program as a directory of texts, which
`python3 DIRECTORY` runs on any machine.
"""

import importlib.util
import marshal
from collections.abc import Mapping
from functools import cache
from pathlib import Path

MAIN = """\
import sys
if sys.version_info < (3, 8):
    sys.exit("{module} needs Python 3.8 or newer; python3 in this image is %d.%d" % sys.version_info[:2])
from {module} import {function}
sys.exit({function}())
"""
# The value of `python3 -c`; its first argument becomes sys.argv[0]. Modules come from memory: with a zip file or a
# directory to run, Python first imports runpy and zipimport, which takes as long as its whole start.
START = "import sys,marshal;exec(marshal.load(sys.stdin.buffer))"
LOADER = """\
del sys.argv[0]
if sys.path[:1] == [""]:  # a module of the current directory must not be imported
    del sys.path[0]
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER
class PackedModules:
    def __init__(self, magic, modules):
        self.modules, self.same_python = modules, magic == MAGIC_NUMBER
    def find_spec(self, name, path=None, target=None):
        if name in self.modules:
            return ModuleSpec(name, self, origin=self.modules[name][0], is_package=self.modules[name][1])
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        path, _, source, code = self.modules[module.__name__]
        code = marshal.loads(code) if self.same_python else compile(source, path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    def get_source(self, name):
        return self.modules[name][2].decode()
sys.meta_path.insert(0, PackedModules(*marshal.load(sys.stdin.buffer)))
"""


@cache
def pack(entry: str, *modules: str) -> bytes:
    """Pack `entry` ("module:function"), which is called without arguments, and the modules that it needs.

    The name of a package stands for all its modules. Bytecode of the packing Python saves two thirds of the start time
    in a pod with the same version; other versions compile the sources.
    """
    texts = dict(source_files(entry, *modules))
    main = texts.pop("__main__.py")
    packed = {
        path[:-3].replace("/", ".").removesuffix(".__init__"): (
            path,
            path.endswith("__init__.py"),
            text.encode(),
            marshal.dumps(compile(text.encode(), path, "exec", dont_inherit=True)),
        )
        for path, text in texts.items()
    }
    # version 2 of the format is the same in every Python 3
    return marshal.dumps(LOADER + main, 2) + marshal.dumps((importlib.util.MAGIC_NUMBER, packed), 2)


@cache
def source_files(entry: str, *modules: str) -> Mapping[str, str]:
    """Return the sources of a program by path, in path order: the same on every host, as files of a task must be."""
    module, _, function = entry.partition(":")
    files = {"__main__.py": MAIN.format(module=module, function=function)}
    for name in (module, *modules):
        files |= _sources(name)
    for path in [path for path in files if "/" in path]:
        for end in (at for at, char in enumerate(path) if char == "/"):
            files.setdefault(f"{path[:end]}/__init__.py", "")
    return dict(sorted(files.items()))


def _sources(name: str) -> dict[str, str]:
    """Return the source files of a module, or of all modules directly in a package, by their paths."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name}: expected a module of which the source is installed")
    origin, path = Path(spec.origin), name.replace(".", "/")
    if spec.submodule_search_locations is None:
        return {f"{path}.py": origin.read_text(encoding="utf-8")}
    return {f"{path}/{file.name}": file.read_text(encoding="utf-8") for file in origin.parent.glob("*.py")}
