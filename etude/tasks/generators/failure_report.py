"""What a failing test tells a person who has not seen the code: the call, what came of it, what should have.

Requests are written from this. It is taken from the test's own text and from what pytest said, never from the place
that was changed.
"""

import ast
import builtins
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from etude.tasks.generators.code import FunctionNode, Module, definitions, mentions, tree_of, without_definitions
from etude.tasks.generators.executor import WORKSPACE, Outcome
from etude.tasks.generators.repository import Repository

LONGEST = 240  # characters of a value that is shown
SNIPPET = 24  # lines of code that are shown
# fixtures whose use needs no explanation
PLAIN = frozenset({"self", "tmp_path", "tmpdir", "monkeypatch", "capsys", "caplog"})


@dataclass(frozen=True)
class Evidence:
    """One failure. Texts are "" where the test does not give them."""

    test: str
    log: str  # pytest's words, without frames of the product
    error: str  # `TypeError: ...`, or "" for an assertion
    call: str  # what was asked for: the left side of the assertion, or the statement that failed
    wanted: str
    got: str  # the value that came instead, as pytest shows it
    sides: tuple[str, str]  # both values of the comparison, as pytest shows them
    not_raised: str  # an exception that did not come
    snippet: str  # runs by itself up to the failure
    closed: bool  # the call means the same outside of the test

    @property
    def title(self) -> str:
        """What the test is about, in the words of its name."""
        name = test_name(self.test)[1].rpartition(".")[2]
        return re.sub(r"\s+", " ", re.sub(r"^test_*|_+", " ", name)).strip()

    def texts(self) -> str:
        given = (self.error, self.call, self.wanted, self.got, self.not_raised, self.snippet, self.title, *self.sides)
        return "\n".join(given)


def test_name(id: str) -> tuple[str, str]:
    """The file and the qualified name of a test, without its parameters."""
    file, _, rest = id.partition("::")
    return file, rest.partition("[")[0].replace("::", ".")


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


def read_evidence(repository: Repository, id: str, outcome: Outcome) -> Evidence | None:
    """What a failure says; None when there is nothing to go by."""
    found = test_node(repository, id)
    if found is None or not outcome.message:
        return None
    module, node = found
    line = next((line for file, line, _ in reversed(outcome.frames) if file == f"{WORKSPACE}/{module.path}"), 0)
    statement = _statement_at(node, line)
    first = outcome.message.strip().splitlines()[0]
    assertion = re.match(r"(AssertionError: )?assert (.*)", first)
    not_raised = re.match(r"Failed: DID NOT RAISE (?:any of \()?(?:<class ')?(?:[\w.]*\.)?(\w+)", first)
    call, wanted = call_of(module, statement)
    sides = _values(assertion[2] if assertion else "")
    return Evidence(
        test=id,
        log=_log(outcome, repository),
        error="" if assertion or not_raised or first.startswith("AssertionError") else shortened(first),
        call=call,
        wanted=wanted,
        got=(sides[0] if sides[0] != wanted else sides[1]) if wanted else "",
        sides=sides,
        not_raised=not_raised[1] if not_raised else "",
        snippet=_snippet(module, node, statement),
        closed=is_closed(module, node, f"({call})\n({wanted or None})"),
    )


def is_closed(module: Module, node: FunctionNode, code: str) -> bool:
    """Whether code of a test means the same outside of it: it has no name that the test itself makes."""
    try:
        free = _free(tree_of(code))
    except SyntaxError:
        return False
    given = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    made = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    return all((name in _imports(module) or hasattr(builtins, name)) and name not in made | given for name in free)


def _statement_at(node: FunctionNode, line: int) -> ast.stmt | None:
    """The innermost statement of a test on a line."""
    found: ast.stmt | None = None
    for each in ast.walk(node):
        here = isinstance(each, ast.stmt) and each is not node and each.lineno <= line <= (each.end_lineno or 0)
        if here and isinstance(each, ast.stmt) and (found is None or each.lineno >= found.lineno):
            found = each
    return found


def call_of(module: Module, statement: ast.stmt | None) -> tuple[str, str]:
    """What is compared with what; or the statement itself."""
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
            one, two = test.left, test.comparators[0]
            if _is_plain(one) and not _is_plain(two):
                one, two = two, one
            return one_line(module.text(one)), one_line(module.text(two))
        return one_line(module.text(test)), ""
    if isinstance(statement, ast.Assign) and statement.value is not None:
        return one_line(module.text(statement.value)), ""
    if isinstance(statement, ast.With):
        return one_line("\n".join(module.text(each) for each in statement.body[:2])), ""
    return (one_line(module.text(statement)), "") if statement is not None else ("", "")


def _is_plain(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def one_line(text: str) -> str:
    """Code on one line, without the space that breaking it had brought."""
    if "\n" not in text:
        return text
    joined = re.sub(r"\s*\n\s*", " ", text).strip()
    return re.sub(r",? (?=[)\]}])", "", re.sub(r"(?<=[(\[{]) ", "", joined))


def _values(explained: str) -> tuple[str, str]:
    """The two values of pytest's `assert value == other`."""
    for sign in (" == ", " is "):
        left, found, right = explained.partition(sign)
        if found:
            return shortened(left), shortened(right)
    return "", ""


def shortened(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."


def _log(outcome: Outcome, repository: Repository) -> str:
    """pytest's words with the product's own frames taken out."""
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


# ------------------------------------------------------------------------------------------------- code to show


def _snippet(module: Module, node: FunctionNode, statement: ast.stmt | None) -> str:
    """The test as a script: its imports, what it uses, its statements up to the failure. "" if it needs more."""
    arguments = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    if statement is None or arguments - PLAIN or node.decorator_list:
        return ""
    body = [each for each in node.body if each.lineno <= statement.lineno and not _is_text(each)]
    if not body:
        return ""
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    code = textwrap.dedent("\n".join(module.lines[first - 1 : last]))
    if mentions(code, "self") or arguments & {"tmp_path", "tmpdir", "monkeypatch", "capsys", "caplog"}:
        return ""
    needed = _needed(module, tree_of(code))
    if needed is None:
        return ""
    text = "\n".join([*needed, "", code.strip("\n")] if needed else [code.strip("\n")])
    return text if len(text.splitlines()) <= SNIPPET else ""


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _needed(module: Module, code: ast.Module) -> list[str] | None:
    """The imports and small definitions that some code takes from around it; None when they are too much to show."""
    given = _imports(module)
    local = {node.name: node for node in module.tree.body if isinstance(node, FunctionNode | ast.ClassDef)}
    lines: dict[str, None] = {}
    pieces: dict[str, None] = {}
    waiting: list[ast.AST] = [code]
    while waiting:
        for name in sorted(_free(waiting.pop())):
            if name in given:
                lines[given[name]] = None
            elif name in local and (local[name].end_lineno or 0) - local[name].lineno < 8 and len(pieces) < 3:
                text = "\n".join(module.lines[_first(local[name]) - 1 : local[name].end_lineno])
                if text not in pieces:
                    pieces[text] = None
                    waiting.append(local[name])
            elif not hasattr(builtins, name):
                return None
    return [*lines, *(f"\n{piece}\n" for piece in pieces)]


def _first(node: FunctionNode | ast.ClassDef) -> int:
    return node.decorator_list[0].lineno if node.decorator_list else node.lineno


def _imports(module: Module) -> dict[str, str]:
    """Names that a module imports, with a line that imports each; none that only its own directory has."""
    found: dict[str, str] = {}
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                line = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                found[alias.asname or alias.name.partition(".")[0]] = line
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and not (node.module or "").startswith("tests"):
            for alias in node.names:
                line = f"from {node.module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                found[alias.asname or alias.name] = line
    return found


def _free(code: ast.AST) -> set[str]:
    """Names that code uses and does not make."""
    made, used = set[str](), set[str]()
    for node in ast.walk(code):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            made.add(node.name)
            if isinstance(node, FunctionNode):
                given = node.args
                made |= {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
                made |= {each.arg for each in (given.vararg, given.kwarg) if each}
        elif isinstance(node, ast.Lambda):
            made |= {each.arg for each in node.args.args}
        elif isinstance(node, ast.alias):
            made.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    return used - made


def named(text: str, secret: Collection[str]) -> bool:
    """Whether a text has a secret word, or the same in plain words (`format_bar`, format bar)."""
    plain = [word.strip("_").replace("_", " ") for word in secret if "_" in word.strip("_") and "." not in word]
    return any(mentions(text, word) for word in secret) or any(mentions(text.lower(), word.lower()) for word in plain)


def silent(evidence: Evidence, secret: Collection[str], log: bool = False) -> bool:
    """Whether a failure's texts keep secret words to themselves."""
    return not named(evidence.log + evidence.test if log else evidence.texts(), secret)


def hidden_tests(repository: Repository, ids: Collection[str]) -> Mapping[str, bytes | None]:
    """Test files without these tests; a file that has no other is gone."""
    by_file: dict[str, set[str]] = {}
    for id in ids:
        file, name = test_name(id)
        by_file.setdefault(file, set()).add(name)
    changes: dict[str, bytes | None] = {}
    for file, names in by_file.items():
        left = {test_name(id)[1] for id in repository.seconds if test_name(id)[0] == file} - names
        changes[file] = without_definitions(repository.files[file], file, names) if left else None
    return changes
