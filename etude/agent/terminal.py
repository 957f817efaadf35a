"""The conversation in a terminal. The main thread belongs to the person, an event loop in another does the work.

Ctrl-C stops the answer or the tool that runs and gives the prompt back; a second one, with nothing typed in between,
quits. Questions of the work (may this command run?) are asked in the main thread, one at a time.
"""

import asyncio
import contextlib
import queue
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from etude.agent.conversation import Earlier, Work, open_work
from etude.agent.diff import Change, one_patch, patch
from etude.agent.options import Options
from etude.agent.permission import Permissions
from etude.agent.screen import Screen, title, visible
from etude.chat.messages import Call
from etude.errors import EtudeError
from etude.harness.tools.tool import Tool
from etude.pods.pod import PodGone

T = TypeVar("T")
SHOWN = 120  # lines of a patch before a person asks for all of it
HELP = """\
/diff    what has changed and is not applied     /cost    tokens, calls and seconds up to now
/apply   apply it                                /quit    leave; the session can be resumed
Ctrl-C   stop the model or its tool              a line that ends with \\ goes on in the next"""
PROMPT = "> "
SIGNS = {"old_string": "-", "new_string": "+", "contents": "+", "content": "+"}  # how arguments are shown
STOP_S = 10.0  # for work to end that was cancelled


class Quit(Exception):
    """The person wants to leave, now."""


class Backstage:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.inbox: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.loop.run_forever, name="etude-agent", daemon=True)
        self.thread.start()

    def do(self, work: Coroutine[Any, Any, T], interrupt: Callable[[], None] | None = None) -> T:
        """The result of some work. Ctrl-C calls `interrupt`, the second or one without it cancels the work: Quit."""
        over = threading.Event()

        async def watched() -> T:
            try:
                return await work
            finally:
                over.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self.loop)
        future.add_done_callback(lambda _: self.inbox.put(None))
        asked = False
        while True:
            try:
                if (item := self.inbox.get()) is not None:
                    self._answer(*item)
                elif future.done():  # else it is the end of some other work, that nobody waited for
                    return future.result()
            except KeyboardInterrupt:
                if asked or interrupt is None:
                    future.cancel()
                    over.wait(STOP_S)
                    raise Quit from None
                asked = True
                self.loop.call_soon_threadsafe(interrupt)
            except CancelledError:
                raise Quit from None

    def _answer(self, question: Callable[[], Any], reply: "asyncio.Future[Any]") -> None:
        if reply.done():  # nobody waits for it any more
            return
        answer = question()
        self.loop.call_soon_threadsafe(lambda: None if reply.done() else reply.set_result(answer))

    def ask(self, question: Callable[[], T]) -> Awaitable[T]:
        """Have the main thread do something; for work to await."""
        reply: asyncio.Future[T] = self.loop.create_future()
        self.inbox.put((question, reply))
        return reply

    def close(self) -> None:
        async def last() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        with contextlib.suppress(Quit):
            self.do(last())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        if not self.thread.is_alive():
            self.loop.close()


class Conversation:
    """A person and a session."""

    def __init__(self, options: Options, screen: Screen) -> None:
        self.options, self.screen = options, screen
        self.stage = Backstage()
        self.work: Work | None = None
        self.declined: Sequence[Change] = ()
        self.stopped = 0  # times Ctrl-C was pressed since something was typed

    def run(self, request: str, earlier: Earlier | None) -> int:
        """From the first message to the last; the exit code."""
        approve = Permissions(str(self.options.directory), self._permit) if self.options.direct else None
        opened = open_work(self.options, self.screen, approve, earlier)
        code = 0
        try:
            self.work = self.stage.do(opened.__aenter__())
            self._greet(earlier)
            self._talk(request)
        except (Quit, KeyboardInterrupt):
            code = 130
        finally:
            self._leave()
            with contextlib.suppress(Quit):
                self.stage.do(opened.__aexit__(None, None, None))
            self.stage.close()
        return code

    def _greet(self, earlier: Earlier | None) -> None:
        work = self.work
        assert work is not None
        where = "directly, asking before each change" if self.options.direct else "in a pod, changes are shown first"
        self.screen.note(f"{work.speaker.model} works on {self.options.directory} {where}; /help lists commands")
        if earlier is not None:
            self.screen.note(f"session {work.id[:12]} goes on; it was asked: {earlier.saved.request.text.strip()}")
            last = earlier.trace.final
            if last:
                self.screen.say(last)

    def _talk(self, request: str) -> None:
        while True:
            text = request or self._read()
            request = ""
            if text is None:
                self._offer()
                return
            try:
                if not self._take(text):
                    self._offer()
                    return
            except PodGone:
                raise
            except EtudeError as error:
                self.screen.error(f"{error}\n(say something to try again, /quit to leave)")

    def _take(self, text: str) -> bool:
        """A command or a message; False to leave."""
        if command := re.fullmatch(r"/([a-z]+)", text.strip()):
            return self._command(command[1])
        if text.strip():
            self._ask(text)
        return True

    def _ask(self, text: str) -> None:
        assert self.work is not None
        trace = self.stage.do(self.work.ask(text), self._interrupt)
        if trace.ending == "interrupted":
            self.screen.note("(interrupted; say what to do instead, or Ctrl-C again to quit)")
            return
        if trace.ending not in ("final", "length"):
            self.screen.note(f"(stopped: the budget of {trace.ending} is spent)")
        self._offer()

    def _interrupt(self) -> None:
        self.stopped += 1
        assert self.work is not None
        self.work.interrupt()

    def _command(self, name: str) -> bool:
        """Do what a command says; False to leave."""
        work = self.work
        assert work is not None
        if name in ("quit", "exit"):
            return False
        if name == "help":
            self.screen.say(HELP)
        elif name == "cost" and work.session is not None:
            self.screen.cost(work.session.trace("final").cost, work.speaker.exact)
        elif name in ("diff", "apply") and self.options.direct:
            self.screen.note("(the changes are in the directory already; `git diff` shows them)")
        elif name == "diff":
            changes = self.stage.do(work.look())
            self.screen.changes(changes)
            self.screen.patch(patch(changes, self.options.directory))
        elif name == "apply":
            self._offer(again=True)
        elif name == "cost":
            self.screen.note("(nothing yet)")
        else:
            self.screen.note(f"(there is no command /{name}; /help lists them)")
        return True

    # ------------------------------------------------------------------------------------------- changes

    def _offer(self, again: bool = False) -> None:
        """Show what has changed, and apply what the person wants."""
        work = self.work
        assert work is not None
        changes = work.changes
        if not changes or (changes == self.declined and not again):
            if again:
                self.screen.note("(nothing to apply)")
            return
        self.screen.changes(changes)
        self.screen.patch(patch(changes, self.options.directory), SHOWN)
        count = f"{len(changes)} change{'s' if len(changes) > 1 else ''}"
        answer = self._confirm(f"Apply {count} to {self.options.directory}? [y]es  [n]o  [f]ile by file: ")
        chosen: Sequence[Change] = ()
        if answer in ("y", "yes"):
            chosen = changes
        elif answer in ("f", "file"):
            chosen = [change for change in changes if self._wanted(change)]
        if chosen:
            applied = self.stage.do(work.apply(chosen))
            self.screen.say(f"applied {len(applied.done)}", "green")
            for change, why in applied.refused:
                self.screen.error(f"not applied: {change.path}: {why}")
        self.declined = list(work.changes)

    def _wanted(self, change: Change) -> bool:
        self.screen.patch(one_patch(change, self.options.directory))
        return self._confirm(f"Apply {visible(change.path)}? [y]es  [n]o: ") in ("y", "yes")

    def _leave(self) -> None:
        """Say where the session is, and what was not applied."""
        work = self.work
        if work is None or work.place is None:
            return
        if work.changes:
            self.screen.say(f"not applied: {len(work.changes)} changes, in {work.place / 'changes.patch'}", "yellow")
        self.screen.note(f"to go on: etude agent --resume {work.id[:12]}")

    # ------------------------------------------------------------------------------------------- the person

    async def _permit(self, call: Call, tool: Tool, choices: str) -> str:
        def question() -> str:
            self.screen.doing("")
            self.screen.say(f"{call.name} {title(call)}", "bold yellow")
            self._details(call)
            return self._line(f"Allow it? {choices}: ") or ""

        return await self.stage.ask(question)

    def _details(self, call: Call) -> None:
        """All that a person must see of a call before it is allowed."""
        for name, value in (call.arguments or {}).items():
            sign = SIGNS.get(name)
            if isinstance(value, str) and sign is not None:
                self.screen.patch("\n".join(f"{sign}{line}" for line in value.split("\n")))
            elif name not in ("explanation", "description") and value != title(call):
                self.screen.say(f"{name}: {value}")

    def _confirm(self, question: str) -> str:
        """What the person chose; Ctrl-C chooses nothing."""
        try:
            return (self._line(question) or "").strip().lower()
        except KeyboardInterrupt:
            self._count_stop()
            return ""

    def _count_stop(self) -> None:
        self.stopped += 1
        if self.stopped > 1:
            raise Quit
        self.screen.say("")
        self.screen.note("(Ctrl-C again, or /quit, to leave)")

    def _read(self) -> str | None:
        """The person's next message; None at the end of input."""
        lines: list[str] = []
        while True:
            try:
                line = self._line(PROMPT if not lines else ". ")
            except KeyboardInterrupt:
                self._count_stop()
                lines = []
                continue
            if line is None:
                return "\n".join(lines) or None
            self.stopped = 0
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        """One line from the person; None at the end of input."""
        self.screen.end_line()
        if sys.stdin.isatty():
            try:
                return input(prompt)
            except EOFError:
                self.screen.say("")
                return None
        self.screen.say(prompt.rstrip())
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


def converse(options: Options, screen: Screen, request: str, earlier: Earlier | None) -> int:
    """Talk until the person has had enough."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  line editing and history for `input`
    return Conversation(options, screen).run(request, earlier)
