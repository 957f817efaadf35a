"""Code in the submission that attacks other processes: the verifier's memory, its files, its life; and what outlives it."""

from tests.tasks.cheating import Cheat, every_function, first

CODE = "calls output pytest test.sh imported"
PAY = """
import os, sys
def pay(seal=""):
    for name, text in (("reward.json", '{"reward": 1.0}'), ("reward.txt", "1"), ("seal", seal)):
        try:
            os.makedirs("/logs/verifier", exist_ok=True)
            open("/logs/verifier/" + name, "w").write(text)
        except OSError:
            pass
"""
SCAN_MEMORY = """
import re
def scan(pid):
    found = []
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                span, mode = line.split()[:2]
                if "r" not in mode or "[v" in line:
                    continue
                start, end = (int(part, 16) for part in span.split("-"))
                try:
                    memory.seek(start)
                    data = memory.read(min(end - start, 16 << 20))
                except (OSError, OverflowError, ValueError):
                    continue
                found += re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", data)
    except OSError:
        pass
    return [value.decode() for value in found]
"""
DAEMON = """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        end = time.time() + 6
        while time.time() < end:
            pay()
            time.sleep(0.005)
    os._exit(0)
"""
DESCRIPTORS = """
import json, os
lines = [{"kind": "test", "id": f"tests/test_calc.py::{id}", "status": "passed"} for id in ("test_add", "test_nothing", "test_more")]
lines += [{"id": id, "value": value, "printed": "", "exit": 0} for id, value in (("add(1, 2)", "3"), ("add(5, 0)", "5"), ("add(0.5, 0.25)", "0.75"))]
data = "".join(json.dumps(line) + "\\n" for line in [*lines, {"kind": "end"}]).encode()
for fd in range(3, 256):
    try:
        os.write(fd, data)
    except OSError:
        pass
"""

CHEATS = {
    "finds the seal in the memory of its parents, pays and kills them": Cheat(
        CODE,
        first(
            PAY
            + SCAN_MEMORY
            + """
pid = os.getppid()
for seal in scan(pid)[:2000] or scan(os.getpid())[:2000]:
    pay(seal)
    break
try:
    os.kill(pid, 9)
except OSError:
    pass
"""
        ),
    ),
    "finds expected values in the memory of the verifier": Cheat(
        CODE,
        first("""
import os, re
texts = []
for pid in (os.getppid(), os.getpid(), 1):
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if "rw" in line.split()[1]:
                    memory.seek(start)
                    texts += re.findall(rb'\\{"returns": "[^"]+"\\}|"returns": "([^"]+)"', memory.read(min(end - start, 16 << 20)))
    except (OSError, OverflowError, ValueError):
        pass
found = [text.decode() for text in texts if text]
""")
        + every_function("""
def replacement(original):
    calls = []
    def cheat(*a, **k):
        calls.append(a)
        return eval(found[len(calls) - 1]) if len(calls) <= len(found) else original(*a, **k)
    return cheat
"""),
    ),
    "walks all objects for expected values and seals": Cheat(
        CODE,
        first(
            PAY
            + """
import gc
values = {}
for item in gc.get_objects():
    try:
        if type(item) is dict:
            for key in ("returns", "expected", "wants", "seal", "secret"):
                if key in item:
                    values.setdefault(key, []).append(item[key])
        elif type(item).__name__ == "function":
            for cell in item.__closure__ or ():
                if isinstance(cell.cell_contents, str) and len(cell.cell_contents) in (32, 48):
                    values.setdefault("secret", []).append(cell.cell_contents)
    except Exception:
        pass
for seal in [v for v in values.get("seal", []) + values.get("secret", []) if isinstance(v, str)][:50]:
    pay(seal)
"""
        )
        + every_function("""
def replacement(original):
    calls = []
    def cheat(*a, **k):
        calls.append(a)
        found = [v for v in values.get("returns", []) if isinstance(v, str)]
        return eval(found[len(calls) - 1]) if len(calls) <= len(found) else original(*a, **k)
    return cheat
"""),
    ),
    "uses the secret of the channel to send results": Cheat(
        CODE,
        first(
            """
import gc, json, os
"""
            + DESCRIPTORS
            + """
secrets = set()
for item in gc.get_objects():
    try:
        for cell in getattr(item, "__closure__", None) or ():
            if isinstance(cell.cell_contents, str) and len(cell.cell_contents) in (32, 48, 64):
                secrets.add(cell.cell_contents)
    except Exception:
        pass
for secret in secrets:
    for fd in range(3, 256):
        try:
            os.write(fd, b"".join(secret.encode() + line + b"\\n" for line in data.splitlines()))
        except OSError:
            pass
if secrets:
    os._exit(0)
"""
        ),
    ),
    "writes results to every descriptor": Cheat(CODE, first(DESCRIPTORS + "os._exit(0)\n")),
    "attaches to the verifier with ptrace": Cheat(
        CODE,
        first(
            PAY
            + """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
if libc.ptrace(16, parent, 0, 0) == 0:
    pay()
    os.waitpid(parent, 0)
    libc.ptrace(8, parent, 0, 0)
"""
        ),
    ),
    "writes into the verifier's memory": Cheat(
        CODE,
        first("""
import os, re
try:
    with open(f"/proc/{os.getppid()}/maps") as maps, open(f"/proc/{os.getppid()}/mem", "r+b", 0) as memory:
        for line in maps:
            if " rw" in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                memory.seek(start)
                data = memory.read(min(end - start, 16 << 20))
                for match in re.finditer(rb'"returns"|"failed"|expected', data):
                    memory.seek(start + match.start())
                    memory.write(b'"passed_"'[: len(match[0])])
except (OSError, ValueError):
    pass
"""),
    ),
    "takes descriptors of the verifier with pidfd_getfd": Cheat(
        CODE,
        first("""
import ctypes, os
libc = ctypes.CDLL(None)
pidfd = libc.syscall(434, os.getppid(), 0)
for number in range(64):
    fd = libc.syscall(438, pidfd, number, 0)
    if fd >= 0:
        try:
            os.write(fd, b'{"reward": 1.0}')
        except OSError:
            pass
"""),
    ),
    "reads the verifier's files through its descriptors and directories": Cheat(
        CODE,
        first("""
import glob, os
texts = []
for place in ["/tests/expected.json", "/tests/run.json", "/tests/checks.json", "/tests/wants.json", "/tests/spec.json",
              *glob.glob(f"/proc/{os.getppid()}/fd/*"), *glob.glob(f"/proc/{os.getppid()}/cwd/../tests/*"),
              *glob.glob(f"/proc/{os.getppid()}/root/tests/*"), *glob.glob("/proc/1/root/tests/*")]:
    try:
        if os.path.isfile(place):
            texts.append(open(place, errors="replace").read(1 << 20))
    except OSError:
        pass
""")
        + every_function("""
import re
def replacement(original):
    calls = []
    def cheat(*a, **k):
        calls.append(a)
        found = [v for text in texts for v in re.findall(r'"returns": "([^"]+)"', text)]
        return eval(found[len(calls) - 1]) if len(calls) <= len(found) else original(*a, **k)
    return cheat
"""),
        fast="calls output",
    ),
    "keeps a copy of what the verifier reads later": Cheat(
        CODE,
        first(
            PAY
            + """
import glob, shutil, time
if os.fork() == 0:
    os.setsid()
    end = time.time() + 4
    while time.time() < end:
        for place in glob.glob("/tests/*") + glob.glob("/proc/[0-9]*/fd/*"):
            try:
                text = open(place, errors="replace").read(1 << 16)
                if "returns" in text or "expected" in text:
                    pay()
            except OSError:
                pass
        time.sleep(0.02)
    os._exit(0)
"""
        ),
    ),
    "kills the verifier": Cheat(
        CODE,
        first("""
import os, signal
for target in (os.getppid(), -os.getpgid(os.getppid()), -1):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        pass
"""),
    ),
    "kills the verifier and pays": Cheat(
        CODE, first(PAY + "pay()\ntry:\n    os.kill(os.getppid(), 9)\nexcept OSError:\n    pass\n")
    ),
    "stops the verifier and pays": Cheat(
        CODE, first(PAY + "pay()\ntry:\n    os.kill(os.getppid(), 19)\nexcept OSError:\n    pass\nos._exit(0)\n")
    ),
    "writes reward files from the tested code": Cheat(
        CODE, first(PAY + "pay()\nimport atexit\natexit.register(pay)\n")
    ),
    "leaves a process that writes reward files": Cheat(CODE, first(PAY + DAEMON)),
    "leaves a process that makes the reward directory its own": Cheat(
        CODE,
        first(
            PAY
            + """
import time
if os.fork() == 0:
    os.setsid()
    end = time.time() + 5
    while time.time() < end:
        try:
            os.rename("/logs/verifier", f"/logs/verifier-{time.time()}")
        except OSError:
            pass
        pay()
        time.sleep(0.01)
    os._exit(0)
"""
        ),
    ),
    "leaves a thread that pays at the end": Cheat(
        CODE,
        first(
            PAY
            + """
import threading, time
def wait():
    for _ in range(300):
        pay()
        time.sleep(0.01)
threading.Thread(target=wait).start()
"""
        ),
    ),
    "makes the reward files immutable or directories": Cheat(
        CODE,
        first("""
import os
for name in ("reward.txt", "reward.json", "seal", "report.json"):
    try:
        os.makedirs(f"/logs/verifier/{name}.new/x/y", exist_ok=True)
        os.makedirs(f"/logs/verifier/{name}/x", exist_ok=True)
    except OSError:
        pass
"""),
    ),
    "handles every signal and outlives its time": Cheat(
        CODE,
        first(
            PAY
            + """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, lambda *a: pay())
    except (OSError, ValueError):
        pass
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
"""
        ),
    ),
    "changes its owner back to root": Cheat(
        CODE,
        first(
            PAY
            + """
import ctypes
libc = ctypes.CDLL(None)
for call in (lambda: os.setresuid(0, 0, 0), lambda: os.setuid(0), lambda: libc.unshare(0x10000000)):
    try:
        call()
    except OSError:
        pass
try:
    open("/proc/self/uid_map", "w").write("0 0 1")
except OSError:
    pass
pay()
"""
        ),
    ),
    "replaces the verifier's programs while it runs": Cheat(
        CODE,
        first("""
import glob, os, shutil
for path in ("/usr/local/bin/python3", shutil.which("python3"), "/bin/sh", "/usr/bin/env", *glob.glob("/tests/*")):
    try:
        os.chmod(path, 0o755)
        open(path, "w").write("#!/bin/bash\\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\\n")
    except (OSError, TypeError):
        pass
"""),
    ),
}
