"""Record the picture of docs/agent.md: a session in tmux on a copy of this repository, with a scripted endpoint.

python docs/agent_picture.py docs/agent.svg
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests" / "harness"))

from stub_endpoint import StubEndpoint, call, says, serving  # noqa: E402

WIDTH, HEIGHT = 116, 38
REQUEST = "show_size stops at TiB: add PiB, and check that it works"
OLD = 'in (("TiB", 1 << 40),'
NEW = 'in (("PiB", 1 << 50), ("TiB", 1 << 40),'
CHECK = "python3 -c 'from etude.pods.cli.units import show_size; print(show_size(3 << 50))'"
SCRIPT = [
    says("", call("grep", pattern="def show_size"), thinking="Where is it defined, and where is it used?"),
    says(
        "", call("read_file", target_file="etude/pods/cli/units.py", offset=30), call("run_terminal_cmd", command=CHECK)
    ),
    says("", call("search_replace", file_path="etude/pods/cli/units.py", old_string=OLD, new_string=NEW)),
    says("", call("run_terminal_cmd", command=CHECK), call("read_lints", paths=["etude/pods/cli/units.py"])),
    says("`show_size` now goes up to PiB: 3 << 50 was shown as 3.07e+03 TiB and is now 3 PiB.", pause=0.02),
]


def tmux(*command: str) -> str:
    done = subprocess.run(["tmux", "-L", "etude-picture", *command], check=True, capture_output=True, text=True)
    return done.stdout


def wait_for(text: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in (shown := tmux("capture-pane", "-p", "-t", "agent")):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited for {text!r}; the screen shows:\n{shown}")
        time.sleep(0.1)


def type_line(text: str) -> None:
    tmux("send-keys", "-t", "agent", "-l", text)
    tmux("send-keys", "-t", "agent", "Enter")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="etude-picture-") as scratch, serving(StubEndpoint(SCRIPT)) as stub:
        project = Path(scratch) / "etude"
        subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{HERE}", project], check=True)
        program = Path(sys.executable).with_name("etude")
        os.environ |= {"XDG_STATE_HOME": f"{scratch}/state", "ETUDE_AGENT_ENDPOINT": stub.url, "PS1": "$ "}
        os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
        shell = ["bash", "--norc", "--noprofile"]
        tmux("new-session", "-d", "-s", "agent", "-x", str(WIDTH), "-y", str(HEIGHT), "-c", str(project), *shell)
        try:
            type_line("clear; etude agent")
            wait_for("\n>")
            type_line(REQUEST)
            wait_for("Apply 1 change")
            type_line("y")
            wait_for("applied 1")
            type_line("/cost")
            wait_for("total ")
            type_line("/quit")
            wait_for("--resume")
            shown = tmux("capture-pane", "-e", "-p", "-t", "agent")
        finally:
            tmux("kill-server")
    shown = shown.replace(str(project), "~/etude").rstrip()
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    picture = console.export_svg(title="etude agent")
    # rich links a web font; a picture in a repository should load nothing from the network
    Path(sys.argv[1]).write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
