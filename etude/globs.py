"""Globs: the pattern language of .gitignore, for every pattern of a task, a repository or a model.

Matching time is at most pattern length times name length, because patterns are untrusted. That is why the matcher is
written by hand: for one name, "a*" ten times and "b" took 11.2 s translated to `re`, and 4.2 s with pathspec.
Runs on the host and, packed, in pods: standard library only, Python 3.8.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Match = Callable[[str], bool]

MAX_BRACES = 256  # patterns that one pattern with braces may expand to


def _tokens(pattern: str) -> list[tuple[str, str]]:
    """Split the pattern of one name into stars, single wildcards, classes (as regular expressions) and characters."""
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
                return [("class", r"[^\W\w]")]  # never closed: matches nothing, as in git
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
    """Convert a bracket expression to a regular expression; return it and its end, None if it is never closed."""
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
        if low <= high:  # a reversed range is empty
            items.append(re.escape(low) if low == high else f"{re.escape(low)}-{re.escape(high)}")
    if not items:
        return ("." if negated else r"[^\W\w]"), end
    return f"[{'^' if negated else ''}{''.join(items)}]", end


def _literal(pattern: str, at: int) -> tuple[str, int]:
    """Return one character of a bracket expression and its end."""
    at += pattern[at : at + 1] == "\\"
    return pattern[at : at + 1], at + 1


def _segments(pattern: str) -> list[str]:
    """Split a path pattern at slashes, except inside brackets."""
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
    """Expand [:alpha:] and other POSIX classes inside a bracket expression."""
    return re.sub(r"\[:(\w+):\]", lambda found: _POSIX.get(found.group(1), found.group(0)), text)


def compile_name(pattern: str) -> Match:
    """Compile the pattern of a single name to a predicate."""
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
    return lambda name: _match_sequence(tests, name)


def _test(kind: str, text: str) -> Match:
    if kind == "char":
        return lambda char: char == text
    if kind == "any":
        return lambda char: True
    matches = re.compile(text).match
    return lambda char: matches(char) is not None


def _match_sequence(tests: Sequence[Match | None], items: Sequence[str]) -> bool:
    """Return whether the items pass the tests in order; a None test matches any run of items.

    Backtracking extends only the last run: the work is at most len(tests) x len(items).
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


class GitignorePattern:
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
            self.tests.append(lambda name: True)  # "a/**" matches everything inside a, not a itself

    def match(self, path: str, directory: bool) -> bool:
        """Return whether a path, relative to the directory of the pattern, matches."""
        if self.directories_only and not directory:
            return False
        if self.name is not None:
            return self.name(path[path.rfind("/") + 1 :])
        return _match_sequence(self.tests, path.split("/"))


def parse_lines(lines: Iterable[str]) -> list[GitignorePattern]:
    """Parse the lines of a .gitignore."""
    patterns = []
    for line in lines:
        text = line.rstrip("\r\n")
        while text.endswith(" ") and not text.endswith("\\ "):
            text = text[:-1]
        if text and not text.startswith("#"):
            patterns.append(GitignorePattern(text))
    return patterns


def last_match(patterns: Sequence[GitignorePattern], path: str, directory: bool) -> GitignorePattern | None:
    """Return the last pattern that matches, which decides."""
    return next((pattern for pattern in reversed(patterns) if pattern.match(path, directory)), None)


class Globs:
    """Patterns that select paths as a .gitignore does: the last one that matches decides, `!` takes a path out again.

    A path below a selected directory is selected too, whatever its own name.
    """

    def __init__(self, patterns: Iterable[str | GitignorePattern]) -> None:
        self.patterns = [GitignorePattern(each) if isinstance(each, str) else each for each in patterns]

    def matches(self, path: str) -> bool:
        """Return whether the path of a file, relative to where the patterns stand, is selected."""
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            found = last_match(self.patterns, "/".join(parts[:depth]), depth < len(parts))
            if found is not None and not found.negated:
                return True
        return False


class GitGlobs:
    """Globs as in `rg --glob`: with braces; a pattern with `!` excludes."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = [GitignorePattern(text) for pattern in patterns for text in expand_braces(pattern.lstrip(" "))]
        self.has_includes = any(not pattern.negated for pattern in self.patterns)

    def match(self, path: str, directory: bool = False) -> bool:
        """Return whether the last matching pattern includes the path."""
        found = last_match(self.patterns, path, directory)
        return found is not None and not found.negated

    def admits(self, path: str) -> bool:
        """Return whether the path passes as a filter: without including patterns, everything not excluded passes."""
        found = last_match(self.patterns, path, False)
        return not self.has_includes if found is None else not found.negated


def expand_braces(pattern: str) -> list[str]:
    """Expand `*.{ts,tsx}` to `*.ts` and `*.tsx`, up to MAX_BRACES patterns."""
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
    """Return start, end and choices of the first pair of braces that contains a comma."""
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
