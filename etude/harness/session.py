"""The agent loop: sample a turn, run its tool calls, append the results, repeat; the same in training and production.

A session uses a model client (a policy with a dialect, or a chat API) and tools in a pod, and records a trace. It ends
with a final message, an exhausted budget, a full window or an interruption. Infrastructure failures (a lost pod, a dead
sampler) are raised, never graded.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from etude.chat.messages import Message, ToolCall, ToolSchema
from etude.harness.budget import Budget
from etude.harness.model_client import ModelClient, Turn
from etude.harness.profile import SessionSettings
from etude.harness.prompt import Recap, SessionRequest, opening_messages
from etude.harness.search.searcher import CodebaseSearcher
from etude.harness.summary import (
    SUMMARY_PROMPT,
    SUMMARY_RETRY_PROMPT,
    SummarySettings,
    compaction_request,
    why_unusable,
)
from etude.harness.tool_set import ToolSet
from etude.harness.tools.context import WebProvider
from etude.harness.tools.executor import Approve
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import Cost, SegmentKind, SessionEnding, Step, StepKind, Trace

T = TypeVar("T")
PENDING_SPAN = (-1, -1)  # span of messages that are not in the context yet
ABORTED = ToolOutcome("This call was stopped before its end.", "aborted")
MIN_TURN_TOKENS = 16  # minimum room in the window for requesting a turn
MIN_RESULT = 200  # characters of a result that are never cut
CUT_NOTICE = "\n[cut here: the rest does not fit in the context]"


@dataclass(frozen=True)
class SessionSpec:
    """How a session works: what the model is shown, its limits, and what is recorded."""

    tool_set: ToolSet = field(default_factory=ToolSet)
    budget: Budget = field(default_factory=Budget)
    summaries: SummarySettings = field(default_factory=SummarySettings)
    searcher: CodebaseSearcher | None = None
    web: WebProvider | None = None
    approve: Approve | None = None
    id: str = ""  # default: a random one
    facts: Mapping[str, Any] = field(default_factory=dict)  # recorded in the trace
    on_step: Callable[[Step], None] = lambda step: None

    @classmethod
    def of(cls, settings: SessionSettings, **others: Any) -> "SessionSpec":
        """Return the sessions that settings describe, with other values of the spec."""
        return cls(settings.tool_set, settings.budget, settings.summaries, **others)


class SessionTools(Protocol):
    """The part of a tool executor that a session uses."""

    @property
    def root(self) -> str: ...
    @property
    def schemas(self) -> Sequence[ToolSchema]: ...
    @property
    def plan(self) -> str: ...
    @property
    def pod_seconds(self) -> float: ...
    async def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]: ...
    def interrupt(self) -> None: ...


class Session:
    """One session. While `run` works, `say` adds a user message and `interrupt` stops the current turn or tools.

    After an ending, `say` and `run` continue the session.
    """

    def __init__(
        self,
        request: SessionRequest,
        client: ModelClient,
        tools: SessionTools,
        spec: SessionSpec | None = None,
    ) -> None:
        self.request, self.client, self.tools, self.spec = request, client, tools, spec or SessionSpec()
        self.budget, self.summaries = self.spec.budget, self.spec.summaries
        self.id = self.spec.id or uuid.uuid4().hex
        self.steps: list[Step] = []
        self.cost = Cost()
        self.unanswered_s = 0.0  # how long the last turn was waited for in vain
        self._earlier_pod_s = 0.0  # of the pods before a restore
        self._started = time.monotonic()
        self._segment = -1
        self._inbox: list[str] = []
        self._current: asyncio.Future[Any] | None = None  # work that an interruption cancels
        self._running_tools = False
        self._interrupted = asyncio.Event()

    # ------------------------------------------------------------------------------------------- loop

    async def run(self, on_turn: Callable[[], Awaitable[None]] | None = None) -> Trace:
        """Run until the session ends; return its trace. `on_turn` is awaited before every turn, when nothing runs."""
        if self._segment < 0:
            self._open_segment(None)
        while (ending := self._exhausted()) is None:
            if self._needs_summary() and not await self._summarize():
                ending = self._exhausted() or ("interrupted" if self._interrupted.is_set() else "context")
                break
            self._append_inbox()
            if on_turn is not None:
                await on_turn()
            turn = await self._next_turn(self._turn_tokens_left())
            if turn is not None and turn.parsed.calls:
                await self._run_calls(turn)
            elif turn is not None:
                self._record_turn("turn", turn)
            if self._inbox:
                self._interrupted.clear()
            elif self._interrupted.is_set():
                ending = "interrupted"
                break
            elif turn is not None and not turn.parsed.calls:
                ending = "final" if turn.parsed.closed else "length"
                break
        self._interrupted.clear()
        return self.trace(ending)

    async def _next_turn(self, max_tokens: int) -> Turn | None:
        """Return the next model turn, of at most `max_tokens` tokens; None if it was interrupted."""
        span = self.client.flush()
        self.steps = [replace(step, span=span) if step.span == PENDING_SPAN else step for step in self.steps]
        asked = self._elapsed_s()
        turn = await self._unless_interrupted(self.client.complete(max_tokens))
        self.unanswered_s = 0.0 if turn else self._elapsed_s() - asked
        return turn

    async def _run_calls(self, turn: Turn) -> None:
        """Run the calls of a turn and append their results."""
        calls = turn.parsed.calls
        self._running_tools = True
        try:
            outcomes = await self._unless_interrupted(self.tools.run(calls)) or [ABORTED] * len(calls)
        finally:
            self._running_tools = False
        step = self._record_turn("turn", turn, self._fit_to_window(calls, outcomes))
        results = step.results()
        self.cost = self.cost.plus(output=self.client.count_tokens(results), calls=len(calls))
        self.client.append(results)

    # ------------------------------------------------------------------------------------------- limits

    def _exhausted(self) -> SessionEnding | None:
        budget, cost = self.budget, self.cost
        if budget.turns is not None and cost.turns >= budget.turns:
            return "turns"
        if budget.tokens is not None and cost.sampled >= budget.tokens:
            return "tokens"
        left = self._seconds_left()
        return "time" if left is not None and left <= 0 else None

    def _seconds_left(self) -> float | None:
        if self.budget.seconds is None:
            return None
        return self.budget.seconds - self._elapsed_s()

    def _elapsed_s(self) -> float:
        """Return the seconds of the session, without those in which requests were held back by a rate limit."""
        return time.monotonic() - self._started - self.client.waited_s

    def _may_summarize(self) -> bool:
        """Return whether another summary is allowed."""
        limit = self.summaries.max_summaries
        return self.summaries.mode != "off" and (not limit or self.cost.summaries < limit)

    def _needs_summary(self) -> bool:
        if self._may_summarize():
            return self.client.size >= self.summaries.at(self.client.window)
        return self.client.window - self.client.size < MIN_TURN_TOKENS

    def _turn_tokens_left(self) -> int:
        """Return the maximum length of the next turn in tokens."""
        left = self.budget.tokens - self.cost.sampled if self.budget.tokens is not None else self.budget.max_turn_tokens
        return max(1, min(self.budget.max_turn_tokens, left, self.client.window - self.client.size))

    def _fit_to_window(self, calls: Sequence[ToolCall], outcomes: Sequence[ToolOutcome]) -> list[ToolOutcome]:
        """Return the outcomes; if they do not fit the window, cut the longest until they do."""
        # terminal output may contain lone surrogates, which cannot be encoded
        kept = [replace(outcome, text=outcome.text.encode("utf-8", "replace").decode()) for outcome in outcomes]
        room = self.client.window - self.client.size - (self.summaries.reserve if self._may_summarize() else 0)
        limit = max(len(outcome.text) for outcome in kept)
        while True:
            texts = zip(calls, kept, strict=True)
            size = self.client.count_tokens(
                [Message("tool", out.text, call=call.id, name=call.name) for call, out in texts]
            )
            if size <= room or limit <= MIN_RESULT:
                return kept
            limit //= 2  # of all outcomes at once: there may be thousands
            kept = [
                replace(out, text=out.text[:limit] + CUT_NOTICE) if len(out.text) > limit + len(CUT_NOTICE) else out
                for out in kept
            ]

    # ------------------------------------------------------------------------------------------- summaries

    async def _summarize(self) -> bool:
        """End the segment with a summary and open the next one from it; return False if no usable summary came."""
        if not self._may_summarize():
            return False
        compacting = self.summaries.mode == "compaction"
        if compacting:
            steps = [step for step in self.steps if step.segment == self._segment]
            request = compaction_request(steps, max_chars=3 * (self.client.window - self.summaries.reserve))
        else:
            request = Message("user", SUMMARY_PROMPT)
        for _ in range(self.summaries.max_attempts):
            if compacting:
                self._begin_segment("compaction", [request], ())
            else:
                self._append("summary-request", request)
            max_tokens = max(1, min(self.budget.max_turn_tokens, self.client.window - self.client.size))
            turn = await self._next_turn(max_tokens)
            if turn is None:
                return False
            self._record_turn("summary", turn)
            if not (why := why_unusable(turn.parsed)):
                self.cost = self.cost.plus(summaries=1)
                self._open_segment(Recap(turn.parsed.text.strip(), self.tools.plan, self.cost.summaries))
                return True
            request = request if compacting else Message("user", SUMMARY_RETRY_PROMPT.format(why=why))
        return False

    # ------------------------------------------------------------------------------------------- interruptions

    def say(self, text: str) -> None:
        """Add a user message; it is appended before the next turn."""
        self._inbox.append(text)

    def interrupt(self) -> None:
        """Stop the current turn or tools. The session continues if a user message is waiting, else it ends."""
        self._interrupted.set()
        if self._running_tools:  # finished calls keep their outcome
            self.tools.interrupt()
        elif self._current is not None:
            self._current.cancel()

    async def _unless_interrupted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result, or None if the user interrupted or time is up; a cancelled session raises."""
        if self._interrupted.is_set():  # interrupted between two steps
            work.close()
            return None
        self._current = asyncio.ensure_future(work)
        try:
            while (left := self._seconds_left()) is None or left > 0:  # grows while a request is held back
                done, _ = await asyncio.wait({self._current}, timeout=left)
                if done:
                    return await self._current  # type: ignore[no-any-return]
            return None
        except asyncio.CancelledError:
            if not self._interrupted.is_set():
                raise
            return None
        finally:
            await _cancel(self._current)
            self._current = None

    def _append_inbox(self) -> None:
        """Append the user messages that arrived meanwhile."""
        texts, self._inbox = self._inbox, []
        if texts:
            self._append("message", Message("user", "\n\n".join(texts)))

    # ------------------------------------------------------------------------------------------- trace

    def trace(self, ending: SessionEnding) -> Trace:
        """Return the trace so far."""
        pod_s, wall_s = self._earlier_pod_s + self.tools.pod_seconds, self._elapsed_s()
        client = self.client
        return Trace(
            id=self.id,
            task=self.request.id,
            dialect=client.name,
            model=client.model,
            tools=self.tools.schemas,
            segments=client.segments(),
            steps=tuple(self.steps),
            ending=ending,
            cost=replace(self.cost, pod_s=pod_s, wall_s=wall_s),
            exact=client.exact,
            facts=dict(self.spec.facts),
        )

    def restore(self, trace: Trace) -> None:
        """Continue an earlier run of this session; the caller restores its pod and the state of its tools."""
        self.id, self.steps, self.cost = trace.id, list(trace.steps), trace.cost
        self._started, self._earlier_pod_s = time.monotonic() - trace.cost.wall_s, trace.cost.pod_s
        self._segment = len(trace.segments) - 1
        ends_with_turn = self.client.restore(trace)
        last = max((index for index, step in enumerate(self.steps) if step.kind in ("turn", "summary")), default=-1)
        if ends_with_turn and last >= 0 and self.steps[last].segment == self._segment:
            self.client.append(self.steps[last].results())
        for step in self.steps[last + 1 :]:
            if step.kind in ("message", "summary-request") and (ends_with_turn or step.span == PENDING_SPAN):
                self.client.append([step.message])

    def _open_segment(self, recap: Recap | None) -> None:
        messages = opening_messages(self.request, self.spec.tool_set, self.tools.root, recap)
        self._begin_segment("summary" if recap else "start", messages, self.tools.schemas)

    def _begin_segment(self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        span = self.client.begin_segment(kind, messages, tools)
        self._segment += 1
        for message in messages:
            self._add(Step("prompt", message, self._segment, span, copied=self._segment > 0))

    def _append(self, kind: StepKind, message: Message) -> None:
        self.client.append([message])
        self._add(Step(kind, message, self._segment, PENDING_SPAN))

    def _record_turn(self, kind: StepKind, turn: Turn, outcomes: Sequence[ToolOutcome] = ()) -> Step:
        """Record a turn as a step and add its cost."""
        parsed = turn.parsed
        if kind == "summary":
            tokens = {"summary": turn.span[1] - turn.span[0]}
        else:
            text = "commentary" if parsed.calls else "final"
            tokens = {
                "thinking": parsed.thinking_tokens,
                "call": parsed.call_tokens,
                text: parsed.text_tokens,
                "turns": 1,
            }
        self.cost = self.cost.plus(prompt=turn.prompt_tokens, cached=turn.cached_tokens, model_s=turn.seconds, **tokens)
        return self._add(Step(kind, parsed.message(), self._segment, turn.span, tuple(outcomes), closed=parsed.closed))

    def _add(self, step: Step) -> Step:
        step = replace(step, time=self._elapsed_s())
        self.steps.append(step)
        self.spec.on_step(step)
        return step


async def _cancel(work: asyncio.Future[Any]) -> None:
    """Cancel work that is not done, and wait for its end."""
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # retrieved, or asyncio reports it as lost
