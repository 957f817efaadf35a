"""Ordinary developer tools work unchanged under the filter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etude.pods.runtime import seccomp
from tests.pods.children import in_child
from tests.pods.confining import install

GIT = "git init -q . && touch a && git add a && git -c user.name=a -c user.email=a@b commit -qm a && git log --oneline"
C = "printf '#include <stdio.h>\\nint main(void) { puts(\"hello\"); }' > a.c && gcc -O1 a.c -o a && ./a | grep hello"
THREADS = "import concurrent.futures as f; print(list(f.ThreadPoolExecutor(4).map(abs, range(9))))"
COMMANDS = {
    "bash": "for i in 1 2 3; do (echo $i) & done; wait; diff <(echo a) <(echo a)",
    "python3": f"python3 -m venv --without-pip v && v/bin/python -c '{THREADS}'",
    "git": GIT,
    "gcc": C,
    "make": "printf 'all: a b\\na b:\\n\\techo $@ > $@\\n' > Makefile && make -sj2 && cat a b",
    "tar": "mkdir d && echo x > d/x && tar czf d.tgz d && tar xzf d.tgz && cat d/x",
    "node": 'node -e \'require("fs").promises.readFile("/dev/null").then(() => console.log(1))\'',
    "java": "java -XX:TieredStopAtLevel=1 -version",
    "strace": "strace -f -o log sh -c 'true | true' && grep -q exited log",
    "gdb": "gdb -q -nx -batch -ex 'break main' -ex run -ex 'info inferiors' --args $(command -v true)",
}


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"), reason="no filter here")
@pytest.mark.parametrize("tool", COMMANDS)
def test_a_tool_runs_as_without_the_filter(tool: str, tmp_path: Path) -> None:
    if not shutil.which(tool) or not shutil.which("bash"):
        pytest.skip(f"{tool} is not installed")

    def child() -> tuple[int, str]:
        install(program)
        run = subprocess.run(["bash", "-ec", COMMANDS[tool]], **options)
        return run.returncode, run.stdout[-2000:]

    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False}
    options["env"] = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    program = seccomp.build_filter()
    code, output = in_child(child)
    assert code == 0, output
    assert "not permitted" not in output.lower()
