"""Attacks on the separation of a verifier's halves; `test_separation.py` runs them as root and as an ordinary user.

python tests/tasks/separation_trials.py DIRECTORY prints one JSON object: agent -> [score or cause of failure, forged].
"""

import asyncio
import json
import sys
import textwrap
from pathlib import Path

from etude.pods import open_fleet
from etude.tasks.checks import VerifierCheck, cases_check, check_files
from etude.tasks.harbor import write_task
from etude.tasks.task import Task
from etude.tasks.trial import TrialAgent, commands_agent, nop_agent, oracle_agent, run_trial
from etude.tasks.verifier_result import VerifierFailed

SECRET = "quartz-8841-heron"  # an expected result that submitted code cannot compute, only find
CONFIG = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\nmemory_mb = 512\n'
# Every place of the pod where an expected result, a reward channel or the verifier's memory could be.
SEARCH = r"""
import gc, os, re, sys
KEY = re.compile(rb"quartz-[0-9]{4}-[a-z]+")
def search():
    frame, found = sys._getframe(), []
    while frame:
        found.append(repr(frame.f_locals).encode("utf-8", "replace"))
        frame = frame.f_back
    found += [repr(each).encode("utf-8", "replace") for each in gc.get_objects() if type(each) in (dict, list, str)]
    for top in ("/tests", "/logs", "/solution", "/tmp", "/var/tmp", "/run"):
        for directory, _, files in os.walk(top):
            for name in files:
                try:
                    found.append(open(os.path.join(directory, name), "rb").read(1 << 22))
                except OSError:
                    pass
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            for line in open(f"/proc/{pid}/maps"):
                start, _, end = line.split()[0].partition("-")
                if "rw" in line.split()[1]:
                    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
                        memory.seek(int(start, 16))
                        found.append(memory.read(min(int(end, 16) - int(start, 16), 1 << 25)))
        except (OSError, ValueError, OverflowError):
            pass
    for data in found:
        for match in KEY.findall(data):
            return match.decode()
    return ""
"""
PAY = r"""
import os
def pay():
    for name, text in (("reward.json", '{"reward": 1.0}'), ("reward.txt", "1")):
        try:
            os.makedirs("/logs/verifier", exist_ok=True)
            open("/logs/verifier/" + name, "w").write(text)
        except OSError:
            pass
"""
KILL = r"""
pay()
for pid in (os.getppid(), 1):
    try:
        os.kill(pid, 9)
    except OSError:
        pass
"""
FORGE = r"""
import json, os, signal
results = {"secret": {"value": "1", "printed": ""}, "add": {"value": "3", "printed": ""}}
answer = json.dumps([{"results": results, "tests": ["x"], "runs": [{"raised": ""}]}])
for pid in (os.getppid(), 1):
    for number in range(64):
        try:
            with open(f"/proc/{pid}/fd/{number}", "w") as file:
                file.write(answer + "\n")
        except OSError:
            pass
for pid in (os.getppid(),):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""
# passes on the first run that it sees and on every other one, however often it is run
COUNT = r"""
import glob
runs = sum(len(glob.glob(f"{place}/count-*")) for place in ("/tmp", "/var/tmp", "/dev/shm", "."))
for place in ("/tmp", "/var/tmp", "/dev/shm", "."):
    try:
        open(f"{place}/count-{runs}", "w").close()
        break
    except OSError:
        pass
assert runs != %d
"""
FOUND = "def secret():\n    return search()\n\n\ndef add(a, b):\n    return a + b\n"
WRONG = "def secret():\n    return ''\n\n\ndef add(a, b):\n    return a - b\n"
CHEATS = {
    "searches frames, files and memory": ("cases", SEARCH + FOUND),
    "writes reward files and kills the verifier": ("cases", PAY + KILL + WRONG),
    "forges observations and kills the observer": ("cases", FORGE + WRONG),
    "forges the results of its tests": ("mutants", FORGE),
    **{f"counts its runs to {number}": ("mutants", COUNT % number) for number in range(3)},
}


def make_task(directory: Path, kind: str) -> Task:
    """Write a task whose solution needs to be told SECRET, or one that asks for a check of `add`."""
    right = f"def secret():\n    return {SECRET!r}\n\n\ndef add(a, b):\n    return a + b\n"
    files: dict[str, str | bytes] = {
        "task.toml": CONFIG,
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM host\nWORKDIR /work\nCOPY repo/ /work/\n",
    }
    if kind == "cases":
        cases = [
            {"id": "secret", "call": "calc:secret", "returns": repr(SECRET)},
            {"id": "add", "call": "calc:add", "args": "(1, 2)", "returns": "3"},
        ]
        files |= {"environment/repo/calc.py": WRONG, "solution/calc.py": right, **check_files([cases_check(cases)])}
        files["solution/solve.sh"] = "#!/bin/sh\ncp /solution/calc.py calc.py\n"
    else:
        code = "def add(a, b):\n    return a + b\n"
        versions = [{}, {"calc.py": code.replace("+", "-")}, {"calc.py": code + "# the same\n"}]
        run = {"script": "check.py", "versions": versions, "timeout": 10.0}
        check = VerifierCheck("mutants", run, {"versions": 3, "correct": [0, 2], "least": 1})
        files |= {
            "environment/repo/calc.py": code,
            "environment/repo/check.py": "import calc\n",
            **check_files([check]),
        }
        files["solution/solve.sh"] = "#!/bin/sh\necho 'assert calc.add(1, 2) == 3' >> check.py\n"
    return write_task(directory / kind, files)


def plant(kind: str, code: str) -> TrialAgent:
    path = "calc.py" if kind == "cases" else "check.py"
    return commands_agent(f"cat > {path} <<'END'\n{textwrap.dedent(code)}\nEND\n")


async def run(directory: Path) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    async with open_fleet(state=directory / "state") as fleet:
        tasks = {kind: make_task(directory, kind) for kind in ("cases", "mutants")}
        agents = {name: (kind, plant(kind, code)) for name, (kind, code) in CHEATS.items()}
        for kind in tasks:
            agents |= {f"{kind}: solves it": (kind, oracle_agent), f"{kind}: does nothing": (kind, nop_agent)}
        for name, (kind, agent) in agents.items():
            try:
                result = (await run_trial(fleet, tasks[kind], agent)).result
                found[name] = [result.score, bool(result.facts.get("forged"))]
            except VerifierFailed as error:
                found[name] = [error.cause, str(error)]
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1])))))
