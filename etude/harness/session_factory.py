"""Opens a session from a request, a model client, a pod and a tool set.

Rollouts, evaluation trials and `etude agent` all open their sessions here, so that with the
same tool set the model sees identical prompts.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from etude.chat.dialects import Dialect
from etude.errors import EtudeError, InputError
from etude.harness.model_client import ModelClient, TokenModelClient
from etude.harness.prompt import SessionRequest, opening_messages
from etude.harness.search.render import render_result
from etude.harness.search.searcher import CodebaseSearcher
from etude.harness.search.source import FileSource
from etude.harness.session import MIN_TURN_TOKENS, Session, SessionSpec
from etude.harness.tools.executor import ToolExecutor, open_tool_executor
from etude.harness.tools.tool import ToolError
from etude.pods.pod import Pod, PodFileError

INSTRUCTIONS = "AGENTS.md"  # instructions of a repository for coding agents
MAX_INSTRUCTIONS = 16 << 10  # bytes


class CodebaseSearchProvider:
    """Adapts a `CodebaseSearcher` to the tools: returns text for the model and raises ToolError."""

    def __init__(self, searcher: CodebaseSearcher) -> None:
        self.searcher = searcher

    async def search(self, files: FileSource, query: str, directories: Sequence[str], limit: int) -> str:
        try:
            return render_result(await self.searcher.search(files, query, directories, limit))
        except InputError as error:
            raise ToolError("bad_arguments", str(error)) from None
        except EtudeError as error:
            raise ToolError("provider", str(error)) from error


@asynccontextmanager
async def open_session(
    request: SessionRequest,
    client: ModelClient,
    pod: Pod,
    spec: SessionSpec | None = None,
) -> AsyncIterator[tuple[Session, ToolExecutor]]:
    """Open a session and its tools in a pod that already contains the workspace.

    The workspace's AGENTS.md becomes the instructions, unless the tool set has instructions or a short system prompt.
    """
    spec = spec or SessionSpec()
    tool_set, searcher = spec.tool_set, CodebaseSearchProvider(spec.searcher) if spec.searcher else None
    async with open_tool_executor(pod, tool_set, searcher=searcher, web=spec.web, approve=spec.approve) as tools:
        if not tool_set.instructions and not tool_set.short_system_prompt:
            tool_set = tool_set.model_copy(update={"instructions": await read_instructions(pod, tools.root)})
        spec = replace(spec, tool_set=tool_set)
        if isinstance(client, TokenModelClient):  # chat endpoints report token counts only after a reply
            check_prompt_fits(request, spec, client.dialect, client.window, tools.root, tools.schemas)
        yield Session(request, client, tools, spec), tools


async def read_instructions(pod: Pod, root: str) -> str:
    """Return the repository's AGENTS.md, empty if there is none."""
    try:
        data = await pod.read(f"{root}/{INSTRUCTIONS}", length=MAX_INSTRUCTIONS)
    except PodFileError:  # missing, or not a file
        return ""
    return data.decode("utf-8", "replace").strip()


def check_prompt_fits(
    request: SessionRequest,
    spec: SessionSpec,
    dialect: Dialect,
    window: int,
    root: str,
    schemas: Sequence[Mapping[str, Any]],
) -> None:
    """Raise InputError if the prompt leaves no room to work: the session would summarize forever."""
    size = len(dialect.render(opening_messages(request, spec.tool_set, root), schemas))
    room = window - MIN_TURN_TOKENS if spec.summaries.mode == "off" else spec.summaries.at(window)
    if size >= room:
        raise InputError(
            f"the prompt has {size:,} tokens, but only {room:,} of the window of {window:,} are free for it: "
            "show fewer tools, use the short system prompt or shorten the request"
        )
