"""Run commands and save their terminal output as an SVG: `python docs/screenshot.py OUT.svg CMD [CMD ...]`."""

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 112


def main() -> None:
    out, *commands = sys.argv[1:]
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for command in commands:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        shown = subprocess.run(
            ["script", "-qec", f"stty cols {WIDTH} 2>/dev/null; {command} 2>/dev/null", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        console.print(Text.from_ansi(shown.replace("\r", "").rstrip()))
        console.print()
    picture = console.export_svg(title="etude")
    # rich links a web font; a picture in a repository should load nothing from the network
    Path(out).write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
