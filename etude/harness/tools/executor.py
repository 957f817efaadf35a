"""The tools of a session: what the model is shown, and its calls run, each to an outcome, in the order of the calls.

Read-only calls that follow one another run together; every other runs alone. Whatever a model wrote gets an answer with
a class. Two things do not: a pod that is gone, which is raised because it is nobody's answer, and a bug of ours, which
the model is told in a line and the log in full.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from etude.chat.messages import Call
from etude.errors import InputError
from etude.harness.tool_set import ALL_TOOLS, ToolSet
from etude.harness.tools.aliases import NAMINGS, Alias
from etude.harness.tools.arguments import check_arguments
from etude.harness.tools.context import Searcher, Web, Workbench
from etude.harness.tools.edit import SEARCH_REPLACE
from etude.harness.tools.files import DELETE_FILE, LIST_DIR, READ_FILE, WRITE
from etude.harness.tools.find import GLOB_FILE_SEARCH, GREP
from etude.harness.tools.lints import READ_LINTS
from etude.harness.tools.semantic import CODEBASE_SEARCH
from etude.harness.tools.terminal import AWAIT, KILL, RUN_TERMINAL_CMD
from etude.harness.tools.todos import TODO_WRITE, plan_text
from etude.harness.tools.tool import Outcome, Tool, ToolError
from etude.harness.tools.web import WEB_FETCH, WEB_SEARCH
from etude.harness.toolserver.client import ToolServer
from etude.pods.pod import Pod, PodError

WEB_TOOLS = ("web_search", "web_fetch")
TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        *(READ_FILE, SEARCH_REPLACE, WRITE, DELETE_FILE, LIST_DIR, GLOB_FILE_SEARCH, GREP, CODEBASE_SEARCH),
        *(RUN_TERMINAL_CMD, AWAIT, KILL, READ_LINTS, TODO_WRITE, WEB_SEARCH, WEB_FETCH),
    )
}
# What is wrong with a call that could not be read, when the dialect does not say it better.
UNREADABLE = {
    "bad_json": "the arguments are not valid JSON",
    "bad_structure": "the call does not have the form of a call: a name, and an object of arguments",
    "missing_name": "the call does not say which tool",
    "unclosed": "the call was not finished",
}
ABORTED = Outcome("The call was interrupted; it may have done a part of its work.", "aborted")
NOT_RUN = Outcome("The call was not run: the user interrupted.", "aborted")

Approve = Callable[[Call, Tool], Awaitable[bool | str]]  # True, or why not

log = logging.getLogger("etude.harness")


@dataclass(frozen=True)
class Shown:
    """A tool as the model of this session knows it."""

    tool: Tool
    alias: Alias
    schema: Mapping[str, Any]
    accepts: Mapping[str, Any]  # the schema of all its arguments; a brief one shows the needed only

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def shown_tools(environment: ToolSet) -> dict[str, Shown]:
    """The tools of an environment, by the names the model sees, in the order of the environment's list."""
    naming = NAMINGS.get(environment.naming)
    if naming is None:
        raise InputError(f"environment: naming is {environment.naming!r}; expected one of {', '.join(NAMINGS)}")
    known = (*ALL_TOOLS, *WEB_TOOLS)
    for key in (*environment.tools, *environment.renamed):
        if key not in known:
            raise InputError(f"environment: {key!r} is not a tool; expected some of {', '.join(known)}")
    wanted = [tool for tool in environment.tools if tool not in WEB_TOOLS]
    wanted += WEB_TOOLS if environment.web else ()
    found: dict[str, Shown] = {}
    for key in wanted:
        if key not in naming:
            continue
        name = environment.renamed.get(key, naming[key].name)
        if name in found:
            raise InputError(f"environment: two tools are called {name!r}; see renamed")
        alias, whole = naming[key], naming[key].schema(TOOLS[key], name)
        schema = alias.schema(TOOLS[key], name, brief=True) if environment.brief else whole
        found[name] = Shown(TOOLS[key], alias, schema, whole["function"]["parameters"])
    return found


@asynccontextmanager
async def open_toolbox(
    pod: Pod,
    environment: ToolSet,
    *,
    searcher: Searcher | None = None,
    web: Web | None = None,
    approve: Approve | None = None,
) -> AsyncIterator["Toolbox"]:
    """The tools of one session in a pod. Leaving ends the tool server; what commands left running goes on."""
    tools = shown_tools(environment)
    names = {shown.tool.name: name for name, shown in tools.items()}
    server = ToolServer(pod, environment.root, names)
    bench = Workbench(server, environment, names, searcher, web)
    await server.start()
    try:
        yield Toolbox(tools, bench, approve)
    finally:
        await server.stop()


class Toolbox:
    """What a session sees of its tools."""

    def __init__(self, tools: Mapping[str, Shown], bench: Workbench, approve: Approve | None) -> None:
        self.tools, self.bench, self.approve = tools, bench, approve
        self.bugs = 0
        self._asking = asyncio.Lock()  # one question at a time
        self._running = False
        self._stop = asyncio.Event()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """What the model is shown. Depends on the environment alone."""
        return [shown.schema for shown in self.tools.values()]

    @property
    def root(self) -> str:
        """The workspace, as a path in the pod."""
        return self.bench.server.root

    @property
    def plan(self) -> str:
        """The to-dos as text; nothing if there are none."""
        return plan_text(self.bench.todos)

    @property
    def pod_seconds(self) -> float:
        """How long the pod has been working on calls."""
        return self.bench.server.seconds

    def state(self) -> dict[str, Any]:
        """What of the tools is not in the pod, as JSON; for `restore` in another process, or on a fork of the pod."""
        return self.bench.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.bench.restore(state)

    async def rest(self) -> None:
        """End the tool server until the next call. A pod in which nothing runs is snapshotted at no cost."""
        await self.bench.server.stop()

    def interrupt(self) -> None:
        """End the calls that are running; they, and those that would follow, have the outcome `aborted`."""
        if self._running:
            self._stop.set()

    # -- running

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run the calls of one answer; their outcomes in the order of the calls. A pod that is gone is raised."""
        self._stop.clear()
        self._running = True
        outcomes: list[Outcome] = []
        try:
            for together, group in itertools.groupby(calls, self._reads_only):
                for batch in [list(group)] if together else [[call] for call in group]:
                    outcomes += [NOT_RUN] * len(batch) if self._stop.is_set() else await self._together(batch)
        finally:
            self._running = False
        return outcomes

    def _reads_only(self, call: Call) -> bool:
        shown = self.tools.get(call.name)
        return call.status != "ok" or shown is None or shown.tool.reads_only

    async def _together(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run calls at the same time. The first that raises, and an interruption, end all of them."""
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

    async def _run_one(self, call: Call) -> Outcome:
        started = time.monotonic()
        try:
            outcome = await self._checked(call)
        except ToolError as error:
            outcome = Outcome(str(error), error.kind)
        except PodError:
            raise  # the pod or its host is gone: nobody's answer
        except Exception:
            self.bugs += 1
            log.exception("bug in the tool %s, called with %.2000r", call.name, call.arguments)
            outcome = Outcome(f"{call.name} failed because of a defect in the tool, not in the call.", "bug")
        return replace(outcome, seconds=time.monotonic() - started)

    async def _checked(self, call: Call) -> Outcome:
        """Run a call if it is one, its arguments are right and nobody objects."""
        if call.status in UNREADABLE:
            raise ToolError("malformed_call", call.problem or UNREADABLE[call.status])
        shown = self.tools.get(call.name)
        if shown is None or call.status == "unknown_tool":
            raise ToolError("unknown_tool", f"there is no tool {call.name[:100]!r}; there are {', '.join(self.tools)}")
        if not isinstance(call.arguments, Mapping):
            raise ToolError("malformed_call", call.problem or UNREADABLE["bad_structure"])
        given, ignored = check_arguments(call.name, shown.accepts, call.arguments, self.bench.environment.strict)
        await self._approved(replace(call, arguments=given), shown.tool)  # what will be done, not what was written
        outcome = await shown.tool.run(self.bench, shown.alias.ours(given))
        if ignored:
            text = f"{outcome.text}\n[ignored: there is no argument {', '.join(key[:100] for key in ignored)}]"
            outcome = replace(outcome, text=text)
        return outcome

    async def _approved(self, call: Call, tool: Tool) -> None:
        if self.approve is None:
            return
        async with self._asking:
            verdict = await self.approve(call, tool)
        if verdict is not True:
            reason = f": {verdict}" if isinstance(verdict, str) else ""
            raise ToolError("denied", f"The user did not allow this call{reason}.")
