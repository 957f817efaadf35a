"""Search text files for a regular expression, with output as ripgrep's: `N:` for a match, `N-` for its context."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from etude.globs import GitGlobs
from etude.harness.toolserver.inside.ignore import walk
from etude.harness.toolserver.inside.paths import SAMPLE, Refusal, ToolWorkspace, quote_name, read_bytes, refusal_for
from etude.harness.toolserver.inside.regex import compile_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_LIMIT = 100  # matching lines, or files
MAX_LIMIT = 1000
COUNT_FACTOR = 10  # matches are counted up to this multiple of the limit, then reported as "at least"
MAX_TEXT = 50 << 10  # characters of a result
MAX_LINE = 500  # characters of a line
MAX_FILE = 16 << 20  # bytes of a file that is searched
MAX_CONTEXT = 50  # lines on either side of a match

TYPES = {
    "c": "*.c *.h",
    "cpp": "*.cpp *.cc *.cxx *.hpp *.hh *.hxx *.h *.inl",
    "cs": "*.cs",
    "css": "*.css *.scss *.sass *.less",
    "cuda": "*.cu *.cuh",
    "docker": "Dockerfile* *.dockerfile",
    "go": "*.go",
    "html": "*.html *.htm",
    "java": "*.java",
    "js": "*.js *.jsx *.mjs *.cjs *.vue",
    "json": "*.json *.jsonl",
    "kotlin": "*.kt *.kts",
    "lua": "*.lua",
    "make": "Makefile makefile GNUmakefile *.mk",
    "markdown": "*.md *.markdown *.mdx",
    "md": "*.md *.markdown *.mdx",
    "perl": "*.pl *.pm",
    "php": "*.php",
    "proto": "*.proto",
    "py": "*.py *.pyi",
    "python": "*.py *.pyi",
    "r": "*.r *.R *.Rmd",
    "rb": "*.rb *.rake Gemfile Rakefile",
    "ruby": "*.rb *.rake Gemfile Rakefile",
    "rust": "*.rs",
    "scala": "*.scala *.sbt",
    "sh": "*.sh *.bash *.zsh",
    "sql": "*.sql",
    "swift": "*.swift",
    "toml": "*.toml",
    "ts": "*.ts *.tsx *.mts *.cts",
    "tsx": "*.tsx",
    "txt": "*.txt",
    "xml": "*.xml *.xsl *.svg",
    "yaml": "*.yaml *.yml",
    "zig": "*.zig",
}


class GrepSearch:
    """One search: its pattern and options, and the results so far."""

    def __init__(self, workspace: ToolWorkspace, arguments: dict[str, Any]) -> None:
        self.workspace = workspace
        self.mode = arguments.get("output_mode") or "content"
        self.multiline = bool(arguments.get("multiline"))
        self.ignore_case = bool(arguments.get("-i"))
        self.text = arguments["pattern"]
        self.pattern = compile_pattern(self.text, ignore_case=self.ignore_case, multiline=self.multiline)
        around = arguments.get("-C") or 0
        self.before = min(arguments.get("-B") or around, MAX_CONTEXT)
        self.after = min(arguments.get("-A") or around, MAX_CONTEXT)
        self.limit = min(arguments.get("head_limit") or DEFAULT_LIMIT, MAX_LIMIT)
        self.shown: list[str] = []  # blocks of lines, one per file
        self.size = 0
        self.matches = self.files = self.listed = 0
        self.full = False  # the output is full; matches are only counted
        self.skipped = 0  # files too large to search

    def done(self) -> bool:
        """Return whether enough matches have been counted."""
        return (self.matches if self.mode == "content" else self.files) >= self.limit * COUNT_FACTOR

    # If the whole text does not match, no line does, except for negative lookarounds and anchors.
    def may_match(self, data: bytes, text: str) -> bool:
        special = any(mark in self.text for mark in ("(?!", "(?<!", "\\A", "\\z", "\\Z"))
        return special or self.pattern.search(text) is not None

    def search_file(self, path: str, data: bytes) -> None:
        """Search one file."""
        plain = self.text.isalnum() and self.text.isascii() and not self.ignore_case
        if plain and self.text.encode() not in data:
            return
        text = data.decode("utf-8", "replace")
        if not self.may_match(data, text):
            return
        lines = text.split("\n")
        if lines and not lines[-1]:
            lines.pop()
        hits = self.multiline_hits(text, lines) if self.multiline else self.matching_lines(lines)
        if not hits:
            return
        self.files += 1
        self.matches += len(hits)
        if self.full:
            return
        name = self.workspace.display(path)
        if self.mode == "files_with_matches":
            self.add(name)
        elif self.mode == "count":
            self.add(f"{name}:{len(hits)}")
        else:
            self.add_content(name, lines, hits)

    def matching_lines(self, lines: list[str]) -> dict[int, int]:
        """Return the matching lines, each with the position of its match."""
        search = self.pattern.search
        return {at: found.start() for at, line in enumerate(lines) if (found := search(line.rstrip("\r"))) is not None}

    def multiline_hits(self, text: str, lines: list[str]) -> dict[int, int]:
        """Return the lines covered by matches that span lines."""
        hits: dict[int, int] = {}
        line = start = 0  # the current line and its offset
        for found in self.pattern.finditer(text):
            while line + 1 < len(lines) and start + len(lines[line]) < found.start():
                start += len(lines[line]) + 1
                line += 1
            last, end = line, start + len(lines[line]) if lines else 0
            while last + 1 < len(lines) and end + 1 < found.end():
                last += 1
                end += len(lines[last]) + 1
            hits.setdefault(line, max(0, found.start() - start))
            for each in range(line + 1, last + 1):
                hits.setdefault(each, 0)
            if len(hits) > MAX_LIMIT * COUNT_FACTOR:
                break
        return hits

    def add(self, entry: str) -> None:
        """Add a file to the list."""
        if self.listed >= self.limit or self.size + len(entry) > MAX_TEXT:
            self.full = True
            return
        self.shown.append(entry)
        self.listed += 1
        self.size += len(entry) + 1

    def add_content(self, name: str, lines: list[str], hits: dict[int, int]) -> None:
        """Add the matching lines of a file with their context."""
        block, previous = [name], -1
        taken = 0
        for at in hits:
            if self.listed + taken >= self.limit or self.size > MAX_TEXT:
                self.full = True
                break
            for number in range(max(previous + 1, at - self.before), min(len(lines), at + self.after + 1)):
                if number > at and number in hits:
                    break  # printed as a match of its own
                if previous >= 0 and number > previous + 1:
                    block.append("--")
                mark = ":" if number in hits else "-"
                block.append(f"{number + 1}{mark}{_cut(lines[number].rstrip(chr(13)), hits.get(number, 0))}")
                self.size += len(block[-1]) + 1
                previous = number
            taken += 1
        if taken:
            self.listed += taken
            self.shown.append("\n".join(block))

    def result(self) -> dict[str, Any]:
        facts = {"matches": self.matches, "files": self.files}
        notes = []
        content = self.mode == "content"
        total, what = (self.matches, "matching lines") if content else (self.files, "files")
        if total > self.listed:
            at_least = "at least " if self.done() else ""
            notes.append(f"[the first {self.listed} of {at_least}{total} {what}; narrow the search to see others]")
        elif self.mode == "count" and self.files > 1:
            notes.append(f"[{self.matches} matching lines in {self.files} files]")
        if self.skipped:
            notes.append(f"[{self.skipped} files over {MAX_FILE >> 20} MB were not searched]")
        if not self.files:
            return {"text": "\n".join(["No matches.", *notes]), "facts": facts}
        between = "\n\n" if content else "\n"
        return {"text": between.join(self.shown) + "".join("\n" + note for note in notes), "facts": facts}


def _cut(line: str, at: int) -> str:
    """Cut a long line to MAX_LINE characters around the match."""
    if len(line) <= MAX_LINE:
        return line
    start = max(0, at - 100) if at > MAX_LINE - 100 else 0
    head = "[...] " if start else ""
    tail = " [...]" if start + MAX_LINE < len(line) else ""
    return f"{head}{line[start : start + MAX_LINE]}{tail}"


def grep(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Search the files below a path, except ignored, hidden and binary ones."""
    search = GrepSearch(workspace, arguments)
    start = workspace.resolve(arguments.get("path") or ".")
    kind = arguments.get("type")
    if kind and kind not in TYPES:
        raise Refusal("bad_arguments", f"type {kind!r} is not known; expected one of {', '.join(TYPES)}")
    types = GitGlobs(TYPES[kind].split()) if kind else None
    if not os.path.isdir(start):
        data, _ = read_bytes(workspace, start, MAX_FILE)
        if b"\0" in data[:SAMPLE]:
            raise Refusal("environment", f"{workspace.display(start)} is a binary file; it was not searched")
        search.search_file(start, data)
        return search.result()
    try:
        os.listdir(start)
    except OSError as error:
        raise refusal_for(workspace, start, error) from None
    glob = arguments.get("glob") or ""
    globs = GitGlobs([glob] if glob else [])
    start = os.path.normpath(start)
    below = len(start.rstrip("/")) + 1
    hidden = is_hidden(glob) or is_hidden(workspace.relative(start))
    for path in files_below(start, workspace.root, hidden):
        relative = path[below:]
        if not globs.admits(relative) or (types is not None and not types.match(relative)):
            continue
        found = contents(path)
        if found is None:
            search.skipped += 1
        elif b"\0" not in found[:SAMPLE]:
            search.search_file(path, found)
            if search.done():
                break
    return search.result()


def is_hidden(pattern: str) -> bool:
    """Return whether a path or glob contains a name that begins with a dot."""
    return any(part.startswith(".") and part not in (".", "..") for part in pattern.split("/"))


def files_below(start: str, root: str, hidden: bool) -> Iterator[str]:
    """Yield the regular files below a directory of the workspace."""
    for entry in walk(start, root, hidden=hidden):
        if entry.is_file(follow_symlinks=False):
            yield entry.path


def contents(path: str) -> bytes | None:
    """Return the content of a file, empty if it cannot be read, None if it is too large."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if os.fstat(file).st_size > MAX_FILE:
            return None
        parts = []
        while chunk := os.read(file, 1 << 20):
            parts.append(chunk)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(file)


def glob_file_search(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """List files whose path matches a glob: first those changed since the session began, each group sorted by path.

    Exact file times differ between runs, so sorting by time would; the set of changed files does not.
    """
    start = workspace.resolve(arguments.get("target_directory") or ".")
    if not os.path.isdir(start):
        raise refusal_for(workspace, start, FileNotFoundError(2, "no such directory"))
    start = os.path.normpath(start)
    pattern = arguments["glob_pattern"].strip()
    if pattern.startswith(start.rstrip("/") + "/"):
        pattern = pattern[len(start.rstrip("/")) + 1 :]
    pattern = pattern[2:] if pattern.startswith("./") else pattern
    globs = GitGlobs([pattern if pattern.startswith("**/") else f"**/{pattern}"])
    below = len(start.rstrip("/")) + 1
    hidden = is_hidden(pattern) or is_hidden(workspace.relative(start))
    changed: list[str] = []
    others: list[str] = []
    for entry in walk(start, workspace.root, hidden=hidden):
        path = entry.path
        if globs.match(path[below:]):
            recent = entry.stat(follow_symlinks=False).st_mtime_ns > workspace.began
            (changed if recent else others).append(path)
    found = sorted(changed) + sorted(others)
    lines = [quote_name(workspace.relative(path)) for path in found[:MAX_LIMIT]]
    if not found:
        lines.append("No files match.")
    if len(found) > MAX_LIMIT:
        lines.append(f"[the first {MAX_LIMIT} of {len(found):,} files]")
    return {"text": "\n".join(lines), "facts": {"files": len(found)}}
