"""A conversation about one directory: the session, the pod it works in, its changes, and its copy on disk.

The session is opened with `open_session`, as every rollout is. It is saved after each answer, with the files that
differ from those on disk; a resumed session continues with the same tokens and files.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.agent.changes import find_changes
from etude.agent.options import AgentOptions
from etude.agent.screen import Screen, call_title
from etude.agent.session_store import SessionRecord, save_session, sessions_directory
from etude.agent.upload import open_workspace, recent_files
from etude.chat.messages import ToolCall
from etude.errors import EtudeError, InputError
from etude.harness.model_client import ModelClient, TokenModelClient
from etude.harness.open_client import OpenedModel, open_model_client
from etude.harness.prompt import SessionRequest
from etude.harness.search.searcher import open_searcher
from etude.harness.session import Session, SessionSpec
from etude.harness.session_factory import open_session
from etude.harness.tools.executor import Approve, ToolExecutor
from etude.harness.tools.tool import Tool
from etude.harness.trace import Trace
from etude.pods.fleet import open_fleet
from etude.pods.pod import Egress, Pod, Unsupported
from etude.pods.runtime.unisolated import open_unisolated
from etude.pods.workspace import ApplyResult, FileChange, FileState, apply_to_directory, apply_to_pod, remove_if_exists
from etude.system.terminal import escape_control

POD_TIMEOUT_S = 120.0  # how long to wait for a pod on a full machine
TICK_S = 0.1


@dataclass(frozen=True)
class LoadedSession:
    """A session read from disk, to be resumed."""

    record: SessionRecord
    trace: Trace
    changes: Sequence[FileChange]


class AgentConversation:
    """An open session with its pod and its changes. Created by `open_conversation`."""

    def __init__(
        self,
        options: AgentOptions,
        screen: Screen,
        model: OpenedModel,
        pod: Pod,
        manifest: dict[str, FileState],
        approve: Approve | None,
        id: str,
    ) -> None:
        self.options, self.screen, self.pod = options, screen, pod
        self.client, self.profile = model.client, model.profile
        self.manifest = manifest  # the files on disk as the session last saw them
        self.id = id
        self.started = time.time()
        self.request: SessionRequest | None = None
        self.trace: Trace | None = None  # as last saved
        self.changes: list[FileChange] = []
        self.session: Session | None = None
        self.tools: ToolExecutor | None = None
        self.saved_at: Path | None = None  # directory of the saved session
        self._working = False
        self._permission = approve  # None: no approval needed, the pod isolates every call
        self._opened = AsyncExitStack()

    # ------------------------------------------------------------------------------------------- messages

    async def ask(self, text: str) -> Trace:
        """Send the model a message and run the session until it ends or is interrupted."""
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # input bytes of any locale
        if self.session is None:
            recent = await asyncio.to_thread(recent_files, self.options.directory)
            await self._open(SessionRequest(text, recent=recent))
        else:
            self.session.say(text)
        assert self.session is not None
        try:
            async with self._show_activity():
                trace = await self.session.run()
        except EtudeError:
            await self.save(self.session.trace("interrupted"))  # can be resumed from here
            raise
        except asyncio.CancelledError:
            self._write(self.session.trace("interrupted"))
            raise
        await self.save(trace)
        return trace

    def interrupt(self) -> None:
        """Stop the answer or the tools that are running."""
        if self._working and self.session is not None:  # an idle session would end its next answer instead
            self.session.interrupt()

    async def _open(self, request: SessionRequest) -> None:
        self.request, profile = request, self.profile
        searcher = open_searcher() if "codebase_search" in profile.tool_set.tools else None
        if searcher is not None:
            self._opened.callback(searcher.close)
        self.session, self.tools = await self._opened.enter_async_context(
            open_session(
                request,
                self.client,
                self.pod,
                SessionSpec.of(
                    profile,
                    searcher=searcher,
                    approve=self._approve,
                    id=self.id,
                    facts=self._facts(),
                    on_step=self.screen.show_step,
                ),
            )
        )
        self.client.on_text = self.screen.stream_text

    def _facts(self) -> dict[str, Any]:
        seed = {"seed": self.client.sampling.seed} if isinstance(self.client, TokenModelClient) else {}
        return {"program": "etude agent", "direct": self.options.direct, **seed}

    async def _approve(self, call: ToolCall, tool: Tool) -> bool | str:
        approval = True if self._permission is None else await self._permission(call, tool)
        self.screen.set_activity(f"{escape_control(call.name)} {call_title(call)}")
        return approval

    @asynccontextmanager
    async def _show_activity(self) -> AsyncIterator[None]:
        async def tick_forever() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                self.screen.tick()

        self.screen.set_activity("thinking")
        task = asyncio.create_task(tick_forever())
        self._working = True
        try:
            yield
        finally:
            self._working = False
            task.cancel()
            self.screen.end_line()
            self.screen.set_activity("")

    # ------------------------------------------------------------------------------------------- changes

    async def refresh_changes(self) -> list[FileChange]:
        """Compare the pod with the manifest; update and return the changes not applied yet."""
        if not self.options.direct:
            root = self.tools.root if self.tools else self.pod.workdir
            self.changes = await find_changes(self.pod, root, self.manifest, self.options.directory, self.changes)
        return self.changes

    async def apply(self, changes: Sequence[FileChange]) -> ApplyResult:
        """Apply changes to the directory and remove the applied ones from `changes`."""
        result = await asyncio.to_thread(apply_to_directory, self.options.directory, changes)
        self._set_manifest({change.path: change.after for change in result.applied})
        done = {change.path for change in result.applied}
        self.changes = [change for change in self.changes if change.path not in done]
        if self.trace is not None:
            await asyncio.to_thread(self._write, self.trace)
        return result

    def _set_manifest(self, states: Mapping[str, FileState | None]) -> None:
        for path, state in states.items():
            if state is None:
                self.manifest.pop(path, None)
            else:
                self.manifest[path] = replace(state, data=None)

    # ------------------------------------------------------------------------------------------- disk

    async def save(self, trace: Trace) -> None:
        """Save the session. If the changes cannot be fetched, print the error and save the rest."""
        try:
            await self.refresh_changes()
        except EtudeError as error:
            self.screen.error(str(error))
        self.trace = trace
        await asyncio.to_thread(self._write, trace)

    def _write(self, trace: Trace) -> None:
        assert self.request is not None
        assert self.tools is not None
        name = self.options.model.name or self.client.model
        model = replace(self.options.model, name=name, session=self.profile.model_dump(mode="json"))
        record = SessionRecord(
            id=self.id,
            options=replace(self.options, model=model),
            tokenizer=tokenizer_digest(self.client),
            request=self.request,
            started=self.started,
            updated=time.time(),
            ending=trace.ending,
            tools=self.tools.state(),
        )
        self.saved_at = save_session(record, trace, self.changes)

    async def restore(self, loaded: LoadedSession) -> None:
        """Continue a saved session: its trace, the state of its tools, and its files."""
        record = loaded.record
        if record.tokenizer and tokenizer_digest(self.client) not in ("", record.tokenizer):
            model = record.options.model.name
            raise InputError(f"session {record.id}: its tokens are of another tokenizer; resume it with {model}")
        self.started = record.started
        await self._open(record.request)
        assert self.session is not None
        assert self.tools is not None
        self.session.restore(loaded.trace)
        self.tools.restore(record.tools)
        self.saved_at, self.trace = sessions_directory() / record.id, loaded.trace
        if self.options.direct:
            return
        for change in loaded.changes:  # the files on disk may be others by now
            await remove_if_exists(self.pod, f"{self.tools.root}/{change.path}")
        await apply_to_pod(self.pod, self.tools.root, loaded.changes)
        self._set_manifest({change.path: change.before for change in loaded.changes})
        self.changes = list(loaded.changes)
        await self.refresh_changes()

    async def close(self) -> None:
        await self._opened.aclose()


@asynccontextmanager
async def open_conversation(
    options: AgentOptions, screen: Screen, approve: Approve | None = None, loaded: LoadedSession | None = None
) -> AsyncIterator[AgentConversation]:
    """Open a model client and a pod with the directory's files; restore the loaded session if one is given."""
    async with AsyncExitStack() as stack:
        id = loaded.record.id if loaded else uuid.uuid4().hex
        screen.set_activity("loading the model")
        screen.tick()
        model = await stack.enter_async_context(open_model_client(options.model, id))
        screen.set_activity("copying the files into a pod" if not options.direct else "")
        screen.tick()
        pod, manifest = await stack.enter_async_context(_open_workspace(options, screen))
        screen.set_activity("")
        conversation = AgentConversation(options, screen, model, pod, manifest, approve, id)
        stack.push_async_callback(conversation.close)
        if loaded is not None:
            await conversation.restore(loaded)
        yield conversation


@asynccontextmanager
async def _open_workspace(options: AgentOptions, screen: Screen) -> AsyncIterator[tuple[Pod, dict[str, FileState]]]:
    """Open the pod in which the tools act; yield it with the manifest of its files."""
    if options.direct:
        async with open_unisolated(options.directory, hidden=[options.model.key_env]) as here:
            yield here, {}
        return
    async with AsyncExitStack() as stack:
        try:
            fleet = await stack.enter_async_context(open_fleet())
        except Unsupported as error:
            raise Unsupported(f"{error}\n  or use --direct: on the directory itself, with your approval") from None
        opened = open_workspace(
            fleet,
            options.image,
            options.directory,
            include=options.include,
            history=options.history,
            egress=Egress.to(*options.egress) if options.egress else None,
            timeout=POD_TIMEOUT_S,
        )
        pod, upload = await stack.enter_async_context(opened)
        for note in upload.notes:
            screen.note(note)
        yield pod, dict(upload.manifest)


def tokenizer_digest(client: ModelClient) -> str:
    """Return the digest of the client's tokenizer, or "" if the client does not handle tokens."""
    return client.dialect.tokenizer.digest if isinstance(client, TokenModelClient) else ""
