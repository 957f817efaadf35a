"""One trial of a model behind a chat API: the session, the ground and the grading of every rollout, without tokens.

What `etude.rollouts.rollout` does for a policy by its tokens, for one that has none: the same settings in, the same
`Rollout` out, and the same line between what the agent did wrong and what the infrastructure did.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from typing import Any

from etude.errors import EtudeError
from etude.harness.model_client import ChatSpeaker, Speaker, Spoken
from etude.harness.tools.executor import shown_tools
from etude.harness.trace import Trace
from etude.inference.chat_format import Listener, ToolCall
from etude.inference.clients.openai import OpenAIChat, Reply
from etude.inference.clients.transport import Patience
from etude.inference.sampling import Sampling
from etude.pods.fleet import Fleet
from etude.rewards import Graded, score
from etude.rollouts.rollout import SESSION_S, SETUP_S, Rollout, RolloutFailed, Settings
from etude.tasks.environment import Ground
from etude.tasks.schema import VERIFIER_S
from etude.tasks.session_agent import in_session
from etude.tasks.task import Task, TaskStep
from etude.tasks.trial import attempt
from etude.tasks.verifier_result import GradingFailed

HIDDEN = "[key]"
SECRET = 16  # characters from which on a key is hidden in answers too; "EMPTY" and the like are words


class DiscreetChat(OpenAIChat):
    """A chat API whose key is in nothing that it says: some repeat it in their errors, and a proxy may do anything."""

    def __init__(
        self, url: str, key: str, *, model: str, limit: str = "max_tokens", patience: Patience | None = None
    ) -> None:
        super().__init__(url, key, model=model, limit=limit, patience=patience)
        self._key = key

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling | None = None,
        listen: Listener | None = None,
    ) -> Reply:
        with self._discreetly():
            reply = await super().chat(messages, tools, sampling, listen)
        if len(self._key) < SECRET:
            return reply
        calls = tuple(ToolCall(*(self._hide(part) for part in (c.name, c.arguments, c.id))) for c in reply.tool_calls)
        return replace(reply, text=self._hide(reply.text), tool_calls=calls, message=self._hide(reply.message))

    async def models(self) -> list[Mapping[str, Any]]:
        with self._discreetly():
            return await super().models()

    @contextmanager
    def _discreetly(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            error.args = tuple(self._hide(part) for part in error.args)
            raise

    def _hide(self, said: Any) -> Any:
        """The same without the key, wherever it stands in what JSON can hold."""
        if isinstance(said, str):
            return said.replace(self._key, HIDDEN) if self._key else said
        if isinstance(said, Mapping):
            return {self._hide(name): self._hide(value) for name, value in said.items()}
        return [self._hide(part) for part in said] if isinstance(said, list | tuple) else said


async def run_chat_rollout(
    fleet: Fleet,
    task: Task,
    client: OpenAIChat,
    window: int,
    settings: Settings,
    *,
    id: str = "",
    facts: Mapping[str, Any] | None = None,
) -> Rollout:
    """Run, grade and score one session. RolloutFailed when there is nothing to be scored."""
    if task.steps:
        raise RolloutFailed(f"{task.name} has steps, each a session; a rollout is one")
    play = _Play(task, client, window, settings, id, facts or {})
    limit = 2 * SETUP_S + play.seconds + (task.verifier.timeout_s or VERIFIER_S)
    try:
        async with asyncio.timeout(limit):
            return await play.rollout(fleet)
    except TimeoutError:
        raise RolloutFailed(f"{task.name}: not over after {limit:.0f} s") from None
    except RolloutFailed:
        raise
    except GradingFailed as error:
        raise RolloutFailed(f"{error.cause}: {error}") from error
    except (EtudeError, OSError) as error:
        raise RolloutFailed(f"{type(error).__name__}: {error}") from error


class _Play:
    """One rollout while it runs."""

    def __init__(
        self, task: Task, client: OpenAIChat, window: int, settings: Settings, id: str, facts: Mapping[str, Any]
    ) -> None:
        self.task, self.client, self.window, self.settings, self.id = task, client, window, settings, id
        self.seconds = settings.budget.seconds or task.agent.timeout_s or SESSION_S
        names = {name: each.tool.name for name, each in shown_tools(settings.environment).items()}
        known = {"effort": asdict(settings.effort), "temperature": settings.temperature, "tool_names": names}
        self.facts = {**facts, **known}
        self.trace: Trace | None = None
        self.speaker: _Patient | None = None

    async def rollout(self, fleet: Fleet) -> Rollout:
        settings, marks = self.settings, [time.monotonic()]
        act = in_session(
            self._speaking,
            environment=settings.environment,
            budget=replace(settings.budget, seconds=self.seconds),
            summaries=settings.summaries,
            searcher=settings.searcher,
            session_id=self.id,
            facts=self.facts,
            on_trace=self._ended,
        )

        async def acted(ground: Ground, step: TaskStep | None) -> None:
            marks.append(time.monotonic())
            await act(ground, step)

        grade = await attempt(fleet, self.task, acted, provision=settings.provision)
        assert self.trace is not None
        assert self.speaker is not None
        trace, waited = self.trace, self.speaker.waited
        if trace.ending == "time" and waited > self.seconds / 2:
            raise RolloutFailed(f"{self.task.name}: no answer for {waited:.0f} s, and the session's time was over")
        reward = score(Graded(self.task, trace, grade), {"correctness": 1.0})
        paid = {"total": reward.total, "parts": dict(reward.parts), "hack": reward.hack, "score": grade.score}
        trace = replace(trace, facts={**trace.facts, "reward": paid})
        seconds = {"ground": marks[1] - marks[0], "session": trace.cost.wall_s, "grading": grade.seconds}
        return Rollout(trace, grade, reward, seconds)

    @asynccontextmanager
    async def _speaking(self, id: str) -> AsyncIterator[Speaker]:
        sampling = Sampling(temperature=self.settings.temperature)
        self.speaker = _Patient(self.client, sampling, window=self.window)
        yield self.speaker

    def _ended(self, trace: Trace) -> None:
        self.trace = trace


class _Patient(ChatSpeaker):
    """Remembers for how long it waited for an answer that did not come before the session's time was over."""

    waited = 0.0

    async def answer(self, max_tokens: int) -> Spoken:
        started = time.monotonic()
        try:
            return await super().answer(max_tokens)
        except asyncio.CancelledError:
            self.waited = time.monotonic() - started
            raise
