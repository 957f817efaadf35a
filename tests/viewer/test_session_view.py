"""Sessions as JSON for the pages: diffs, calls, tokens."""

import json
from pathlib import Path
from typing import Any

from harness_traces import example, traces
from hypothesis import given, settings

from etude.chat.messages import ToolCall
from etude.harness.tools.tool import ToolOutcome
from etude.viewer.file_history import EditDiff, FileHistory
from etude.viewer.server import to_json
from etude.viewer.session_view import PAGE_TOKENS, TextLimit, TokenTexts, describe_session, describe_tokens, headline


def apply_call(
    files: FileHistory, tool: str, facts: dict[str, Any] | None = None, text: str = "", **given: Any
) -> EditDiff | None:
    return files.apply_call(tool, ToolCall(tool, given, "c"), ToolOutcome(text, facts=facts or {}))


def read(files: FileHistory, path: str, content: str) -> None:
    lines = content.split("\n")[:-1] if content.endswith("\n") else content.split("\n")
    text = "\n".join(f"{number}|{line}" for number, line in enumerate(lines, 1))
    facts = {"path": path, "size": len(content.encode()), "total": len(lines), "first": 1, "last": len(lines)}
    apply_call(files, "read_file", facts, text, target_file=path)


def plain(diff: EditDiff | None) -> list[str]:
    assert diff is not None
    return [f"{mark}{line}" for mark, line in diff.lines]


def test_an_edit_of_a_known_file_shows_surrounding_lines() -> None:
    files = FileHistory()
    read(files, "a.py", "one\ntwo\nthree\nfour\nfive\n")
    diff = apply_call(files, "search_replace", {"path": "a.py"}, file_path="a.py", old_string="three", new_string="3")
    assert plain(diff) == ["@line 1", " one", " two", "-three", "+3", " four", " five"]
    assert diff is not None
    assert (diff.added, diff.removed, diff.known) == (1, 1, True)
    assert files.texts["a.py"] == "one\ntwo\n3\nfour\nfive\n"
    again = apply_call(
        files, "search_replace", {"path": "a.py"}, file_path="a.py", old_string="3\nfour", new_string="4"
    )
    assert plain(again) == ["@line 1", " one", " two", "-3", "-four", "+4", " five"]


def test_an_edit_of_an_unknown_file_shows_only_the_replacement() -> None:
    files = FileHistory()
    diff = apply_call(
        files, "search_replace", {}, file_path="a.py", old_string="x = 1\ny = 2", new_string="x = 1\ny = 3"
    )
    assert plain(diff) == ["@", " x = 1", "-y = 2", "+y = 3"]
    assert diff is not None
    assert not diff.known


def test_a_call_that_contradicts_the_known_contents_is_right() -> None:
    files = FileHistory()
    read(files, "a.py", "old\n")
    diff = apply_call(files, "search_replace", {"path": "a.py"}, file_path="a.py", old_string="other", new_string="new")
    assert plain(diff) == ["@", "-other", "+new"]
    assert "a.py" not in files.texts


def test_writing_and_deleting_files() -> None:
    files = FileHistory()
    assert plain(apply_call(files, "write", {"path": "n.py"}, file_path="n.py", contents="a\nb\n")) == [
        "@line 1",
        "+a",
        "+b",
    ]
    assert plain(apply_call(files, "write", {"path": "n.py"}, file_path="n.py", contents="a\nc\n"))[1:] == [
        " a",
        "-b",
        "+c",
    ]
    created = apply_call(files, "search_replace", {"path": "m.py"}, file_path="m.py", old_string="", new_string="z\n")
    assert plain(created) == ["@line 1", "+z"]
    assert plain(apply_call(files, "delete_file", {"path": "n.py"}, target_file="n.py"))[1:] == ["-a", "-c"]
    unseen = apply_call(files, "write", {"path": "u.py", "lines_removed": 3}, file_path="u.py", contents="all new\n")
    assert unseen is not None
    assert not unseen.known, "its old contents are not known"


def test_a_failed_call_changes_nothing() -> None:
    files = FileHistory()
    call = ToolCall("search_replace", {"file_path": "a", "old_string": "x", "new_string": "y"}, "c")
    assert files.apply_call("search_replace", call, ToolOutcome("not found", "environment")) is None
    assert files.apply_call("search_replace", call, None) is None
    broken = ToolCall("search_replace", None, "c", "bad_json")
    assert files.apply_call("search_replace", broken, ToolOutcome("", None)) is None


def test_a_partly_read_file_is_not_known() -> None:
    files = FileHistory()
    apply_call(
        files, "read_file", {"path": "a", "total": 9, "first": 1, "last": 2, "size": 90}, "1|a\n2|b", target_file="a"
    )
    assert files.texts == {}


def test_a_session_has_its_segments_and_malformed_calls() -> None:
    data = describe_session(example())
    assert [step["kind"] for step in data["steps"]].count("summary") == 1
    turn = data["steps"][4]
    assert [call.get("status") for call in turn["calls"]] == [None, "bad_json"]
    assert turn["calls"][0]["error"] == "environment"
    assert turn["calls"][0]["exit_code"] == 1
    assert turn["calls"][1]["raw"] == '{"pattern": '
    assert [segment["kind"] for segment in data["segments"]] == ["start", "summary"]
    assert [mark.get("bad") for mark in data["strip"]] == ["environment", "bad_json", None, None, None]
    assert turn["versions"] == [7, 8]


def test_tokens_come_in_pages(tmp_path: Path) -> None:
    page = describe_tokens(example(), 0, 0, TokenTexts(tmp_path))
    assert page["texts"][:2] == ["⟨1⟩", "⟨2⟩"], "without a tokenizer, ids"
    assert "decoded" in page["problem"]
    assert page["made"] == [[0, 3], [1, 2], [0, 1], [1, 1]]
    assert page["logprobs"][3:5] == [-0.1, -0.7]
    assert describe_tokens(example(), 9, 0, TokenTexts(tmp_path))["texts"] == []
    assert describe_tokens(example(), 0, 10**6, TokenTexts(tmp_path))["texts"] == []
    assert PAGE_TOKENS >= 1000


@settings(deadline=None, max_examples=60)
@given(traces())
def test_every_trace_becomes_json(trace: Any) -> None:
    spelling = TokenTexts(Path("/nowhere"))
    for data in (
        describe_session(trace),
        describe_session(trace, TextLimit(4)),
        describe_tokens(trace, 0, 0, spelling),
    ):
        data = json.loads(to_json(data))
        assert isinstance(data, dict)


def test_long_texts_are_shortened_in_the_middle() -> None:
    cut = TextLimit(100)("a" * 500 + "b" * 500)
    assert cut.startswith("a" * 50)
    assert cut.endswith("b" * 50)
    assert "900 characters are left out" in cut
    assert TextLimit(100)("short") == "short"


def test_the_headline_of_a_call_is_its_main_argument() -> None:
    assert headline(ToolCall("run", {"explanation": "why", "command": "ls -l\nrm x"}, "")) == "ls -l"
    assert headline(ToolCall("odd", {"n": 3, "what": "this"}, "")) == "this"
    assert headline(ToolCall("broken", None, "", "bad_json")) == ""
