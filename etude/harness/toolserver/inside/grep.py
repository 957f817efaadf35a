"""Searching text files for a regular expression, the way ripgrep shows it: `N:` for a match, `N-` for its context."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from etude.harness.toolserver.inside.ignore import GitGlobs, walk
from etude.harness.toolserver.inside.paths import SAMPLE, Refusal, ToolWorkspace, quoted, read_bytes, refused
from etude.harness.toolserver.inside.regex import compile_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

MATCHES = 100  # shown unless told otherwise: matching lines, or files
MOST_MATCHES = 1000
COUNTED = 10  # times what is shown is counted on, then it is "at least"
MAX_TEXT = 50 << 10  # characters of a result
MAX_LINE = 500  # characters of a line
MAX_FILE = 16 << 20  # bytes of a file that is searched
CONTEXT = 50  # lines at most around a match

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
    """One search: what is looked for, how it is shown, and what was found so far."""

    def __init__(self, workspace: ToolWorkspace, given: dict[str, Any]) -> None:
        self.workspace = workspace
        self.mode = given.get("output_mode") or "content"
        self.multiline = bool(given.get("multiline"))
        self.ignore_case = bool(given.get("-i"))
        self.text = given["pattern"]
        self.pattern = compile_pattern(self.text, ignore_case=self.ignore_case, multiline=self.multiline)
        around = given.get("-C") or 0
        self.before = min(given.get("-B") or around, CONTEXT)
        self.after = min(given.get("-A") or around, CONTEXT)
        self.limit = min(given.get("head_limit") or MATCHES, MOST_MATCHES)
        self.shown: list[str] = []  # blocks of lines, one per file
        self.size = 0
        self.matches = self.files = self.listed = 0
        self.full = False  # nothing more fits, only counting goes on
        self.skipped = 0  # files too large to be searched

    def done(self) -> bool:
        """Whether even counting has gone on for long enough."""
        return (self.matches if self.mode == "content" else self.files) >= self.limit * COUNTED

    # What a whole text does not match, no line of it does; not so for expressions that look at what is not there.
    def may_match(self, data: bytes, text: str) -> bool:
        special = any(mark in self.text for mark in ("(?!", "(?<!", "\\A", "\\z", "\\Z"))
        return special or self.pattern.search(text) is not None

    def look_into(self, path: str, data: bytes) -> None:
        """GrepSearch one file."""
        plain = self.text.isalnum() and self.text.isascii() and not self.ignore_case
        if plain and self.text.encode() not in data:
            return
        text = data.decode("utf-8", "replace")
        if not self.may_match(data, text):
            return
        lines = text.split("\n")
        if lines and not lines[-1]:
            lines.pop()
        hits = self.spanned(text, lines) if self.multiline else self.matching(lines)
        if not hits:
            return
        self.files += 1
        self.matches += len(hits)
        if self.full:
            return
        name = self.workspace.shown(path)
        if self.mode == "files_with_matches":
            self.add(name)
        elif self.mode == "count":
            self.add(f"{name}:{len(hits)}")
        else:
            self.add_content(name, lines, hits)

    def matching(self, lines: list[str]) -> dict[int, int]:
        """The lines that match, each with where in it."""
        search = self.pattern.search
        return {at: found.start() for at, line in enumerate(lines) if (found := search(line.rstrip("\r"))) is not None}

    def spanned(self, text: str, lines: list[str]) -> dict[int, int]:
        """The lines that matches over several lines lie on."""
        hits: dict[int, int] = {}
        line = start = 0  # the line we are at, and where it begins
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
            if len(hits) > MOST_MATCHES * COUNTED:
                break
        return hits

    def add(self, entry: str) -> None:
        """A file in the list."""
        if self.listed >= self.limit or self.size + len(entry) > MAX_TEXT:
            self.full = True
            return
        self.shown.append(entry)
        self.listed += 1
        self.size += len(entry) + 1

    def add_content(self, name: str, lines: list[str], hits: dict[int, int]) -> None:
        """The matching lines of a file with what is around them."""
        block, previous = [name], -1
        taken = 0
        for at in hits:
            if self.listed + taken >= self.limit or self.size > MAX_TEXT:
                self.full = True
                break
            for number in range(max(previous + 1, at - self.before), min(len(lines), at + self.after + 1)):
                if number > at and number in hits:
                    break  # it comes in its own turn
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
    """A line of bearable length, with the match in it."""
    if len(line) <= MAX_LINE:
        return line
    start = max(0, at - 100) if at > MAX_LINE - 100 else 0
    head = "[...] " if start else ""
    tail = " [...]" if start + MAX_LINE < len(line) else ""
    return f"{head}{line[start : start + MAX_LINE]}{tail}"


def grep(workspace: ToolWorkspace, given: dict[str, Any]) -> dict[str, Any]:
    """GrepSearch the files below a path; those .gitignore names, hidden ones and binary ones are left out."""
    search = GrepSearch(workspace, given)
    start = workspace.resolve(given.get("path") or ".")
    kind = given.get("type")
    if kind and kind not in TYPES:
        raise Refusal("bad_arguments", f"type {kind!r} is not known; expected one of {', '.join(TYPES)}")
    types = GitGlobs(TYPES[kind].split()) if kind else None
    if not os.path.isdir(start):
        data, _ = read_bytes(workspace, start, MAX_FILE)
        if b"\0" in data[:SAMPLE]:
            raise Refusal("environment", f"{workspace.shown(start)} is a binary file; it was not searched")
        search.look_into(start, data)
        return search.result()
    try:
        os.listdir(start)
    except OSError as error:
        raise refused(workspace, start, error) from None
    glob = given.get("glob") or ""
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
            search.look_into(path, found)
            if search.done():
                break
    return search.result()


def is_hidden(pattern: str) -> bool:
    """Whether a path or glob asks for names that begin with a dot."""
    return any(part.startswith(".") and part not in (".", "..") for part in pattern.split("/"))


def files_below(start: str, root: str, hidden: bool) -> Iterator[str]:
    """The regular files below a directory of the workspace."""
    for entry in walk(start, root, hidden=hidden):
        if entry.is_file(follow_symlinks=False):
            yield entry.path


def contents(path: str) -> bytes | None:
    """A file's bytes; nothing if it cannot be read, None if it is too large."""
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


def glob_file_search(workspace: ToolWorkspace, given: dict[str, Any]) -> dict[str, Any]:
    """Files whose path matches a glob: those changed since the session began first, the rest after, each by path.

    The exact times of files are another in every run, and with them an order by time; which files a session has
    changed is not.
    """
    start = workspace.resolve(given.get("target_directory") or ".")
    if not os.path.isdir(start):
        raise refused(workspace, start, FileNotFoundError(2, "no such directory"))
    start = os.path.normpath(start)
    pattern = given["glob_pattern"].strip()
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
    lines = [quoted(workspace.relative(path)) for path in found[:MOST_MATCHES]]
    if not found:
        lines.append("No files match.")
    if len(found) > MOST_MATCHES:
        lines.append(f"[the first {MOST_MATCHES} of {len(found):,} files]")
    return {"text": "\n".join(lines), "facts": {"files": len(found)}}
