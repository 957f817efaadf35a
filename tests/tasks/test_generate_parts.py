"""The parts that generators are made of, without pods: sources, edits, operators, names, history, journals."""

import ast
import io
import json
import random
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import InputError
from etude.tasks.generators import prompts as words
from etude.tasks.generators.candidate import Draft, Unfit, difference, overlaid
from etude.tasks.generators.code import Edit, Module, mentions, parse, parses, spliced, without_definitions
from etude.tasks.generators.compose import merged
from etude.tasks.generators.failure_report import Evidence, named
from etude.tasks.generators.generator_run import shares
from etude.tasks.generators.inside.judges import Seen, digests, judge_answer, judge_findings, judge_scope
from etude.tasks.generators.inside.patterns import lines_with
from etude.tasks.generators.journal import Entry, Journal, yields
from etude.tasks.generators.migration import AGINGS
from etude.tasks.generators.neutral_edits import rewordings
from etude.tasks.generators.operators import OPERATORS, mutations
from etude.tasks.generators.packages import own_metadata, plugins_among
from etude.tasks.generators.removal import prose_without, without_names
from etude.tasks.generators.single_commit_repo import sealed_git
from etude.tasks.generators.source import make_source, read_source

CODE = b'''"""A module."""

import os


def early(items, limit=3, *, strict=True):
    """Some of the items."""
    found = []
    for item in items:  # in order
        if item is None and strict:
            continue
        if len(found) >= limit or item == limit:
            break
        found.append(item)
        os.environ.get("X", "y")
    return found if found else None


class Box:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        if not isinstance(other, Box):
            return NotImplemented
        return self.value == other.value

    def half(self):
        try:
            return max(self.value // 2, 1) + 0
        except TypeError:
            raise ValueError(f"not a number: {self.value}") from None
'''
MINIMAL = {
    "pyproject.toml": b'[project]\nname = "Small.Thing"\nversion = "2"\ndependencies = ["idna"]\n'
    b'[dependency-groups]\ntests = ["pytest", {include-group = "more"}]\nmore = ["trio"]\n'
    b"[tool.pytest.ini_options]\naddopts = \"-ra -m 'not slow' --strict-markers --cov\"\nxfail_strict = true\n",
    "small/__init__.py": b"def one():\n    return 1\n",
    "tests/test_one.py": b"from small import one\n\n\ndef test_one():\n    assert one() == 1\n",
}


# ------------------------------------------------------------------------------------------------- sources


def test_a_source_says_what_it_is_without_being_run() -> None:
    source = make_source(MINIMAL)
    assert (source.name, source.version, source.roots, source.modules) == (
        "small-thing",
        "2",
        (".",),
        ("small/__init__.py",),
    )
    assert source.requirements == ("idna", "pytest", "trio")
    assert source.arguments == ("-m", "not slow", "--strict-markers")
    assert source.ini == {"xfail_strict": "True"}
    assert source.module_name("small/__init__.py") == "small"


def test_what_building_leaves_behind_is_not_taken_along() -> None:
    leaks = {
        "small/__pycache__/a.pyc": b"x",
        "small.egg-info/SOURCES.txt": b"x",
        "build/lib/small/__init__.py": b"def one():\n    return 1\n",
        ".git/HEAD": b"x",
        ".mypy_cache/x.json": b"x",
        "PKG-INFO": b"Name: small\nVersion: 7\n\nA description with everything in it.\n",
    }
    source = make_source({**MINIMAL, **leaks})
    assert set(source.files) == {*MINIMAL, "PKG-INFO"}
    assert b"description" not in source.files["PKG-INFO"]


def test_an_archive_is_read_without_links_and_ways_out(tmp_path: Path) -> None:
    archive = tmp_path / "small-2.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in {**MINIMAL, "../evil.py": b"x", "/etc/evil.py": b"x"}.items():
            info = tarfile.TarInfo(name if name[0] in "./" else f"small-2/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("small-2/small/secret.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert set(read_source(archive).files) == set(MINIMAL)


def test_what_is_no_repository_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no test files"):
        make_source({"small/__init__.py": b""})
    with pytest.raises(InputError, match="expected a directory or a source archive"):
        read_source(tmp_path / "nothing")
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    with pytest.raises(InputError, match="cannot be unpacked"):
        read_source(tmp_path / "bad.zip")


def test_the_package_itself_is_a_name_and_a_version_without_code() -> None:
    [(name, data)] = own_metadata(make_source(MINIMAL)).items()
    assert name == "small_thing-2-py3-none-any.whl"
    assert all(".dist-info/" in member for member in zipfile.ZipFile(io.BytesIO(data)).namelist())
    assert plugins_among({name: data}) == ()


def test_a_sealed_history_is_one_commit_and_always_the_same(tmp_path: Path) -> None:
    files = {"a.py": b"x = 1\n", 'dir/b "c".txt': b"\0\xff", "run.sh": b"#!/bin/sh\n"}
    made = sealed_git(files)
    assert made == sealed_git(files)
    for name, data in {**{f".git/{name}": data for name, data in made.items()}, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "run.sh").chmod(0o755)

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(tmp_path), *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    assert git("rev-list", "--all", "--count").strip() == "1"
    assert git("status", "--porcelain") == ""
    objects = git("cat-file", "--batch-all-objects", "--batch-check=%(objecttype)").split()
    assert sorted(objects) == ["blob"] * 3 + ["commit"] + ["tree"] * 2


# ------------------------------------------------------------------------------------------------- code


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8), st.text("ab", max_size=3)), max_size=6))
def test_edits_change_what_they_name_and_nothing_else(raw: list[tuple[int, int, str]]) -> None:
    data = bytes(range(48, 96))
    edits, at = [], 0
    for start, length, text in sorted(raw):
        if start >= at:
            edits.append(Edit(start, start + length, text))
            at = start + length
    expected = data
    for edit in reversed(edits):
        expected = expected[: edit.start] + edit.text.encode() + expected[edit.end :]
    assert spliced(data, edits) == expected


EVERYTHING = (
    CODE
    + b"""

def everything(names, table, one, two, flag=False):
    ready = not flag and (one or two)
    if not ready or one == two:
        return True
    for name in names:
        table[name] = name.startswith("x")
    return call(one, two, key=min(one, two)) if names else table.get(one, two)
"""
)


def test_every_operator_makes_other_code_that_parses() -> None:
    module = Module("box.py", EVERYTHING)
    found = [mutation for function in module.functions for mutation in mutations(function)]
    assert {mutation.operator for mutation in found} == set(OPERATORS)
    for mutation in found:
        changed = spliced(EVERYTHING, [mutation.edit])
        assert parses(changed), mutation
        assert ast.dump(ast.parse(changed)) != ast.dump(module.tree), mutation
        assert mutation.function.lines[0] <= mutation.line <= mutation.function.lines[-1]


def test_a_planted_change_leaves_no_trace_of_the_tool() -> None:
    module = Module("box.py", CODE)
    for function in module.functions:
        for mutation in mutations(function):
            assert b"False and" not in spliced(CODE, [mutation.edit]), mutation
            assert mutation.edit.text.strip() != "pass", mutation


def test_harmless_changes_mean_the_same() -> None:
    module = Module("box.py", CODE)
    for function in module.functions:
        for rewording in rewordings(function, random.Random(1)):
            names: dict[str, object] = {}
            exec(compile(spliced(CODE, rewording.edits), "box.py", "exec"), names)
            early, box = names["early"], names["Box"]
            assert early([1, None, 2, 3, 4]) == [1, 2]  # type: ignore[operator]
            assert early([]) is None  # type: ignore[operator]
            assert (box(5).half(), box(5) == box(5), box(5) == 5) == (2, True, False)  # type: ignore[operator]


def test_definitions_go_with_their_decorators_and_leave_no_empty_body() -> None:
    text = b"import x\n\n\n@x.y\n@x.z(1)\ndef a():\n    pass\n\n\n"
    text += b"class B:\n    def c(self): ...\n\n    def d(self): ...\n\n\nE = 1\n"
    assert without_definitions(text, "m.py", {"a"}) == text.replace(b"@x.y\n@x.z(1)\ndef a():\n    pass\n\n\n", b"")
    emptied = without_definitions(text, "m.py", {"B.c", "B.d"})
    assert parses(emptied)
    assert b"def c" not in emptied
    assert b"def d" not in emptied


def test_a_name_goes_out_of_imports_lists_and_tables() -> None:
    text = (
        b"from .a import one, two\nfrom .b import (\n    three,\n    four,\n)\n\n"
        b'__all__ = [\n    "one",\n    "two",\n    "three",\n]\nTABLE = {\n    "1": one,\n    "2": two,\n}\n'
    )
    after = without_names("m.py", text, {"one", "three"})
    assert parses(after)
    assert "one" not in parse("m.py", after).names
    assert b'"three"' not in after
    assert b'"2": two' in after
    assert b"four" in after


def test_prose_loses_the_paragraphs_that_have_the_name() -> None:
    text = "Intro\n\n.. autofunction:: gone\n\n   Indented.\n\n.. autofunction:: kept\n\nThe gone_too stays.\n"
    after = prose_without(text, {"gone"})
    assert "autofunction:: gone" not in after
    assert "Indented" not in after
    assert "kept" in after
    assert "gone_too" in after


OLD = (
    b"from __future__ import annotations\nimport typing as t\n\n\nclass A:\n"
    b"    def f(self, x: int | None, y: list[str]) -> dict[str, int] | None:\n"
    b"        super().__init__()\n        try:\n            z = {1, 2}\n        except OSError:\n            z = []\n"
    b'        return f"{x!r} and {y}" if {} else [i + 1 for i in z]\n'
)


@pytest.mark.parametrize("family", sorted(AGINGS))
def test_what_a_migration_makes_old_the_verifier_finds(family: str) -> None:
    module = Module("m.py", OLD)
    aged = spliced(OLD, list(AGINGS[family](module)))
    assert parses(aged)
    assert lines_with(family, OLD) == []
    assert lines_with(family, aged)


# ------------------------------------------------------------------------------------------------- words


def test_a_place_is_named_by_its_words_too() -> None:
    assert named("it fails in format_bar()", ["format_bar"])
    assert named("Something is off with format bar", ["_format_bar"])
    assert not named("reformat_bars is fine", ["format_bar"])
    assert mentions("see core.py:12", "core.py")
    assert not mentions("see test_core.py:12", "core.py")


def test_requests_are_terse_and_say_what_was_seen() -> None:
    seen = Evidence(
        test="tests/test_x.py::test_add_up",
        log="E   assert 3 == 4",
        error="",
        call="add(1, 2)",
        wanted="4",
        got="3",
        sides=("3", "4"),
        not_raised="",
        snippet="from x import add\n\nassert add(1, 2) == 4",
        closed=True,
    )
    for seed in range(20):
        rng = random.Random(seed)
        for text in (
            words.symptom(rng, seen),
            words.imperative(rng, seen),
            words.issue(rng, seen),
            words.log(rng, [seen]),
        ):
            assert text
            assert len(text) < 300
            assert "4" in text
    assert "`` `x` ``".replace(" ", "") == words.quoted("`x`").replace(" ", "")


# ------------------------------------------------------------------------------------------------- tasks


def draft(name: str, **given: object) -> Draft:
    values: dict[str, object] = {
        "category": name,
        "family": "f",
        "register": "r",
        "request": f"Do {name}.",
        "difficulty": 2,
    }
    values |= {"workspace": {}, "solved": {}, "checks": ()}
    return Draft(**{**values, **given})  # type: ignore[arg-type]


def test_composed_parts_must_not_meet() -> None:
    one = draft("docs", workspace={"a.py": b"1"}, solved={"a.py": b"0"})
    two = draft("debugging", workspace={"b.py": b"1"}, solved={"b.py": b"0"}, secret=("hidden",))
    both = merged(["docs", "debugging"], [one, two], random.Random(0))
    assert set(both.solved) == {"a.py", "b.py"}
    assert both.secret == ("hidden",)
    assert "Do docs." in both.request
    assert "Do debugging." in both.request
    with pytest.raises(Unfit, match="overlap"):
        merged(["docs", "debugging"], [one, draft("debugging", workspace={"a.py": b"2"})], random.Random(0))
    with pytest.raises(Unfit, match="alike"):
        merged(["docs", "docs"], [one, draft("docs")], random.Random(0))


@given(
    st.dictionaries(st.sampled_from("abc"), st.binary(max_size=2)),
    st.dictionaries(st.sampled_from("abc"), st.binary(max_size=2)),
)
def test_a_difference_makes_one_of_the_other(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    assert overlaid(before, difference(before, after)) == after


@given(st.integers(0, 300), st.lists(st.floats(0.1, 3.0), min_size=1, max_size=30))
def test_shares_add_up_and_leave_nobody_out(count: int, weights: list[float]) -> None:
    found = shares(count, weights)
    assert sum(found) == count
    assert min(found) >= (1 if count >= len(weights) else 0)


def test_a_journal_survives_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "lane.jsonl"
    journal = Journal.open(path, "docs")
    for number in range(3):
        journal.add(Entry(f"s{number}", "f", "t" if number else "", "" if number else "survives", "", 1.0, 2.0))
    path.write_text(path.read_text() + '{"site": "s3", "fam')
    again = Journal.open(path, "docs")
    assert set(again.entries) == {"s0", "s1", "s2"}
    again.add(Entry("s3", "f", "", "overlap", "", 1.0, 2.0))
    assert len(Journal.open(path, "docs").entries) == 4
    [row] = yields([again])
    assert (row.tried, row.made, row.reasons, row.pod_seconds) == (4, 2, {"survives": 1, "overlap": 1}, 8.0)


# ------------------------------------------------------------------------------------------------- judging


def test_findings_are_paid_by_precision_and_recall(tmp_path: Path) -> None:
    wanted = {
        "file": "review.json",
        "planted": [{"file": "a.py", "first": 10, "last": 10}, {"file": "b.py", "first": 5, "last": 6}],
    }

    def score(found: object) -> float:
        (tmp_path / "review.json").write_text(json.dumps(found))
        return judge_findings(Seen(str(tmp_path), {}), wanted, {})[0]

    right = [{"file": "a.py", "line": 12}, {"file": "./b.py", "line": 4}]
    assert score(right) == 1.0
    assert score({"findings": right}) == 1.0
    assert score(right[:1]) == pytest.approx(2 / 3)
    assert score([*right, {"file": "c.py", "line": 1}, {"file": "a.py", "line": 99}]) == pytest.approx(4 / 6)
    assert score([]) == 0.0
    assert score([{"file": "a.py"}]) == 0.0
    assert score("nonsense") == 0.0


def test_answers_are_read_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "final.txt"
    monkeypatch.setattr("etude.tasks.generators.inside.judges.FINAL", str(final))

    def score(text: str, wanted: dict[str, object]) -> float:
        final.write_text(text)
        return judge_answer(Seen(str(tmp_path), {}), wanted, {})[0]

    value: dict[str, object] = {"accepted": ["'utf-8'", "utf-8"]}
    for text in ("'utf-8'", "`utf-8`.", "The default is utf-8.", "I looked it up in the source.\n\nutf-8\n"):
        assert score(text, value) == 1.0, text
    for text in ("", "ascii", "utf-8 or ascii", "It is not utf-8"):
        assert score(text, value) == 0.0, text


def test_nothing_outside_of_what_is_allowed_may_change(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/x.md").write_text("1")
    wanted = {"digests": digests(str(tmp_path)), "allowed": ["docs/*"]}
    (tmp_path / "docs/x.md").write_text("2")
    (tmp_path / "docs/y.md").write_text("2")
    assert judge_scope(Seen(str(tmp_path), digests(str(tmp_path))), wanted, {})[0] == 1.0
    (tmp_path / "b.py").write_text("2")
    assert judge_scope(Seen(str(tmp_path), digests(str(tmp_path))), wanted, {})[0] == 0.0
