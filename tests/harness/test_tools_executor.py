"""The toolbox: what the model is shown, how calls are checked and run, what becomes of errors, bugs and lost pods."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from harness_pods import Box, Yard, shared_yard
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.messages import ToolCall, tool_names
from etude.errors import InputError
from etude.harness.search.source import FileSource
from etude.harness.tool_set import ALL_TOOLS, ToolSet
from etude.harness.tools.arguments import check_arguments
from etude.harness.tools.executor import TOOLS, ToolExecutor, exposed_tools
from etude.harness.tools.tool import Tool, ToolError, ToolOutcome
from etude.pods.pod import PodGone


@pytest.fixture
def yard(request: pytest.FixtureRequest) -> Yard:
    return shared_yard(request.config)


# -- what is shown


def schemas(environment: ToolSet) -> dict[str, Any]:
    return {shown.name: shown.schema["function"] for shown in exposed_tools(environment).values()}


def test_the_tools_have_cursors_names_and_arguments() -> None:
    found = {name: list(schema["parameters"]["properties"]) for name, schema in schemas(ToolSet()).items()}
    assert tuple(found) == ALL_TOOLS
    assert found["read_file"] == ["target_file", "offset", "limit"]
    assert found["search_replace"] == ["file_path", "old_string", "new_string", "replace_all"]
    assert found["write"] == ["file_path", "contents"]
    assert found["list_dir"] == ["target_directory", "ignore_globs"]
    assert found["glob_file_search"] == ["glob_pattern", "target_directory"]
    assert found["grep"] == (
        ["pattern", "path", "glob", "output_mode", "-B", "-A", "-C", "-i", "type", "head_limit", "multiline"]
    )
    assert found["codebase_search"] == ["query", "target_directories", "explanation"]
    assert found["run_terminal_cmd"] == ["command", "block_until_ms", "is_background", "explanation"]
    assert found["await"] == ["job_id", "block_until_ms", "pattern"]
    assert found["todo_write"] == ["merge", "todos"]
    assert set(schemas(ToolSet(web=True))) - set(found) == {"web_search", "web_fetch"}


def test_what_is_shown_depends_on_the_environment_alone_and_not_on_strictness() -> None:
    assert schemas(ToolSet(strict=True)) == schemas(ToolSet())
    assert json.loads(json.dumps(schemas(ToolSet()))) == schemas(ToolSet())
    for naming in ("cursor", "claude-code", "bash"):
        for schema in schemas(ToolSet(aliases=naming, web=True)).values():
            assert "{" not in schema["description"], schema["description"]


def test_a_brief_environment_shows_the_same_tools_in_fewer_words() -> None:
    for naming in ("cursor", "claude-code", "bash"):
        full, brief = schemas(ToolSet(aliases=naming)), schemas(ToolSet(aliases=naming, short_system_prompt=True))
        assert list(brief) == list(full)
        assert len(json.dumps(brief)) < 0.65 * len(json.dumps(full))
        for name, schema in brief.items():
            assert full[name]["description"].startswith(schema["description"])
            assert schema["description"].count(".") == 1
            every, needed = full[name]["parameters"]["properties"], full[name]["parameters"]["required"]
            assert set(schema["parameters"]["properties"]) == set(needed or every)
            assert schema["parameters"]["required"] == needed


def test_a_brief_environment_still_takes_the_arguments_it_does_not_show(yard: Yard) -> None:
    async def check(box: Box) -> None:
        text = await box.text("read_file", target_file="a.txt", offset=2, limit=1)
        assert "2|two" in text
        assert "1|one" not in text

    yard.run(check, environment=ToolSet(short_system_prompt=True), files={"a.txt": "one\ntwo\nthree\n"})


def test_the_same_tools_go_by_other_names() -> None:
    claude = schemas(ToolSet(aliases="claude-code"))
    assert list(claude) == (
        ["Read", "Edit", "Write", "LS", "Glob", "Grep", "Bash", "BashOutput", "KillShell", "TodoWrite"]
    )
    assert list(claude["Read"]["parameters"]["properties"]) == ["file_path", "offset", "limit"]
    assert claude["Write"]["parameters"]["required"] == ["file_path", "content"]
    assert list(claude["Bash"]["parameters"]["properties"]) == (
        ["command", "timeout", "run_in_background", "description"]
    )
    assert "timeout" in claude["Bash"]["description"]
    bash = schemas(ToolSet(aliases="bash"))
    assert {name: list(schema["parameters"]["properties"]) for name, schema in bash.items()} == {"bash": ["command"]}
    renamed = exposed_tools(ToolSet(tools=("read_file", "grep"), renamed={"grep": "rg"}))
    assert list(renamed) == ["read_file", "rg"]
    assert tool_names([shown.schema for shown in renamed.values()]) == {"read_file", "rg"}


def test_an_environment_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="naming is 'vim'"):
        exposed_tools(ToolSet(aliases="vim"))
    with pytest.raises(InputError, match="'raed_file' is not a tool"):
        exposed_tools(ToolSet(tools=("raed_file",)))
    with pytest.raises(InputError, match="two tools are called 'x'"):
        exposed_tools(ToolSet(renamed={"grep": "x", "write": "x"}))


# -- arguments

SCHEMA = TOOLS["grep"].parameters
TODOS = TOOLS["todo_write"].parameters


def test_strict_checking_takes_nothing_that_the_schema_does_not_say() -> None:
    def wrong(given: Mapping[str, Any], schema: Mapping[str, Any] = SCHEMA) -> str:
        with pytest.raises(ToolError) as caught:
            check_arguments("grep", schema, given, strict=True)
        assert caught.value.kind == "bad_arguments"
        return str(caught.value)

    assert wrong({}) == "grep: the argument pattern is missing"
    assert wrong({"patern": "x"}) == (
        "grep: there is no argument 'patern'; did you mean pattern?; the argument pattern is missing (there is "
        "'patern', which is not known)"
    )
    assert wrong({"pattern": "x", "-A": "5"}) == 'grep: -A must be an integer, not "5"'
    assert wrong({"pattern": 5}) == "grep: pattern must be a string, not 5"
    assert wrong({"pattern": None}) == "grep: pattern must be a string, not null"
    assert wrong({"pattern": "x", "-i": 1}) == "grep: -i must be a boolean, not 1"
    assert wrong({"pattern": "x", "-A": True}) == "grep: -A must be an integer, not true"
    assert "must be at least 1" in wrong({"pattern": "x", "head_limit": 0})
    assert "must be one of content, files_with_matches, count" in wrong({"pattern": "x", "output_mode": "lines"})
    assert "half a character" in wrong({"pattern": "\ud800"})
    assert "todos[1].id is missing" in wrong({"merge": True, "todos": [{"id": "a"}, {"content": "x"}]}, TODOS)
    assert "todos[0].status must be one of" in wrong({"merge": True, "todos": [{"id": "a", "status": "y"}]}, TODOS)


def test_otherwise_what_can_only_mean_one_thing_is_taken() -> None:
    def taken(given: Mapping[str, Any], schema: Mapping[str, Any] = SCHEMA) -> Any:
        return check_arguments("grep", schema, given, strict=False)

    assert taken({"pattern": "x", "-A": "5", "-B": 2.0, "-i": "True", "path": None, "why": 1}) == (
        {"pattern": "x", "-A": 5, "-B": 2, "-i": True},
        ["why"],
    )
    assert taken({"pattern": 5})[0] == {"pattern": "5"}
    assert taken({"merge": "false", "todos": '[{"id": 1, "x": 2}]'}, TODOS)[0] == {
        "merge": False,
        "todos": [{"id": "1"}],
    }
    listing = TOOLS["list_dir"].parameters
    assert taken({"target_directory": ".", "ignore_globs": "*.py"}, listing)[0]["ignore_globs"] == ["*.py"]
    for bad in ({"pattern": True}, {"pattern": ["x"]}, {"pattern": "x", "-A": "five"}, {"pattern": "x", "-A": 1.5}):
        with pytest.raises(ToolError):
            taken(bad)
    with pytest.raises(ToolError):
        taken({"pattern": "x", "-A": "[" * 100_000})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["pattern", "-A", "-i", "merge", "todos", "other"]), values), st.booleans())
def test_checking_arguments_ends_in_arguments_or_a_tool_error(given: dict[str, Any], strict: bool) -> None:
    for schema in (SCHEMA, TODOS):
        try:
            checked, _ = check_arguments("tool", schema, given, strict)
        except ToolError:
            continue
        assert set(schema["required"]) <= set(checked) <= set(schema["properties"])


# -- running


def test_calls_that_are_none_are_answered_and_classified(yard: Yard) -> None:
    async def check(box: Box) -> None:
        bad = [
            ToolCall("read_file", None, "1", "bad_json", problem="line 1: expected a comma"),
            ToolCall("read_file", None, "2", "unclosed"),
            ToolCall("", None, "3", "missing_name"),
            ToolCall("read_fiel", {}, "4", "unknown_tool"),
            ToolCall("Read", {"target_file": "a"}, "5"),
            ToolCall("read_file", None, "6"),
            ToolCall("read_file", {"file": "a"}, "7"),
            box.made("read_file", target_file="a"),
        ]
        outcomes = await box.toolbox.run(bad)
        kinds = ["malformed_call"] * 3 + ["unknown_tool"] * 2 + ["malformed_call", "bad_arguments", None]
        assert [outcome.error for outcome in outcomes] == kinds
        assert outcomes[0].text == "line 1: expected a comma"
        assert outcomes[1].text == "the call was not finished"
        assert "there is no tool 'read_fiel'; there are read_file, search_replace" in outcomes[3].text
        assert await box.toolbox.run([]) == []
        outcome = await box.call("read_file", target_file="a", offset="1", reason="curious")
        assert outcome.text == "1|x\n[ignored: there is no argument reason]"

    yard.run(check, files={"a": "x\n"})


def test_reads_run_together_writes_alone_and_outcomes_keep_the_order(yard: Yard) -> None:
    async def check(box: Box) -> None:
        jobs = [box.made("run_terminal_cmd", command="sleep 0.5", block_until_ms=0) for _ in range(3)]
        await box.toolbox.run(jobs)
        waits = [box.made("await", job_id=str(n)) for n in (3, 2, 1)]
        edits = [
            box.made("search_replace", file_path="a", old_string=f"v{n}", new_string=f"v{n + 1}") for n in range(5)
        ]
        reads = [box.made("read_file", target_file="a")] * 3
        before = box.toolbox.pod_seconds
        outcomes = await box.toolbox.run([*waits, reads[0], *edits[:3], reads[1], *edits[3:], reads[2]])
        assert [outcome.error for outcome in outcomes] == [None] * 11
        assert [outcome.facts["job"] for outcome in outcomes[:3]] == ["3", "2", "1"]
        assert [outcomes[n].text for n in (3, 7, 10)] == ["1|v0", "1|v3", "1|v5"]
        assert sum(outcome.seconds for outcome in outcomes[:3]) > 0.9  # each took its half second,
        assert 0.2 < box.toolbox.pod_seconds - before < 0.9  # and all at once

    yard.run(check, files={"a": "v0\n"})


def test_a_person_may_refuse_a_call(yard: Yard) -> None:
    asked: list[str] = []

    async def approve(call: ToolCall, tool: Tool) -> bool | str:
        asked.append(tool.name)
        return tool.read_only or ("use a branch" if tool.name == "write" else False)

    async def check(box: Box) -> None:
        assert await box.text("read_file", target_file="a") == "1|x"
        assert "did not allow this call: use a branch." in await box.error(
            "denied", "write", file_path="a", contents=""
        )
        assert "did not allow this call." in await box.error("denied", "delete_file", target_file="a")
        assert await box.read("a") == b"x\n"
        assert asked == ["read_file", "write", "delete_file"]

    yard.run(check, files={"a": "x\n"}, approve=approve)


def test_a_bug_is_told_in_a_line_logged_in_full_and_counted(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(bench: object, given: Mapping[str, Any]) -> ToolOutcome:
        raise ZeroDivisionError("oh no")

    async def check(box: Box) -> None:
        shown = box.toolbox.tools["read_file"]
        tools = {"read_file": replace(shown, tool=replace(shown.tool, run=broken))}
        toolbox = ToolExecutor(tools, box.toolbox.context, None)
        with caplog.at_level(logging.ERROR, "etude.harness"):
            (outcome,) = await toolbox.run([box.made("read_file", target_file="a")])
        assert outcome.error == "bug"
        assert "oh no" not in outcome.text
        assert toolbox.bugs == 1
        assert "ZeroDivisionError: oh no" in caplog.text
        assert "target_file" in caplog.text

    yard.run(check)


def test_a_pod_that_is_gone_is_raised_and_is_no_outcome(yard: Yard) -> None:
    async def check(box: Box) -> None:
        calls = [box.made("run_terminal_cmd", command="sleep 60"), box.made("read_file", target_file="a")]
        running = asyncio.create_task(box.toolbox.run(calls))
        await asyncio.sleep(0.3)
        await box.pod.close()
        with pytest.raises(PodGone):
            await running
        with pytest.raises(PodGone):
            await box.call("read_file", target_file="a")
        assert await box.text("todo_write", merge=False, todos=[]) == "The list is empty."

    yard.run(check)


def test_the_same_calls_give_the_same_text_in_every_run(yard: Yard) -> None:
    texts: list[list[str]] = []

    async def check(box: Box) -> None:
        calls = [
            box.made("list_dir", target_directory="."),
            box.made("glob_file_search", glob_pattern="*"),
            box.made("grep", pattern="def"),
            box.made("run_terminal_cmd", command="cd src && ls && false"),
            box.made("run_terminal_cmd", command="sleep 9", is_background=True),
            box.made("write", file_path="src/c.py", contents="x = 1\n"),
            box.made("glob_file_search", glob_pattern="*.py"),
            box.made("search_replace", file_path="src/c.py", old_string="y", new_string="z"),
            box.made("read_lints"),
            box.made("kill", job_id="2"),
        ]
        outcomes = await box.toolbox.run(calls)
        temporary = (await box.sh('echo "${TMPDIR:-/tmp}"')).strip()  # some backends give each pod its own
        texts.append([outcome.text.replace(box.root, "ROOT").replace(temporary, "TMP") for outcome in outcomes])

    for _ in range(2):
        yard.run(check, files={f"src/{name}.py": f"def {name}(): pass\n" for name in "ab"})
    assert texts[0] == texts[1]


# -- to-dos, names and what is outside


def test_todos_are_merged_by_id_and_only_one_is_in_progress(yard: Yard) -> None:
    async def check(box: Box) -> None:
        todo = box.text
        first = [
            {"id": "1", "content": "read", "status": "in_progress"},
            {"id": "2", "content": "fix", "status": "pending"},
        ]
        assert await todo("todo_write", merge=False, todos=first) == "[>] 1: read\n[ ] 2: fix"
        await todo("todo_write", merge=True, todos=[{"id": "1", "status": "completed"}, {"id": "3", "content": "test"}])
        assert box.toolbox.plan == "[x] 1: read\n[ ] 2: fix\n[ ] 3: test"
        busy = [{"id": "2", "status": "in_progress"}, {"id": "3", "status": "in_progress"}]
        assert "only one may be in_progress, not 2, 3" in await box.error(
            "bad_arguments", "todo_write", merge=True, todos=busy
        )
        assert "has no content" in await box.error("bad_arguments", "todo_write", merge=True, todos=[{"id": "9"}])
        assert "given twice" in await box.error("bad_arguments", "todo_write", merge=True, todos=[{"id": "1"}] * 2)
        state = json.loads(json.dumps(box.toolbox.state()))
        await todo("todo_write", merge=False, todos=[])
        assert box.toolbox.plan == ""
        box.toolbox.restore(state)
        assert box.toolbox.plan == "[x] 1: read\n[ ] 2: fix\n[ ] 3: test"
        outcome = await box.call("todo_write", merge=True, todos=[{"id": "2", "status": "cancelled"}])
        assert outcome.facts == {"pending": 1, "in_progress": 0, "completed": 1, "cancelled": 1}

    yard.run(check)


def test_claude_codes_tools_do_the_same_work(yard: Yard) -> None:
    async def check(box: Box) -> None:
        await box.text("Write", file_path="a.py", content="x = 1\n")
        assert await box.text("Read", file_path="a.py") == "1|x = 1"
        await box.text("Edit", file_path="a.py", old_string="1", new_string="2")
        assert await box.text("Glob", pattern="*.py", path=".") == "a.py"
        assert await box.text("Grep", pattern="x") == "a.py\n1:x = 2"
        assert "a.py" in await box.text("LS", path=box.root)
        text = await box.text("Bash", command="echo hi; sleep 60", timeout=300, description="wait")
        assert "Wait with BashOutput, end it with KillShell" in text
        assert "still running" in await box.text("BashOutput", bash_id="1", timeout=0)
        await box.text("KillShell", shell_id="1")
        assert (
            await box.text("TodoWrite", todos=[{"content": "a", "status": "pending", "activeForm": "b"}]) == "[ ] 1: a"
        )
        assert "List it with LS." in await box.error("environment", "Read", file_path=".")
        assert "file_path must be a string" in await box.error("bad_arguments", "Read", file_path=["a"])

    yard.run(check, environment=ToolSet(aliases="claude-code"))


def test_with_bash_alone_a_command_is_waited_for_to_its_end(yard: Yard) -> None:
    async def check(box: Box) -> None:
        assert await box.text("bash", command="sleep 0.3; echo over") == "over\n[exit code 0]"
        outcome = await box.call("bash", command="sleep 60")
        assert outcome.error == "timeout"
        assert "block_until_ms" in await box.error("bad_arguments", "bash", command="true", block_until_ms=0)

    yard.run(check, environment=ToolSet(aliases="bash", command_timeout_s=1.0, strict=True))


class Finder:
    """A searcher that looks for the words themselves."""

    async def search(self, files: FileSource, query: str, directories: Sequence[str], limit: int) -> str:
        entries = await files.listing()
        found = await files.contents([entry.path for entry in entries])
        hits = [path for path, data in found.items() if query.encode() in data]
        return f"{len(entries)} files; {', '.join(sorted(hits))}; {list(directories)} {limit}"


class Library:
    async def search(self, query: str) -> str:
        return f"results for {query}"

    async def fetch(self, url: str) -> str:
        raise ToolError("provider", f"{url}: no route")


def test_what_is_outside_the_pod_is_reached_through_its_door_or_not_at_all(yard: Yard) -> None:
    async def check(box: Box) -> None:
        assert await box.text("codebase_search", query="needle", target_directories=["src"]) == (
            "3 files; big.txt, src/a.py; ['src'] 10"
        )
        await box.text("search_replace", file_path="src/a.py", old_string="needle", new_string="pin")
        assert "; big.txt;" in await box.text("codebase_search", query="needle")
        assert await box.text("web_search", search_term="x") == "results for x"
        assert "no route" in await box.error("provider", "web_fetch", url="http://x")

    files = {
        "src/a.py": "needle\n",
        "big.txt": "needle" * 100_000,
        ".gitignore": "*.log\n",
        "a.log": "needle",
        "b": b"\0needle",
    }
    yard.run(check, files=files, environment=ToolSet(web=True), searcher=Finder(), web=Library())

    async def without(box: Box) -> None:
        assert "is not set up" in await box.error("provider", "codebase_search", query="x")
        assert "web_search" not in box.toolbox.tools

    yard.run(without)
