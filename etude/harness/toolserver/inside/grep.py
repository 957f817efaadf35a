"""Search text files with ripgrep, which the host lends to the pod; `N:` marks a matching line, `N-` its context.

The files are chosen here: ripgrep would block on a pipe called .gitignore, and show ignored files that a glob matches.
Its linear-time engine is used where it can; look-around and back references use PCRE2, which has a step limit.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess

from etude.globs import GitGlobs
from etude.harness.toolserver.inside.ignore import files_below, is_hidden
from etude.harness.toolserver.inside.paths import SAMPLE, Refusal, ToolWorkspace, lent_program, read_bytes, refusal_for

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

DEFAULT_LIMIT = 100  # matching lines, or files
MAX_LIMIT = 1000
COUNT_FACTOR = 10  # matches are counted up to this multiple of the limit, then reported as "at least"
MAX_TEXT = 50 << 10  # characters of a result
MAX_LINE = 500  # characters of a line
MAX_CONTEXT = 50  # lines on either side of a match
MAX_PATTERN = 10_000  # characters
MAX_ERRORS = 64 << 10  # bytes of ripgrep's messages
MAX_BATCH = 256 << 10  # bytes of the paths of one command line
OPTIONS = ("--json", "--no-config", "--no-ignore", "--threads=1", "--crlf", "--engine=auto", "--no-mmap")


class FileMatches:
    """The matches of one file: their number, and what is shown of them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.matches = 0  # matching lines
        self.shown = 0
        self.lines: list[str] = []
        self.pending: list[tuple[int, str]] = []  # context lines that belong to the next match, if it is shown
        self.last = self.last_match = 0  # line numbers

    def add(self, number: int, mark: str, text: str) -> None:
        """Add a line to the output."""
        if self.last and number > self.last + 1:
            self.lines.append("--")
        self.lines.append(f"{number}{mark}{text}")
        self.last = number


class GrepSearch:
    """One search: its options, and the results so far."""

    def __init__(self, workspace: ToolWorkspace, base: str, arguments: dict[str, Any]) -> None:
        self.workspace, self.base = workspace, base  # ripgrep's working directory
        self.mode = arguments.get("output_mode") or "content"
        around = arguments.get("-C") or 0
        self.before = min(arguments.get("-B") or around, MAX_CONTEXT)
        self.after = min(arguments.get("-A") or around, MAX_CONTEXT)
        self.limit = min(arguments.get("head_limit") or DEFAULT_LIMIT, MAX_LIMIT)
        self.shown: list[str] = []  # one entry per file
        self.size = 0
        self.matches = self.files = self.listed = 0

    def command(self, program: str, arguments: dict[str, Any]) -> list[str]:
        """Return ripgrep's command line, but for the files."""
        command = [program, *OPTIONS, f"--before-context={self.before}", f"--after-context={self.after}"]
        if arguments.get("-i"):
            command.append("--ignore-case")
        if arguments.get("multiline"):
            command += ["--multiline", "--multiline-dotall"]
        return [*command, f"--regexp={arguments['pattern']}", "--"]

    def read(self, events: Iterable[bytes]) -> None:
        """Read ripgrep's events until enough matches have been counted."""
        file = FileMatches("")
        for line in events:
            event = json.loads(line)
            kind, data = event["type"], event["data"]
            if kind == "begin":
                file = FileMatches(os.path.normpath(os.fsdecode(_bytes(data["path"]))))
            elif kind == "match":
                self.add_match(file, data)
            elif kind == "context":
                text = _text(_bytes(data["lines"]))
                if file.shown and data["line_number"] <= file.last_match + self.after:
                    file.add(data["line_number"], "-", _cut(text, 0))
                else:
                    file.pending.append((data["line_number"], text))
            elif kind == "end" and data["binary_offset"] is None:
                self.add_file(file)
                if self.done():
                    return

    def add_match(self, file: FileMatches, data: dict[str, Any]) -> None:
        """Add the lines of a match; one that spans lines comes as one event."""
        block = _bytes(data["lines"])
        lines = (block[:-1] if block.endswith(b"\n") else block).split(b"\n")
        starts = [found["start"] for found in data["submatches"]]
        offset = 0
        for at, line in enumerate(lines):
            file.matches += 1
            first = next((start - offset for start in starts if offset <= start <= offset + len(line)), 0)
            offset += len(line) + 1
            size = self.size + sum(map(len, file.lines))
            if self.mode != "content" or self.listed + file.shown >= self.limit or size > MAX_TEXT:
                file.last_match = -self.after  # what follows is not shown
                continue
            for number, text in file.pending:
                file.add(number, "-", _cut(text, 0))
            file.pending = []
            file.last_match = data["line_number"] + at
            file.add(file.last_match, ":", _cut(_text(line), len(_text(line[:first]))))
            file.shown += 1

    def add_file(self, file: FileMatches) -> None:
        """Add a file that was searched to its end."""
        self.files += 1
        self.matches += file.matches
        name = self.workspace.display(os.path.join(self.base, file.path))
        entry = {"files_with_matches": name, "count": f"{name}:{file.matches}"}.get(self.mode)
        if entry is None:
            entry, shown = "\n".join([name, *file.lines]), file.shown
        else:
            shown = int(self.listed < self.limit and self.size + len(entry) <= MAX_TEXT)
        if shown:
            self.shown.append(entry)
            self.listed += shown
            self.size += len(entry) + 1

    def done(self) -> bool:
        """Return whether enough matches have been counted."""
        return (self.matches if self.mode == "content" else self.files) >= self.limit * COUNT_FACTOR

    def result(self) -> dict[str, Any]:
        facts = {"matches": self.matches, "files": self.files}
        if not self.files:
            return {"text": "No matches.", "facts": facts}
        content = self.mode == "content"
        total, what = (self.matches, "matching lines") if content else (self.files, "files")
        note = ""
        if total > self.listed:
            at_least = "at least " if self.done() else ""
            note = f"\n[the first {self.listed} of {at_least}{total} {what}; narrow the search to see others]"
        elif self.mode == "count" and self.files > 1:
            note = f"\n[{self.matches} matching lines in {self.files} files]"
        return {"text": ("\n\n" if content else "\n").join(self.shown) + note, "facts": facts}


def _bytes(value: dict[str, str]) -> bytes:
    """Return a text of ripgrep's JSON, which is in base64 if it is not UTF-8."""
    return value["text"].encode() if "text" in value else base64.b64decode(value["bytes"])


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def _cut(line: str, at: int) -> str:
    """Cut a long line to MAX_LINE characters around the match."""
    if len(line) <= MAX_LINE:
        return line
    start = max(0, at - 100) if at > MAX_LINE - 100 else 0
    head = "[...] " if start else ""
    tail = " [...]" if start + MAX_LINE < len(line) else ""
    return f"{head}{line[start : start + MAX_LINE]}{tail}"


def grep(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Search the files below a path, except ignored, hidden and binary ones. `need` asks the host to lend ripgrep."""
    if len(arguments["pattern"]) > MAX_PATTERN:
        size = f"{len(arguments['pattern']):,}"
        raise Refusal("bad_arguments", f"the pattern has {size} characters; expected at most {MAX_PATTERN:,}")
    start = os.path.normpath(workspace.resolve(arguments.get("path") or "."))
    directory = os.path.isdir(start)
    if directory:
        try:
            os.listdir(start)
        except OSError as error:
            raise refusal_for(workspace, start, error) from None
    elif b"\0" in read_bytes(workspace, start)[0][:SAMPLE]:
        raise Refusal("environment", f"{workspace.display(start)} is a binary file; it was not searched")
    program = lent_program(workspace, "rg")
    if program is None:
        return {"need": "rg"}
    base, name = (start, "") if directory else os.path.split(start)
    paths = _files(workspace, start, program, arguments) if directory else iter([name])
    search = GrepSearch(workspace, base, arguments)
    command = search.command(program, arguments)
    while not search.done() and (batch := _batch(paths)):
        with open(os.memfd_create("errors"), "w+b") as errors:
            try:
                run = subprocess.Popen(
                    command + batch, cwd=base, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
                )
            except OSError as error:
                raise Refusal("environment", f"ripgrep cannot run here: {error.strerror}") from None
            with run:
                assert run.stdout is not None
                search.read(run.stdout)
                if search.done():
                    run.kill()
            errors.seek(0)
            _check_errors(errors.read(MAX_ERRORS).decode("utf-8", "replace"))
        if run.returncode < 0 and not search.done():
            raise Refusal("environment", f"ripgrep was ended by signal {-run.returncode}; narrow the search")
    return search.result()


def _files(workspace: ToolWorkspace, start: str, program: str, arguments: dict[str, Any]) -> Iterator[str]:
    """Yield the files below a directory that are to be searched, relative to it."""
    glob = arguments.get("glob") or ""
    globs = GitGlobs([glob] if glob else [])
    types = _type_globs(program, arguments["type"]) if arguments.get("type") else None
    below = len(start.rstrip("/")) + 1
    for path in files_below(start, workspace.root, is_hidden(glob) or is_hidden(workspace.relative(start))):
        relative = path[below:]
        if globs.admits(relative) and (types is None or types.match(relative)):
            yield relative


def _type_globs(program: str, kind: str) -> GitGlobs:
    """Return the globs of one of ripgrep's file types."""
    listed = subprocess.run([program, "--no-config", "--type-list"], stdout=subprocess.PIPE, check=False).stdout
    types = dict(line.split(": ", 1) for line in listed.decode().splitlines())
    types.update(rb=types.get("ruby", ""), tsx="*.tsx")
    if kind not in types:
        raise Refusal("bad_arguments", f"type {kind!r} is not known; expected one of {', '.join(sorted(types))}")
    return GitGlobs(types[kind].split(", "))


def _batch(paths: Iterator[str]) -> list[str]:
    """Return the next paths, as many as a command line can hold."""
    batch, size = [], 0
    for path in paths:
        batch.append(f"./{path}")
        size += len(path) + 20  # with its pointer
        if size > MAX_BATCH:
            break
    return batch


def _check_errors(text: str) -> None:
    """Refuse what ripgrep refused; files that it could not read are left out."""
    if "PCRE2: error matching" in text:
        raise Refusal("timeout", "matching took too many steps; use a simpler expression, without look-around")
    reasons = re.findall(r"^error: (.*)|error compiling pattern at offset \d+: (.*)|^(compiled regex .*)", text, re.M)
    usable = [reason for reason in map("".join, reasons) if "not supported" not in reason]
    if usable:
        message = f"the pattern is not a valid regular expression: {usable[0]}"
        raise Refusal("bad_arguments", f"{message}. A backslash before a character takes it as it is")
