"""The one place where a request, an environment, a pod and a speaker become a session.

Training opens its rollouts here, evaluation its trials, `etude agent` a person's conversation: what the model is shown
is therefore equal to the byte, whoever asks.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from etude.errors import EtudeError, InputError
from etude.harness.model_client import Speaker, TokenSpeaker
from etude.harness.prompt import Request, opening
from etude.harness.search.render import show
from etude.harness.search.searcher import Searcher
from etude.harness.search.source import FileSource
from etude.harness.session import LEAST_ROOM, Budget, Session
from etude.harness.summary import Summaries
from etude.harness.tool_set import ToolSet
from etude.harness.tools.context import Web
from etude.harness.tools.executor import Approve, Toolbox, open_toolbox
from etude.harness.tools.tool import ToolError
from etude.harness.trace import Step
from etude.pods.pod import Pod, PodFileError

INSTRUCTIONS = "AGENTS.md"  # what a repository tells whoever works in it
MAX_INSTRUCTIONS = 16 << 10  # bytes


class CodeSearch:
    """Semantic search as the tools ask for it: text for the model, and its mistakes told as such."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher

    async def search(self, files: FileSource, query: str, directories: Sequence[str], limit: int) -> str:
        try:
            return show(await self.searcher.search(files, query, directories, limit))
        except InputError as error:
            raise ToolError("bad_arguments", str(error)) from None
        except EtudeError as error:
            raise ToolError("provider", str(error)) from error


@asynccontextmanager
async def open_session(
    request: Request,
    speaker: Speaker,
    pod: Pod,
    *,
    environment: ToolSet | None = None,
    budget: Budget | None = None,
    summaries: Summaries | None = None,
    searcher: Searcher | None = None,
    web: Web | None = None,
    approve: Approve | None = None,
    id: str = "",
    facts: Mapping[str, Any] | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> AsyncIterator[tuple[Session, Toolbox]]:
    """A session in a pod whose workspace is there already, and its tools.

    The workspace's own AGENTS.md becomes the instructions of an environment that has none and is not brief.
    """
    environment, summaries = environment or ToolSet(), summaries or Summaries()
    search = CodeSearch(searcher) if searcher is not None else None
    async with open_toolbox(pod, environment, searcher=search, web=web, approve=approve) as tools:
        if not environment.instructions and not environment.brief:
            environment = replace(environment, instructions=await instructions_in(pod, tools.root))
        check_room(request, environment, summaries, speaker, tools)
        yield (
            Session(
                request,
                speaker,
                tools,
                environment=environment,
                budget=budget,
                summaries=summaries,
                id=id,
                facts=facts,
                on_step=on_step,
            ),
            tools,
        )


async def instructions_in(pod: Pod, root: str) -> str:
    """What the repository says to those who work in it; nothing where it says nothing."""
    try:
        data = await pod.read(f"{root}/{INSTRUCTIONS}", length=MAX_INSTRUCTIONS)
    except PodFileError:  # not there, or not a file
        return ""
    return data.decode("utf-8", "replace").strip()


def check_room(
    request: Request, environment: ToolSet, summaries: Summaries, speaker: Speaker, tools: Toolbox
) -> None:
    """Refuse a prompt that leaves the model no room to work in: it would sum up for ever."""
    if not isinstance(speaker, TokenSpeaker):
        return  # of other models nobody knows the tokens before they answer
    size = len(speaker.dialect.render(opening(request, environment, tools.root), tools.schemas))
    room = speaker.window - LEAST_ROOM if summaries.mode == "off" else summaries.at(speaker.window)
    if size >= room:
        raise InputError(
            f"the prompt has {size:,} tokens, and {room:,} of this model's {speaker.window:,} are there for it: "
            "show it fewer tools, or make the environment brief or the request shorter"
        )
