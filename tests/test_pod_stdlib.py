"""JSON in programs for pods equals that of the standard library, on every Python, and loads none of it."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from interpreters import interpreters

from etude import pod_stdlib

TEXTS = [
    *('{"a": [1, 2.5, null, true, "x\\ud800"]}', " 3 \n", '"\u00e9"', "NaN", "-Infinity", "1e999", "[]", "{}"),
    *("", "[", '{"a":', "1 2", "nul", '"\\x"', "[1,]", '"a\nb"', "\ufeff1", "'a'", "[" * 100_000),
]
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
VALUES = [
    {"a": (1, 2), "b": {}},
    {1: 2, None: True, 2.5: 0},
    "\u00e9\U0001f600\ud800",
    1e22,
    math.inf,
    CIRCLE,
    object(),
]
ECHO = """
import sys
value = loads(sys.stdin.read())
print(dumps(value), "json" in sys.modules, "re" in sys.modules)
"""


def outcome(function: Any, given: Any) -> Any:
    try:
        return repr(function(given))
    except (ValueError, RecursionError, TypeError) as error:
        return next(kind for kind in (ValueError, RecursionError, TypeError) if isinstance(error, kind))


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_texts_are_read_as_by_json(text: str) -> None:
    assert outcome(pod_stdlib.loads, text) == outcome(json.loads, text)
    if not text.startswith("\ufeff"):  # which json accepts in bytes only
        assert outcome(pod_stdlib.loads, text.encode()) == outcome(json.loads, text)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_are_written_as_by_json(value: Any) -> None:
    assert outcome(pod_stdlib.dumps, value) == outcome(json.dumps, value)


@pytest.mark.parametrize("python", interpreters())
def test_it_runs_on_this_python_without_json(python: str) -> None:
    source = Path(pod_stdlib.__file__).read_text()
    command, value = [python, "-I", "-S", "-c", source + ECHO], {"a": [1.5, None, "\u00e9"]}
    done = subprocess.run(command, input=json.dumps(value), capture_output=True, text=True)
    assert done.stdout == f"{json.dumps(value)} False False\n", done.stderr
