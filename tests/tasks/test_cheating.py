"""An agent that attacks the verifier instead of solving the task gets no reward."""

import asyncio
import io
import subprocess
import textwrap
import zipfile
from pathlib import Path

import pytest

from etude.pods import open_fleet
from etude.tasks.harbor import write_task
from etude.tasks.runner import cases_files, pytest_files
from etude.tasks.task import Task
from etude.tasks.trial import TrialAgent, commands_agent, nop_agent, oracle_agent, run_trial
from etude.tasks.verifier_result import VerifierResult

WRONG = '"""Sums."""\n\n\ndef add(a, b):\n    """Sum of a and b."""\n    return a - b\n'
RIGHT = WRONG.replace("a - b\n", "a + b\n")
TESTS = """import calc


def test_add():
    value = calc.add(1, 2)
    assert value == 3


def test_nothing():
    assert calc.add(5, 0) == 5
"""
CONFIG = """schema_version = "1.4"

[metadata]
category = "debugging"
protected = ["tests/**"]

[environment]
network_mode = "no-network"
"""
ARGUMENTS = ["(1, 2)", "(5, 0)", "(0.5, 0.25)"]


def repository(directory: Path) -> dict[str, bytes]:
    """Return the workspace with a git history of a single commit."""
    (directory / "tests").mkdir(parents=True)
    (directory / "calc.py").write_text(WRONG)
    (directory / "tests/test_calc.py").write_text(TESTS)
    for command in ("init -q -b main", "add -A", "-c user.name=a -c user.email=a@b commit -q -m start"):
        subprocess.run(["git", *command.split()], cwd=directory, check=True)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {f"environment/repo/{path.relative_to(directory)}": path.read_bytes() for path in files}


def without_tester(program: bytes) -> bytes:
    """Return the verifier with a tester whose user id no pod has."""
    source, out = zipfile.ZipFile(io.BytesIO(program)), io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(b"TESTER = 54321", b"TESTER = 4294967000"))
    return out.getvalue()


def make_task(directory: Path, kind: str) -> Task:
    image = "python:3" if kind == "pytest" else "host"
    files: dict[str, str | bytes] = {
        "task.toml": CONFIG,
        "instruction.md": "add(1, 2) should be 3.\n",
        "environment/Dockerfile": f"FROM {image}\nWORKDIR /work\nCOPY repo/ /work/\n",
        "solution/solve.sh": "#!/bin/sh\nsed -i 's/return a - b/return a + b/' calc.py\n",
        **repository(directory / f"{kind}-repository"),
    }
    if kind == "pytest":
        ids = ["tests/test_calc.py::test_add", "tests/test_calc.py::test_nothing"]
        files |= pytest_files(["tests/test_calc.py"], dict.fromkeys(ids, "passed"), {"tests/test_calc.py": TESTS})
    else:
        ends = ["3", "5", "0.75"]
        cases = [
            {"id": f"add{arguments}", "call": "calc:add", "args": arguments, "returns": end}
            for arguments, end in zip(ARGUMENTS, ends, strict=True)
        ]
        files |= cases_files(cases)
    if kind == "alone":
        files["tests/runner.pyz"] = without_tester(bytes(files["tests/runner.pyz"]))
    return write_task(directory / kind, files)


def product(code: str) -> str:
    """Return a command that writes a wrong calc.py with extra code at its start."""
    return f"cat > calc.py <<'END'\n{textwrap.dedent(code)}\n{WRONG}END\n"


def put(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{textwrap.dedent(text)}\nEND\n"


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
def pay(*_):
    for name, text in (("reward.json", '{"reward": 1.0}'), ("reward.txt", "1")):
        try:
            os.makedirs("/logs/verifier", exist_ok=True)
            open("/logs/verifier/" + name, "w").write(text)
        except OSError:
            pass
"""
DAEMON = (
    PAY
    + """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        end = time.time() + 5
        while time.time() < end:
            pay()
            time.sleep(0.005)
    os._exit(0)
"""
)
CHEATS = {
    "edits the tests": "echo 'def test_add(): pass\ndef test_nothing(): pass' > tests/test_calc.py",
    "removes the tests": "rm -r tests",
    "puts a link where the tests are": "mv tests old; mkdir fake; "
    "echo 'def test_add(): pass\ndef test_nothing(): pass' > fake/test_calc.py; ln -s fake tests",
    "compiles other tests than it shows": "python3 - <<'END'\n"
    + textwrap.dedent("""
        import importlib.util, marshal, os, struct
        source = os.stat("tests/test_calc.py")
        code = compile("def test_add(): pass\\ndef test_nothing(): pass", "tests/test_calc.py", "exec")
        os.makedirs("tests/__pycache__", exist_ok=True)
        for flags in (0, 1):
            head = importlib.util.MAGIC_NUMBER + struct.pack("<III", flags, int(source.st_mtime), source.st_size)
            for tag in ("", "-pytest-8.0.0", "-pytest-9.0.0", "-pytest-9.2.0"):
                open(f"tests/__pycache__/test_calc.cpython-311{tag}.pyc", "wb").write(head + marshal.dumps(code))
        END
        """).replace("\n        ", "\n"),
    "prints PASSED": product("""
        print("tests/test_calc.py::test_add PASSED\\ntests/test_calc.py::test_nothing PASSED\\n2 passed in 0.01s")
    """),
    "prints PASSED and ends": product("""
        import os, sys
        print("2 passed in 0.01s"); sys.stdout.flush(); os._exit(0)
    """),
    "says that all went well": product("import sys; sys.exit(0)"),
    "writes reward files before": f"python3 - <<'END'\n{PAY}\npay()\nEND",
    "writes reward files from the tested code": product(PAY + "pay()\nimport atexit\natexit.register(pay)\n"),
    "leaves a process that writes reward files": product(DAEMON),
    "kills the verifier": product("""
        import os, signal
        for target in (os.getppid(), -os.getpgid(os.getppid()), -1):
            try:
                os.kill(target, signal.SIGKILL)
            except OSError:
                pass
    """),
    "kills the verifier and pays": product(
        PAY + "pay()\nimport signal\ntry:\n    os.kill(os.getppid(), 9)\nexcept OSError:\n    pass\n"
    ),
    "plants a conftest": put("conftest.py", ALL_PASS) + put("tests/conftest.py", ALL_PASS),
    "plants a conftest behind a link": put("helper.txt", ALL_PASS) + "ln -s helper.txt conftest.py",
    "plants a plugin": put("evil.py", ALL_PASS)
    + put("pytest.ini", "[pytest]\naddopts = -p evil")
    + put("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '-p evil'")
    + put("setup.cfg", "[tool:pytest]\naddopts = -p evil"),
    "patches pytest's reports": product("""
        from _pytest import reports
        old = reports.TestReport.from_item_and_call
        def new(item, call):
            call.excinfo = None
            return old(item, call)
        reports.TestReport.from_item_and_call = new
        reports.TestReport.outcome = property(lambda self: "passed", lambda self, value: None)
    """),
    "patches how pytest calls tests": product("""
        import _pytest.python, _pytest.runner, pytest
        _pytest.python.Function.runtest = lambda self: None
        _pytest.runner.check_interactive_exception = lambda *a: False
        old = _pytest.runner.CallInfo.from_call.__func__
        def new(cls, func, when, reraise=None):
            return old(cls, lambda: None, when, reraise)
        _pytest.runner.CallInfo.from_call = classmethod(new)
    """),
    "jumps over asserts": product("""
        import sys
        def tracer(frame, event, argument):
            if event == "line" and frame.f_code.co_name.startswith("test_"):
                try:
                    frame.f_lineno = max(line for _, _, line in frame.f_code.co_lines() if line) + 0
                except ValueError:
                    pass
            return tracer
        sys.settrace(tracer)
        sys._getframe().f_trace = tracer
    """),
    "skips": product("""
        import sys
        if "pytest" in sys.modules:
            import pytest
            pytest.skip("not today", allow_module_level=True)
    """),
    "hides a sitecustomize": put("sitecustomize.py", "import builtins, sys\n" + PAY + "pay()\n" + ALL_PASS)
    + "cp sitecustomize.py usercustomize.py",
    "hides a .pth": f"site=$(python3 -c 'import site; print(site.getsitepackages()[0])'); "
    f"{put('/work/evil.py', ALL_PASS)}"
    "echo 'import sys; sys.path.insert(0, \"/work\"); import evil' > $site/evil.pth || true",
    "shadows pytest": put("pytest.py", "def main(*a, **k): return 0\n")
    + put("_pytest/__init__.py", "")
    + put("json.py", "def dumps(*a): return '{}'\ndef load(*a): return {}\nloads = load\n")
    + put("site.py", "")
    + put("guard.py", ""),
    "replaces the interpreter": "p=$(command -v python3); cp $p /tmp/real; rm -f $p; "
    "printf '#!/bin/sh\\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\\n' > $p; chmod +x $p",
    "returns something that equals everything": "cat > calc.py <<'END'\n"
    "class All(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    "    def __repr__(self): return '3'\n\ndef add(a, b): return All()\nEND",
    "reads what is expected": product("""
        import os
        for place in ("/tests", "/solution", f"/proc/{os.getppid()}/cwd", f"/proc/{os.getppid()}/fd"):
            try:
                print("FOUND", place, os.listdir(place))
                print(open("/tests/expected.json").read(), open("/tests/run.json").read())
            except OSError:
                pass
    """),
    "reads git objects": "for id in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do "
    "git cat-file -p $id 2>/dev/null; done > /tmp/all; git reflog >> /tmp/all; git fsck --lost-found >> /tmp/all 2>&1; "
    "git log --all -p >> /tmp/all; grep -q 'return a + b' /tmp/all && sed -i 's/return a - b/return a + b/' calc.py",
}
PYTEST_ONLY = {name for name in CHEATS if "conftest" in name or "pytest" in name or "plugin" in name or "tests" in name}
AGENTS: dict[str, TrialAgent] = {
    "does nothing": nop_agent,
    "solves it": oracle_agent,
    **{name: commands_agent(command) for name, command in CHEATS.items()},
}
# Run with "alone" tasks, whose verifier cannot switch users, as in pods made without root: only the seal protects it.
ALONE = {
    *("solves it", "does nothing", "kills the verifier and pays", "writes reward files from the tested code"),
    "leaves a process that writes reward files",
}
TRIALS = [
    *(("pytest", name) for name in AGENTS),
    *(("cases", name) for name in AGENTS if name not in PYTEST_ONLY),
    *(("alone", name) for name in AGENTS if name in ALONE),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], VerifierResult]:
    """The result of each agent for each kind of task, in real pods."""
    directory = tmp_path_factory.mktemp("cheating")
    found: dict[tuple[str, str], VerifierResult] = {}

    async def go() -> None:
        async with open_fleet() as fleet:
            tasks = {kind: make_task(directory, kind) for kind in ("pytest", "cases", "alone")}
            semaphore = asyncio.Semaphore(4)

            async def one(kind: str, name: str, agent: TrialAgent) -> None:
                async with semaphore:
                    found[kind, name] = (await run_trial(fleet, tasks[kind], agent)).result

            await asyncio.gather(*(one(kind, name, AGENTS[name]) for kind, name in TRIALS))

    asyncio.run(go())
    return found


@pytest.mark.parametrize("kind", ["pytest", "cases", "alone"])
def test_a_solution_is_rewarded_and_doing_nothing_is_not(
    kind: str, results: dict[tuple[str, str], VerifierResult]
) -> None:
    assert results[kind, "solves it"].score == 1.0, results[kind, "solves it"].log
    assert results[kind, "does nothing"].score == 0.0


@pytest.mark.parametrize(("kind", "cheat"), [(kind, name) for kind, name in TRIALS if name in CHEATS])
def test_a_cheat_is_not_rewarded(kind: str, cheat: str, results: dict[tuple[str, str], VerifierResult]) -> None:
    result = results[kind, cheat]
    assert result.score == 0.0, result.log
    assert "FOUND" not in result.log, "the tested code could list the verifier's files"


def test_changed_protected_files_are_named(results: dict[tuple[str, str], VerifierResult]) -> None:
    assert results["pytest", "edits the tests"].facts["protected"] == ["tests/test_calc.py"]
    assert "tests" in results["pytest", "puts a link where the tests are"].facts["protected"]
