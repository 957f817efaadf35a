"""Formats command output for the model: without control sequences, and cut to head and tail."""

from __future__ import annotations

import os

HEAD = 5_000  # characters
TAIL = 10_000
WINDOW = 64 << 10  # bytes read at either end: enough for any characters and for removed sequences

_SEQUENCES = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours and cursor movement
    r"|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)"  # titles and links
    r"|[PX^_][^\x1b]{0,512}\x1b\\"
    r"|[ -/]*[0-~])"
)
_CONTROLS = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"


def clean(text: str) -> str:
    """Return the text as a terminal would finally show it: no colours, and only the last state of a progress bar."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    import re  # takes as long to import as everything else here

    text = re.sub(_SEQUENCES, "", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_overwritten(line) for line in text.split("\n"))
    return re.sub(_CONTROLS, "", text)


def _overwritten(line: str) -> str:
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


def excerpt(path: str, start: int, end: int, log: str) -> tuple[str, bool]:
    """Return bytes `start` to `end` of a log as text, head and tail if it is long; and whether it was cut."""
    if end - start <= 2 * WINDOW:
        text = clean(_decode(_read(path, start, end)))
        if len(text) <= HEAD + TAIL:
            return text, False
        left_out = f"{len(text) - HEAD - TAIL:,} characters"
        head, tail = text[:HEAD], text[-TAIL:]
    else:
        head = clean(_decode(_read(path, start, start + WINDOW)))[:HEAD]
        tail = clean(_decode(_read(path, end - WINDOW, end)))[-TAIL:]
        left_out = f"about {end - start - HEAD - TAIL:,} bytes"
    return f"{head}\n[... {left_out} left out; the whole output is in {log} ...]\n{tail}", True


def _read(path: str, start: int, end: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(max(0, end - start))
    except OSError:
        return b""  # a process in the pod may have removed it


def _decode(data: bytes) -> str:
    """Decode a window: a character cut by its edge is dropped, other invalid bytes become U+FFFD."""
    for _ in range(3):
        if data and 0x80 <= data[0] < 0xC0:
            data = data[1:]
    for back in range(1, min(4, len(data) + 1)):
        if data[-back] >= 0xC0:
            whole = {0xC0: 2, 0xE0: 3, 0xF0: 4}.get(data[-back] & 0xF0, 2)
            data = data[:-back] if whole > back else data
            break
        if data[-back] < 0x80:
            break
    return data.decode("utf-8", "replace")


def size_of(path: str) -> int:
    """Return the size of a file, 0 if it does not exist."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
