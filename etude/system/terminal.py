"""Printing text that may come from models, pods, verifiers and tasks: control characters become visible symbols.

A terminal obeys what it is sent: an escape sequence clears the screen, hides text, or writes the clipboard. Print such
text with `say`, or with `Console`, which is rich's and escapes all text that it renders.
"""

import re
import sys
from collections.abc import Iterable
from typing import TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 and C1 except newline and tab; bidirectional controls; lone surrogates.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_control(text: str) -> str:
    """Return the text with control characters replaced by visible symbols."""
    return CONTROL_CHARACTERS.sub(_control_picture, text.replace("\r\n", "\n"))


def _control_picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\ufffd" if 0xD800 <= code < 0xE000 else f"\\u{code:04x}"


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line, with control characters visible."""
    print(escape_control(text), file=file or sys.stdout, flush=True)


class Console(rich.console.Console):
    """rich's console; text that it renders cannot contain control characters, only its own styles can."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_control(segment.text), segment.style)
