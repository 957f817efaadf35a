"""Exact replacement: what matches, what is kept, and how a failure explains itself."""

import random

import pytest
from harness_pods import PodFixture, PodTools, shared_pod_fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.harness.toolserver.inside import nearest

SOURCE = """\
import os


def first(a, b):
    total = a + b
    return total


def second(a, b):
    total = a - b
    return total
"""


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> PodFixture:
    return shared_pod_fixture(request.config)


def test_the_one_place_is_replaced_and_nothing_else(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        outcome = await tools.call("search_replace", file_path="a.py", old_string="a + b", new_string="(\n a + b\n)")
        assert outcome.text == "Edited a.py at line 5."
        assert outcome.facts == {"path": "a.py", "lines_added": 3, "lines_removed": 1, "places": 1}
        assert await tools.read("a.py") == SOURCE.replace("a + b", "(\n a + b\n)").encode()
        said = await tools.text(
            "search_replace", file_path="a.py", old_string="total", new_string="t", replace_all=True
        )
        assert said == "Edited a.py in 4 places, the first at line 5."
        assert await tools.read("a.py") == SOURCE.replace("a + b", "(\n a + b\n)").replace("total", "t").encode()
        await tools.text("search_replace", file_path="a.py", old_string="import os\n\n\n", new_string="")
        assert (await tools.read("a.py")).startswith(b"def first")

    pods.run(check, files={"a.py": SOURCE})


def test_a_text_found_several_times_is_refused_with_the_lines(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        said = await tools.error(
            "environment", "search_replace", file_path="a.py", old_string="    return total", new_string=""
        )
        assert said == (
            "old_string is found 2 times in a.py, at lines 6, 11; nothing was changed. Add lines around it to "
            "old_string until it is found once, or set replace_all."
        )
        assert await tools.read("a.py") == SOURCE.encode()

    pods.run(check, files={"a.py": SOURCE})


def test_a_text_that_is_not_there_is_explained(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        async def why(old: str) -> str:
            return await tools.error("environment", "search_replace", file_path="a.py", old_string=old, new_string="x")

        said = await why("def first(a, b):\n  total = a + b\n")
        assert "differs in indentation: line 5 begins with 4 spaces, in old_string with 2 spaces" in said
        assert "4|def first(a, b):\n5|    total = a + b" in said
        assert "line 5 begins with 4 spaces, in old_string with 1 tab" in await why("def first(a, b):\n\ttotal = a + b")
        assert "line numbers" in await why("4|def first(a, b):\n5|    total = a + b")
        assert "backslash" in await why("def first(a, b):\\n    total = a + b")
        assert "white space at the end of lines" in await why("def first(a, b):   \n    total = a + b")
        assert "white space inside lines" in await why("def first(a,b):")
        assert "upper and lower case" in await why("DEF first(a, b):")
        said = await why("def second(a, b):\n    total = a * b\n    return total\n")
        assert "The nearest text is:\n9|def second(a, b):\n10|    total = a - b\n11|    return total" in said
        assert "first difference is at line 10; old_string has there:\ntotal = a * b" in said
        assert "9|def second(a, b):" in await why("def secnod(a, b):")
        assert "Nothing in the file is like it" in await why("zzzzzzzzzzzzzzzzzzzzzz")
        assert await tools.read("a.py") == SOURCE.encode()

    pods.run(check, files={"a.py": SOURCE})


def test_pointless_replacements_are_refused(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        async def refused(old: str, new: str, path: str = "a.py") -> str:
            return await tools.error("bad_arguments", "search_replace", file_path=path, old_string=old, new_string=new)

        assert "are the same" in await refused("import os", "import os")
        assert "only white space" in await refused("\n\n", "\n")
        assert "only white space" in await refused("    ", "")
        assert "exists and is not empty" in await refused("", "x")
        assert "binary" in await tools.error(
            "environment", "search_replace", file_path="bin", old_string="a", new_string="b"
        )
        assert "does not exist" in await tools.error(
            "environment", "search_replace", file_path="none.py", old_string="a", new_string="b"
        )
        assert await tools.text("search_replace", file_path="sub/new.py", old_string="", new_string="x\n") == (
            "Created sub/new.py (1 line)."
        )
        assert "Created empty" in await tools.text("search_replace", file_path="empty", old_string="", new_string="y")
        assert await tools.read("a.py") == SOURCE.encode()

    pods.run(check, files={"a.py": SOURCE, "bin": b"a\0b", "empty": ""})


def test_line_ends_modes_links_and_stray_bytes_are_kept(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text("search_replace", file_path="dos", old_string="two\nthree", new_string="2\n3\nmore")
        assert await tools.read("dos") == b"one\r\n2\r\n3\r\nmore\r\nfour\r\n"
        await tools.text("search_replace", file_path="dos", old_string="one", new_string="1\n1")
        assert await tools.read("dos") == b"1\r\n1\r\n2\r\n3\r\nmore\r\nfour\r\n"
        await tools.text("search_replace", file_path="mixed", old_string="a\nb\nc", new_string="x\ny")
        assert await tools.read("mixed") == b"x\ny\nd\n"
        await tools.text("search_replace", file_path="latin", old_string="here", new_string="thére")
        assert await tools.read("latin") == b"\xff caf\xe9 " + "thére".encode() + b" \xfe\n"
        await tools.sh(f"cd {tools.root} && chmod 711 latin && mkdir d && ln -s ../latin d/link")
        await tools.text("search_replace", file_path="d/link", old_string="thére", new_string="again")
        assert await tools.read("latin") == b"\xff caf\xe9 again \xfe\n"
        assert (
            await tools.sh(f"cd {tools.root} && readlink d/link && stat -c %a latin && ls -A d")
            == "../latin\n711\nlink\n"
        )

    files = {
        "dos": b"one\r\ntwo\r\nthree\r\nfour\r\n",
        "mixed": b"a\r\nb\nc\nd\n",
        "latin": b"\xff caf\xe9 here \xfe\n",
    }
    pods.run(check, files=files)


def test_a_megabyte_is_edited_and_a_file_made_to_be_slow_does_not_hang(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text("search_replace", file_path="big", old_string="line 40000\n", new_string="changed\n")
        assert b"changed" in await tools.read("big")
        old = "".join(random.Random(1).choice("ab") for _ in range(200))
        outcome = await tools.call("search_replace", file_path="alike", old_string=old, new_string="x")
        assert outcome.error == "environment"

    rng = random.Random(0)
    alike = "".join("".join(rng.choice("ab") for _ in range(200)) + "\n" for _ in range(6000))
    pods.run(check, files={"big": "".join(f"line {i}\n" for i in range(80_000)), "alike": alike})


lines = st.lists(st.text("ab \t\n\\|1é", max_size=12), max_size=12)


@settings(max_examples=300, deadline=None)
@given(lines, lines)
def test_explaining_a_failure_never_fails_itself(have: list[str], wanted: list[str]) -> None:
    text = nearest.explain("\n".join(have).encode(), "\n".join(wanted) or "x")
    assert text
    assert len(text) < 8000
