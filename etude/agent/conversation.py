"""One conversation over one directory: the session, the place it works in, what it has changed, and its copy on disk.

It is opened from `open_session` like every rollout. After each answer the session is saved, with the files that differ
from those on disk; a saved one goes on with the same tokens and the same files.
"""

import asyncio
import contextlib
import io
import tarfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.agent import session_store as store
from etude.agent.apply import Applied, apply_changes
from etude.agent.diff import Change, find_changes
from etude.agent.manifest import Entry
from etude.agent.options import Options
from etude.agent.screen import Screen, title, visible
from etude.agent.session_store import Saved
from etude.agent.upload import recent_files, take_in, unpack
from etude.chat.messages import ToolCall
from etude.errors import EtudeError, InputError
from etude.harness.model_client import ModelClient, TokenModelClient
from etude.harness.open_client import open_model_client
from etude.harness.session_factory import open_session
from etude.harness.prompt import SessionRequest
from etude.harness.search.searcher import open_searcher
from etude.harness.session import Budget, Session
from etude.harness.summary import SummarySettings
from etude.harness.tools.executor import Approve, ToolExecutor
from etude.harness.tools.tool import Tool
from etude.harness.trace import Trace
from etude.pods.fleet import open_fleet
from etude.pods.pod import Egress, Pod, PodFileError, Unsupported
from etude.pods.runtime.unisolated import open_unisolated

POD_S = 120.0  # to wait for a pod on a machine that is full
TICK_S = 0.1


@dataclass(frozen=True)
class Earlier:
    """A session from disk."""

    saved: Saved
    trace: Trace
    changes: Sequence[Change]


class Work:
    """What a person has open. Made by `open_work`."""

    def __init__(
        self,
        options: Options,
        screen: Screen,
        speaker: ModelClient,
        pod: Pod,
        before: dict[str, Entry],
        approve: Approve | None,
        id: str,
    ) -> None:
        self.options, self.screen, self.speaker, self.pod = options, screen, speaker, pod
        self.before = before  # the files on disk as the session knows them
        self.id = id
        self.started = time.time()
        self.request: SessionRequest | None = None
        self.trace: Trace | None = None  # as it was saved last
        self.changes: list[Change] = []
        self.session: Session | None = None
        self.tools: ToolExecutor | None = None
        self.place: Path | None = None  # where it was saved
        self._working = False
        self._permission = approve  # None: whatever it does, it does in a pod
        self._opened = AsyncExitStack()

    # ------------------------------------------------------------------------------------------- talking

    async def ask(self, text: str) -> Trace:
        """Give the model a message and let it work until it ends, or is interrupted."""
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # as typed, in any locale
        if self.session is None:
            recent = await asyncio.to_thread(recent_files, self.options.directory)
            await self._open(SessionRequest(text, recent=recent))
        else:
            self.session.say(text)
        assert self.session is not None
        try:
            async with self._watched():
                trace = await self.session.run()
        except EtudeError:
            await self.save(self.session.trace("interrupted"))  # what there is can go on later
            raise
        except asyncio.CancelledError:
            self._write(self.session.trace("interrupted"))
            raise
        await self.save(trace)
        return trace

    def interrupt(self) -> None:
        """Stop the answer or the tools that run now."""
        if self._working and self.session is not None:  # an idle one would end its next answer instead
            self.session.interrupt()

    async def _open(self, request: SessionRequest) -> None:
        options = self.options
        self.request = request
        searcher = open_searcher() if "codebase_search" in options.environment.tools else None
        if searcher is not None:
            self._opened.callback(searcher.close)
        self.session, self.tools = await self._opened.enter_async_context(
            open_session(
                request,
                self.speaker,
                self.pod,
                tool_set=options.environment,
                budget=Budget(
                    turns=options.turns,
                    tokens=options.tokens,
                    seconds=options.seconds,
                    max_turn_tokens=options.answer,
                ),
                summaries=SummarySettings(reserve=min(SummarySettings().reserve, max(1, self.speaker.window // 4))),
                searcher=searcher,
                approve=self._approve,
                id=self.id,
                facts=self._facts(),
                on_step=self.screen.step,
            )
        )
        self.speaker.on_text = self.screen.heard

    def _facts(self) -> dict[str, Any]:
        seed = {"seed": self.speaker.sampling.seed} if isinstance(self.speaker, TokenModelClient) else {}
        return {"program": "etude agent", "direct": self.options.direct, **seed}

    async def _approve(self, call: ToolCall, tool: Tool) -> bool | str:
        verdict = True if self._permission is None else await self._permission(call, tool)
        self.screen.doing(f"{visible(call.name)} {title(call)}")
        return verdict

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        async def ticking() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                self.screen.tick()

        self.screen.doing("thinking")
        task = asyncio.create_task(ticking())
        self._working = True
        try:
            yield
        finally:
            self._working = False
            task.cancel()
            self.screen.end_line()
            self.screen.doing("")

    # ------------------------------------------------------------------------------------------- changes

    async def look(self) -> list[Change]:
        """What differs now between the pod and the disk as the session knows it."""
        if not self.options.direct:
            root = self.tools.root if self.tools else self.pod.workdir
            self.changes = await find_changes(self.pod, root, self.before, self.changes)
        return self.changes

    async def apply(self, changes: Sequence[Change]) -> Applied:
        """Bring changes to the directory; those that are there are changes no more."""
        applied = await asyncio.to_thread(apply_changes, self.options.directory, changes)
        for change in applied.done:
            if change.after is None:
                self.before.pop(change.path, None)
            else:
                self.before[change.path] = change.after
        done = {change.path for change in applied.done}
        self.changes = [change for change in self.changes if change.path not in done]
        if self.trace is not None:
            await asyncio.to_thread(self._write, self.trace)
        return applied

    # ------------------------------------------------------------------------------------------- disk

    async def save(self, trace: Trace) -> None:
        """Write the session down; that its changes cannot be had is said, and no reason to lose the rest."""
        try:
            await self.look()
        except EtudeError as error:
            self.screen.error(str(error))
        self.trace = trace
        await asyncio.to_thread(self._write, trace)

    def _write(self, trace: Trace) -> None:
        assert self.request is not None
        assert self.tools is not None
        options, speaker = self.options, self.speaker
        saved = Saved(
            id=self.id,
            directory=str(options.directory),
            identity=store.identity(options.directory),
            direct=options.direct,
            model=replace(options.model, name=options.model.name or speaker.model),
            tokenizer=tokenizer_of(speaker),
            environment=options.environment,
            request=self.request,
            image=options.image,
            egress=options.egress,
            include=options.include,
            history=options.history,
            started=self.started,
            updated=time.time(),
            ending=trace.ending,
            tools=self.tools.state(),
        )
        self.place = store.save(saved, trace, self.changes)

    async def restore(self, earlier: Earlier) -> None:
        """Go on where a saved session was left."""
        saved = earlier.saved
        if saved.tokenizer and tokenizer_of(self.speaker) not in ("", saved.tokenizer):
            raise InputError(f"session {saved.id}: its tokens are of another tokenizer; go on with {saved.model.name}")
        self.started = saved.started
        await self._open(saved.request)
        assert self.session is not None
        assert self.tools is not None
        self.session.restore(earlier.trace)
        self.tools.restore(saved.tools)
        self.place, self.trace = store.home() / saved.id, earlier.trace
        if self.options.direct:
            return
        await put_back(self.pod, self.tools.root, earlier.changes)
        for change in earlier.changes:
            if change.before is None:
                self.before.pop(change.path, None)
            else:
                self.before[change.path] = change.before
        await self.look()

    async def close(self) -> None:
        await self._opened.aclose()


@asynccontextmanager
async def open_work(
    options: Options, screen: Screen, approve: Approve | None = None, earlier: Earlier | None = None
) -> AsyncIterator[Work]:
    """A model and a place to work in, ready; and the saved session, if one is to go on."""
    async with AsyncExitStack() as stack:
        id = earlier.saved.id if earlier else uuid.uuid4().hex
        screen.doing("loading the model")
        screen.tick()
        speaker = await stack.enter_async_context(open_model_client(options.model, id))
        screen.doing("copying the files into a pod" if not options.direct else "")
        screen.tick()
        pod, before = await stack.enter_async_context(_open_place(options, screen))
        screen.doing("")
        work = Work(options, screen, speaker, pod, before, approve, id)
        stack.push_async_callback(work.close)
        if earlier is not None:
            await work.restore(earlier)
        yield work


@asynccontextmanager
async def _open_place(options: Options, screen: Screen) -> AsyncIterator[tuple[Pod, dict[str, Entry]]]:
    """Where the tools act, and the files that are there."""
    if options.direct:
        async with open_unisolated(options.directory, hidden=[options.model.key_env]) as here:
            yield here, {}
        return
    async with AsyncExitStack() as stack:
        try:
            fleet = await stack.enter_async_context(open_fleet())
        except Unsupported as error:
            raise Unsupported(f"{error}\n  or on the directory itself, asked before each change: --direct") from None
        egress = Egress.to(*options.egress) if options.egress else None
        pod = await stack.enter_async_context(await fleet.create(options.image, egress=egress, timeout=POD_S))
        root = options.environment.root or pod.workdir
        intake = await take_in(pod, root, options.directory, include=options.include, history=options.history)
        for note in intake.notes:
            screen.note(note)
        yield pod, dict(intake.tree)


async def put_back(pod: Pod, root: str, changes: Sequence[Change]) -> None:
    """Make the files of a new pod what they were in the one where they were changed."""
    for change in changes:
        with contextlib.suppress(PodFileError):  # it is not there
            await pod.remove(f"{root}/{change.path}")
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
            for change in changes:
                if change.after is None:
                    continue
                member = tarfile.TarInfo(change.path)
                member.mode = 0o755 if change.after.executable else 0o644
                if change.after.kind == "link":
                    member.type, member.linkname = tarfile.SYMTYPE, change.after.digest
                member.size, member.mtime = len(change.data), time.time()
                tar.addfile(member, io.BytesIO(change.data))
        file.seek(0)
        await unpack(pod, root, file)


def tokenizer_of(speaker: ModelClient) -> str:
    """What a session's tokens mean something to; "" where there are none."""
    return speaker.dialect.tokenizer.digest if isinstance(speaker, TokenModelClient) else ""
