"""Checks observe what must not change: other spellings, settings, lines, contents of wheels, versions of code."""

import ast
import hashlib
import json
import random
from typing import Any

import pytest

from etude.tasks.checks import lines_check
from etude.tasks.checks.equivalents import rewrite_equivalently
from etude.tasks.checks.inside.file_judges import FILE_KINDS, judge_data, judge_findings, judge_lines, judge_scope
from etude.tasks.checks.inside.judges import Secret, judge_wheel
from etude.tasks.checks.inside.patterns import PATTERNS, lines_with, modern_forms
from etude.tasks.checks.inside.probes import Planted, _others, false_copy
from etude_nano import nano_task

SPELLINGS = {  # of legacy forms, by family
    "text-formatting": (
        '"- %s".__mod__(x)',
        'import operator as o\no.mod("- %s", x)',
        'from operator import mod\nmod("- %s", x)',
        'form = "- %s"\nform % x',
        'getattr("- %s", "__mod__")(x)',
        '"- {}".format(x)',
        'f = "- {}".format\nf(x)',
        'format(x, "s")',
        'string.Template("- $x").substitute(x=x)',
        '"- " + x',
        '"".join(["- ", x])',
    ),
    "none-comparisons": (
        "x == None",
        "x.__eq__(None)",
        "nothing = None\nx != nothing",
        "x in (None,)",
        "a == x == None",
    ),
    "type-comparisons": ("type(x) == int", "type(x) is int", "x.__class__ == int", "kind = type(x)\nkind == int"),
    "typing": ("import typing as q\ny: q.List[int]", "from typing import Optional as O\ny: 'O[int]'"),
    "classes": (
        "import builtins\nclass A(builtins.object): pass",
        "base = object\nclass A(base): pass",
        "s = super\ns(A, x)",
    ),
    "literals": ("d = dict\nd()", "list(())", "set((1, 2))", "import builtins\nbuiltins.dict()"),
    "os-errors": ("import builtins\nbuiltins.IOError", "getattr(b, 'EnvironmentError')"),
    "maps": ("[*map(lambda y: y, x)]", "f = lambda y: y\nlist(map(f, x))"),
}


@pytest.mark.parametrize("family", SPELLINGS)
def test_a_legacy_form_is_found_in_every_spelling(family: str) -> None:
    for code in SPELLINGS[family]:
        assert lines_with(family, ast.parse(code)), code


def test_what_replaces_a_legacy_form_is_counted() -> None:
    modern = {
        "text-formatting": 'f"- {x}"',
        "none-comparisons": "x is None",
        "type-comparisons": "isinstance(x, int)",
        "typing": "y: list[int]",
        "classes": "class A: pass",
        "literals": "{}",
        "os-errors": "OSError",
        "maps": "[y for y in x]",
    }
    for family, code in modern.items():
        tree = ast.parse(code)
        assert (modern_forms(family, tree), lines_with(family, tree)) == (1, []), family
    assert PATTERNS.keys() - modern.keys() == {"percent", "str-format"}


def test_a_migration_that_hides_the_old_form_is_not_paid() -> None:
    files = nano_task(2, "unseen", 1, "migrate")
    (expected,) = [each for each in json.loads(files["tests/expected.json"]) if "family" in each]
    top = "environment/repo/"
    before = {path.removeprefix(top): text.encode() for path, text in files.items() if path.startswith(top)}
    (path,) = [path.removeprefix("solution/repo/") for path in files if path.startswith("solution/repo/")]
    solved = {**before, path: files[f"solution/repo/{path}"].encode()}
    method = before[path].replace(b" % ", b".__mod__(").replace(b" for ", b") for ")
    assert FILE_KINDS["patterns"](expected, solved)[0] == 1.0
    assert (
        FILE_KINDS["patterns"](expected, before)[0]
        == FILE_KINDS["patterns"](expected, {**before, path: method})[0]
        == 0
    )
    assert FILE_KINDS["patterns"](expected, {**before, path: b"x = 1\n"})[0] == 0


def test_a_migration_may_not_look_up_the_old_form_at_run_time() -> None:
    files = nano_task(2, "unseen", 1, "migrate")
    (expected,) = [each for each in json.loads(files["tests/expected.json"]) if "family" in each]
    (path,) = [path.removeprefix("solution/repo/") for path in files if path.startswith("solution/repo/")]
    top = "environment/repo/"
    before = {path.removeprefix(top): text.encode() for path, text in files.items() if path.startswith(top)}
    text = 'def list_roles(roles):\n    """A line for each of the roles."""\n    return [f"{%s}" for role in roles]\n'
    for value, score in (
        ("'- ' f'{role}'", 1.0),
        ("vars(str)['form' 'at']('- {}', role)", 0.0),
        ("str.__dict__['for' + 'mat']('- {}', role)", 0.0),
        ("getattr('- {}', 'for' + 'mat')(role)", 0.0),
        ("eval(chr(39) + '- ' + chr(39))", 0.0),
    ):
        submitted = {**before, path: (text % value).encode()}
        assert FILE_KINDS["patterns"](expected, submitted)[0] == score, value


def test_a_rename_may_not_serve_the_old_name_at_run_time() -> None:
    code = b"class LedgerFailure(Exception): pass\n"
    served = code + b"def __getattr__(name):\n    return LedgerFailure\n"
    expected = {"gone": ["LedgerError"], "defined": [["a.py", "LedgerFailure"]], "undefined": [], "lookups": 0}
    for text in (served, b"import sys\nsys.modules[__name__] = 1\n" + code, code + b"globals()['Ledger' 'Er'] = 1\n"):
        assert FILE_KINDS["names"](expected, {"a.py": text})[0] == 0.0, text
    assert FILE_KINDS["names"](expected, {"a.py": code, "tests/test_a.py": served})[0] == 1.0
    assert FILE_KINDS["names"]({**expected, "lookups": 1}, {"a.py": served})[0] == 1.0


def test_settings_are_compared_as_a_whole() -> None:
    expected = {"files": {"config.json": {"reward": 22, "other": 1}}}
    assert judge_data(expected, {"config.json": b'{"other": 1, "reward": 22}'})[0] == 1.0
    for data in (
        b'{"reward": 22}',
        b'{"reward": 22, "other": 1.0}',
        b'{"reward": 22, "other": 1, "new": 0}',
        b"{",
        b"",
    ):
        assert judge_data(expected, {"config.json": data})[0] == 0.0, data


def test_other_lines_of_a_document_stay_visible() -> None:
    before = "# sale\n\nCall in_stock from hotel.py:\n\n    in_stock([1])\n"
    after = before.replace("in_stock", "find_stock")
    expected = lines_check("README.md", before, after).expected
    assert judge_lines(expected, {"README.md": after.encode()})[0] == 1.0
    assert judge_lines(expected, {"README.md": after.encode() + b"\nMore.\n"})[0] == 1.0
    hidden = "\n".join(f"<!-- {line} -->" for line in after.splitlines())
    for text in ("# sale\n\nfind_stock\n", hidden, after.replace("# sale", ""), after + "x\n" * 9):
        assert judge_lines(expected, {"README.md": text.encode()})[0] == 0.0, text


def test_a_wheel_is_judged_by_its_contents() -> None:
    def digest(text: bytes) -> str:
        return hashlib.sha256(text).hexdigest()

    contents: dict[str, Any] = {"digests": {"a.py": digest(b"x = 1\n")}, "metadata": {"Summary": ["A."]}, "entry": []}
    expected, secret = {**contents, "roots": ["src"]}, Secret([], Planted([]))
    files = {"src/a.py": b"x = 1\n", "src/b.py": b"y = 2\n"}
    more = {**contents, "digests": {**contents["digests"], "b.py": digest(b"y = 2\n")}}
    assert judge_wheel(expected, contents, secret, files)[0] == judge_wheel(expected, more, secret, files)[0] == 1.0
    for other in (
        {**contents, "digests": {"a.py": digest(b"")}},
        {**contents, "digests": {**contents["digests"], "b.py": digest(b"")}},
        {**contents, "metadata": {}},
    ):
        assert judge_wheel(expected, other, secret, files)[0] == 0.0, other


def test_new_files_may_be_allowed_where_known_ones_must_stay() -> None:
    expected = {"digests": {"a.py": hashlib.sha256(b"").hexdigest()}, "allowed": ["/c.toml"], "new": True}
    assert judge_scope(expected, {"a.py": b"", "b.py": b"", "c.toml": b"x"})[0] == 1.0
    assert judge_scope(expected, {"b.py": b""})[0] == judge_scope(expected, {"a.py": b"x"})[0] == 0.0


def test_a_list_of_all_lines_is_no_review() -> None:
    expected = {"file": "f.json", "planted": [{"file": "a.py", "first": 5, "last": 5}]}
    lines = [{"file": "a.py", "line": line} for line in range(1, 21)]
    assert judge_findings(expected, {"f.json": json.dumps(lines[4:6]).encode()})[0] == 1.0
    assert judge_findings(expected, {"f.json": json.dumps(lines).encode()})[0] == 0.0


# ------------------------------------------------------------------------------------------------- versions of code

RIGHT = '''def pick(xs, least=3):
    """Sum of large numbers."""
    total = 0
    for x in xs:
        if x > least:
            total += x
        else:
            total -= 1
    return total
'''
WRONG = RIGHT.replace("x > least", "x >= least")


def test_rewritten_code_does_the_same_and_has_the_parts_of_all_versions() -> None:
    for seed in range(40):
        codes = {}
        for source in (RIGHT, WRONG):
            text = rewrite_equivalently(source, (RIGHT, WRONG), random.Random(seed))
            old: dict[str, Any] = {}
            new: dict[str, Any] = {}
            exec(source, old)
            exec(text, new)
            for xs in ([], [3], [1, 5, 9], [4, 3, 2]):
                assert new["pick"](xs) == old["pick"](xs), text
            codes[source] = new["pick"].__code__
            assert "x > least" in text, text
            assert "x >= least" in text, text
        assert set(codes[RIGHT].co_names) == set(codes[WRONG].co_names)


def test_names_of_other_scopes_are_not_made_local() -> None:
    right = "n = 1\ndef f(x):\n    return x + n\n"
    wrong = "n = 1\ndef f(x):\n    n = 2\n    return x + n\n"
    space: dict[str, Any] = {}
    exec(rewrite_equivalently(right, (right, wrong), random.Random(1)), space)
    assert space["f"](1) == 2


# ------------------------------------------------------------------------------------------------- other values


@pytest.mark.parametrize("value", [0, 3, 250, -7, 2.5, "text", ""])
def test_the_real_value_has_any_rank_among_its_twins(value: object) -> None:
    ranks = set()
    for _ in range(200):
        others = [ast.literal_eval(text.decode()) for text in _others(value, 4)]
        assert len({value, *others}) == 5, others
        assert {type(each) for each in others} == {type(value)}
        ranks.add(
            sorted([value, *others], key=lambda each: (len(each), each) if isinstance(each, str) else each).index(value)
        )  # type: ignore[arg-type, return-value]
    assert len(ranks) == (5 if not isinstance(value, str) else len(ranks))
    assert len(ranks) > 1 or value == ""


def test_a_false_copy_changes_values_that_were_not_seen_and_no_lines() -> None:
    first, second = b"    assert calc.add(1, 2) == 3\n", b"    assert calc.add(2, 7) == 9\n"
    source = b"import calc\n\n\ndef test_a():\n" + first + b"\n\ndef test_b():\n" + second
    copy = false_copy(source)
    assert copy is not None
    changed = [old != new for old, new in zip(source.splitlines(), copy.splitlines(), strict=True)]
    assert changed == [False] * 4 + [True] + [False] * 3 + [True]
    assert b"calc.add(2, 7)" in copy
    seen = false_copy(source, frozenset({b"assert calc.add(1, 2) == 3"}))
    assert seen is not None
    assert b"calc.add(1, 2) == 3" in seen
    assert b"== 9" not in seen
    assert false_copy(b"import inspect\nassert 1 == 2\n") is None
