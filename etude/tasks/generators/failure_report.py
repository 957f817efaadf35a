"""Failure reports: the call, the actual and the expected value of a failing test, without the code under test.

Requests are written from these. They are taken from the test's own code and from pytest's output, never from the
changed code.
"""

import ast
import builtins
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from etude.syntax import parse_tree
from etude.tasks.generators.code import (
    FunctionNode,
    Module,
    definitions,
    import_text,
    mentions,
    remove_definitions,
    span_lines,
)
from etude.tasks.generators.executor import WORKSPACE, TestOutcome
from etude.tasks.generators.repository import Repository

MAX_VALUE_CHARS = 240  # of a value shown in a request
MAX_SNIPPET_LINES = 24  # of code shown in a request
# fixtures that a snippet does not have to define
COMMON_FIXTURES = frozenset({"self", "tmp_path", "tmpdir", "monkeypatch", "capsys", "caplog"})


@dataclass(frozen=True)
class FailureReport:
    """One test failure. Texts are "" where the test does not provide them."""

    test: str
    log: str  # pytest's output, without frames outside the tests
    error: str  # `TypeError: ...`, or "" for an assertion
    call: str  # left side of the assertion, or the statement that failed
    expected: str
    actual: str  # the value instead of the expected one, as pytest shows it
    compared: tuple[str, str]  # both values of the comparison, as pytest shows them
    not_raised: str  # an expected exception that was not raised
    snippet: str  # a script that runs up to the failure
    self_contained: bool  # the call means the same outside the test

    @property
    def title(self) -> str:
        """The test's name as words."""
        name = test_name(self.test)[1].rpartition(".")[2]
        return re.sub(r"\s+", " ", re.sub(r"^test_*|_+", " ", name)).strip()

    def texts(self) -> str:
        given = (
            self.error,
            self.call,
            self.expected,
            self.actual,
            self.not_raised,
            self.snippet,
            self.title,
            *self.compared,
        )
        return "\n".join(given)


def test_name(id: str) -> tuple[str, str]:
    """Return the file and the qualified name of a test, without its parameters."""
    file, _, rest = id.partition("::")
    return file, rest.partition("[")[0].replace("::", ".")


def names_by_file(ids: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of tests by their files."""
    found: dict[str, set[str]] = {}
    for file, name in map(test_name, ids):
        found.setdefault(file, set()).add(name)
    return found


def test_node(repository: Repository, id: str) -> tuple[Module, FunctionNode] | None:
    file, name = test_name(id)
    if file not in repository.files:
        return None
    module = repository.module(file)
    for node, owner in definitions(module.tree):
        if isinstance(node, FunctionNode) and ".".join([*owner, node.name]) == name:
            return module, node
    return None


def test_text(repository: Repository, id: str) -> str:
    found = test_node(repository, id)
    return found[0].text(found[1]) if found else ""


def read_failure_report(repository: Repository, id: str, outcome: TestOutcome) -> FailureReport | None:
    """Return the report of a failure, or None when the test or its message is missing."""
    found = test_node(repository, id)
    if found is None or not outcome.message:
        return None
    module, node = found
    line = next((line for file, line, _ in reversed(outcome.frames) if file == f"{WORKSPACE}/{module.path}"), 0)
    statement = _statement_at(node, line)
    first = outcome.message.strip().splitlines()[0]
    assertion = re.match(r"(AssertionError: )?assert (.*)", first)
    not_raised = re.match(r"Failed: DID NOT RAISE (?:any of \()?(?:<class ')?(?:[\w.]*\.)?(\w+)", first)
    call, expected = call_of(module, statement)
    compared = _values(assertion[2] if assertion else "")
    return FailureReport(
        test=id,
        log=_log(outcome, repository),
        error="" if assertion or not_raised or first.startswith("AssertionError") else truncate(first),
        call=call,
        expected=expected,
        actual=(compared[0] if compared[0] != expected else compared[1]) if expected else "",
        compared=compared,
        not_raised=not_raised[1] if not_raised else "",
        snippet=_snippet(module, node, statement),
        self_contained=is_self_contained(module, node, f"({call})\n({expected or None})"),
    )


def is_self_contained(module: Module, node: FunctionNode, code: str) -> bool:
    """Return whether code of a test means the same outside it: it uses no name that the test binds."""
    try:
        free = _free_names(parse_tree(code))
    except SyntaxError:
        return False
    given = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    bound = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    return all((name in _imports(module) or hasattr(builtins, name)) and name not in bound | given for name in free)


def _statement_at(node: FunctionNode, line: int) -> ast.stmt | None:
    """Return the innermost statement of a test on a line."""
    found: ast.stmt | None = None
    for each in ast.walk(node):
        here = isinstance(each, ast.stmt) and each is not node and each.lineno <= line <= (each.end_lineno or 0)
        if here and isinstance(each, ast.stmt) and (found is None or each.lineno >= found.lineno):
            found = each
    return found


def call_of(module: Module, statement: ast.stmt | None) -> tuple[str, str]:
    """Return the two sides of a comparison, or the statement itself and ""."""
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
            one, two = test.left, test.comparators[0]
            if _is_literal(one) and not _is_literal(two):
                one, two = two, one
            return one_line(module.text(one)), one_line(module.text(two))
        return one_line(module.text(test)), ""
    if isinstance(statement, ast.Assign) and statement.value is not None:
        return one_line(module.text(statement.value)), ""
    if isinstance(statement, ast.With):
        return one_line("\n".join(module.text(each) for each in statement.body[:2])), ""
    return (one_line(module.text(statement)), "") if statement is not None else ("", "")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def one_line(text: str) -> str:
    """Join code into one line, without the spaces that line breaks introduced."""
    if "\n" not in text:
        return text
    joined = re.sub(r"\s*\n\s*", " ", text).strip()
    return re.sub(r",? (?=[)\]}])", "", re.sub(r"(?<=[(\[{]) ", "", joined))


def _values(explained: str) -> tuple[str, str]:
    """Return the two values of pytest's `assert value == other`."""
    for sign in (" == ", " is "):
        left, found, right = explained.partition(sign)
        if found:
            return truncate(left), truncate(right)
    return "", ""


def truncate(text: str, most: int = MAX_VALUE_CHARS) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."


def _log(outcome: TestOutcome, repository: Repository) -> str:
    """Return pytest's output without frames outside the tests."""
    kept: list[str] = []
    keep = True
    for line in outcome.text.splitlines():
        frame = re.match(r"(\S+\.py):\d+: (in|[A-Z])", line)
        if frame is not None:
            keep = repository.source.is_test_path(frame[1])
        if line.startswith("E  "):
            keep = True
        if keep and not re.fullmatch(r"\s*\^+\s*", line) and "/site-packages/" not in line:
            kept.append(line[:200])
    lines = [line for line in kept if line.strip()]
    if len(lines) > 30:
        lines = [*lines[:18], "    ...", *lines[-10:]]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- snippets


def _snippet(module: Module, node: FunctionNode, statement: ast.stmt | None) -> str:
    """Return the test as a script: imports, helpers, statements up to the failure. "" if it needs more."""
    arguments = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    if statement is None or arguments - COMMON_FIXTURES or node.decorator_list:
        return ""
    body = [each for each in node.body if each.lineno <= statement.lineno and not _is_docstring(each)]
    if not body:
        return ""
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    code = textwrap.dedent("\n".join(module.lines[first - 1 : last]))
    if mentions(code, "self") or arguments & {"tmp_path", "tmpdir", "monkeypatch", "capsys", "caplog"}:
        return ""
    needed = _required_lines(module, parse_tree(code))
    if needed is None:
        return ""
    text = "\n".join([*needed, "", code.strip("\n")] if needed else [code.strip("\n")])
    return text if len(text.splitlines()) <= MAX_SNIPPET_LINES else ""


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _required_lines(module: Module, code: ast.Module) -> list[str] | None:
    """Return the imports and small definitions that code needs from its module, or None when they are too many."""
    given = _imports(module)
    local = {node.name: node for node in module.tree.body if isinstance(node, FunctionNode | ast.ClassDef)}
    lines: dict[str, None] = {}
    pieces: dict[str, None] = {}
    waiting: list[ast.AST] = [code]
    while waiting:
        for name in sorted(_free_names(waiting.pop())):
            if name in given:
                lines[given[name]] = None
            elif name in local and (local[name].end_lineno or 0) - local[name].lineno < 8 and len(pieces) < 3:
                text = "\n".join(module.lines[span_lines(local[name])[0] - 1 : local[name].end_lineno])
                if text not in pieces:
                    pieces[text] = None
                    waiting.append(local[name])
            elif not hasattr(builtins, name):
                return None
    return [*lines, *(f"\n{piece}\n" for piece in pieces)]


def _imports(module: Module) -> dict[str, str]:
    """Return the names a module imports, each with its import line; relative and `tests` imports are left out."""
    found: dict[str, str] = {}
    for node in module.tree.body:
        inner = isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("tests"))
        if isinstance(node, ast.Import | ast.ImportFrom) and not inner:
            found |= {each.asname or each.name.partition(".")[0]: import_text(node, [each]) for each in node.names}
    return found


def _free_names(code: ast.AST) -> set[str]:
    """Return the names that code uses and does not bind."""
    bound, used = set[str](), set[str]()
    for node in ast.walk(code):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            bound.add(node.name)
            if isinstance(node, FunctionNode):
                given = node.args
                bound |= {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
                bound |= {each.arg for each in (given.vararg, given.kwarg) if each}
        elif isinstance(node, ast.Lambda):
            bound |= {each.arg for each in node.args.args}
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def mentions_any(text: str, forbidden_words: Collection[str]) -> bool:
    """Return whether a text contains a forbidden word, also as separate words (`format_bar`, format bar)."""
    plain = [
        word.strip("_").replace("_", " ") for word in forbidden_words if "_" in word.strip("_") and "." not in word
    ]
    return any(mentions(text, word) for word in forbidden_words) or any(
        mentions(text.lower(), word.lower()) for word in plain
    )


def mentions_none(report: FailureReport, forbidden_words: Collection[str], log: bool = False) -> bool:
    """Return whether the texts of a report (with `log`: its log and test id) contain no forbidden word."""
    return not mentions_any(report.log + report.test if log else report.texts(), forbidden_words)


def without_tests(repository: Repository, ids: Collection[str]) -> Mapping[str, bytes | None]:
    """Return the changes that remove these tests; a file without other tests is deleted."""
    changes: dict[str, bytes | None] = {}
    for file, names in names_by_file(ids).items():
        left = names_by_file(repository.durations)[file] - names
        changes[file] = remove_definitions(repository.files[file], file, names) if left else None
    return changes
