"""Chunks: exact lines, nothing lost, for any text."""

import itertools
import json.decoder
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.harness.search.chunk_text import embedded_text, headline
from etude.harness.search.chunks import MAX_CHARS, MAX_LINES, Chunk, chunk_text, cut_chunks, read_lines

MODULE = '''\
"""A module."""

import os

LIMIT = 3


# About f.
@decorator
def f(x):
    """What f does."""
    return x


class Small:
    a = 1

    def g(self):
        return 2
'''


def lines_of(text: str) -> list[str]:
    lines = read_lines(text.encode())
    assert lines is not None
    return lines


def places(chunks: Sequence[Chunk]) -> list[tuple[int, int, str]]:
    return [(chunk.first, chunk.last, chunk.name) for chunk in chunks]


def assert_whole(lines: Sequence[str], chunks: Sequence[Chunk]) -> None:
    """Every line with something on it is in a chunk; chunks are in order, in the file, and bounded."""
    covered = {number for chunk in chunks for number in range(chunk.first, chunk.last + 1)}
    assert {number for number, line in enumerate(lines, start=1) if line.strip()} <= covered
    assert [chunk.first for chunk in chunks] == sorted({chunk.first for chunk in chunks})
    for chunk in chunks:
        assert 1 <= chunk.first <= chunk.last <= len(lines)
        assert chunk.last - chunk.first < MAX_LINES
        assert len(chunk_text(chunk, lines)) <= MAX_CHARS


def test_definitions_have_their_exact_lines_with_the_comments_and_decorators_above() -> None:
    chunks = cut_chunks("m.py", lines_of(MODULE))
    assert places(chunks) == [(1, 5, ""), (8, 12, "f"), (15, 19, "Small")]
    assert chunk_text(chunks[1], lines_of(MODULE)).startswith("# About f.\n@decorator")


def test_a_long_class_is_its_head_and_its_methods() -> None:
    body = "".join(f"\n    def m{n}(self):\n        x = {n}\n        y = x\n        return y\n" for n in range(5))
    text = f'class Big(Base):\n    """Head."""\n\n    field: int = 0\n{body}\n\nBig.tail = 1\n'
    expected = [(1, 4, "Big"), *((6 + 5 * n, 9 + 5 * n, f"Big.m{n}") for n in range(5)), (32, 32, "")]
    assert places(cut_chunks("m.py", lines_of(text))) == expected


def test_a_giant_function_is_cut_into_pieces_that_overlap_and_keep_its_name() -> None:
    text = "def giant():\n" + "".join(f"    step_{n}()\n" for n in range(150))
    chunks = cut_chunks("m.py", lines_of(text))
    assert_whole(lines_of(text), chunks)
    assert {chunk.name for chunk in chunks} == {"giant"}
    assert all(after.first <= before.last for before, after in itertools.pairwise(chunks))


def test_every_line_of_the_standard_librarys_json_is_in_a_chunk() -> None:
    for path in Path(json.decoder.__file__).parent.glob("*.py"):
        lines = lines_of(path.read_text(encoding="utf-8"))
        assert_whole(lines, cut_chunks(path.name, lines))


STATEMENTS = [
    "x = 1",
    "",
    "# a comment",
    "import os; import sys",
    "def f():\n    pass",
    "async def g(a,\n        b):\n    '''doc'''\n\n    return a",
    "@d(\n  1)\nclass C:\n    '''Doc.'''\n    a = 1\n\n    # m\n    def m(self): return 1\n\n    b: int = 2",
    "if x:\n    def inner():\n        pass\nelse:\n    y = '''\n\ntext\n'''",
    "class D: pass",
    "try:\n    pass\nfinally:\n    z = (1,\n         2)",
    "class E:\n" + "\n".join(f"    def m{n}(self):\n        return {n}\n" for n in range(20)),
    "y = [\n" + "    1,\n" * 70 + "]",
    "s = '" + "x" * 5000 + "'",
]


@given(st.lists(st.sampled_from(STATEMENTS), max_size=12), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_all_lines_of_any_python_file_are_in_its_chunks(statements: list[str], end: str, closed: bool) -> None:
    text = end.join(statements).replace("\n", end).replace("\r\r", "\r") + (end if closed else "")
    lines = lines_of(text)
    assert_whole(lines, cut_chunks("m.py", lines))


@given(
    st.text(alphabet=st.sampled_from("ab #{}()\n\n\t\r\\\"'=:.é\x0c\u2028\x85"), max_size=400),
    st.sampled_from(["m.py", "m.c", "m.md", "m"]),
)
@example("x = (\n", "m.py")
@example("\ufeffx = 1\ndef f(): pass\n", "m.py")
@example("a\rdef f():\r  pass\n", "m.py")
def test_any_text_is_chunked_without_loss(text: str, path: str) -> None:
    lines = lines_of(text)
    chunks = cut_chunks(path, lines)
    assert_whole(lines, chunks)
    for chunk in chunks:
        assert len(embedded_text(chunk, lines, headline(path, lines))) < 2_000


@pytest.mark.parametrize(
    "text",
    [
        "-" * 100_000 + "1",
        "a" + ".b" * 100_000,
        "(1\n" + "+1\n" * 50_000 + ")",
        "if 1:\n pass\n" + "elif 1:\n pass\n" * 20_000,
        "x" * 500_000,
        "\n" * 300_000,
        "def f(:\n" * 1000,
    ],
    ids=["signs", "attributes", "sums", "branches", "one line", "blank", "broken"],
)
def test_files_that_break_the_parser_are_still_chunked(text: str) -> None:
    lines = lines_of(text)
    assert_whole(lines, cut_chunks("m.py", lines))


def test_a_binary_file_has_no_lines() -> None:
    assert read_lines(random.Random(0).randbytes(2000)) is None
    assert read_lines(b"") == []
    assert read_lines(b"caf\xe9\n") == ["caf\ufffd"]


def test_a_file_of_another_language_is_cut_at_its_margin() -> None:
    text = textwrap.dedent("""\
        // Reads the configuration.
        #include <stdio.h>

        static int read_all(int fd) {
            int a = 0;

            a += 1;
            a += 2;
            a += 3;
            return a;
        }

        export function writeAll(fd) {
          one();
          two();
          three();
          four();
          five();
          six();
        }
    """)
    chunks = cut_chunks("m.c", lines_of(text))
    assert_whole(lines_of(text), chunks)
    assert places(chunks)[-1] == (13, 20, "writeAll")
    assert headline("m.c", lines_of(text)) == "Reads the configuration."


def test_prose_is_cut_at_its_headings() -> None:
    section = "word word.\n" * 8
    text = f"# Title\n\n{section}\n## First part\n\n{section}\n## Second part\n\n{section}"
    assert [chunk.name for chunk in cut_chunks("doc.md", lines_of(text))] == ["Title", "First part", "Second part"]


def test_a_licence_header_is_not_a_headline() -> None:
    text = "# Copyright 2020 Somebody. All rights reserved.\n# You may use it.\nimport os\n"
    assert headline("m.py", lines_of(text)) == ""
    assert headline("m.py", lines_of(text + '"""Reads things. And more."""\n')) == "Reads things"
    chunk = Chunk("pkg/readThings.py", 3, 3)
    assert embedded_text(chunk, lines_of(text), "") == "pkg read Things import os"
