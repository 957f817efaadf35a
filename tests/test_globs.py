"""Globs: what the patterns of a task select, for the verifier and the gates alike, and their time limits."""

import pytest
from work import ends

from etude.errors import InputError
from etude.globs import GitignorePattern, Globs, expand_braces
from etude.pods.images.context import DockerIgnore

SELECTED = {
    "conftest.py": ["conftest.py", "pkg/conftest.py", "pkg/conftest.py/inside"],
    "tests/": ["tests/a.py", "pkg/tests/a.py", "tests/deep/a.py"],
    "tests": ["tests", "pkg/tests", "pkg/tests/a.py"],
    "/tests": ["tests", "tests/a.py"],
    "test_*.py": ["test_a.py", "pkg/sub/test_a.py"],
    "tests/**": ["tests/a.py", "tests/deep/a.py"],
}
NOT_SELECTED = {
    "conftest.py": ["conftest.pyi", "myconftest.py"],
    "tests/": ["tests", "testsuite/a.py"],
    "tests": ["test", "tests.py"],
    "/tests": ["pkg/tests", "pkg/tests/a.py"],
    "test_*.py": ["test_a.pyc", "a/test.py"],
    "tests/**": ["tests", "pkg/tests/a.py"],
}


@pytest.mark.parametrize("pattern", SELECTED)
def test_a_glob_selects_files_and_everything_below_directories(pattern: str) -> None:
    globs = Globs([pattern])
    assert [path for path in SELECTED[pattern] if not globs.matches(path)] == []
    assert [path for path in NOT_SELECTED[pattern] if globs.matches(path)] == []


def test_the_last_glob_decides_but_not_below_a_selected_directory() -> None:
    globs = Globs(["*.log", "!keep.log", "out", "!out/keep.txt"])
    assert [globs.matches(path) for path in ("a.log", "a/keep.log", "out/keep.txt")] == [True, False, True]


def test_a_pattern_of_many_stars_does_not_backtrack() -> None:
    with ends():
        pattern = GitignorePattern("*a" * 100 + "*b")
        assert not pattern.match("a" * 255, False)
        assert not DockerIgnore.parse("a*" * 30 + "b\n**/" + "*a" * 30 + "b").ignores("a" * 255)
        deep = GitignorePattern("/".join(["**", "a"] * 50) + "/b")
        assert not deep.match("/".join(["a"] * 500), False)


def test_a_dockerignore_has_a_limited_number_of_rules() -> None:
    assert len(DockerIgnore.parse("a\n" * 1000).rules) == 1000
    with pytest.raises(InputError, match="1,001 rules"):
        DockerIgnore.parse("a\n" * 1001)


def test_braces_stand_for_their_choices_and_cannot_explode() -> None:
    assert expand_braces("*.{ts,tsx}") == ["*.ts", "*.tsx"]
    assert expand_braces("{a,b{c,d}}x") == ["ax", "bcx", "bdx"]
    assert expand_braces("{a}") == ["{a}"]
    assert expand_braces("{a,b") == ["{a,b"]
    assert len(expand_braces("{a,b}" * 40)) < 1000
