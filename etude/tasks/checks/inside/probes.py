"""Plants probes in the test files of a task: tests with a planned status that look like the others.

A false twin is a copy of a real test that expects another value, so it must fail. Code that makes tests pass without
doing the work, such as reading the expected value from the caller's frame, makes a twin pass too. A test has several
twins: which of the copies is the real one, what it is called and whether its value is the smallest or the largest is
drawn for each run, as are the places.

`false_copy` returns a file in which every expected value is another one. As the text on disk it misleads code that
reads the test file; in place of a public task's tests no submission may pass it.
"""

from __future__ import annotations

import ast
import collections
import random
import re

from etude.syntax import parse_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_FILES = 16  # test files of a check that get probes
MAX_BYTES = 1 << 20  # of a test file that gets probes
TWINS = 4  # of a test
TWINNED_TESTS = 6  # of a file
MAX_TWINNED_TESTS = 16  # of a check
UNFIT = re.compile(rb"\bpytestmark\b|importorskip|\b__test__\b|allow_module_level|pytest_generate_tests|load_tests")
SHOWS_LINES = re.compile(
    rb"lineno|inspect|linecache|traceback|_getframe|currentframe|stacklevel|doctest|getsource|__file__"
)
EQUALITIES = ("assertEqual", "assertEquals")
LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)
WORDS = (
    *("again", "twice", "default", "empty", "other", "more", "simple", "basic", "mixed", "edge", "small", "large"),
    *("same", "next", "last", "first", "nested", "order", "plain", "short", "long", "whole", "single", "value"),
)
_rng = random.SystemRandom()


class Planted:
    """The probes of one run. `files` replace test files; ids are those that pytest reports."""

    def __init__(self, run: list[str]) -> None:
        self.run = list(run)
        self.files: dict[str, str] = {}
        self.planned: dict[str, str] = {}  # status by id of a probe
        self.real: dict[str, str] = {}  # id of a test by the id under which it runs

    def statuses(self, reported: dict[str, str]) -> dict[str, str]:
        """Return the statuses of the real tests under their own ids."""
        return {self.real.get(name, name): status for name, status in reported.items() if name not in self.planned}

    def deviation(self, reported: dict[str, str]) -> str:
        """Return which probe did not have its planned status, or ""."""
        for name, status in self.planned.items():
            if reported.get(name, "missing") != status:
                return f"{name}, which must have the status {status}, has {reported.get(name, 'missing')}"
        return ""


class _Test:
    """A test function of a file. `owner` is the part of its id between file and name."""

    def __init__(self, node: ast.FunctionDef, owner: str, places: list[int]) -> None:
        self.node, self.owner, self.places = node, owner, places


def plant(run: list[str], expected: dict[str, str], suite: Callable[[str], bytes | None]) -> Planted:
    """Return the tests to run with probes in their files. `suite` returns the file of a path, None if it has none."""
    planted = Planted(run)
    paths = sorted({test.partition("::")[0] for test in run if test.partition("::")[0].endswith(".py")})
    sources = {path: source for path in paths if (source := suite(path)) is not None}
    words = collections.Counter(word for source in sources.values() for word in re.findall(rb"\w+", source))
    for path in _rng.sample(sorted(sources), min(len(sources), MAX_FILES)):
        source = sources[path]
        if len(source) > MAX_BYTES or UNFIT.search(source):
            continue
        try:
            tree = parse_tree(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        # A class that another one may extend would give its probes to it.
        extended = {word.decode() for word, count in words.items() if count > 1}
        _plant_in(planted, path, tree, source, expected, extended)
    return planted


def _plant_in(
    planted: Planted, path: str, tree: ast.Module, source: bytes, expected: dict[str, str], extended: set[str]
) -> None:
    lines = source.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    chosen = {test.partition("::")[2] for test in planted.run if test.startswith(f"{path}::")}
    taken = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    places = [len(lines)] if SHOWS_LINES.search(source) else _boundaries(tree, len(lines))
    tests = [each for each in _tests(tree, places, extended) if f"{path}::{each.owner}{each.node.name}" in expected]
    names = [each.node.name for each in tests] or ["test_value"]
    added: list[tuple[int, bool, bytes]] = []  # line after which it is inserted, whether it leaves a class, text

    def add(test_id: str, status: str) -> None:
        planted.planned[f"{path}::{test_id}"] = status
        if chosen and test_id not in chosen:
            planted.run.append(f"{path}::{test_id}")

    unique = [each for each in tests if len(re.findall(rb"\b%s\b" % each.node.name.encode(), source)) == 1]
    passing = [each for each in unique if expected[f"{path}::{each.owner}{each.node.name}"] == "passed"]
    false = [(each, values) for each in passing if (values := _false_values(each.node))]
    twinned = sum(status == "failed" for status in planted.planned.values()) // TWINS
    for test, values in _rng.sample(false, min(len(false), TWINNED_TESTS, max(1, MAX_TWINNED_TESTS - twinned))):
        own = test.node.name
        renamed = [own, *(_draw_name(names, taken) for _ in range(TWINS))]
        _rng.shuffle(renamed)  # the first is the name of the real test
        if renamed[0] != own:
            planted.real[f"{path}::{test.owner}{renamed[0]}"] = f"{path}::{test.owner}{own}"
            if chosen:
                planted.run.append(f"{path}::{test.owner}{renamed[0]}")
        constant = _rng.choice(values)
        for number, text in enumerate(_others(constant.value, TWINS), 1):
            name = renamed[number]
            copy = b"\n\n" + _copy(lines, test.node, name, constant, text)
            added.append((_rng.choice(test.places), not test.owner, copy))
            add(f"{test.owner}{name}", "failed")
        at = test.node.lineno - 1
        lines[at] = _rename(lines[at], own, renamed[0])
    for status in ("passed",) if false else ("passed", "failed"):
        value, name = _rng.randrange(2, 1000), _draw_name(names, taken)
        wanted = value if status == "passed" else value + _rng.choice((-1, 1)) * _rng.randrange(1, 10)
        probe = f"\n\ndef {name}():\n    value = {value}\n    assert value == {wanted}\n".encode()
        added.append((_rng.choice(places), True, probe))
        add(name, status)
    _rng.shuffle(added)
    for place, _, text in sorted(added, key=lambda each: each[:2], reverse=True):
        lines.insert(place, text)
    planted.files[path] = b"".join(lines).decode("utf-8", "surrogateescape")


def _tests(tree: ast.Module, places: list[int], extended: set[str]) -> Iterator[_Test]:
    """Yield the test functions of a file, and the methods of classes that none extends, which stay in their class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield _Test(node, "", places)
        elif isinstance(node, ast.ClassDef) and len(places) > 1 and node.name not in extended:
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            ends = [each.end_lineno or 0 for each in methods]
            yield from (_Test(each, f"{node.name}::", ends) for each in methods)


def _copy(lines: list[bytes], node: ast.FunctionDef, name: str, constant: ast.Constant, text: bytes) -> bytes:
    """Return the lines of a test under another name, with another value for a constant."""
    copy = lines[node.lineno - 1 : node.end_lineno]
    at = constant.lineno - node.lineno
    copy[at] = copy[at][: constant.col_offset] + text + copy[at][constant.end_col_offset :]
    copy[0] = _rename(copy[0], node.name, name)
    return b"".join(copy)


def _false_values(node: ast.FunctionDef) -> list[ast.Constant]:
    """Return constants that a test compares a result with: in an equality that it always reaches, and after which it
    does nothing but check. A copy that fails there leaves behind what the test leaves behind; one that fails earlier
    may not restore a global setting, which then fails the tests after it."""
    if node.decorator_list or any(argument.arg == "request" for argument in node.args.args):
        return []
    if any(isinstance(each, (ast.Global, ast.Nonlocal)) for each in node.body):
        return []
    if any(isinstance(each, ast.Call) and _called(each) == "sleep" for each in ast.walk(node)):
        return []  # every copy would wait as long
    reached = next(
        (at for at, each in enumerate(node.body) if isinstance(each, (ast.Return, ast.Raise))), len(node.body)
    )
    acts = (at for at in reversed(range(reached)) if not _only_checks(node.body[at]))
    found: list[ast.Constant] = []
    for statement in node.body[next(acts, -1) + 1 : reached]:
        sides = _compared(statement)
        literal = [side for side in sides if all(isinstance(part, LITERALS) for part in ast.walk(side))]
        if len(literal) == 1:
            found += [part for part in ast.walk(literal[0]) if isinstance(part, ast.Constant) and _is_plain(part)]
    return found


def _only_checks(statement: ast.stmt) -> bool:
    """Return whether a statement of a test restores nothing: it asserts, expects an exception, or sets local names."""
    if isinstance(statement, (ast.Assert, ast.Pass, ast.FunctionDef, ast.ClassDef)):
        return True
    if isinstance(statement, (ast.For, ast.If)):
        return all(map(_only_checks, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.With):
        return all(_is_check(each.context_expr) for each in statement.items)
    if isinstance(statement, ast.Expr):
        return _is_check(statement.value)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        parts = [part for target in targets for part in ast.walk(target)]
        return all(isinstance(part, (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.Store)) for part in parts)
    return False


def _is_check(value: ast.expr) -> bool:
    """Return whether an expression is a constant, `pytest.raises(...)` or a method like `self.assertEqual(...)`."""
    if isinstance(value, ast.Constant):
        return True
    name = _called(value) if isinstance(value, ast.Call) else ""
    return name.startswith("assert") or name in ("raises", "warns", "fail")


def _called(call: ast.Call) -> str:
    """Return the last name of what is called, or ""."""
    return str(getattr(call.func, "attr", "") or getattr(call.func, "id", ""))


def _compared(statement: ast.stmt) -> list[ast.expr]:
    """Return both sides of `assert a == b` or `self.assertEqual(a, b)`; nothing of other statements."""
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
            return [test.left, test.comparators[0]]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and call.func.attr in EQUALITIES and not call.keywords:
            return list(call.args[:2]) if len(call.args) >= 2 else []
    return []


def _is_plain(node: ast.Constant) -> bool:
    """Whether another value of the same type can be put in place of a constant."""
    return type(node.value) in (int, float, str) and node.lineno == node.end_lineno and node.value == node.value


def _others(value: object, count: int) -> list[bytes]:
    """Return the sources of other values of the same type. Among them the value has any rank with the same chance."""
    found: set[object] = set()
    below = _rng.randrange(count + 1)
    if isinstance(value, str):
        while len(found) < count:
            found.add(_another_text(value))
        return [ascii(each).encode() for each in _rng.sample(sorted(map(str, found - {value})), count)]
    assert isinstance(value, (int, float)), value
    steps = max(10, min(abs(int(value)), 1000) // 2 + 1) if abs(value) < 1e300 else 10
    numbers: list[int | float] = [value - step for step in _rng.sample(range(1, steps), below)]
    numbers += [value + step for step in _rng.sample(range(1, steps), count - below)]
    if len({value, *numbers}) <= count:  # a float so large that a step does not change it
        numbers = [value * (step + 2) for step in range(count)]
    _rng.shuffle(numbers)
    return [repr(each).encode() for each in numbers]


def _another_text(value: str) -> str:
    """Return a text like this one: shorter, longer or of the same length."""
    at = _rng.randrange(len(value)) if value else 0
    letter = _rng.choice("aeinorst" if not value or value.islower() else "AEINORST0123456789")
    changed = _rng.choice(
        [
            value[:at] + value[at + 1 :],
            value[:at] + letter + value[at + 1 :],
            value[:at] + letter + value[at:],
            value + _rng.choice(WORDS),
        ]
    )
    return changed if changed != value else value + letter


def _rename(line: bytes, old: str, new: str) -> bytes:
    return re.sub(rb"\b%s\b" % old.encode(), new.encode(), line, count=1)


def _draw_name(names: list[str], taken: set[str]) -> str:
    while True:
        name = f"{_rng.choice(names)}_{_rng.choice(WORDS)}"
        if name in taken:
            name += f"_{_rng.randrange(2, 100)}"
        if name not in taken:
            taken.add(name)
            return name


def _boundaries(tree: ast.Module, last: int) -> list[int]:
    """Return the numbers of lines after which a function can be inserted: after the first function or class."""
    found, end = [last], 0
    for node in tree.body:
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        if 0 < end < start:
            found.append(end)
        if end or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            end = node.end_lineno or 0
    return found


# ------------------------------------------------------------------------------------------------- false copies


def false_copy(source: bytes, seen: frozenset[bytes] = frozenset()) -> bytes | None:
    """Return a Python file with the same lines in which the values of comparisons and tables are other ones; None if it
    has none, cannot be parsed, or shows its own lines. Lines in `seen` keep theirs if others have values."""
    if len(source) > MAX_BYTES or SHOWS_LINES.search(source):
        return None
    try:
        tree = parse_tree(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = source.splitlines(keepends=True)
    found = sorted(_table_values(tree), key=lambda each: (each.lineno, each.col_offset), reverse=True)
    found = [each for each in found if lines[each.lineno - 1].strip() not in seen] or found
    for constant in found:
        line = lines[constant.lineno - 1]
        (text,) = _others(constant.value, 1)
        lines[constant.lineno - 1] = line[: constant.col_offset] + text + line[constant.end_col_offset :]
    return b"".join(lines) if found else None


def _table_values(tree: ast.AST, inside: bool = False) -> Iterator[ast.Constant]:
    """Yield the constants of comparisons, of assertEqual and of displays, but not of other calls, which name files and
    modules."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Constant):
            if inside and _is_plain(node):
                yield node
        elif isinstance(node, ast.Call):
            equal = isinstance(node.func, ast.Attribute) and node.func.attr in (*EQUALITIES, "parametrize")
            for part in node.args if equal else ():
                yield from _table_values(ast.Expression(part), True)
            if not equal:
                yield from _table_values(node, False)
        elif not isinstance(node, ast.JoinedStr):
            displays = (ast.Compare, ast.Tuple, ast.List, ast.Set, ast.Dict)
            keep = inside and isinstance(node, (ast.UnaryOp, ast.Expression))
            yield from _table_values(node, keep or isinstance(node, displays))
