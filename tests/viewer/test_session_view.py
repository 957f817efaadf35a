"""Sessions as the pages tell them: diffs, calls, tokens."""

import json
from pathlib import Path
from typing import Any

from harness_traces import example, traces
from hypothesis import given, settings

from etude.chat.messages import Call
from etude.harness.tools.tool import Outcome
from etude.viewer.file_history import Diff, Workspace
from etude.viewer.server import dump
from etude.viewer.session_view import PAGE, Cut, Spelling, headline, tell, tell_tokens


def follow(
    files: Workspace, tool: str, facts: dict[str, Any] | None = None, text: str = "", **given: Any
) -> Diff | None:
    return files.follow(tool, Call(tool, given, "c"), Outcome(text, facts=facts or {}))


def read(files: Workspace, path: str, content: str) -> None:
    lines = content.split("\n")[:-1] if content.endswith("\n") else content.split("\n")
    text = "\n".join(f"{number}|{line}" for number, line in enumerate(lines, 1))
    facts = {"path": path, "size": len(content.encode()), "total": len(lines), "first": 1, "last": len(lines)}
    follow(files, "read_file", facts, text, target_file=path)


def plain(diff: Diff | None) -> list[str]:
    assert diff is not None
    return [f"{mark}{line}" for mark, line in diff.lines]


def test_an_edit_of_a_file_that_was_read_shows_the_lines_around_it() -> None:
    files = Workspace()
    read(files, "a.py", "one\ntwo\nthree\nfour\nfive\n")
    diff = follow(files, "search_replace", {"path": "a.py"}, file_path="a.py", old_string="three", new_string="3")
    assert plain(diff) == ["@line 1", " one", " two", "-three", "+3", " four", " five"]
    assert diff is not None
    assert (diff.added, diff.removed, diff.known) == (1, 1, True)
    assert files.texts["a.py"] == "one\ntwo\n3\nfour\nfive\n"
    again = follow(files, "search_replace", {"path": "a.py"}, file_path="a.py", old_string="3\nfour", new_string="4")
    assert plain(again) == ["@line 1", " one", " two", "-3", "-four", "+4", " five"]


def test_an_edit_of_a_file_nobody_read_shows_what_took_the_place_of_what() -> None:
    files = Workspace()
    diff = follow(files, "search_replace", {}, file_path="a.py", old_string="x = 1\ny = 2", new_string="x = 1\ny = 3")
    assert plain(diff) == ["@", " x = 1", "-y = 2", "+y = 3"]
    assert diff is not None
    assert not diff.known


def test_a_command_may_have_changed_a_file_unseen() -> None:
    files = Workspace()
    read(files, "a.py", "old\n")
    diff = follow(files, "search_replace", {"path": "a.py"}, file_path="a.py", old_string="other", new_string="new")
    assert plain(diff) == ["@", "-other", "+new"]
    assert "a.py" not in files.texts


def test_writing_and_deleting_files() -> None:
    files = Workspace()
    assert plain(follow(files, "write", {"path": "n.py"}, file_path="n.py", contents="a\nb\n")) == [
        "@line 1",
        "+a",
        "+b",
    ]
    assert plain(follow(files, "write", {"path": "n.py"}, file_path="n.py", contents="a\nc\n"))[1:] == [
        " a",
        "-b",
        "+c",
    ]
    created = follow(files, "search_replace", {"path": "m.py"}, file_path="m.py", old_string="", new_string="z\n")
    assert plain(created) == ["@line 1", "+z"]
    assert plain(follow(files, "delete_file", {"path": "n.py"}, target_file="n.py"))[1:] == ["-a", "-c"]
    unseen = follow(files, "write", {"path": "u.py", "lines_removed": 3}, file_path="u.py", contents="all new\n")
    assert unseen is not None
    assert not unseen.known, "what it was before, nobody has seen"


def test_what_failed_changed_nothing() -> None:
    files = Workspace()
    call = Call("search_replace", {"file_path": "a", "old_string": "x", "new_string": "y"}, "c")
    assert files.follow("search_replace", call, Outcome("not found", "environment")) is None
    assert files.follow("search_replace", call, None) is None
    broken = Call("search_replace", None, "c", "bad_json")
    assert files.follow("search_replace", broken, Outcome("", None)) is None


def test_a_file_that_was_read_in_part_is_not_known() -> None:
    files = Workspace()
    follow(
        files, "read_file", {"path": "a", "total": 9, "first": 1, "last": 2, "size": 90}, "1|a\n2|b", target_file="a"
    )
    assert files.texts == {}


def test_a_session_is_told_with_its_boundaries_and_broken_calls() -> None:
    told = tell(example())
    assert [step["kind"] for step in told["steps"]].count("summary") == 1
    turn = told["steps"][4]
    assert [call.get("status") for call in turn["calls"]] == [None, "bad_json"]
    assert turn["calls"][0]["error"] == "environment"
    assert turn["calls"][0]["exit_code"] == 1
    assert turn["calls"][1]["raw"] == '{"pattern": '
    assert [segment["kind"] for segment in told["segments"]] == ["start", "summary"]
    assert [mark.get("bad") for mark in told["strip"]] == ["environment", "bad_json", None, None, None]
    assert turn["versions"] == [7, 8]


def test_tokens_come_in_pages_with_what_is_known_of_each(tmp_path: Path) -> None:
    page = tell_tokens(example(), 0, 0, Spelling(tmp_path))
    assert page["texts"][:2] == ["⟨1⟩", "⟨2⟩"], "without a tokenizer, ids"
    assert "spelled" in page["problem"]
    assert page["made"] == [[0, 3], [1, 2], [0, 1], [1, 1]]
    assert page["logprobs"][3:5] == [-0.1, -0.7]
    assert tell_tokens(example(), 9, 0, Spelling(tmp_path))["texts"] == []
    assert tell_tokens(example(), 0, 10**6, Spelling(tmp_path))["texts"] == []
    assert PAGE >= 1000


@settings(deadline=None, max_examples=60)
@given(traces())
def test_whatever_a_trace_holds_it_becomes_json(trace: Any) -> None:
    spelling = Spelling(Path("/nowhere"))
    for told in (tell(trace), tell(trace, Cut(4)), tell_tokens(trace, 0, 0, spelling)):
        data = json.loads(dump(told))
        assert isinstance(data, dict)


def test_long_texts_are_cut_in_their_middle_and_say_so() -> None:
    cut = Cut(100)("a" * 500 + "b" * 500)
    assert cut.startswith("a" * 50)
    assert cut.endswith("b" * 50)
    assert "900 characters are left out" in cut
    assert Cut(100)("short") == "short"


def test_a_call_is_named_by_what_it_is_about() -> None:
    assert headline(Call("run", {"explanation": "why", "command": "ls -l\nrm x"}, "")) == "ls -l"
    assert headline(Call("odd", {"n": 3, "what": "this"}, "")) == "this"
    assert headline(Call("broken", None, "", "bad_json")) == ""
