"""Run one trial of a model behind a chat API: session, environment and verifier of every rollout, without tokens.

The counterpart of `etude.rollouts.rollout`, which needs a policy that samples tokens: same options, same `Rollout`, and
the same distinction between failures of the agent and of the infrastructure.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from etude.chat.messages import PartListener
from etude.errors import EtudeError
from etude.harness.model_client import ChatModelClient, ModelClient, Turn
from etude.harness.tools.executor import exposed_tools
from etude.harness.trace import Trace
from etude.inference.chat_format import ParsedToolCall
from etude.inference.clients.openai import OpenAIChat, Reply
from etude.inference.clients.transport import RetryPolicy
from etude.inference.sampling import Sampling
from etude.pods.fleet import Fleet
from etude.rewards import VerifiedTrial, score
from etude.rollouts.rollout import SESSION_S, SETUP_S, Rollout, RolloutFailed, RolloutOptions
from etude.tasks.environment import TaskEnvironment
from etude.tasks.schema import DEFAULT_VERIFIER_TIMEOUT_S
from etude.tasks.session_agent import session_agent
from etude.tasks.task import Task, TaskStep
from etude.tasks.trial import run_trial
from etude.tasks.verifier_result import VerifierFailed

REDACTED = "[key]"
MIN_SECRET_LENGTH = 16  # shorter keys, such as "EMPTY", are not redacted in answers: they may be ordinary words


class RedactingChat(OpenAIChat):
    """A chat client that removes the API key from answers and errors: some endpoints and proxies repeat it."""

    def __init__(
        self, url: str, key: str, *, model: str, limit: str = "max_tokens", retry: RetryPolicy | None = None
    ) -> None:
        super().__init__(url, key, model=model, limit=limit, retry=retry)
        self._key = key

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling | None = None,
        listen: PartListener | None = None,
    ) -> Reply:
        with self._redact_errors():
            reply = await super().chat(messages, tools, sampling, listen)
        if len(self._key) < MIN_SECRET_LENGTH:
            return reply
        calls = tuple(
            ParsedToolCall(*(self._redact(part) for part in (c.name, c.arguments, c.id))) for c in reply.tool_calls
        )
        return replace(reply, text=self._redact(reply.text), tool_calls=calls, message=self._redact(reply.message))

    async def models(self) -> list[Mapping[str, Any]]:
        with self._redact_errors():
            return await super().models()

    @contextmanager
    def _redact_errors(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            error.args = tuple(self._redact(part) for part in error.args)
            raise

    def _redact(self, value: Any) -> Any:
        """Return a JSON value with the key replaced wherever it occurs."""
        if isinstance(value, str):
            return value.replace(self._key, REDACTED) if self._key else value
        if isinstance(value, Mapping):
            return {self._redact(name): self._redact(each) for name, each in value.items()}
        return [self._redact(part) for part in value] if isinstance(value, list | tuple) else value


async def run_chat_rollout(
    fleet: Fleet,
    task: Task,
    client: OpenAIChat,
    window: int,
    settings: RolloutOptions,
    *,
    id: str = "",
    facts: Mapping[str, Any] | None = None,
) -> Rollout:
    """Run, verify and score one session. Raise RolloutFailed if nothing can be scored."""
    if task.steps:
        raise RolloutFailed(f"{task.name} has steps, each with its own session; a rollout is one session")
    runner = ChatRolloutRunner(task, client, window, settings, id, facts or {})
    limit = 2 * SETUP_S + runner.seconds + (task.verifier.timeout_s or DEFAULT_VERIFIER_TIMEOUT_S)
    try:
        async with asyncio.timeout(limit):
            return await runner.run(fleet)
    except TimeoutError:
        raise RolloutFailed(f"{task.name}: not finished after {limit:.0f} s") from None
    except RolloutFailed:
        raise
    except VerifierFailed as error:
        raise RolloutFailed(f"{error.cause}: {error}") from error
    except (EtudeError, OSError) as error:
        raise RolloutFailed(f"{type(error).__name__}: {error}") from error


class ChatRolloutRunner:
    """The state of one running rollout."""

    def __init__(
        self, task: Task, chat: OpenAIChat, window: int, options: RolloutOptions, id: str, facts: Mapping[str, Any]
    ) -> None:
        self.task, self.chat, self.window, self.options, self.id = task, chat, window, options, id
        self.seconds = options.budget.seconds or task.agent.timeout_s or SESSION_S
        names = {name: each.tool.name for name, each in exposed_tools(options.tool_set).items()}
        recorded = {"effort": options.effort.model_dump(), "temperature": options.temperature, "tool_names": names}
        self.facts = {**facts, **recorded}
        self.trace: Trace | None = None
        self.client: _WaitTimingClient | None = None

    async def run(self, fleet: Fleet) -> Rollout:
        options, times = self.options, [time.monotonic()]
        agent = session_agent(
            self._open_client,
            tool_set=options.tool_set,
            budget=options.budget.model_copy(update={"seconds": self.seconds}),
            summaries=options.summaries,
            searcher=options.searcher,
            session_id=self.id,
            facts=self.facts,
            on_trace=self._on_trace,
        )

        async def timed_agent(environment: TaskEnvironment, step: TaskStep | None) -> None:
            times.append(time.monotonic())
            await agent(environment, step)

        result = await run_trial(fleet, self.task, timed_agent, host_settings=options.host_settings)
        assert self.trace is not None
        assert self.client is not None
        trace, waited = self.trace, self.client.waited
        if trace.ending == "time" and waited > self.seconds / 2:
            raise RolloutFailed(f"{self.task.name}: no answer for {waited:.0f} s until the session's time limit")
        reward = score(VerifiedTrial(self.task, trace, result), {"correctness": 1.0})
        recorded = {"total": reward.total, "parts": dict(reward.parts), "hack": reward.hack, "score": result.score}
        trace = replace(trace, facts={**trace.facts, "reward": recorded})
        seconds = {"ground": times[1] - times[0], "session": trace.cost.wall_s, "grading": result.seconds}
        return Rollout(trace, result, reward, seconds)

    @asynccontextmanager
    async def _open_client(self, id: str) -> AsyncIterator[ModelClient]:
        sampling = Sampling(temperature=self.options.temperature)
        self.client = _WaitTimingClient(self.chat, sampling, window=self.window)
        yield self.client

    def _on_trace(self, trace: Trace) -> None:
        self.trace = trace


class _WaitTimingClient(ChatModelClient):
    """Records how long it waited for an answer that did not arrive before the session's time limit."""

    waited = 0.0

    async def complete(self, max_tokens: int) -> Turn:
        started = time.monotonic()
        try:
            return await super().complete(max_tokens)
        except asyncio.CancelledError:
            self.waited = time.monotonic() - started
            raise
