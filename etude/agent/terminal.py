"""The interactive conversation. The event loop runs while the session works, and stands while the user types.

Ctrl-C stops the running answer or tool and returns to the prompt; a second one, with nothing typed in between, quits.
"""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from etude.agent.changes import format_file_patch, format_patch
from etude.agent.conversation import AgentConversation, LoadedSession, open_conversation
from etude.agent.options import AgentOptions
from etude.agent.permission import Permissions
from etude.agent.screen import Screen, call_title
from etude.chat.messages import ToolCall
from etude.errors import EtudeError
from etude.harness.tools.tool import Tool
from etude.pods.pod import PodGone
from etude.pods.workspace import FileChange
from etude.system.terminal import escape_control

T = TypeVar("T")
MAX_PATCH_LINES = 120  # shown without /diff
HELP = """\
/diff    show the changes that are not applied   /cost    tokens, calls and seconds so far
/apply   apply them                              /quit    quit; the session can be resumed
Ctrl-C   stop the model or its tool              a line that ends with \\ continues on the next"""
PROMPT = "> "
ARGUMENT_SIGNS = {"old_string": "-", "new_string": "+", "contents": "+", "content": "+"}  # shown as lines of a patch


class QuitRequested(Exception):
    """The user pressed Ctrl-C to quit."""


class TerminalConversation:
    """Reads messages and commands from the user and runs them in an AgentConversation."""

    conversation: AgentConversation  # once it is open

    def __init__(self, options: AgentOptions, screen: Screen) -> None:
        self.options, self.screen = options, screen
        self.runner = asyncio.Runner()
        self.on_sigint: Callable[[], object] = lambda: None  # while the event loop runs
        self.declined: Sequence[FileChange] = ()
        self.interrupts = 0  # Ctrl-C presses since the last input

    def run(self, request: str, loaded: LoadedSession | None) -> int:
        """Run the conversation until the user quits; return the exit code."""
        approve = Permissions(str(self.options.directory), self._ask_permission) if self.options.direct else None
        opened = open_conversation(self.options, self.screen, approve, loaded)
        try:
            self.conversation = self._await(opened.__aenter__())
            try:
                self._print_banner(loaded)
                self._run_loop(request)
            finally:
                self._print_farewell()
        except (QuitRequested, KeyboardInterrupt):
            return 130
        finally:
            with contextlib.suppress(QuitRequested):
                self._await(opened.__aexit__(None, None, None))
            self.runner.close()
        return 0

    def _await(self, work: Coroutine[Any, Any, T], interrupt: Callable[[], None] | None = None) -> T:
        """Run a coroutine and return its result.

        Ctrl-C calls `interrupt`; a second one, or one without `interrupt`, cancels the work and raises QuitRequested.
        """

        async def run() -> T:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            actions = iter(() if interrupt is None else (interrupt,))
            self.on_sigint = lambda: next(actions, task.cancel)()
            loop.add_signal_handler(signal.SIGINT, self.on_sigint)
            try:
                return await work
            finally:
                loop.remove_signal_handler(signal.SIGINT)

        try:
            return self.runner.run(run())
        except asyncio.CancelledError:
            raise QuitRequested from None

    def _print_banner(self, loaded: LoadedSession | None) -> None:
        conversation = self.conversation
        where = "directly, asking before each change" if self.options.direct else "in a pod; changes are shown first"
        self.screen.note(f"{conversation.client.model} works on {self.options.directory} {where}; /help lists commands")
        if loaded is not None:
            self.screen.note(
                f"session {conversation.id[:12]} resumed; its request was: {loaded.record.request.text.strip()}"
            )
            last = loaded.trace.final
            if last:
                self.screen.print(last)

    def _run_loop(self, request: str) -> None:
        """Handle messages and commands until the user quits or the input ends."""
        while (text := request or self._read_message()) is not None:
            request = ""
            try:
                if command := re.fullmatch(r"/([a-z]+)", text.strip()):
                    if command[1] in ("quit", "exit"):
                        break
                    self._run_command(command[1])
                elif text.strip():
                    self._ask(text)
            except PodGone:
                raise
            except EtudeError as error:
                self.screen.error(f"{error}\n(send a message to try again, /quit to quit)")
        self._offer_changes()

    def _ask(self, text: str) -> None:
        trace = self._await(self.conversation.ask(text), self._interrupt)
        if trace.ending == "interrupted":
            self.screen.note("(interrupted; type what to do instead, or press Ctrl-C again to quit)")
            return
        if trace.ending not in ("final", "length"):
            self.screen.note(f"(stopped: the budget of {trace.ending} is exhausted)")
        self._offer_changes()

    def _interrupt(self) -> None:
        self.interrupts += 1
        self.conversation.interrupt()

    def _run_command(self, name: str) -> None:
        conversation = self.conversation
        if name == "help":
            self.screen.print(HELP)
        elif name == "cost" and conversation.session is not None:
            self.screen.show_cost(conversation.session.trace("final").cost, conversation.client.exact)
        elif name in ("diff", "apply") and self.options.direct:
            self.screen.note("(the changes are in the directory already; `git diff` shows them)")
        elif name == "diff":
            changes = self._await(conversation.refresh_changes())
            self.screen.show_changes(changes)
            self.screen.show_patch(format_patch(changes))
        elif name == "apply":
            self._offer_changes(again=True)
        elif name == "cost":
            self.screen.note("(nothing yet)")
        else:
            self.screen.note(f"(no command /{name}; /help lists the commands)")

    # ------------------------------------------------------------------------------------------- changes

    def _offer_changes(self, again: bool = False) -> None:
        """Show the changes and apply those that the user accepts."""
        conversation = self.conversation
        changes = conversation.changes
        if not changes or (changes == self.declined and not again):
            if again:
                self.screen.note("(nothing to apply)")
            return
        self.screen.show_changes(changes)
        self.screen.show_patch(format_patch(changes), MAX_PATCH_LINES)
        count = f"{len(changes)} change{'s' if len(changes) > 1 else ''}"
        answer = self._confirm(f"Apply {count} to {self.options.directory}? [y]es  [n]o  [f]ile by file: ")
        chosen: Sequence[FileChange] = ()
        if answer in ("y", "yes"):
            chosen = changes
        elif answer in ("f", "file"):
            chosen = [change for change in changes if self._confirm_file(change)]
        if chosen:
            result = self._await(conversation.apply(chosen))
            self.screen.print(f"applied {len(result.applied)}", "green")
            for change, why in result.refused:
                self.screen.error(f"not applied: {change.path}: {why}")
        self.declined = list(conversation.changes)

    def _confirm_file(self, change: FileChange) -> bool:
        self.screen.show_patch(format_file_patch(change))
        return self._confirm(f"Apply {escape_control(change.path)}? [y]es  [n]o: ") in ("y", "yes")

    def _print_farewell(self) -> None:
        """Print how to resume the session, and where changes that were not applied are."""
        conversation = self.conversation
        if conversation.saved_at is None:
            return
        if conversation.changes:
            self.screen.print(
                f"not applied: {len(conversation.changes)} changes, in {conversation.saved_at / 'changes.patch'}",
                "yellow",
            )
        self.screen.note(f"to resume: etude agent --resume {conversation.id[:12]}")

    # ------------------------------------------------------------------------------------------- input

    async def _ask_permission(self, call: ToolCall, tool: Tool, choices: str) -> str:
        self.screen.set_activity("")
        self.screen.print(f"{call.name} {call_title(call)}", "bold yellow")
        self._print_arguments(call)
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)  # so that Ctrl-C ends the input
        try:
            return self._read_line(f"Allow it? {choices}: ") or ""
        except KeyboardInterrupt:
            self.on_sigint()
            return ""
        finally:
            loop.add_signal_handler(signal.SIGINT, self.on_sigint)

    def _print_arguments(self, call: ToolCall) -> None:
        """Print the arguments of a call, for the user to approve."""
        for name, value in (call.arguments or {}).items():
            sign = ARGUMENT_SIGNS.get(name)
            if isinstance(value, str) and sign is not None:
                self.screen.show_patch("\n".join(f"{sign}{line}" for line in value.split("\n")))
            elif name not in ("explanation", "description") and value != call_title(call):
                self.screen.print(f"{name}: {value}")

    def _confirm(self, question: str) -> str:
        """Return the user's answer in lower case; "" after Ctrl-C."""
        try:
            return (self._read_line(question) or "").strip().lower()
        except KeyboardInterrupt:
            self._count_interrupt()
            return ""

    def _count_interrupt(self) -> None:
        self.interrupts += 1
        if self.interrupts > 1:
            raise QuitRequested
        self.screen.print("")
        self.screen.note("(Ctrl-C again, or /quit, to quit)")

    def _read_message(self) -> str | None:
        """Return the user's next message; None at the end of input."""
        lines: list[str] = []
        while True:
            try:
                line = self._read_line(PROMPT if not lines else ". ")
            except KeyboardInterrupt:
                self._count_interrupt()
                lines = []
                continue
            if line is None:
                return "\n".join(lines) or None
            self.interrupts = 0
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _read_line(self, prompt: str) -> str | None:
        """Read one line of input; None at its end."""
        self.screen.end_line()
        if sys.stdin.isatty():
            try:
                return input(prompt)
            except EOFError:
                self.screen.print("")
                return None
        self.screen.print(prompt.rstrip())
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


def run_terminal(options: AgentOptions, screen: Screen, request: str, loaded: LoadedSession | None) -> int:
    """Run an interactive conversation; return the exit code."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  line editing and history for `input`
    return TerminalConversation(options, screen).run(request, loaded)
