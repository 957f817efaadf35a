"""The .gitignore rules of a directory tree."""

from __future__ import annotations

import os
import stat

from etude.globs import GitignorePattern, parse_lines

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_IGNORE = 1 << 20  # bytes of a .gitignore that are read


class IgnoreRules:
    """The ignore rules of one directory: its own .gitignore, then those of its parents."""

    def __init__(self, patterns: list[GitignorePattern], base: str, above: IgnoreRules | None) -> None:
        self.patterns = list(reversed(patterns))  # the last one that matches decides
        self.base = base  # absolute, ends with "/"
        self.above = above

    def covers(self, path: str, directory: bool) -> bool:
        """Return whether an absolute path is ignored."""
        rules: IgnoreRules | None = self
        while rules is not None:
            relative = path[len(rules.base) :]
            for pattern in rules.patterns:
                if pattern.match(relative, directory):
                    return not pattern.negated
            rules = rules.above
        return False

    def below(self, directory: str) -> IgnoreRules:
        """Return the rules of a subdirectory: these and its own .gitignore."""
        patterns = read_patterns(directory + "/.gitignore")
        return IgnoreRules(patterns, directory.rstrip("/") + "/", self) if patterns else self


def rules_at(directory: str, root: str) -> IgnoreRules:
    """Return the rules of a directory, from the top of its repository down, or from `root` if there is none."""
    tops = [directory]
    while tops[-1] != "/" and not os.path.lexists(tops[-1] + "/.git"):
        tops.append(os.path.dirname(tops[-1]))
    if not os.path.lexists(tops[-1] + "/.git"):
        tops = tops[: tops.index(root) + 1] if root in tops else tops[:1]
    top = tops[-1].rstrip("/")
    rules = IgnoreRules(read_patterns(top + "/.git/info/exclude"), top + "/", None)
    for each in reversed(tops):
        rules = rules.below(each)
    return rules


def read_patterns(path: str) -> list[GitignorePattern]:
    """Read the patterns of a regular file; links (as in git) and pipes (which would block) have none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return []
        data = os.read(file, MAX_IGNORE)
    except OSError:
        return []
    finally:
        os.close(file)
    return parse_lines(data.decode("utf-8", "surrogateescape").split("\n"))


def walk(start: str, root: str, *, hidden: bool = False) -> Iterator[os.DirEntry[str]]:
    """Yield the files and links below a directory that are not ignored, sorted; links are not followed.

    Names that begin with a dot are skipped unless `hidden`; `.git` is always skipped.
    """
    stack = [(start.rstrip("/"), rules_at(start.rstrip("/") or "/", root))]
    while stack:
        directory, rules = stack.pop()
        try:
            with os.scandir(directory + "/") as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError:
            continue
        deeper = []
        for entry in entries:
            if entry.name == ".git" or (entry.name.startswith(".") and not hidden):
                continue
            is_directory = entry.is_dir(follow_symlinks=False)
            path = f"{directory}/{entry.name}"
            if rules.covers(path, is_directory):
                continue
            if is_directory:
                deeper.append((path, rules.below(path)))
            else:
                yield entry
        stack.extend(reversed(deeper))


def is_hidden(pattern: str) -> bool:
    """Return whether a path or glob contains a name that begins with a dot."""
    return any(part.startswith(".") and part not in (".", "..") for part in pattern.split("/"))


def files_below(start: str, root: str, hidden: bool) -> Iterator[str]:
    """Yield the regular files below a directory of the workspace."""
    for entry in walk(start, root, hidden=hidden):
        if entry.is_file(follow_symlinks=False):
            yield entry.path
