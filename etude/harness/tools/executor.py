"""Runs the tool calls of a session and returns their outcomes in the order of the calls.

Consecutive read-only calls run concurrently; all others run alone. Every call gets an outcome, failed ones with an
error class. A lost pod is raised instead. A bug in a tool is logged in full and shown to the model as one line.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from etude.chat.messages import ToolCall
from etude.errors import InputError
from etude.harness.tool_set import ALL_TOOLS, ToolSet
from etude.harness.tools.aliases import CURSOR, TOOL_ALIASES, ToolAlias
from etude.harness.tools.arguments import check_arguments
from etude.harness.tools.context import SearchProvider, ToolContext, WebProvider
from etude.harness.tools.edit import SEARCH_REPLACE
from etude.harness.tools.files import DELETE_FILE, LIST_DIR, READ_FILE, WRITE
from etude.harness.tools.find import GLOB_FILE_SEARCH, GREP
from etude.harness.tools.lints import READ_LINTS
from etude.harness.tools.semantic import CODEBASE_SEARCH
from etude.harness.tools.terminal import AWAIT, KILL, RUN_TERMINAL_CMD
from etude.harness.tools.todos import TODO_WRITE, plan_text
from etude.harness.tools.tool import TOOLS, Tool, ToolError, ToolOutcome
from etude.harness.tools.web import WEB_FETCH, WEB_SEARCH
from etude.harness.toolserver.client import ToolServer
from etude.pods.pod import Pod, PodError

WEB_TOOLS = ("web_search", "web_fetch")
for _builtin in (
    *(READ_FILE, SEARCH_REPLACE, WRITE, DELETE_FILE, LIST_DIR, GLOB_FILE_SEARCH, GREP, CODEBASE_SEARCH),
    *(RUN_TERMINAL_CMD, AWAIT, KILL, READ_LINTS, TODO_WRITE, WEB_SEARCH, WEB_FETCH),
):
    TOOLS.add(_builtin)
# Error text for a call that could not be parsed, if the dialect gives none.
MALFORMED_CALL = {
    "bad_json": "the arguments are not valid JSON",
    "bad_structure": "the call does not have the form of a call: a name, and an object of arguments",
    "missing_name": "the call does not say which tool",
    "unclosed": "the call was not finished",
}
ABORTED = ToolOutcome("The call was interrupted; it may have done a part of its work.", "aborted")
NOT_RUN = ToolOutcome("The call was not run: the user interrupted.", "aborted")

Approve = Callable[[ToolCall, Tool], Awaitable[bool | str]]  # True, or False or the reason for a refusal

log = logging.getLogger("etude.harness")


@dataclass(frozen=True)
class ExposedTool:
    """A tool as shown to the model of this session."""

    tool: Tool
    alias: ToolAlias
    schema: Mapping[str, Any]
    accepts: Mapping[str, Any]  # schema of all arguments; a short schema shows only the required ones

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def exposed_tools(tool_set: ToolSet) -> dict[str, ExposedTool]:
    """Return the tools of a tool set by the names shown to the model, in the order of the set."""
    aliases = TOOL_ALIASES.get(tool_set.aliases)
    if aliases is None:
        raise InputError(f"tool set: aliases is {tool_set.aliases!r}; expected one of {', '.join(TOOL_ALIASES)}")
    for key in (*tool_set.tools, *tool_set.renamed):
        if key not in TOOLS:
            raise InputError(f"tool set: {key!r} is not a tool; {TOOLS.advice(key)}")
    wanted = [tool for tool in tool_set.tools if tool not in WEB_TOOLS]
    wanted += WEB_TOOLS if tool_set.web else ()
    exposed: dict[str, ExposedTool] = {}
    for key in wanted:
        # A plugin's tool has its own name under every set of aliases.
        alias = aliases.get(key) or (None if key in CURSOR else ToolAlias(key))
        if alias is None:
            if tool_set.tools != ALL_TOOLS and key not in WEB_TOOLS:
                raise InputError(f"tool set: {key!r} has no name under aliases = {tool_set.aliases!r}; leave it out")
            continue
        name = tool_set.renamed.get(key, alias.name)
        if name in exposed:
            raise InputError(f"tool set: two tools are called {name!r}; see renamed")
        full = alias.schema(TOOLS[key], name)
        schema = alias.schema(TOOLS[key], name, brief=True) if tool_set.short_system_prompt else full
        exposed[name] = ExposedTool(TOOLS[key], alias, schema, full["function"]["parameters"])
    for key in tool_set.renamed:
        if key not in {each.tool.name for each in exposed.values()}:
            raise InputError(f"tool set: renamed.{key} would not be used: the tool set does not show {key!r}")
    return exposed


@asynccontextmanager
async def open_tool_executor(
    pod: Pod,
    tool_set: ToolSet,
    *,
    searcher: SearchProvider | None = None,
    web: WebProvider | None = None,
    approve: Approve | None = None,
) -> AsyncIterator["ToolExecutor"]:
    """Open the tools of one session in a pod. Leaving stops the tool server; background jobs keep running."""
    tools = exposed_tools(tool_set)
    names = {exposed.tool.name: name for name, exposed in tools.items()}
    server = ToolServer(pod, tool_set.root, names)
    context = ToolContext(server, tool_set, names, searcher, web)
    await server.start()
    try:
        yield ToolExecutor(tools, context, approve)
    finally:
        await server.stop()


class ToolExecutor:
    """Runs the calls of one session."""

    def __init__(self, tools: Mapping[str, ExposedTool], context: ToolContext, approve: Approve | None) -> None:
        self.tools, self.context, self.approve = tools, context, approve
        self.bugs = 0
        self._approval_lock = asyncio.Lock()  # one approval request at a time
        self._running = False
        self._stop = asyncio.Event()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The tool schemas shown to the model; they depend on the tool set alone."""
        return [exposed.schema for exposed in self.tools.values()]

    @property
    def root(self) -> str:
        """The path of the workspace in the pod."""
        return self.context.server.root

    @property
    def plan(self) -> str:
        """The to-dos as text, empty if there are none."""
        return plan_text(self.context.todos)

    @property
    def pod_seconds(self) -> float:
        """The time the pod has spent on calls."""
        return self.context.server.seconds

    def state(self) -> dict[str, Any]:
        """Return the state that is not in the pod, as JSON; `restore` accepts it in another process or a forked pod."""
        return self.context.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.context.restore(state)

    async def stop_server(self) -> None:
        """Stop the tool server until the next call. A snapshot of a pod without processes costs nothing."""
        await self.context.server.stop()

    def interrupt(self) -> None:
        """Stop the running calls; they and the remaining calls get the outcome `aborted`."""
        if self._running:
            self._stop.set()

    # -- running

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Run the calls of one turn; return their outcomes in order. A lost pod is raised."""
        self._stop.clear()
        self._running = True
        outcomes: list[ToolOutcome] = []
        try:
            for together, group in itertools.groupby(calls, self._is_read_only):
                for batch in [list(group)] if together else [[call] for call in group]:
                    outcomes += [NOT_RUN] * len(batch) if self._stop.is_set() else await self._run_concurrently(batch)
        finally:
            self._running = False
        return outcomes

    def _is_read_only(self, call: ToolCall) -> bool:
        exposed = self.tools.get(call.name)
        return call.status != "ok" or exposed is None or exposed.tool.read_only

    async def _run_concurrently(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Run calls concurrently. An exception or an interruption ends all of them."""
        tasks = [asyncio.create_task(self._run_one(call)) for call in calls]
        stop = asyncio.create_task(self._stop.wait())
        left = set(tasks)
        try:
            while left and not stop.done():
                done, _ = await asyncio.wait({*left, stop}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
                for task in done - {stop}:
                    task.result()
        finally:
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.gather(*tasks, stop, return_exceptions=True)
        return [ABORTED if task.cancelled() else task.result() for task in tasks]

    async def _run_one(self, call: ToolCall) -> ToolOutcome:
        """Run a call if it is well-formed, its arguments are valid and it is approved."""
        started = time.monotonic()
        try:
            exposed, arguments = self._recognize(call)
            given, ignored = check_arguments(call.name, exposed.accepts, arguments, self.context.tool_set.strict)
            # approval is for the validated arguments, not for those the model wrote
            await self._require_approval(replace(call, arguments=given), exposed.tool)
            outcome = await exposed.tool.run(self.context, exposed.alias.to_tool_arguments(given))
            if ignored:
                text = f"{outcome.text}\n[ignored: there is no argument {', '.join(key[:100] for key in ignored)}]"
                outcome = replace(outcome, text=text)
        except ToolError as error:
            outcome = ToolOutcome(str(error), error.kind)
        except PodError:
            raise  # the pod or its host is lost: not an outcome of the call
        except Exception:
            self.bugs += 1
            log.exception("bug in the tool %s, called with %.2000r", call.name, call.arguments)
            outcome = ToolOutcome(f"{call.name} failed because of a defect in the tool, not in the call.", "bug")
        return replace(outcome, seconds=time.monotonic() - started)

    def _recognize(self, call: ToolCall) -> tuple[ExposedTool, Mapping[str, Any]]:
        """Return the tool and the arguments of a well-formed call."""
        if call.status in MALFORMED_CALL:
            raise ToolError("malformed_call", call.problem or MALFORMED_CALL[call.status])
        exposed = self.tools.get(call.name)
        if exposed is None or call.status == "unknown_tool":
            raise ToolError("unknown_tool", f"there is no tool {call.name[:100]!r}; there are {', '.join(self.tools)}")
        if not isinstance(call.arguments, Mapping):
            raise ToolError("malformed_call", call.problem or MALFORMED_CALL["bad_structure"])
        return exposed, call.arguments

    async def _require_approval(self, call: ToolCall, tool: Tool) -> None:
        if self.approve is None:
            return
        async with self._approval_lock:
            verdict = await self.approve(call, tool)
        if verdict is not True:
            reason = f": {verdict}" if isinstance(verdict, str) else ""
            raise ToolError("denied", f"The user did not allow this call{reason}.")
