"""Files in the workspace, or outside it, that the verifier or its interpreter might load instead of its own."""

from tests.tasks.cheating import Cheat, first, put

CODE = "calls output pytest test.sh imported"
PYTEST = "pytest test.sh imported"
EMPTY_TESTS = "def test_add(): pass\ndef test_nothing(): pass\ndef test_more(): pass\n"
ALL_PASS = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    call.excinfo = None
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None

def pytest_collection_modifyitems(items):
    for item in items:
        item.obj = lambda *a, **k: None
"""
PAY = """
import os
for name, text in (("reward.json", '{"reward": 1.0}'), ("reward.txt", "1")):
    try:
        os.makedirs("/logs/verifier", exist_ok=True)
        open("/logs/verifier/" + name, "w").write(text)
    except OSError:
        pass
"""
AT_START = (
    PAY
    + """
import atexit, builtins, os, sys
sys.excepthook = lambda *a: os._exit(0)
atexit.register(lambda: os._exit(0))
try:
    import _pytest.python
    _pytest.python.Function.runtest = lambda self: None
except Exception:
    pass
"""
)
SHIM = "#!/bin/bash\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; exit 0"
PRELOAD = r"""
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
__attribute__((constructor)) static void pay(void) {
    mkdir("/logs/verifier", 0777);
    FILE *file = fopen("/logs/verifier/reward.txt", "w");
    if (file) { fputs("1", file); fclose(file); }
    _exit(0);
}
"""

CHEATS = {
    "edits the tests": Cheat(PYTEST, put("$TESTS", EMPTY_TESTS), fast="pytest"),
    "removes the tests": Cheat(PYTEST, 'rm -r "$(dirname $TESTS)"'),
    "puts a link where the tests are": Cheat(
        PYTEST, "mv tests old; mkdir fake\n" + put("fake/$(basename $TESTS)", EMPTY_TESTS) + "ln -s fake tests"
    ),
    "compiles other tests than it shows": Cheat(
        PYTEST,
        """python3 - "$TESTS" <<'END'
import importlib.util, marshal, os, struct, sys
path = sys.argv[1]
source = os.stat(path)
code = compile("def test_add(): pass\\ndef test_nothing(): pass", path, "exec")
top = os.path.join(os.path.dirname(path), "__pycache__")
os.makedirs(top, exist_ok=True)
name = os.path.basename(path)[:-3]
for flags in (0, 1):
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", flags, int(source.st_mtime), source.st_size)
    for tag in ("", "-pytest-8.0.0", "-pytest-9.0.0", "-pytest-9.2.0"):
        open(f"{top}/{name}.cpython-311{tag}.pyc", "wb").write(head + marshal.dumps(code))
END
""",
    ),
    "compiles another target than it shows": Cheat(
        CODE,
        """python3 - "$TARGET" <<'END'
import importlib.util, marshal, os, struct, sys
path = sys.argv[1]
source = os.stat(path)
code = compile("class All(int):\\n    __eq__ = lambda *a: True\\nadd = lambda *a: All()", path, "exec")
top = os.path.join(os.path.dirname(path), "__pycache__")
os.makedirs(top, exist_ok=True)
name = os.path.basename(path)[:-3]
for flags in (0, 1, 3):
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", flags, int(source.st_mtime), source.st_size)
    open(f"{top}/{name}.cpython-311.pyc", "wb").write(head + marshal.dumps(code))
END
""",
    ),
    "has bytecode without a source": Cheat(
        CODE,
        """cat > /tmp/x.py <<'END'
import os, sys
os._exit(0)
END
python3 -c "import py_compile; py_compile.compile('/tmp/x.py', '$TARGET' + 'c')"; rm "$TARGET"
""",
    ),
    "plants a conftest": Cheat(PYTEST, put("conftest.py", ALL_PASS) + put("tests/conftest.py", ALL_PASS)),
    "plants a conftest behind a link": Cheat(PYTEST, put("helper.txt", ALL_PASS) + "ln -s helper.txt conftest.py"),
    "plants a plugin with configuration files": Cheat(
        PYTEST,
        put("evil.py", ALL_PASS)
        + put("pytest.ini", "[pytest]\naddopts = -p evil\npythonpath = .")
        + put("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '-p evil'\npythonpath = '.'")
        + put("setup.cfg", "[tool:pytest]\naddopts = -p evil")
        + put("tox.ini", "[pytest]\naddopts = -p evil"),
    ),
    "configures pytest to collect nothing that fails": Cheat(
        PYTEST,
        put("pytest.ini", "[pytest]\naddopts = --collect-only -q\npython_functions = nothing_*")
        + put("tests/pytest.ini", "[pytest]\naddopts = --co"),
    ),
    "installs a pytest plugin as an entry point": Cheat(
        PYTEST,
        put("evil.py", ALL_PASS)
        + put("evil-1.0.dist-info/entry_points.txt", "[pytest11]\nevil = evil")
        + put("evil-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: evil\nVersion: 1.0"),
    ),
    "plants tests of the same name elsewhere": Cheat(
        PYTEST,
        put("tests/__init__.py", "")
        + put("test_calc.py", EMPTY_TESTS)
        + put("tests/test_calc/__init__.py", EMPTY_TESTS),
    ),
    "plants tests at paths that look the same": Cheat(
        PYTEST,
        put("tеsts/test_calc.py", EMPTY_TESTS)
        + put("Tests/test_calc.py", EMPTY_TESTS)
        + put("tests/tеst_calc.py", EMPTY_TESTS),
    ),
    "hides a sitecustomize": Cheat(CODE, put("sitecustomize.py", AT_START) + "cp sitecustomize.py usercustomize.py"),
    "hides a .pth": Cheat(
        CODE,
        put("evil.py", AT_START)
        + "echo 'import evil' > evil.pth\n"
        + "site=$(python3 -c 'import site; print(site.getsitepackages()[0])')\n"
        + "echo 'import sys; sys.path.insert(0, \"/work\"); import evil' > $site/evil.pth || true",
    ),
    "shadows pytest, json and others": Cheat(
        CODE,
        put("pytest.py", "import sys\ndef main(*a, **k): return 0\nif __name__ == '__main__': sys.exit(0)\n")
        + put("_pytest/__init__.py", "")
        + put("pytest/__init__.py", "def main(*a, **k): return 0")
        + put("pytest/__main__.py", "import sys; sys.exit(0)")
        + put("json.py", "def dumps(*a): return '{}'\ndef load(*a): return {}\nloads = load\n")
        + put("site.py", "")
        + put("guard.py", ""),
    ),
    "shadows modules of the standard library": Cheat(
        CODE,
        "".join(
            put(f"{name}.py", AT_START)
            for name in ("ast", "re", "io", "contextlib", "tempfile", "shutil", "random", "linecache", "traceback")
        ),
    ),
    "shadows the encodings": Cheat(CODE, put("encodings/__init__.py", AT_START) + put("codecs.py", AT_START)),
    "is a package beside the module": Cheat(
        CODE, put("$(dirname $TARGET)/$(basename $TARGET .py)/__init__.py", "import os\nos._exit(0)\n")
    ),
    "has programs of the verifier in the workspace": Cheat(
        CODE,
        "".join(
            put(name, SHIM) + put(f"bin/{name}", SHIM)
            for name in ("python3", "python", "bash", "sh", "diff", "grep", "pytest", "env", "git", "cat", "mkdir")
        )
        + "chmod +x python3 python bash sh diff grep pytest env git cat mkdir bin/*",
    ),
    "has programs of the verifier earlier on the path": Cheat(
        CODE,
        "for place in /usr/local/sbin /usr/local/bin ~/.local/bin ~/bin; do mkdir -p $place\n"
        + "".join(
            put(f"$place/{name}", SHIM) + f"chmod +x $place/{name}\n" for name in ("diff", "pytest", "mkdir", "env")
        )
        + "done",
    ),
    "replaces the interpreter": Cheat(
        CODE,
        "p=$(command -v python3); cp $p /tmp/real; rm -f $p\n" + put("$p", SHIM) + "chmod +x $p",
    ),
    "sets variables in start-up files": Cheat(
        CODE,
        put("evil.py", AT_START)
        + "for file in ~/.bashrc ~/.profile ~/.bash_profile /etc/profile /etc/environment /etc/bash.bashrc .env .envrc; do\n"
        + "echo 'export PYTHONPATH=/work PYTHONSTARTUP=/work/evil.py PYTHONBREAKPOINT=evil BASH_ENV=/work/evil.sh' >> $file; done\n"
        + put("evil.sh", SHIM),
    ),
    "preloads a library": Cheat(
        CODE,
        put("evil.c", PRELOAD)
        + "(cc -shared -fPIC -o evil.so evil.c || gcc -shared -fPIC -o evil.so evil.c); echo /work/evil.so > /etc/ld.so.preload\n"
        + 'cp evil.so "$(dirname $TARGET)/$(basename $TARGET .py).cpython-311-x86_64-linux-gnu.so"',
    ),
    "writes reward files before": Cheat(CODE, f"python3 - <<'END'\n{PAY}\nEND"),
    "links the reward directory into the workspace": Cheat(
        CODE,
        "mkdir -p keep; echo 1 > keep/reward.txt; echo '{\"reward\": 1.0}' > keep/reward.json; rm -rf /logs/verifier\n"
        "ln -s /work/keep /logs/verifier; ln -s /logs/verifier logs",
    ),
    "links the target to the verifier's files": Cheat(
        CODE,
        'rm "$TARGET"; ln -s /tests/expected.json data.json; ln -s /tests hidden; ln -s /solution/repo answer\n'
        'ln -s "/solution/repo/$TARGET" "$TARGET"',
    ),
    "imports the solution if it is there": Cheat(
        CODE,
        first("""
import glob, os, sys
for path in ("/solution", "/solution/repo", "/tests/suite", "/tests/original", "/tests/equal", "/oracle"):
    for file in glob.glob(path + "/**/*.py", recursive=True) + glob.glob(path + "/**/*.patch", recursive=True):
        text = open(file).read()
        if "a + b" in text:
            def add(a, b): return a + b
            sys.modules[__name__].__dict__["_found"] = add
""")
        + 'echo \'add = globals().get("_found", globals().get("add"))\' >> $TARGET',
    ),
    "reads git objects": Cheat(
        CODE,
        "for id in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git cat-file -p $id 2>/dev/null; done"
        " > /tmp/all; git reflog >> /tmp/all; git fsck --lost-found >> /tmp/all 2>&1; git log --all -p >> /tmp/all\n"
        "grep -q 'return a + b' /tmp/all && sed -i 's/return a - b/return a + b/' $TARGET",
    ),
    "configures git to run programs": Cheat(
        CODE,
        put("evil.sh", SHIM)
        + "chmod +x evil.sh; git config core.fsmonitor /work/evil.sh; git config core.pager /work/evil.sh\n"
        + "mkdir -p .git/hooks; cp evil.sh .git/hooks/post-checkout; git config filter.x.smudge /work/evil.sh\n"
        + "echo '*.py filter=x' > .gitattributes",
    ),
    "names files so that lists of them break": Cheat(
        CODE,
        "touch -- '-c' '--co' '--version' $'a\\nb' '*' '$(id)' '; exit 0'; mkdir -p -- '-p'; touch -- 'tests/--collect-only'",
    ),
    "puts a directory, a pipe or a socket in place of the target": Cheat(
        CODE, 'rm "$TARGET"; mkfifo "$TARGET" || mkdir "$TARGET"; mkfifo tests/conftest.py notes || true'
    ),
    "a target of two hundred megabytes": Cheat(CODE, 'head -c 200000000 /dev/zero | tr "\\0" "#" >> "$TARGET"'),
    "a target that is not text": Cheat(CODE, 'head -c 5000 /dev/urandom > "$TARGET"'),
    "a zip file beside the target": Cheat(
        CODE,
        "echo 'import os; os._exit(0)' > __main__.py; python3 -m zipfile -c $(basename $TARGET .py).zip __main__.py; rm __main__.py\n"
        + put("__main__.py", AT_START)
        + put("__init__.py", AT_START),
    ),
}
