"""GitGlobs as git reads them, and the .gitignore files of a tree.

Matching takes time in proportion to pattern and name, whatever they are: a repository brings its own patterns, and one
made of stars must not hang a search. Hence the matcher of our own beside simple regular expressions.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Match = Callable[[str], bool]

MAX_IGNORE = 1 << 20  # bytes of a .gitignore that are read
MAX_BRACES = 256  # patterns that one with braces may stand for


def _tokens(pattern: str) -> list[tuple[str, str]]:
    """One name's pattern in parts: a star, any one character, a class (as in a regular expression), or a character."""
    parts: list[tuple[str, str]] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "*":
            if not parts or parts[-1][0] != "star":
                parts.append(("star", ""))
        elif char == "?":
            parts.append(("any", ""))
        elif char == "[":
            if (found := _class(pattern, at)) is None:
                return [("class", r"[^\W\w]")]  # never closed: means nothing, as in git
            text, at = found
            parts.append(("class", text))
        elif char == "\\" and at + 1 < len(pattern):
            at += 1
            parts.append(("char", pattern[at]))
        else:
            parts.append(("char", char))
        at += 1
    return parts


def _class(pattern: str, at: int) -> tuple[str, int] | None:
    """A bracket expression as a regular expression, and where it ends; None if the bracket is never closed."""
    end = at + 1
    negated = pattern[end : end + 1] in ("!", "^")
    end += negated
    first, items = end, []
    while pattern[end : end + 1] != "]" or end == first:
        if pattern.startswith("[:", end) and (close := pattern.find(":]", end)) > 0:
            items.append(posix_classes(pattern[end : close + 2]))
            end = close + 2
            continue
        low, end = _literal(pattern, end)
        high = low
        if pattern[end : end + 1] == "-" and pattern[end + 1 : end + 2] not in ("", "]"):
            high, end = _literal(pattern, end + 1)
        if not low or not high:
            return None
        if low <= high:  # a range the other way round is empty
            items.append(re.escape(low) if low == high else f"{re.escape(low)}-{re.escape(high)}")
    if not items:
        return ("." if negated else r"[^\W\w]"), end
    return f"[{'^' if negated else ''}{''.join(items)}]", end


def _literal(pattern: str, at: int) -> tuple[str, int]:
    """One character of a bracket expression, and where it ends."""
    at += pattern[at : at + 1] == "\\"
    return pattern[at : at + 1], at + 1


def _segments(pattern: str) -> list[str]:
    """The names of a path pattern; a slash in brackets does not divide."""
    parts, start, at = [], 0, 0
    while at < len(pattern):
        if pattern[at] == "/":
            parts.append(pattern[start:at])
            start = at + 1
        elif pattern[at] == "[" and (found := _class(pattern, at)):
            at = found[1]
        elif pattern[at] == "\\":
            at += 1
        at += 1
    return [part for part in (*parts, pattern[start:]) if part]


_POSIX = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\x5b-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}


def posix_classes(text: str) -> str:
    """The inside of a bracket expression with [:alpha:] and the like written out."""
    return re.sub(r"\[:(\w+):\]", lambda found: _POSIX.get(found.group(1), found.group(0)), text)


def compile_name(pattern: str) -> Match:
    """A function that tells whether a single name matches."""
    parts = _tokens(pattern)
    kinds = [kind for kind, _ in parts]
    literal = "".join(text for kind, text in parts if kind == "char")
    if all(kind == "char" for kind in kinds):
        return lambda name: name == literal
    if kinds[0] == "star" and all(kind == "char" for kind in kinds[1:]):
        return lambda name: name.endswith(literal)
    if kinds[-1] == "star" and all(kind == "char" for kind in kinds[:-1]):
        return lambda name: name.startswith(literal)
    if kinds.count("star") <= 2:
        texts = {"star": ".*", "any": "."}
        expression = "".join(texts.get(kind) or (text if kind == "class" else re.escape(text)) for kind, text in parts)
        matches = re.compile(expression, re.DOTALL).fullmatch
        return lambda name: matches(name) is not None
    tests = [None if kind == "star" else _test(kind, text) for kind, text in parts]
    return lambda name: _follows(tests, name)


def _test(kind: str, text: str) -> Match:
    if kind == "char":
        return lambda char: char == text
    if kind == "any":
        return lambda char: True
    matches = re.compile(text).match
    return lambda char: matches(char) is not None


def _follows(tests: Sequence[Match | None], items: Sequence[str]) -> bool:
    """Whether the items pass the tests in order, None standing for any run of items.

    Only the last run is ever tried again, one item longer: the work is at most len(tests) x len(items).
    """
    test = item = 0
    run, resumed = -1, 0
    while item < len(items):
        if test < len(tests):
            here = tests[test]
            if here is None:
                run, resumed, test = test, item, test + 1
                continue
            if here(items[item]):
                test, item = test + 1, item + 1
                continue
        if run < 0:
            return False
        resumed += 1
        test, item = run + 1, resumed
    return all(left is None for left in tests[test:])


class Pattern:
    """One line of a .gitignore."""

    def __init__(self, text: str) -> None:
        self.negated = text.startswith("!")
        text = text[1:] if self.negated else text
        self.directories_only = text.endswith("/")
        text = text.rstrip("/") if self.directories_only else text
        self.anchored = "/" in text
        self.name: Match | None = None
        self.tests: list[Match | None] = []
        if not self.anchored:
            self.name = compile_name(text) if text else lambda name: False
            return
        segments = _segments(text)
        if not segments:
            self.name = lambda name: False
        for part in segments:
            if part != "**":
                self.tests.append(compile_name(part))
            elif not self.tests or self.tests[-1] is not None:
                self.tests.append(None)
        if segments and segments[-1] == "**":
            self.tests.append(lambda name: True)  # "a/**" is all inside a, not a itself

    def match(self, path: str, directory: bool) -> bool:
        """Whether a path, from where the pattern stands, is meant."""
        if self.directories_only and not directory:
            return False
        if self.name is not None:
            return self.name(path[path.rfind("/") + 1 :])
        return _follows(self.tests, path.split("/"))


def parse_lines(lines: Iterable[str]) -> list[Pattern]:
    """The patterns of a .gitignore."""
    patterns = []
    for line in lines:
        text = line.rstrip("\r\n")
        while text.endswith(" ") and not text.endswith("\\ "):
            text = text[:-1]
        if text and not text.startswith("#"):
            patterns.append(Pattern(text))
    return patterns


class GitGlobs:
    """Patterns of a caller, as `rg --glob` takes them: with braces; one with `!` takes out."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = [Pattern(text) for pattern in patterns for text in expand_braces(pattern.lstrip(" "))]
        self.only = any(not pattern.negated for pattern in self.patterns)

    def match(self, path: str, directory: bool = False) -> bool:
        """Whether the last pattern that means the path takes it in."""
        for pattern in reversed(self.patterns):
            if pattern.match(path, directory):
                return not pattern.negated
        return False

    def admits(self, path: str) -> bool:
        """As a filter: without a pattern that takes in, all is in that none takes out."""
        for pattern in reversed(self.patterns):
            if pattern.match(path, False):
                return not pattern.negated
        return not self.only


def expand_braces(pattern: str) -> list[str]:
    """`*.{ts,tsx}` as `*.ts` and `*.tsx`; at most a few hundred."""
    done: list[str] = []
    todo = [pattern]
    while todo and len(done) + len(todo) <= MAX_BRACES:
        text = todo.pop(0)
        if (found := _braces(text)) is None:
            done.append(text)
            continue
        start, end, choices = found
        todo = [text[:start] + choice + text[end:] for choice in choices] + todo
    return done + todo


def _braces(text: str) -> tuple[int, int, list[str]] | None:
    """The first pair of braces with a comma: where it begins and ends, and the choices in it."""
    depth, start, at = 0, -1, 0
    commas: list[int] = []
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "{":
            if depth == 0:
                start, commas = at, []
            depth += 1
        elif char == "," and depth == 1:
            commas.append(at)
        elif char == "}" and depth:
            depth -= 1
            if depth == 0 and commas:
                edges = [start, *commas, at]
                return start, at + 1, [text[edges[i] + 1 : edges[i + 1]] for i in range(len(edges) - 1)]
        at += 1
    return None


class Ignored:
    """The ignore rules that hold in one directory: its own .gitignore, over those of the directories above."""

    def __init__(self, patterns: list[Pattern], base: str, above: Ignored | None) -> None:
        self.patterns = list(reversed(patterns))  # the last one that matches decides
        self.base = base  # absolute, ends with "/"
        self.above = above

    def covers(self, path: str, directory: bool) -> bool:
        """Whether an absolute path is ignored."""
        rules: Ignored | None = self
        while rules is not None:
            relative = path[len(rules.base) :]
            for pattern in rules.patterns:
                if pattern.match(relative, directory):
                    return not pattern.negated
            rules = rules.above
        return False

    def below(self, directory: str) -> Ignored:
        """The rules in a directory below: these, and those of its own file."""
        patterns = read_patterns(directory + "/.gitignore")
        return Ignored(patterns, directory.rstrip("/") + "/", self) if patterns else self


def rules_at(directory: str, root: str) -> Ignored:
    """The rules that hold in a directory, from the top of its repository down, or from `root` if there is none."""
    tops = [directory]
    while tops[-1] != "/" and not os.path.lexists(tops[-1] + "/.git"):
        tops.append(os.path.dirname(tops[-1]))
    if not os.path.lexists(tops[-1] + "/.git"):
        tops = tops[: tops.index(root) + 1] if root in tops else tops[:1]
    top = tops[-1].rstrip("/")
    rules = Ignored(read_patterns(top + "/.git/info/exclude"), top + "/", None)
    for each in reversed(tops):
        rules = rules.below(each)
    return rules


def read_patterns(path: str) -> list[Pattern]:
    """The patterns of a file, if it is one: not a link, as in git, and not a pipe on which we would wait."""
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
    """The files and links below a directory that are not ignored, sorted; links are not followed.

    Names that begin with a dot are left out unless `hidden`; `.git` always is.
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
