"""Syntax trees are parsed by one function, because `ast.parse` fails in concurrent threads."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etude.syntax import literal_value, parse_tree

ROOT = Path(__file__).parents[1]
# The first is the function itself; the second runs beside tested code in a pod and imports as little as it can.
ALLOWED = {"etude/syntax.py", "etude/tasks/checks/inside/pytest_run.py"}
# `ast.literal_eval` parses what is given as text. These give it nodes; the last runs in a pod, in one thread.
NODES_ONLY = {
    "etude/tasks/generators/failure_report.py",
    "etude/tasks/generators/question.py",
    "etude/tasks/installation/detect_python.py",
    "etude/tasks/checks/inside/judges.py",
}


def test_concurrent_threads_get_the_same_trees() -> None:
    source = "x = " + "(" * 60 + "1" + ")" * 60 + "\n" + "def f(a):\n    return [g(h(i(j(k(a)))))]\n" * 300
    expected = ast.dump(ast.parse(source))
    with ThreadPoolExecutor(8) as threads:
        assert {ast.dump(tree) for tree in threads.map(parse_tree, [source] * 64)} == {expected}


def test_literals_and_trees_are_parsed_at_the_same_time() -> None:
    source, literal = "def f(a):\n    return [g(h(i(j(k(a)))))]\n" * 200, "[" * 30 + "1, 'two'" + "]" * 30

    def work(number: int) -> object:
        return literal_value(literal) if number % 2 else ast.dump(parse_tree(source))

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(64)))
    assert found == [ast.dump(ast.parse(source)), ast.literal_eval(literal)] * 32


def test_only_this_module_parses() -> None:
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for package in ("etude", "etude_nano")
        for path in (ROOT / package).rglob("*.py")
    }
    assert {path for path, text in sources.items() if "ast.parse(" in text} <= ALLOWED
    assert {path for path, text in sources.items() if "ast.literal_eval(" in text} <= ALLOWED | NODES_ONLY
