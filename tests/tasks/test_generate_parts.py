"""The parts of generators without pods: sources, edits, operators, names, git directories, journals, judges."""

import ast
import hashlib
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
from etude.tasks.checks.inside.file_judges import FINAL, judge_answer, judge_findings, judge_scope
from etude.tasks.checks.inside.patterns import lines_with
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import CandidateRejected, TaskDraft
from etude.tasks.generators.cli import describe_shortfall
from etude.tasks.generators.code import (
    Module,
    SourceEdit,
    apply_edits,
    is_parsable,
    mentions,
    parse,
    remove_definitions,
)
from etude.tasks.generators.compose import merge_drafts
from etude.tasks.generators.failure_report import FailureReport, mentions_any
from etude.tasks.generators.generator_run import split_by_weight
from etude.tasks.generators.journal import GeneratorYield, Journal, JournalEntry, summarize_journals
from etude.tasks.generators.migration import LEGACY_REWRITES
from etude.tasks.generators.neutral_edits import neutral_edits
from etude.tasks.generators.operators import OPERATORS, mutations
from etude.tasks.generators.packages import own_metadata, pytest_plugin_names
from etude.tasks.generators.removal import remove_names, remove_paragraphs
from etude.tasks.generators.single_commit_repo import single_commit_git_dir
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


def test_source_metadata_is_read_without_running_code() -> None:
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


def test_build_products_are_excluded() -> None:
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


def test_archive_links_and_escaping_paths_are_ignored(tmp_path: Path) -> None:
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


def test_a_checkout_is_read_as_its_build_would_make_it_without_what_git_ignores(tmp_path: Path) -> None:
    top = tmp_path / "checkout"
    configured = {
        "pyproject.toml": b'[project]\nname = "thing"\ndynamic = ["version"]\n'
        b'[tool.hatch.build.hooks.vcs]\nversion-file = "small/_version.py"\n'
        b'[tool.setuptools_scm]\nwrite_to = "small/VERSION.txt"\n',
        "small/__init__.py": b"from ._version import __version__\n",
        "tests/test_one.py": MINIMAL["tests/test_one.py"],
        ".gitignore": b".env\nmyenv/\n",
    }
    for name, data in {
        **configured,
        ".env": b"SECRET=1",
        "myenv/lib/other.py": b"",
        "small/new.py": b"x = 1\n",
    }.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    git = ["git", "-C", str(top), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", *configured], ["commit", "-qm", "one"], ["tag", "v4.16.0"]):
        subprocess.run([*git, *command], check=True)
    source = read_source(top)
    assert (source.name, source.version) == ("thing", "4.16.0")
    assert set(source.files) == {*configured, "small/new.py", "small/_version.py", "small/VERSION.txt"}
    assert source.text("small/VERSION.txt") == "4.16.0\n"
    written: dict[str, object] = {}
    exec(source.text("small/_version.py"), written)
    assert (written["__version__"], written["__version_tuple__"]) == ("4.16.0", (4, 16, 0))


def test_too_few_tasks_are_an_error_that_says_why() -> None:
    rows = [
        GeneratorYield("debugging", 5, 2, {"survives": 2, "too-broken": 1}, 1.0, 1.0),
        GeneratorYield("docs", 1, 0, {"survives": 1}, 1.0, 1.0),
        GeneratorYield("review", 0, 0, {}, 0.0, 0.0),
    ]
    words = describe_shortfall(Path("tasks"), rows, 9)
    assert words.startswith("tasks: 2 of 9 tasks, and no generator has another candidate: 6 were tried")
    assert "survives 3, too-broken 1; nothing to try for review" in words
    assert "--count 2" in words


def test_invalid_repositories_are_rejected_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no test files"):
        make_source({"small/__init__.py": b""})
    with pytest.raises(InputError, match="expected a directory or a source archive"):
        read_source(tmp_path / "nothing")
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    with pytest.raises(InputError, match="cannot be unpacked"):
        read_source(tmp_path / "bad.zip")


def test_own_metadata_wheel_contains_no_code() -> None:
    [(name, data)] = own_metadata(make_source(MINIMAL)).items()
    assert name == "small_thing-2-py3-none-any.whl"
    assert all(".dist-info/" in member for member in zipfile.ZipFile(io.BytesIO(data)).namelist())
    assert pytest_plugin_names({name: data}) == ()


def test_git_directory_has_one_commit_and_is_deterministic(tmp_path: Path) -> None:
    files = {"a.py": b"x = 1\n", 'dir/b "c".txt': b"\0\xff", "run.sh": b"#!/bin/sh\n"}
    made = single_commit_git_dir(files)
    assert made == single_commit_git_dir(files)
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
def test_edits_change_only_their_span(raw: list[tuple[int, int, str]]) -> None:
    data = bytes(range(48, 96))
    edits, at = [], 0
    for start, length, text in sorted(raw):
        if start >= at:
            edits.append(SourceEdit(start, start + length, text))
            at = start + length
    expected = data
    for edit in reversed(edits):
        expected = expected[: edit.start] + edit.text.encode() + expected[edit.end :]
    assert apply_edits(data, edits) == expected


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


def test_every_operator_gives_different_code_that_parses() -> None:
    module = Module("box.py", EVERYTHING)
    found = [mutation for function in module.functions for mutation in mutations(function)]
    assert {mutation.operator for mutation in found} == set(OPERATORS)
    for mutation in found:
        changed = apply_edits(EVERYTHING, [mutation.edit])
        assert is_parsable(changed), mutation
        assert ast.dump(ast.parse(changed)) != ast.dump(module.tree), mutation
        assert mutation.function.lines[0] <= mutation.line <= mutation.function.lines[-1]


def test_mutations_leave_no_trace_of_the_tool() -> None:
    module = Module("box.py", CODE)
    for function in module.functions:
        for mutation in mutations(function):
            assert b"False and" not in apply_edits(CODE, [mutation.edit]), mutation
            assert mutation.edit.text.strip() != "pass", mutation


def test_neutral_edits_preserve_behaviour() -> None:
    module = Module("box.py", CODE)
    for function in module.functions:
        for neutral_edit in neutral_edits(function, random.Random(1)):
            names: dict[str, object] = {}
            exec(compile(apply_edits(CODE, neutral_edit.edits), "box.py", "exec"), names)
            early, box = names["early"], names["Box"]
            assert early([1, None, 2, 3, 4]) == [1, 2]  # type: ignore[operator]
            assert early([]) is None  # type: ignore[operator]
            assert (box(5).half(), box(5) == box(5), box(5) == 5) == (2, True, False)  # type: ignore[operator]


def test_definitions_are_removed_with_decorators_and_leave_no_empty_body() -> None:
    text = b"import x\n\n\n@x.y\n@x.z(1)\ndef a():\n    pass\n\n\n"
    text += b"class B:\n    def c(self): ...\n\n    def d(self): ...\n\n\nE = 1\n"
    assert remove_definitions(text, "m.py", {"a"}) == text.replace(b"@x.y\n@x.z(1)\ndef a():\n    pass\n\n\n", b"")
    emptied = remove_definitions(text, "m.py", {"B.c", "B.d"})
    assert is_parsable(emptied)
    assert b"def c" not in emptied
    assert b"def d" not in emptied


def test_names_are_removed_from_imports_lists_and_tables() -> None:
    text = (
        b"from .a import one, two\nfrom .b import (\n    three,\n    four,\n)\n\n"
        b'__all__ = [\n    "one",\n    "two",\n    "three",\n]\nTABLE = {\n    "1": one,\n    "2": two,\n}\n'
    )
    after = remove_names("m.py", text, {"one", "three"})
    assert is_parsable(after)
    assert "one" not in parse("m.py", after).names
    assert b'"three"' not in after
    assert b'"2": two' in after
    assert b"four" in after


def test_paragraphs_that_mention_the_name_are_removed() -> None:
    text = "Intro\n\n.. autofunction:: gone\n\n   Indented.\n\n.. autofunction:: kept\n\nThe gone_too stays.\n"
    after = remove_paragraphs(text, {"gone"})
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


@pytest.mark.parametrize("family", sorted(LEGACY_REWRITES))
def test_verifier_finds_every_legacy_rewrite(family: str) -> None:
    module = Module("m.py", OLD)
    legacy = apply_edits(OLD, list(LEGACY_REWRITES[family](module)))
    assert is_parsable(legacy)
    assert lines_with(family, ast.parse(OLD)) == []
    assert lines_with(family, ast.parse(legacy))


# ------------------------------------------------------------------------------------------------- requests


def test_forbidden_words_match_as_separate_words_too() -> None:
    assert mentions_any("it fails in format_bar()", ["format_bar"])
    assert mentions_any("Something is off with format bar", ["_format_bar"])
    assert not mentions_any("reformat_bars is fine", ["format_bar"])
    assert mentions("see core.py:12", "core.py")
    assert not mentions("see test_core.py:12", "core.py")


def test_requests_are_short_and_contain_the_expected_value() -> None:
    report = FailureReport(
        test="tests/test_x.py::test_add_up",
        log="E   assert 3 == 4",
        error="",
        call="add(1, 2)",
        expected="4",
        actual="3",
        compared=("3", "4"),
        not_raised="",
        snippet="from x import add\n\nassert add(1, 2) == 4",
        self_contained=True,
    )
    for seed in range(20):
        rng = random.Random(seed)
        for text in (
            prompts.symptom(rng, report),
            prompts.imperative(rng, report),
            prompts.issue(rng, report),
            prompts.log(rng, [report]),
        ):
            assert text
            assert len(text) < 300
            assert "4" in text
    assert "`` `x` ``".replace(" ", "") == prompts.quoted("`x`").replace(" ", "")


# ------------------------------------------------------------------------------------------------- tasks


def draft(name: str, **given: object) -> TaskDraft:
    values: dict[str, object] = {
        "category": name,
        "family": "f",
        "register": "r",
        "request": f"Do {name}.",
        "difficulty": 2,
    }
    values |= {"workspace": {}, "solution": {}, "checks": ()}
    return TaskDraft(**{**values, **given})  # type: ignore[arg-type]


def test_composed_parts_must_not_overlap() -> None:
    one = draft("docs", workspace={"a.py": b"1"}, solution={"a.py": b"0"})
    two = draft("debugging", workspace={"b.py": b"1"}, solution={"b.py": b"0"}, forbidden_words=("hidden",))
    both = merge_drafts(["docs", "debugging"], [one, two], random.Random(0))
    assert set(both.solution) == {"a.py", "b.py"}
    assert both.forbidden_words == ("hidden",)
    assert "Do docs." in both.request
    assert "Do debugging." in both.request
    with pytest.raises(CandidateRejected, match="overlap"):
        merge_drafts(["docs", "debugging"], [one, draft("debugging", workspace={"a.py": b"2"})], random.Random(0))
    with pytest.raises(CandidateRejected, match="alike"):
        merge_drafts(["docs", "docs"], [one, draft("docs")], random.Random(0))


@given(st.integers(0, 300), st.lists(st.floats(0.1, 3.0), min_size=1, max_size=30))
def test_split_by_weight_sums_up_and_leaves_no_part_empty(count: int, weights: list[float]) -> None:
    found = split_by_weight(count, weights)
    assert sum(found) == count
    assert min(found) >= (1 if count >= len(weights) else 0)


def test_journal_ignores_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal.open(path, "docs")
    for number in range(3):
        journal.add(JournalEntry(f"s{number}", "f", "t" if number else "", "" if number else "survives", "", 1.0, 2.0))
    path.write_text(path.read_text() + '{"site": "s3", "fam')
    again = Journal.open(path, "docs")
    assert set(again.entries) == {"s0", "s1", "s2"}
    again.add(JournalEntry("s3", "f", "", "overlap", "", 1.0, 2.0))
    assert len(Journal.open(path, "docs").entries) == 4
    [row] = summarize_journals([again])
    assert (row.tried, row.made, row.reasons, row.pod_seconds) == (4, 2, {"survives": 1, "overlap": 1}, 8.0)


# ------------------------------------------------------------------------------------------------- judges


def test_findings_are_scored_by_precision_and_recall() -> None:
    wanted = {
        "file": "review.json",
        "planted": [{"file": "a.py", "first": 10, "last": 10}, {"file": "b.py", "first": 5, "last": 6}],
    }

    def score(found: object) -> float:
        return judge_findings(wanted, {"review.json": json.dumps(found).encode()})[0]

    right = [{"file": "a.py", "line": 12}, {"file": "./b.py", "line": 4}]
    assert score(right) == 1.0
    assert score({"findings": right}) == 1.0
    assert score(right[:1]) == pytest.approx(2 / 3)
    assert score([*right, {"file": "c.py", "line": 1}, {"file": "a.py", "line": 99}]) == pytest.approx(4 / 6)
    assert score([]) == 0.0
    assert score([{"file": "a.py"}]) == 0.0
    assert score("nonsense") == 0.0


def test_answers_are_normalized() -> None:
    def score(text: str, wanted: dict[str, object]) -> float:
        return judge_answer(wanted, {FINAL: text.encode()})[0]

    value: dict[str, object] = {"accepted": ["'utf-8'", "utf-8"]}
    for text in ("'utf-8'", "`utf-8`.", "The default is utf-8.", "I looked it up in the source.\n\nutf-8\n"):
        assert score(text, value) == 1.0, text
    for text in ("", "ascii", "utf-8 or ascii", "It is not utf-8"):
        assert score(text, value) == 0.0, text


def test_only_allowed_files_may_change() -> None:
    files = {"a.py": b"1", "docs/x.md": b"1"}
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    wanted = {"digests": digests, "allowed": ["docs/*"]}
    assert judge_scope(wanted, {**files, "docs/x.md": b"2", "docs/y.md": b"2"})[0] == 1.0
    assert judge_scope(wanted, {**files, "b.py": b"2"})[0] == 0.0
