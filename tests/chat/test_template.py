"""A checkpoint's chat template cannot hang the program that renders it."""

import subprocess
import sys
import threading

import pytest

from etude.chat import template
from etude.chat.template import render_template
from etude.errors import InputError

LOOPS = {
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3,
    "filtered": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive": "{% for a in [1] recursive %}{{ loop([1, 1]) if loop.depth < 40 }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "filters": "{% for a in range(99999) %}{% set x = range(99999) | map('string') | join | length %}{% endfor %}",
}
OPERATIONS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "text": "{{ 'a' * 10 ** 12 }}",
    "list": "{{ 10 ** 12 * [0] }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_does_not_end_is_interrupted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_S", 0.5)
    with pytest.raises(InputError, match=r"took more than 0.5 s"):
        render_template(LOOPS[name], {})
    assert render_template("{{ x }}", {"x": 1}) == "1"


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_cannot_be_interrupted_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"too large|Range too big|took more than"):
        render_template(OPERATIONS[name], {})


def test_products_of_templates_in_use_still_work() -> None:
    assert render_template("{{ '-' * 3 }}{{ 2 * 3 }}{{ 2 ** 8 }}{{ 1.5 * 2 }}{{ [0] * 2 }}{{ 2 * 'a' }}", {}) == (
        "---62563.0[0, 0]aa"
    )


def test_a_thread_is_interrupted_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_S", 0.5)
    found: list[str] = []

    def render(source: str) -> None:
        try:
            found.append(render_template(source, {}))
        except InputError as error:
            found.append(str(error))

    threads = [threading.Thread(target=render, args=(source,)) for source in (LOOPS["nested"], "fine")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["fine", "the chat template failed: it took more than 0.5 s"]


def test_many_renders_at_the_limit_leave_no_exception_behind() -> None:
    """A render may end at the moment of the interruption; nothing may be raised after it."""
    program = """
from etude.chat import template
from etude.errors import InputError
template.RENDER_S, template.POLL_S = 0.002, 0.001
ended = {True: 0, False: 0}
for count in range(150):
    try:
        template.render_template("{% for a in range(n) %}{% endfor %}", {"n": 100 * count})
        ended[True] += 1
    except InputError:
        ended[False] += 1
template.RENDER_S = 30
assert template.render_template("x", {}) == "x"
print(sum(ended.values()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "150\n", done.stderr
