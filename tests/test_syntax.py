"""Syntax trees are parsed by one function, because `ast.parse` fails in concurrent threads."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etude.syntax import parse_tree

ROOT = Path(__file__).parents[1]
# The first is the function itself; the second runs beside tested code in a pod and imports as little as it can.
ALLOWED = {"etude/syntax.py", "etude/tasks/checks/inside/pytest_run.py"}


def test_concurrent_threads_get_the_same_trees() -> None:
    source = "x = " + "(" * 60 + "1" + ")" * 60 + "\n" + "def f(a):\n    return [g(h(i(j(k(a)))))]\n" * 300
    expected = ast.dump(ast.parse(source))
    with ThreadPoolExecutor(8) as threads:
        assert {ast.dump(tree) for tree in threads.map(parse_tree, [source] * 64)} == {expected}


def test_only_this_function_parses() -> None:
    calls = [
        str(path.relative_to(ROOT))
        for package in ("etude", "etude_nano")
        for path in (ROOT / package).rglob("*.py")
        if "ast.parse(" in path.read_text()
    ]
    assert {*calls} <= ALLOWED
