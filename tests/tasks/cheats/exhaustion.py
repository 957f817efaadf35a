"""Submissions that make the verifier hang or fail, for another try. Each is bounded, so that a host without limits lives."""

from tests.tasks.cheating import Cheat, first

HANG = "hang"  # one target of each kind of verifier

CHEATS = {
    "loops for ever": Cheat(HANG, first("while True: pass")),
    "sleeps for ever and ignores signals": Cheat(
        HANG,
        first("""
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)
"""),
    ),
    "many processes": Cheat(
        HANG,
        first("""
import os, time
for _ in range(300):
    try:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
    except OSError:
        pass
"""),
    ),
    "many processes in their own sessions": Cheat(
        HANG,
        first("""
import os, signal, time
for _ in range(200):
    try:
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork():
                os._exit(0)
            time.sleep(30)
            os._exit(0)
    except OSError:
        pass
"""),
    ),
    "fills the disk": Cheat(
        HANG,
        first("""
import os
for place in (".", "/tmp", "/logs/verifier", "/dev/shm", os.environ.get("HOME", "/")):
    try:
        with open(place + "/fill", "wb") as file:
            for _ in range(600):
                file.write(bytes(1 << 20))
    except OSError:
        pass
"""),
    ),
    "uses up the inodes": Cheat(
        HANG,
        first("""
import os
for place in (".", "/tmp", "/logs/verifier"):
    try:
        os.mkdir(place + "/many")
        for number in range(30000):
            os.close(os.open(f"{place}/many/{number}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass
"""),
    ),
    "prints without end": Cheat(
        HANG,
        first("""
import os
for fd in (1, 2):
    try:
        for _ in range(300):
            os.write(fd, b"PASSED " * (1 << 17))
    except OSError:
        pass
"""),
    ),
    "uses up the memory": Cheat(HANG, first("kept = [bytearray(1 << 20) for _ in range(1500)]\n")),
    "uses up the descriptors": Cheat(
        HANG,
        first("""
import os
try:
    while True:
        os.dup(1)
except OSError:
    pass
"""),
    ),
    "crashes the interpreter": Cheat(HANG, first("import ctypes\nctypes.string_at(0)\n")),
    "stops itself": Cheat(HANG, first("import os\nos.kill(os.getpid(), 19)\n")),
    "returns a value without end": Cheat(
        HANG,
        first("")
        + """cat >> "$TARGET" <<'END'
for _name, _value in list(globals().items()):
    if type(_value).__name__ == "function":
        def _endless(*a, **k):
            top = []
            for _ in range(3000):
                top = [top, top]
            return top
        globals()[_name] = _endless
END
""",
    ),
    "returns after the time of the verifier": Cheat(
        HANG,
        """cat >> "$TARGET" <<'END'
for _name, _value in list(globals().items()):
    if type(_value).__name__ == "function":
        def _late(*a, **k):
            import time
            time.sleep(60)
        globals()[_name] = _late
END
""",
    ),
}
