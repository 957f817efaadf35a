"""The tool executor: schemas, validation and execution of calls, errors, bugs and lost pods."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from harness_pods import PodFixture, PodTools, shared_pod_fixture
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.chat.messages import ToolCall, tool_names
from etude.errors import InputError
from etude.harness.search.source import FileSource
from etude.harness.tool_set import ALL_TOOLS, ToolSet
from etude.harness.tools.arguments import check_arguments
from etude.harness.tools.executor import TOOLS, ToolExecutor, exposed_tools
from etude.harness.tools.tool import Tool, ToolError, ToolOutcome
from etude.pods.pod import PodGone


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> PodFixture:
    return shared_pod_fixture(request.config)


# -- what is shown


def schemas(tool_set: ToolSet) -> dict[str, Any]:
    return {shown.name: shown.schema["function"] for shown in exposed_tools(tool_set).values()}


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


def test_schemas_depend_on_the_tool_set_but_not_on_strictness() -> None:
    assert schemas(ToolSet(strict=True)) == schemas(ToolSet())
    assert json.loads(json.dumps(schemas(ToolSet()))) == schemas(ToolSet())
    for naming in ("cursor", "claude-code", "bash"):
        for schema in schemas(ToolSet(aliases=naming, web=True)).values():
            assert "{" not in schema["description"], schema["description"]


def test_short_schemas_show_the_same_tools_in_fewer_words() -> None:
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


def test_short_schemas_still_accept_arguments_that_are_not_shown(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        text = await tools.text("read_file", target_file="a.txt", offset=2, limit=1)
        assert "2|two" in text
        assert "1|one" not in text

    pods.run(check, tool_set=ToolSet(short_system_prompt=True), files={"a.txt": "one\ntwo\nthree\n"})


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


def test_an_invalid_tool_set_is_refused() -> None:
    with pytest.raises(ValidationError, match="aliases"):
        ToolSet(aliases="vim")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'raed_file' is not a tool"):
        exposed_tools(ToolSet(tools=("raed_file",)))
    with pytest.raises(InputError, match="two tools are called 'x'"):
        exposed_tools(ToolSet(renamed={"grep": "x", "write": "x"}))


# -- arguments

SCHEMA = TOOLS["grep"].parameters
TODOS = TOOLS["todo_write"].parameters


def test_strict_checking_follows_the_schema_exactly() -> None:
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


def test_unambiguous_values_are_converted_unless_strict() -> None:
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


def test_malformed_calls_get_an_error_class(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        bad = [
            ToolCall("read_file", None, "1", "bad_json", problem="line 1: expected a comma"),
            ToolCall("read_file", None, "2", "unclosed"),
            ToolCall("", None, "3", "missing_name"),
            ToolCall("read_fiel", {}, "4", "unknown_tool"),
            ToolCall("Read", {"target_file": "a"}, "5"),
            ToolCall("read_file", None, "6"),
            ToolCall("read_file", {"file": "a"}, "7"),
            tools.make_call("read_file", target_file="a"),
        ]
        outcomes = await tools.executor.run(bad)
        kinds = ["malformed_call"] * 3 + ["unknown_tool"] * 2 + ["malformed_call", "bad_arguments", None]
        assert [outcome.error for outcome in outcomes] == kinds
        assert outcomes[0].text == "line 1: expected a comma"
        assert outcomes[1].text == "the call was not finished"
        assert "there is no tool 'read_fiel'; there are read_file, search_replace" in outcomes[3].text
        assert await tools.executor.run([]) == []
        outcome = await tools.call("read_file", target_file="a", offset="1", reason="curious")
        assert outcome.text == "1|x\n[ignored: there is no argument reason]"

    pods.run(check, files={"a": "x\n"})


def test_reads_run_concurrently_writes_alone_and_outcomes_keep_the_order(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        waiting = "until [ -e go ]; do sleep 0.05; done"
        jobs = [tools.make_call("run_terminal_cmd", command=waiting, block_until_ms=0) for _ in range(3)]
        await tools.executor.run(jobs)
        before = tools.executor.pod_seconds
        waits = asyncio.create_task(
            tools.executor.run([tools.make_call("await", job_id=str(n), block_until_ms=600_000) for n in (3, 2, 1)])
        )
        await asyncio.sleep(0.5)
        await tools.pod.write(f"{tools.root}/go", "")
        outcomes = await waits
        assert [outcome.facts["job"] for outcome in outcomes] == ["3", "2", "1"]
        # One after the other, the first would have waited and the others found their jobs ended.
        assert sum(outcome.seconds for outcome in outcomes) > 1.5 * (tools.executor.pod_seconds - before)
        edits = [
            tools.make_call("search_replace", file_path="a", old_string=f"v{n}", new_string=f"v{n + 1}")
            for n in range(5)
        ]
        reads = [tools.make_call("read_file", target_file="a")] * 3
        outcomes = await tools.executor.run([reads[0], *edits[:3], reads[1], *edits[3:], reads[2]])
        assert [outcome.error for outcome in outcomes] == [None] * 8
        assert [outcomes[n].text for n in (0, 4, 7)] == ["1|v0", "1|v3", "1|v5"]

    pods.run(check, files={"a": "v0\n"})


def test_the_user_may_refuse_a_call(pods: PodFixture) -> None:
    asked: list[str] = []

    async def approve(call: ToolCall, tool: Tool) -> bool | str:
        asked.append(tool.name)
        return tool.read_only or ("use a branch" if tool.name == "write" else False)

    async def check(tools: PodTools) -> None:
        assert await tools.text("read_file", target_file="a") == "1|x"
        assert "did not allow this call: use a branch." in await tools.error(
            "denied", "write", file_path="a", contents=""
        )
        assert "did not allow this call." in await tools.error("denied", "delete_file", target_file="a")
        assert await tools.read("a") == b"x\n"
        assert asked == ["read_file", "write", "delete_file"]

    pods.run(check, files={"a": "x\n"}, approve=approve)


def test_a_bug_is_reported_in_a_line_logged_in_full_and_counted(
    pods: PodFixture, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(context: object, arguments: Mapping[str, Any]) -> ToolOutcome:
        raise ZeroDivisionError("oh no")

    async def check(tools: PodTools) -> None:
        shown = tools.executor.tools["read_file"]
        exposed = {"read_file": replace(shown, tool=replace(shown.tool, run=broken))}
        executor = ToolExecutor(exposed, tools.executor.context, None)
        with caplog.at_level(logging.ERROR, "etude.harness"):
            (outcome,) = await executor.run([tools.make_call("read_file", target_file="a")])
        assert outcome.error == "bug"
        assert "oh no" not in outcome.text
        assert executor.bugs == 1
        assert "ZeroDivisionError: oh no" in caplog.text
        assert "target_file" in caplog.text

    pods.run(check)


def test_a_lost_pod_is_raised(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        calls = [tools.make_call("run_terminal_cmd", command="sleep 60"), tools.make_call("read_file", target_file="a")]
        running = asyncio.create_task(tools.executor.run(calls))
        await asyncio.sleep(0.3)
        await tools.pod.close()
        with pytest.raises(PodGone):
            await running
        with pytest.raises(PodGone):
            await tools.call("read_file", target_file="a")
        assert await tools.text("todo_write", merge=False, todos=[]) == "The list is empty."

    pods.run(check)


def test_the_same_calls_give_the_same_text_in_every_run(pods: PodFixture) -> None:
    texts: list[list[str]] = []

    async def check(tools: PodTools) -> None:
        calls = [
            tools.make_call("list_dir", target_directory="."),
            tools.make_call("glob_file_search", glob_pattern="*"),
            tools.make_call("grep", pattern="def"),
            tools.make_call("run_terminal_cmd", command="cd src && ls && false"),
            tools.make_call("run_terminal_cmd", command="sleep 9", is_background=True),
            tools.make_call("write", file_path="src/c.py", contents="x = 1\n"),
            tools.make_call("glob_file_search", glob_pattern="*.py"),
            tools.make_call("search_replace", file_path="src/c.py", old_string="y", new_string="z"),
            tools.make_call("read_lints"),
            tools.make_call("kill", job_id="2"),
        ]
        outcomes = await tools.executor.run(calls)
        temporary = (await tools.sh('echo "${TMPDIR:-/tmp}"')).strip()  # some backends give each pod its own
        texts.append([outcome.text.replace(tools.root, "ROOT").replace(temporary, "TMP") for outcome in outcomes])

    for _ in range(2):
        pods.run(check, files={f"src/{name}.py": f"def {name}(): pass\n" for name in "ab"})
    assert texts[0] == texts[1]


# -- to-dos, names and what is outside


def test_todos_are_merged_by_id_and_only_one_is_in_progress(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        todo = tools.text
        first = [
            {"id": "1", "content": "read", "status": "in_progress"},
            {"id": "2", "content": "fix", "status": "pending"},
        ]
        assert await todo("todo_write", merge=False, todos=first) == "[>] 1: read\n[ ] 2: fix"
        await todo("todo_write", merge=True, todos=[{"id": "1", "status": "completed"}, {"id": "3", "content": "test"}])
        assert tools.executor.plan == "[x] 1: read\n[ ] 2: fix\n[ ] 3: test"
        busy = [{"id": "2", "status": "in_progress"}, {"id": "3", "status": "in_progress"}]
        assert "only one may be in_progress, not 2, 3" in await tools.error(
            "bad_arguments", "todo_write", merge=True, todos=busy
        )
        assert "has no content" in await tools.error("bad_arguments", "todo_write", merge=True, todos=[{"id": "9"}])
        assert "given twice" in await tools.error("bad_arguments", "todo_write", merge=True, todos=[{"id": "1"}] * 2)
        state = json.loads(json.dumps(tools.executor.state()))
        await todo("todo_write", merge=False, todos=[])
        assert tools.executor.plan == ""
        tools.executor.restore(state)
        assert tools.executor.plan == "[x] 1: read\n[ ] 2: fix\n[ ] 3: test"
        outcome = await tools.call("todo_write", merge=True, todos=[{"id": "2", "status": "cancelled"}])
        assert outcome.facts == {"pending": 1, "in_progress": 0, "completed": 1, "cancelled": 1}

    pods.run(check)


def test_claude_codes_tools_do_the_same_work(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text("Write", file_path="a.py", content="x = 1\n")
        assert await tools.text("Read", file_path="a.py") == "1|x = 1"
        await tools.text("Edit", file_path="a.py", old_string="1", new_string="2")
        assert await tools.text("Glob", pattern="*.py", path=".") == "a.py"
        assert await tools.text("Grep", pattern="x") == "a.py\n1:x = 2"
        assert "a.py" in await tools.text("LS", path=tools.root)
        text = await tools.text("Bash", command="echo hi; sleep 60", timeout=300, description="wait")
        assert "Wait with BashOutput, end it with KillShell" in text
        assert "still running" in await tools.text("BashOutput", bash_id="1", timeout=0)
        await tools.text("KillShell", shell_id="1")
        assert (
            await tools.text("TodoWrite", todos=[{"content": "a", "status": "pending", "activeForm": "b"}])
            == "[ ] 1: a"
        )
        assert "List it with LS." in await tools.error("environment", "Read", file_path=".")
        assert "file_path must be a string" in await tools.error("bad_arguments", "Read", file_path=["a"])

    pods.run(check, tool_set=ToolSet(aliases="claude-code"))


def test_with_only_bash_a_command_is_awaited_to_its_end(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await tools.text("bash", command="sleep 0.3; echo over") == "over\n[exit code 0]"
        outcome = await tools.call("bash", command="sleep 60")
        assert outcome.error == "timeout"
        assert "block_until_ms" in await tools.error("bad_arguments", "bash", command="true", block_until_ms=0)

    pods.run(check, tool_set=ToolSet(aliases="bash", command_timeout_s=1.0, strict=True))


class Finder:
    """A search provider that finds the words themselves."""

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


def test_search_and_web_use_their_providers_or_fail(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await tools.text("codebase_search", query="needle", target_directories=["src"]) == (
            "3 files; big.txt, src/a.py; ['src'] 10"
        )
        await tools.text("search_replace", file_path="src/a.py", old_string="needle", new_string="pin")
        assert "; big.txt;" in await tools.text("codebase_search", query="needle")
        assert await tools.text("web_search", search_term="x") == "results for x"
        assert "no route" in await tools.error("provider", "web_fetch", url="http://x")

    files = {
        "src/a.py": "needle\n",
        "big.txt": "needle" * 100_000,
        ".gitignore": "*.log\n",
        "a.log": "needle",
        "b": b"\0needle",
    }
    pods.run(check, files=files, tool_set=ToolSet(web=True), searcher=Finder(), web=Library())

    async def without(tools: PodTools) -> None:
        assert "is not set up" in await tools.error("provider", "codebase_search", query="x")
        assert "web_search" not in tools.executor.tools

    pods.run(without)
