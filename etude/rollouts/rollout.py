"""One rollout: a session of the agent on a task, graded and scored. What every slot is filled with.

The session, the tools, the ground and the verifier are those that evaluation and people run. What goes wrong underneath
(a pod, a host, the samplers, the verifier, the clock of the infrastructure) is `RolloutFailed`: no reward, and the slot
is tried again. Cancelling a rollout closes its pod.

Between two answers a session stands still: then its pod is snapshotted and its trace written down, every so often, and
whoever takes the slot up after a death goes on from there, to the same tokens. A snapshot holds files and no processes,
so a session with a command in the background is not written down until that has ended.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from etude.chat.dialects.dialect import Dialect
from etude.errors import EtudeError, InputError
from etude.harness.model_client import SEEDS, Speaker, TokenSpeaker, turn_seed
from etude.harness.search.searcher import Searcher
from etude.harness.session import Budget, Session
from etude.harness.summary import Summaries
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import Toolbox, shown_tools
from etude.harness.trace import Trace
from etude.harness.trace_store import load_trace, save_trace
from etude.inference.policy import OneSample, Policy, Weights
from etude.inference.request import Sample
from etude.inference.sampling import Sampling
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError, Snapshot, Unsupported
from etude.rewards import EffortWeights, Graded, Reward, score
from etude.rl.metrics import habits
from etude.tasks.base_images import Provision
from etude.tasks.environment import Ground, Origin, OriginGone
from etude.tasks.schema import VERIFIER_S
from etude.tasks.session_agent import Begun, in_session
from etude.tasks.task import Task, TaskStep
from etude.tasks.trial import Actor, attempt
from etude.tasks.verifier import graded_in_place
from etude.tasks.verifier_result import Grade, GradingFailed
from etude.tasks.workspace import Entry

Stage = Literal["starting", "running", "grading"]  # as the table of slots calls them
Doing = Literal["ground", "answer", "tools", "checkpoint", "grading"]

SESSION_S = 3600.0  # of a session for which neither the budget nor the task has a limit
SETUP_S = 900.0  # for the ground, image and turn in the queue included; and again for that of the verifier
MARK = "checkpoint"  # among the facts of a trace that is not over


class RolloutFailed(EtudeError):
    """There is no rollout, and the agent is not to blame; the message says what broke."""


@dataclass(frozen=True)
class Voice:
    """Who speaks in the sessions."""

    policy: Policy
    dialect: Dialect
    window: int  # tokens of context
    model: str = ""


@dataclass(frozen=True)
class Settings:
    """What is equal for all rollouts of a run."""

    environment: ToolSet = field(default_factory=ToolSet)
    budget: Budget = field(default_factory=Budget)
    summaries: Summaries = field(default_factory=Summaries)
    temperature: float = 1.0
    effort: EffortWeights = field(default_factory=EffortWeights)
    checkpoint_s: float = 0.0  # between checkpoints of one rollout; 0: none
    provision: Provision = field(default_factory=Provision)
    searcher: Searcher | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A rollout that could go on, or be graded when its session is `over`."""

    trace: Trace
    origin: Origin
    tools: Mapping[str, Any]
    seed: int
    over: bool


@dataclass(frozen=True)
class Rollout:
    """What a slot is filled with. `seconds` are those of the clock, by what they were spent on."""

    trace: Trace
    grade: Grade
    reward: Reward
    seconds: Mapping[str, float]
    note: str = ""

    def record(self, task: Task) -> dict[str, Any]:
        """What the table keeps of it, as JSON."""
        trace, reward = self.trace, self.reward
        return {
            "total": reward.total,
            "parts": dict(reward.parts),
            "hack": reward.hack,
            "score": self.grade.score,
            "solved": self.grade.score >= task.passing and not reward.hack,
            "category": task.category,
            "ending": trace.ending,
            "cost": asdict(trace.cost),
            "errors": dict(trace.errors),
            "segments": len(trace.segments),
            "tokens": sum(map(len, trace.segments)),
            "made": trace.cost.made,
            "pod_s": trace.cost.pod_s,
            "seconds": dict(self.seconds),
            "evidence": {name: dict(seen) for name, seen in reward.evidence.items()},
            "habits": habits(Graded(task, trace, self.grade), reward),
        }


def rollout_seed(seed: int, *place: int) -> int:
    """A seed of its own for every place in the table: two rollouts of a prompt must not have the same luck."""
    found = seed % SEEDS
    for number in place:
        found = turn_seed(found, number)
    return found


# ------------------------------------------------------------------------------------------- running one


async def run_rollout(
    fleet: Fleet,
    task: Task,
    voice: Voice,
    settings: Settings,
    *,
    seed: int = 0,
    id: str = "",
    facts: Mapping[str, Any] | None = None,
    weights: Callable[[int], Mapping[str, float]] = lambda version: {"correctness": 1.0},
    resume: Checkpoint | None = None,
    on_checkpoint: Callable[[Checkpoint], Awaitable[None]] | None = None,
    on_doing: Callable[[Doing], None] = lambda doing: None,
) -> Rollout:
    """Run, grade and score one session. RolloutFailed when there is nothing to be scored.

    `weights` are those of the rewards at a version of the model's; `on_doing` hears what is being waited for.
    """
    if task.steps:
        raise RolloutFailed(f"{task.name} has steps, each a session; a rollout is one")
    play = _Play(task, voice, settings, resume.seed if resume else seed, id, facts or {}, on_checkpoint, on_doing)
    limit = 2 * SETUP_S + play.seconds + (task.verifier.timeout_s or VERIFIER_S)
    try:
        async with asyncio.timeout(limit):
            try:
                return await play.rollout(fleet, resume, weights)
            except OriginGone as error:
                play.begin_anew(seed, f"begun anew: {error}")
                return await play.rollout(fleet, None, weights)
    except TimeoutError:
        raise RolloutFailed(f"{task.name}: not over after {limit:.0f} s; it was at: {play.doing}") from None
    except RolloutFailed:
        raise
    except GradingFailed as error:
        raise RolloutFailed(f"{error.cause}: {error}") from error
    except (EtudeError, OSError) as error:
        raise RolloutFailed(f"{type(error).__name__}: {error}") from error


class _Play:
    """One rollout while it runs."""

    def __init__(
        self,
        task: Task,
        voice: Voice,
        settings: Settings,
        seed: int,
        id: str,
        facts: Mapping[str, Any],
        on_checkpoint: Callable[[Checkpoint], Awaitable[None]] | None,
        on_doing: Callable[[Doing], None],
    ) -> None:
        self.task, self.voice, self.settings, self.seed, self.id = task, voice, settings, seed, id
        self.given, self.on_checkpoint, self.on_doing = facts, on_checkpoint, on_doing
        self.seconds = settings.budget.seconds or task.agent.timeout_s or SESSION_S
        self.doing: Doing = "ground"
        self.note = ""
        self.trace: Trace | None = None
        self.place: tuple[Ground, Session, Toolbox] | None = None
        self.kept = time.monotonic()  # when it was last written down ...
        self.turns = 0  # ... and after how many turns
        self.waited = 0.0  # for an answer that did not come before the session's time was over

    def begin_anew(self, seed: int, note: str) -> None:
        self.seed, self.note, self.trace, self.place = seed, note, None, None

    def do(self, doing: Doing) -> None:
        self.doing = doing
        self.on_doing(doing)

    async def rollout(
        self, fleet: Fleet, resume: Checkpoint | None, weights: Callable[[int], Mapping[str, float]]
    ) -> Rollout:
        self.do("ground")
        marks = [time.monotonic()]
        act = self.actor(resume)

        async def acted(ground: Ground, step: TaskStep | None) -> None:
            marks.append(time.monotonic())
            await act(ground, step)
            await self.keep_end(ground, resume)
            self.do("grading")

        provision, origin = self.settings.provision, resume.origin if resume else None
        grade = await attempt(fleet, self.task, acted, provision=provision, origin=origin)
        assert self.trace is not None
        trace = self.whole(self.trace, resume)
        if trace.ending == "time" and self.waited > self.seconds / 2:
            raise RolloutFailed(f"{self.task.name}: no answer for {self.waited:.0f} s, and the session's time was over")
        oldest, newest = trace.versions()
        reward = score(Graded(self.task, trace, grade), weights(newest))
        paid = {"total": reward.total, "parts": dict(reward.parts), "hack": reward.hack, "score": grade.score}
        trace = replace(trace, facts={**trace.facts, "versions": [oldest, newest], "reward": paid})
        seconds = {"ground": marks[1] - marks[0], "session": trace.cost.wall_s, "grading": grade.seconds}
        return Rollout(trace, grade, reward, seconds, self.note)

    def actor(self, resume: Checkpoint | None) -> Actor:
        """The session, from its beginning or from where it was; nothing where only its grade is missing."""
        if resume is not None and resume.over:
            return self._recall(resume.trace)
        settings = self.settings
        return in_session(
            self._speaking,
            environment=settings.environment,
            budget=replace(settings.budget, seconds=self.seconds),
            summaries=settings.summaries,
            searcher=settings.searcher,
            session_id=self.id,
            facts=self.facts(),
            begun=Begun(resume.trace, resume.tools) if resume else None,
            on_open=self._opened,
            on_trace=self._ended,
        )

    def facts(self) -> dict[str, Any]:
        """What the trace says beside what happened."""
        shown = shown_tools(self.settings.environment)
        return {
            **self.given,
            "effort": asdict(self.settings.effort),
            "seed": self.seed,
            "temperature": self.settings.temperature,
            "tool_names": {name: each.tool.name for name, each in shown.items()},
            **({"note": self.note} if self.note else {}),
        }

    def whole(self, trace: Trace, resume: Checkpoint | None) -> Trace:
        """With the seconds of the pods before."""
        before = resume.trace.cost.pod_s if resume and not resume.over else 0.0
        return replace(trace, cost=trace.cost.plus(pod_s=before)) if before else trace

    def _recall(self, trace: Trace) -> Actor:
        async def act(ground: Ground, step: TaskStep | None) -> None:
            self.trace = trace

        return act

    def _opened(self, ground: Ground, session: Session, tools: Toolbox) -> None:
        self.place = ground, session, tools
        self.kept, self.turns = time.monotonic(), session.cost.turns
        self.do("tools")

    def _ended(self, trace: Trace) -> None:
        self.trace = trace

    @asynccontextmanager
    async def _speaking(self, id: str) -> AsyncIterator[Speaker]:
        voice = self.voice
        sampling = Sampling(temperature=self.settings.temperature, seed=self.seed)
        policy = _Attended(self)
        yield TokenSpeaker(
            policy, voice.dialect, sampling, window=voice.window, session=self.id, model=voice.model or "policy"
        )

    # -- writing down

    @property
    def due(self) -> bool:
        every = self.settings.checkpoint_s
        return self.on_checkpoint is not None and every > 0 and time.monotonic() - self.kept >= every

    async def keep_between(self, force: bool = False) -> None:
        """Write a session down that stands between two answers, if it is time; with `force` it always is."""
        if self.place is None or not (self.due or (force and self.on_checkpoint and self.settings.checkpoint_s)):
            return
        ground, session, tools = self.place
        trace = session.trace("interrupted")
        if trace.cost.turns == self.turns:
            return  # nothing to lose
        if session.steps[-1].kind == "summary-request" or trace.segments[-1].kind == "compaction":
            return  # it would be asked for again
        state = tools.state()
        self.do("checkpoint")
        await tools.rest()
        await self._keep(ground, trace, state, over=False)

    async def keep_end(self, ground: Ground, resume: Checkpoint | None) -> None:
        """Write a session down that is over, if much would be lost with it."""
        if self.due and self.trace is not None and not (resume and resume.over):
            self.do("checkpoint")
            await self._keep(ground, self.whole(self.trace, resume), {}, over=True)

    async def _keep(self, ground: Ground, trace: Trace, tools: Mapping[str, Any], *, over: bool) -> None:
        assert self.on_checkpoint is not None
        self.kept, self.turns = time.monotonic(), trace.cost.turns
        try:
            snapshot = await ground.pod.snapshot()
        except Unsupported:  # on this backend, or with something running
            return
        if snapshot.kind != "fs" and (not over or graded_in_place(self.task)):  # what runs there would be missing
            await forget_snapshot(ground.fleet, snapshot.id)
            return
        await self.on_checkpoint(Checkpoint(trace, Origin(snapshot, ground.before), tools, self.seed, over))


class _Attended(OneSample):
    """The policy, as a rollout asks it: between two answers there is time to write things down."""

    def __init__(self, play: _Play) -> None:
        self.play, self.policy = play, play.voice.policy
        self._since: int | None = None  # the version that made the first token

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        await self.play.keep_between()
        self.play.do("answer")
        started = time.monotonic()
        try:
            # weights may change between two answers as within one: the session goes on over what it has read
            found = await self.policy.samples(tokens, replace(sampling, since=self._since), session=session)
            if self._since is None and found[0].versions:
                self._since = found[0].versions[0]
            return found
        except asyncio.CancelledError:
            self.play.waited = time.monotonic() - started
            raise
        except InputError:  # it would be refused again
            raise
        except EtudeError:
            # whoever takes the slot up when there are samplers again need not do this work again
            await self.play.keep_between(force=True)
            raise
        finally:
            self.play.do("tools")

    async def load(self, weights: Weights, version: int) -> None:
        raise InputError("a rollout does not load weights; samplers do")

    async def version(self) -> int:
        return await self.policy.version()

    async def close(self) -> None:
        """It is its owner's."""


# ------------------------------------------------------------------------------------------- checkpoints as files


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """As a trace whose facts say how to go on."""
    origin = checkpoint.origin
    before = {
        name: [entry.kind, entry.digest, entry.executable, str(entry.source) if entry.source else ""]
        for name, entry in origin.before.items()
    }
    mark = {
        "snapshot": asdict(origin.snapshot),
        "before": before,
        "tools": dict(checkpoint.tools),
        "seed": checkpoint.seed,
        "over": checkpoint.over,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_trace(replace(checkpoint.trace, facts={**checkpoint.trace.facts, MARK: mark}), path)


def load_checkpoint(path: Path) -> Checkpoint:
    """InputError when there is none, or it is damaged."""
    trace = load_trace(path)
    try:
        mark = trace.facts[MARK]
        before = {
            str(name): Entry(kind, digest, bool(executable), Path(source) if source else None)
            for name, (kind, digest, executable, source) in mark["before"].items()
        }
        origin = Origin(Snapshot(**mark["snapshot"]), before)
        tools, seed, over = dict(mark["tools"]), int(mark["seed"]), bool(mark["over"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: no checkpoint of a rollout, or damaged: {error!r}") from error
    facts = {name: value for name, value in trace.facts.items() if name != MARK}
    return Checkpoint(replace(trace, facts=facts), origin, tools, seed, over)


async def forget_snapshot(fleet: Fleet, id: str) -> None:
    """Remove a snapshot wherever it is; one that is nowhere is fine."""
    for door in list(fleet.doors.values()):
        try:
            await door.remove_snapshot(id)
        except (InputError, PodError):  # not there, or the host is not
            continue
