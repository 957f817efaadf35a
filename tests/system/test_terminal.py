"""Text from outside cannot control the terminal, however it is printed."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from etude.system.terminal import CONTROL_CHARACTERS, Console, escape_control, say

# title, clear screen, clipboard, C1 introducer, bell, backspace, line overwritten, text direction
ATTACKS = [
    "\x1b]0;evil\x07",
    "\x1b[2J",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x9b2J",
    "a\bb",
    "shown\rhidden",
    "\u202eevil",
    "\x7f",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_control_character_is_printed(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    for renderable in (attack, Text(attack), Text(attack, "bold")):
        out = io.StringIO()
        table = Table(attack, title=attack)
        table.add_row(renderable)
        console = Console(file=out, force_terminal=True, width=60, markup=False)
        console.print(table)
        console.print(renderable)
        own = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's styles
        assert not CONTROL_CHARACTERS.search(own.replace("\n", "")), own
        assert len({len(line) for line in own.splitlines()[1:4]}) == 1, "the lines of the table are aligned"
    say(attack)
    assert not CONTROL_CHARACTERS.search(capsys.readouterr().out)


def test_text_stays_as_it_is() -> None:
    assert escape_control("a\tb\nc\r\nd é 漢") == "a\tb\nc\nd é 漢"


def test_only_the_escaping_console_is_used() -> None:
    root = Path(__file__).parent.parent.parent
    users = [path for folder in ("etude", "studies") for path in (root / folder).rglob("*.py")]
    direct = [path.name for path in users if re.search(r"from rich\.console import .*\bConsole\b", path.read_text())]
    assert direct == []


def test_the_message_of_an_error_is_escaped(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli", "recipe", "show", str(tmp_path / "\x1b[2Jx.toml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "␛[2Jx.toml" in done.stderr
    assert "\x1b" not in done.stderr
