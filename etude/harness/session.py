"""A session: sample, run the tools that were called, append, repeat. The same for training, evaluation and people.

It talks to a speaker (a policy in a dialect, or a chat API) and to a toolbox (tools in a pod), and writes a trace. It
ends with a final message, a spent budget, a full window or an interruption. What breaks underneath (a lost pod, a dead
sampler) is raised, never graded.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from etude.chat.messages import Call, Message, ToolSchema
from etude.errors import InputError
from etude.harness.model_client import Speaker, Spoken
from etude.harness.prompt import Recap, Request, opening
from etude.harness.summary import ASK, ASK_AGAIN, Summaries, compaction_request, unusable
from etude.harness.tool_set import ToolSet
from etude.harness.tools.tool import Outcome
from etude.harness.trace import Cost, SegmentKind, SessionEnding, Step, StepKind, Trace

T = TypeVar("T")
NOWHERE = (-1, -1)  # the place of what the model has not heard
ABORTED = Outcome("This call was stopped before its end.", "aborted")
LEAST_ROOM = 16  # tokens below which an answer is not worth asking for
SHORT = 200  # characters of a result that are never cut
CUT = "\n[cut here: the rest does not fit in the context]"


@dataclass(frozen=True)
class Budget:
    """What a session may take; None is no bound."""

    turns: int | None = None
    tokens: int | None = None  # that the model makes, over all segments
    seconds: float | None = None
    answer: int = 4096  # tokens of one answer

    def __post_init__(self) -> None:
        if self.answer < 1 or any(
            bound is not None and bound <= 0 for bound in (self.turns, self.tokens, self.seconds)
        ):
            raise InputError(f"budget: {self}; expected positive numbers")


class Tools(Protocol):
    """What a session needs of a toolbox."""

    @property
    def root(self) -> str: ...
    @property
    def schemas(self) -> Sequence[ToolSchema]: ...
    @property
    def plan(self) -> str: ...
    @property
    def pod_seconds(self) -> float: ...
    async def run(self, calls: Sequence[Call]) -> list[Outcome]: ...
    def interrupt(self) -> None: ...


class Session:
    """One session. `run` it; meanwhile `say` adds a user's message and `interrupt` stops what goes on.

    After its end, more can be said, and it runs on from there.
    """

    def __init__(
        self,
        request: Request,
        speaker: Speaker,
        tools: Tools,
        *,
        environment: ToolSet | None = None,
        budget: Budget | None = None,
        summaries: Summaries | None = None,
        id: str = "",
        facts: Mapping[str, Any] | None = None,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.request, self.speaker, self.tools, self.facts = request, speaker, tools, dict(facts or {})
        self.environment, self.budget = environment or ToolSet(), budget or Budget()
        self.summaries, self.id, self.on_step = summaries or Summaries(), id or uuid.uuid4().hex, on_step
        self.steps: list[Step] = []
        self.cost = Cost()
        self._started = time.monotonic()
        self._segment = -1
        self._inbox: list[str] = []
        self._doing: asyncio.Future[Any] | None = None  # what an interruption would stop
        self._acting = False
        self._interrupted = asyncio.Event()

    # ------------------------------------------------------------------------------------------- the loop

    async def run(self) -> Trace:
        """Work until it is over."""
        if self._segment < 0:
            self._open(None)
        while (ending := self._spent()) is None:
            if self._full() and not await self._sum_up():
                ending = self._spent() or ("interrupted" if self._interrupted.is_set() else "context")
                break
            self._tell_inbox()
            spoken = await self._speak(self._room())
            if spoken is not None and spoken.answer.calls:
                await self._act(spoken)
            elif spoken is not None:
                self._note("turn", spoken)
            if self._inbox:
                self._interrupted.clear()
            elif self._interrupted.is_set():
                ending = "interrupted"
                break
            elif spoken is not None and not spoken.answer.calls:
                ending = "final" if spoken.answer.closed else "length"
                break
        self._interrupted.clear()
        return self.trace(ending)

    async def _speak(self, room: int) -> Spoken | None:
        """The model's next answer, at most `room` tokens; None when it was stopped."""
        heard = self.speaker.listen()
        self.steps = [replace(step, span=heard) if step.span == NOWHERE else step for step in self.steps]
        return await self._unless_stopped(self.speaker.answer(room))

    async def _act(self, spoken: Spoken) -> None:
        """Run the calls of an answer; the model is told what came of them."""
        calls = spoken.answer.calls
        self._acting = True
        try:
            outcomes = await self._unless_stopped(self.tools.run(calls)) or [ABORTED] * len(calls)
        finally:
            self._acting = False
        step = self._note("turn", spoken, self._fitting(calls, outcomes))
        results = step.results()
        self.cost = self.cost.plus(output=self.speaker.measure(results), calls=len(calls))
        self.speaker.tell(results)

    # ------------------------------------------------------------------------------------------- limits

    def _spent(self) -> SessionEnding | None:
        budget, cost = self.budget, self.cost
        if budget.turns is not None and cost.turns >= budget.turns:
            return "turns"
        if budget.tokens is not None and cost.made >= budget.tokens:
            return "tokens"
        left = self._seconds_left()
        return "time" if left is not None and left <= 0 else None

    def _seconds_left(self) -> float | None:
        if self.budget.seconds is None:
            return None
        return self.budget.seconds - (time.monotonic() - self._started)

    def _sums_up(self) -> bool:
        """Whether there may be a summary, or one more."""
        most = self.summaries.most
        return self.summaries.mode != "off" and (not most or self.cost.summaries < most)

    def _full(self) -> bool:
        if self._sums_up():
            return self.speaker.size >= self.summaries.at(self.speaker.window)
        return self.speaker.window - self.speaker.size < LEAST_ROOM

    def _room(self) -> int:
        """Tokens that the next answer may have."""
        left = self.budget.tokens - self.cost.made if self.budget.tokens is not None else self.budget.answer
        return max(1, min(self.budget.answer, left, self.speaker.window - self.speaker.size))

    def _fitting(self, calls: Sequence[Call], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes; where they would fill the window, the longest are cut until they do not."""
        # what a terminal shows need not be Unicode, and what is not cannot be told
        kept = [replace(outcome, text=outcome.text.encode("utf-8", "replace").decode()) for outcome in outcomes]
        room = self.speaker.window - self.speaker.size - (self.summaries.reserve if self._sums_up() else 0)
        most = max(len(outcome.text) for outcome in kept)
        while True:
            texts = zip(calls, kept, strict=True)
            size = self.speaker.measure(
                [Message("tool", out.text, call=call.id, name=call.name) for call, out in texts]
            )
            if size <= room or most <= SHORT:
                return kept
            most //= 2  # of all at once: there may be thousands
            kept = [
                replace(out, text=out.text[:most] + CUT) if len(out.text) > most + len(CUT) else out for out in kept
            ]

    # ------------------------------------------------------------------------------------------- summaries

    async def _sum_up(self) -> bool:
        """End the segment with a summary and open the next from it; False when no usable one was to be had."""
        if not self._sums_up():
            return False
        compacting = self.summaries.mode == "compaction"
        if compacting:
            here = [step for step in self.steps if step.segment == self._segment]
            ask = compaction_request(here, most=3 * (self.speaker.window - self.summaries.reserve))
        else:
            ask = Message("user", ASK)
        for _ in range(self.summaries.attempts):
            if compacting:
                self._begin("compaction", [ask], ())
            else:
                self._tell("summary-request", ask)
            room = max(1, min(self.budget.answer, self.speaker.window - self.speaker.size))
            spoken = await self._speak(room)
            if spoken is None:
                return False
            self._note("summary", spoken)
            if not (why := unusable(spoken.answer)):
                self.cost = self.cost.plus(summaries=1)
                self._open(Recap(spoken.answer.text.strip(), self.tools.plan, self.cost.summaries))
                return True
            ask = ask if compacting else Message("user", ASK_AGAIN.format(why=why))
        return False

    # ------------------------------------------------------------------------------------------- interruptions

    def say(self, text: str) -> None:
        """A message from the user; the model hears it before it speaks next."""
        self._inbox.append(text)

    def interrupt(self) -> None:
        """Stop the answer or the tools that run now. With a message waiting the session goes on, else it ends."""
        self._interrupted.set()
        if self._acting:  # what is finished keeps its outcome
            self.tools.interrupt()
        elif self._doing is not None:
            self._doing.cancel()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result, or None when the user interrupted or the time is over; a cancelled session raises."""
        if self._interrupted.is_set():  # between two pieces of work
            work.close()
            return None
        self._doing = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(self._seconds_left()):
                return await self._doing  # type: ignore[no-any-return]
        except TimeoutError:
            if self._spent() != "time":  # somebody else's
                raise
            return None
        except asyncio.CancelledError:
            if not self._interrupted.is_set():
                raise
            return None
        finally:
            self._doing = None

    def _tell_inbox(self) -> None:
        """Tell the model what the user has said meanwhile."""
        said, self._inbox = self._inbox, []
        if said:
            self._tell("message", Message("user", "\n\n".join(said)))

    # ------------------------------------------------------------------------------------------- the record

    def trace(self, ending: SessionEnding) -> Trace:
        """What has happened up to now."""
        cost = replace(self.cost, pod_s=self.tools.pod_seconds, wall_s=time.monotonic() - self._started)
        speaker = self.speaker
        return Trace(
            id=self.id,
            task=self.request.id,
            dialect=speaker.name,
            model=speaker.model,
            tools=self.tools.schemas,
            segments=speaker.segments(),
            steps=tuple(self.steps),
            ending=ending,
            cost=cost,
            exact=speaker.exact,
            facts=self.facts,
        )

    def restore(self, trace: Trace) -> None:
        """Be where an earlier run of this session ended; its pod, and the state of its tools, are the caller's part."""
        self.id, self.steps, self.cost = trace.id, list(trace.steps), trace.cost
        self._started = time.monotonic() - trace.cost.wall_s
        self._segment = len(trace.segments) - 1
        nothing_heard = self.speaker.restore(trace)
        last = max((index for index, step in enumerate(self.steps) if step.kind in ("turn", "summary")), default=-1)
        if nothing_heard and last >= 0 and self.steps[last].segment == self._segment:
            self.speaker.tell(self.steps[last].results())
        for step in self.steps[last + 1 :]:
            if step.kind in ("message", "summary-request") and (nothing_heard or step.span == NOWHERE):
                self.speaker.tell([step.message])

    def _open(self, recap: Recap | None) -> None:
        messages = opening(self.request, self.environment, self.tools.root, recap)
        self._begin("summary" if recap else "start", messages, self.tools.schemas)

    def _begin(self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        span = self.speaker.begin(kind, messages, tools)
        self._segment += 1
        for message in messages:
            self._add(Step("prompt", message, self._segment, span, copied=self._segment > 0))

    def _tell(self, kind: StepKind, message: Message) -> None:
        self.speaker.tell([message])
        self._add(Step(kind, message, self._segment, NOWHERE))

    def _note(self, kind: StepKind, spoken: Spoken, outcomes: Sequence[Outcome] = ()) -> Step:
        """Write an answer down, with what it cost."""
        answer = spoken.answer
        made = spoken.span[1] - spoken.span[0]
        if kind == "summary":
            spent = {"summary": made}
        else:
            text = "commentary" if answer.calls else "final"
            spent = {
                "thinking": answer.thinking_tokens,
                "call": answer.call_tokens,
                text: answer.text_tokens,
                "turns": 1,
            }
        self.cost = self.cost.plus(prompt=spoken.prompt, cached=spoken.cached, model_s=spoken.seconds, **spent)
        return self._add(
            Step(kind, answer.message(), self._segment, spoken.span, tuple(outcomes), closed=answer.closed)
        )

    def _add(self, step: Step) -> Step:
        step = replace(step, time=time.monotonic() - self._started)
        self.steps.append(step)
        self.on_step(step)
        return step
