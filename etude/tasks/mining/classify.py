"""Decide whether a change can become a task: the reason to drop it, its parts, its size and its category.

A change has a source part (code, documents, configuration), which is the reference solution, and a test part, which the
verifier runs.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from etude.syntax import parse_tree
from etude.tasks.generators.code import docstring_node
from etude.tasks.mining.history import FileDifference, HistoryCommit
from etude.tasks.task import Category

# Reasons for dropping a change, in the order in which they are looked for, with explanations.
DROP_REASONS = {
    "merge": "a merge of branches; its commits are changes of their own",
    "first-commit": "has no parent",
    "revert": "reverts another change",
    "bot": "made by a program",
    "release": "a release or a version bump",
    "submodule": "changes a submodule",
    "no-source": "changes no source file",
    "vendored": "its source files are copies of other projects",
    "generated": "its source files are generated",
    "formatting": "the syntax trees of its source files are equal, or comments and docstrings are all that changes",
    "no-tests": "changes no test",
    "tests-formatting": "the syntax trees of its tests are equal",
    "too-small": "changes fewer source lines than asked for",
    "too-large": "changes more source lines or files than asked for, or a file too large to install",
    "few-files": "changes fewer source files than asked for",
    "vague": "its message does not say what to do",
}
BOTS = re.compile(
    r"\[bot\]|\b(dependabot|renovate|pre-commit-ci|github-actions|pyup-bot|greenkeeper|snyk-bot|weblate|imgbot)\b", re.I
)
REVERT = re.compile(r"revert(s|ed)?\b|back out\b|undo\b", re.I)
RELEASE = re.compile(
    r"(v|version )?\d+(\.\d+)+\S*\.?$|(\S+ )?(rel[e]?ase[ds]?|prepare|tag|bump( to)?|bump(ed)? version( to)?|version)"
    r"( for| to| of)?( release)?:? \(?v?\d+(\.\d+)*\S*",
    re.I,
)
PYTHON = (".py", ".pyi", ".pyx")
SOURCE_SUFFIXES = (
    *PYTHON,
    ".js",
    ".mjs",
    ".cjs",
    ".ts",
    ".mts",
    ".tsx",
    ".jsx",
    ".go",
    ".rs",
    ".c",
    ".h",
    ".java",
    ".rb",
)
TEST_PATH = re.compile(
    r"(^|/)(tests?|__tests__|testing|spec)/|(^|/)(test_[^/]*|[^/]*_tests?|conftest|tests?)\.py$"
    r"|[._-](test|spec|test-d)\.[cm]?[jt]sx?$|(^|/)tests?\.[cm]?[jt]sx?$|_test\.go$"
)
VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|third[_-]?party|node_modules|extern(al)?|bundled)/")
GENERATED_PATH = re.compile(
    r"_pb2(_grpc)?\.pyi?$|\.min\.(js|css)$|(^|/)(_?version\.py|package-lock\.json|.*\.lock|yarn\.lock|pnpm-lock\.yaml)$|\.snap$"
    r"|(^|/)(dist|build)/"
)
GENERATED_TEXT = re.compile(rb"@generated|DO NOT EDIT|(auto-?|automatically )generated (by|from|file)", re.I)
NOT_PRODUCT = re.compile(
    r"(^|/)(docs?|examples?|bench(marks?)?|scripts?|tools?|\.github|\.ci)/"
    r"|^(setup|conftest|noxfile|tasks|fabfile|bench)\.[a-z]+$|(^|/)[^/]*\.config\.[cm]?[jt]s$"
)


@dataclass(frozen=True)
class MiningLimits:
    """Sizes of changes that become tasks: lines added and removed in source files, and their number."""

    min_lines: int = 3
    max_lines: int = 1500
    min_files: int = 1
    max_files: int = 30


@dataclass(frozen=True)
class ChangeParts:
    """The parts of a change. `source` are files of the product; `others` are documents and configuration."""

    source: tuple[FileDifference, ...] = ()
    tests: tuple[FileDifference, ...] = ()
    others: tuple[FileDifference, ...] = ()

    @property
    def solution(self) -> dict[str, bytes | None]:
        """The reference solution: everything but the tests."""
        return {each.path: each.after for each in (*self.source, *self.others)}

    @property
    def test_changes(self) -> dict[str, bytes | None]:
        return {each.path: each.after for each in self.tests}

    @property
    def changed_lines(self) -> int:
        return sum(changed_line_count(each) for each in self.source)


def is_test_path(path: str) -> bool:
    return TEST_PATH.search(path) is not None


def is_source_path(path: str) -> bool:
    """Return whether a file is code of the product, by its name."""
    return path.endswith(SOURCE_SUFFIXES) and not is_test_path(path) and not NOT_PRODUCT.search(path)


def is_vendored(path: str) -> bool:
    return VENDORED.search(path) is not None


def is_generated(file: FileDifference) -> bool:
    head = (file.after or file.before or b"")[:600]
    return GENERATED_PATH.search(file.path) is not None or GENERATED_TEXT.search(head) is not None


def split_parts(files: Sequence[FileDifference]) -> ChangeParts:
    """Separate the tests of a change from its source and its other files; lock files and links are left out."""
    kept = [file for file in files if file.mode.startswith("100") and not re.search(r"\.lock$|-lock\.", file.path)]
    tests = [file for file in kept if is_test_path(file.path)]
    source = [
        file for file in kept if is_source_path(file.path) and not is_vendored(file.path) and not is_generated(file)
    ]
    chosen = {file.path for file in (*tests, *source)}
    return ChangeParts(tuple(source), tuple(tests), tuple(file for file in kept if file.path not in chosen))


def reason_of_message(commit: HistoryCommit) -> str:
    """Return why a commit is dropped by its message, parents and author alone, or ""."""
    subject, body = commit.message
    if commit.is_merge and not commit.is_pull_request:
        return "merge"
    if not commit.parents:
        return "first-commit"
    if REVERT.match(subject) or "This reverts commit" in body:
        return "revert"
    if BOTS.search(f"{commit.author} {commit.email}") or BOTS.search(subject):
        return "bot"
    if RELEASE.match(subject):
        return "release"
    return ""


def reason_of_files(files: Sequence[FileDifference], limits: MiningLimits) -> str:
    """Return why a change is dropped by the files that it changes, or ""."""
    if any(file.mode == "160000" for file in files):
        return "submodule"
    parts = split_parts(files)
    if not parts.source:
        code = [file for file in files if is_source_path(file.path)]
        if code and all(is_vendored(file.path) for file in code):
            return "vendored"
        return (
            "generated" if code and all(is_generated(file) or is_vendored(file.path) for file in code) else "no-source"
        )
    if all(same_code(file) for file in parts.source):
        return "formatting"
    code = [file for file in parts.tests if file.path.endswith(SOURCE_SUFFIXES) and file.after is not None]
    if not code:
        return "no-tests"
    if all(same_code(file) for file in code):
        return "tests-formatting"
    return _reason_of_size(parts, limits)


def _reason_of_size(parts: ChangeParts, limits: MiningLimits) -> str:
    lines = parts.changed_lines
    if lines < limits.min_lines:
        return "too-small"
    if lines > limits.max_lines or len(parts.source) > limits.max_files:
        return "too-large"
    return "few-files" if len(parts.source) < limits.min_files else ""


def same_code(file: FileDifference) -> bool:
    """Return whether only layout, comments or docstrings of a file change."""
    if file.before is None or file.after is None:
        return False
    if not file.path.endswith((".py", ".pyi")):
        return _words(file.before) == _words(file.after)
    try:
        return code_dump(file.before) == code_dump(file.after)
    except (SyntaxError, ValueError):
        return file.before == file.after


def _words(data: bytes) -> bytes:
    """Return code of any language without white space and whole-line comments."""
    lines = (line.strip() for line in data.splitlines())
    return b"".join(re.sub(rb"\s+", b"", line) for line in lines if not line.startswith((b"//", b"#", b"*", b"/*")))


def code_dump(data: bytes) -> str:
    """Return the syntax tree of Python code as text, without docstrings; raise SyntaxError if it is none."""
    return ast.dump(without_docstrings(parse_tree(data)))


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Empty all docstrings of a tree in place."""
    for node in ast.walk(tree):
        if (documented := docstring_node(node)) is not None:
            documented.value = ast.Constant("")
    return tree


def text_lines(data: bytes | None) -> list[str]:
    return (data or b"").decode("utf-8", "replace").splitlines()


def changed_line_count(file: FileDifference) -> int:
    """Return the number of lines that a change adds and removes."""
    matcher = SequenceMatcher(None, text_lines(file.before), text_lines(file.after), autojunk=False)
    return sum((i2 - i1) + (j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def added_lines(files: Sequence[FileDifference]) -> list[str]:
    """Return the lines that changes add, without white space at their ends."""
    found = []
    for file in files:
        before, after = text_lines(file.before), text_lines(file.after)
        for tag, _, _, start, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            found += [line.strip() for line in after[start:end]] if tag != "equal" else []
    return [line for line in found if line]


# ------------------------------------------------------------------------------------------------- categories

_CATEGORY_WORDS: tuple[tuple[Category, str], ...] = (
    ("migration", r"drop(ped)? support|deprecat|migrat|port(ed)? to|moderni[sz]e|switch(ed)? (from|to)|python ?[23]\b"),
    ("debugging", r"fix(e[sd])?\b|bug|regression|crash|wrong|incorrect|broken|error when|handle|prevent|avoid|correct"),
    (
        "refactor",
        r"refactor|renam|mov(e|ed) |simplif|clean ?up|extract|split|rewrite|reorgani|dedup|speed|optimi[sz]|perf",
    ),
    ("feature", r"add(s|ed)?\b|support|implement|introduce|allow|new\b|feat|enable|expose|accept|option"),
)
_PREFIXES: dict[str, Category] = {"fix": "debugging", "feat": "feature", "refactor": "refactor", "perf": "refactor"}


def category_of(subject: str, parts: ChangeParts) -> Category:
    """Return the category of a change: by its prefix, by the first word that says it, else by what it adds."""
    prefix = re.match(r"(\w+)(\([^)]*\))?!?: ", subject)
    if prefix and prefix[1].lower() in _PREFIXES:
        return _PREFIXES[prefix[1].lower()]
    places = [(found.start(), name) for name, words in _CATEGORY_WORDS if (found := re.search(words, subject, re.I))]
    if places:
        return min(places)[1]
    before = sum(len(text_lines(file.before)) for file in parts.source)
    return "feature" if sum(len(text_lines(file.after)) for file in parts.source) > before + 8 else "debugging"
