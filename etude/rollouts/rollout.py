"""One rollout: a trial of a task, scored, with checkpoints to resume from.

The session, tools, environment and verifier are those of evaluation and of `etude tasks run`. An infrastructure failure
(pod, host, samplers, verifier, time limit of the infrastructure) is RolloutFailed: there is no reward, and the slot is
retried. Cancelling a rollout closes its pod.

Between two turns a session is idle. At intervals its pod is snapshotted there and its trace saved; after a crash,
another worker continues from that checkpoint to the same tokens. A snapshot has files but no processes, so a session
with a running background command is not checkpointed until the command has ended.
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
from etude.harness.budget import Budget
from etude.harness.model_client import SEED_LIMIT, ModelClient, TokenModelClient, turn_seed
from etude.harness.search.searcher import CodebaseSearcher
from etude.harness.session import Session
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import ToolExecutor, exposed_tools
from etude.harness.trace import Trace
from etude.harness.trace_store import load_trace, save_trace
from etude.inference.policy import Policy, PolicyBase, Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.pods.fleet import Fleet
from etude.pods.pod import Unsupported
from etude.rewards.effort import EffortSettings
from etude.rewards.monitors import behaviour_rates
from etude.rewards.reward import Reward, VerifiedTrial, score
from etude.tasks.base_images import HostSettings
from etude.tasks.environment import EnvironmentCheckpoint, EnvironmentCheckpointLost, TaskEnvironment
from etude.tasks.schema import DEFAULT_VERIFIER_TIMEOUT_S
from etude.tasks.session_agent import ResumedSession, session_agent
from etude.tasks.task import Task, TaskStep
from etude.tasks.trial import TrialAgent, run_trial
from etude.tasks.verifier import verified_in_place
from etude.tasks.verifier_result import VerifierFailed, VerifierResult

RolloutPhase = Literal["environment", "answer", "tools", "checkpoint", "grading"]

SESSION_S = 3600.0  # time limit of a session if neither the budget nor the task has one
SETUP_S = 900.0  # to open the environment, including image build and admission; again for the verifier's
CHECKPOINT_KEY = "checkpoint"  # in the facts of a saved trace that can be resumed


class RolloutFailed(EtudeError):
    """The infrastructure failed, not the agent: there is no reward. The message says what failed."""


@dataclass(frozen=True)
class PolicyBinding:
    """A policy with the dialect and context window in which sessions use it."""

    policy: Policy
    dialect: Dialect
    window: int  # tokens
    model: str = ""  # name recorded in traces


@dataclass(frozen=True)
class RolloutOptions:
    """The options shared by all rollouts of a run."""

    tool_set: ToolSet = field(default_factory=ToolSet)
    budget: Budget = field(default_factory=Budget)
    summaries: SummarySettings = field(default_factory=SummarySettings)
    temperature: float = 1.0
    effort: EffortSettings = field(default_factory=EffortSettings)
    checkpoint_s: float = 0.0  # seconds between checkpoints of one rollout; 0: no checkpoints
    host_settings: HostSettings = field(default_factory=HostSettings)
    searcher: CodebaseSearcher | None = None


@dataclass(frozen=True)
class RolloutCheckpoint:
    """An unfinished rollout: its session can continue, or only has to be verified if it is `finished`."""

    trace: Trace
    environment: EnvironmentCheckpoint
    tools: Mapping[str, Any]  # tool state that is not in the pod
    seed: int
    finished: bool


@dataclass(frozen=True)
class Rollout:
    """A scored trial with its trace. `seconds` is wall time by phase."""

    trace: Trace
    verifier_result: VerifierResult
    reward: Reward
    seconds: Mapping[str, float]
    note: str = ""

    def record(self, task: Task) -> dict[str, Any]:
        """Return the JSON that the rollout queue stores."""
        trace, reward, result = self.trace, self.reward, self.verifier_result
        return {
            "total": reward.total,
            "parts": dict(reward.parts),
            "hack": reward.hack,
            "score": result.score,
            "solved": result.score >= task.passing_score and not reward.hack,
            "category": task.category,
            "ending": trace.ending,
            "cost": asdict(trace.cost),
            "errors": dict(trace.errors),
            "segments": len(trace.segments),
            "tokens": sum(map(len, trace.segments)),
            "made": trace.cost.sampled,
            "pod_s": trace.cost.pod_s,
            "seconds": dict(self.seconds),
            "evidence": {name: dict(evidence) for name, evidence in reward.evidence.items()},
            "habits": behaviour_rates(VerifiedTrial(task, trace, result), reward),
        }


def rollout_seed(seed: int, *path: int) -> int:
    """Derive a seed from the run's seed and the numbers that identify a rollout, so that no two rollouts share one."""
    found = seed % SEED_LIMIT
    for number in path:
        found = turn_seed(found, number)
    return found


# ------------------------------------------------------------------------------------------- running


async def run_rollout(
    fleet: Fleet,
    task: Task,
    binding: PolicyBinding,
    options: RolloutOptions,
    *,
    seed: int = 0,
    id: str = "",
    facts: Mapping[str, Any] | None = None,
    weights: Callable[[int], Mapping[str, float]] = lambda version: {"correctness": 1.0},
    resume: RolloutCheckpoint | None = None,
    on_checkpoint: Callable[[RolloutCheckpoint], Awaitable[None]] | None = None,
    on_phase: Callable[[RolloutPhase], None] = lambda phase: None,
) -> Rollout:
    """Run, verify and score one session. Raise RolloutFailed if there is no verifier result.

    `weights` returns the reward weights for a weight version. If the snapshot of `resume` is lost, the rollout starts
    from the beginning.
    """
    if task.steps:
        raise RolloutFailed(f"{task.name} is a multi-step task; a rollout supports one session only")
    runner = RolloutRunner(
        task, binding, options, resume.seed if resume else seed, id, facts or {}, on_checkpoint, on_phase
    )
    limit = 2 * SETUP_S + runner.session_s + (task.verifier.timeout_s or DEFAULT_VERIFIER_TIMEOUT_S)
    try:
        async with asyncio.timeout(limit):
            try:
                return await runner.run(fleet, resume, weights)
            except EnvironmentCheckpointLost as error:
                runner.reset(seed, f"restarted from the beginning: {error}")
                return await runner.run(fleet, None, weights)
    except TimeoutError:
        raise RolloutFailed(f"{task.name}: not finished after {limit:.0f} s, in phase {runner.phase}") from None
    except RolloutFailed:
        raise
    except VerifierFailed as error:
        raise RolloutFailed(f"{error.cause}: {error}") from error
    except (EtudeError, OSError) as error:
        raise RolloutFailed(f"{type(error).__name__}: {error}") from error


class RolloutRunner:
    """Runs one rollout and writes its checkpoints."""

    def __init__(
        self,
        task: Task,
        binding: PolicyBinding,
        options: RolloutOptions,
        seed: int,
        id: str,
        facts: Mapping[str, Any],
        on_checkpoint: Callable[[RolloutCheckpoint], Awaitable[None]] | None,
        on_phase: Callable[[RolloutPhase], None],
    ) -> None:
        self.task, self.binding, self.options, self.seed, self.id = task, binding, options, seed, id
        self.extra_facts, self.on_checkpoint, self.on_phase = facts, on_checkpoint, on_phase
        self.session_s = options.budget.seconds or task.agent.timeout_s or SESSION_S
        self.phase: RolloutPhase = "environment"
        self.note = ""
        self.trace: Trace | None = None
        self.opened: tuple[TaskEnvironment, Session, ToolExecutor] | None = None
        self.checkpointed_at = time.monotonic()
        self.checkpointed_turns = 0
        self.waited = 0.0  # for a completion that did not arrive before the session's time limit

    def reset(self, seed: int, note: str) -> None:
        self.seed, self.note, self.trace, self.opened = seed, note, None, None

    def enter(self, phase: RolloutPhase) -> None:
        self.phase = phase
        self.on_phase(phase)

    async def run(
        self, fleet: Fleet, resume: RolloutCheckpoint | None, weights: Callable[[int], Mapping[str, float]]
    ) -> Rollout:
        self.enter("environment")
        times = [time.monotonic()]
        run_session = self.agent(resume)

        async def agent(environment: TaskEnvironment, step: TaskStep | None) -> None:
            times.append(time.monotonic())
            await run_session(environment, step)
            await self.checkpoint_at_end(environment, resume)
            self.enter("grading")

        host_settings, checkpoint = self.options.host_settings, resume.environment if resume else None
        result = await run_trial(fleet, self.task, agent, host_settings=host_settings, checkpoint=checkpoint)
        assert self.trace is not None
        trace = self.with_earlier_pod_time(self.trace, resume)
        if trace.ending == "time" and self.waited > self.session_s / 2:
            raise RolloutFailed(
                f"{self.task.name}: no completion for {self.waited:.0f} s, until the session's time limit"
            )
        oldest, newest = trace.versions()
        reward = score(VerifiedTrial(self.task, trace, result), weights(newest))
        recorded = {"total": reward.total, "parts": dict(reward.parts), "hack": reward.hack, "score": result.score}
        trace = replace(trace, facts={**trace.facts, "versions": [oldest, newest], "reward": recorded})
        seconds = {"ground": times[1] - times[0], "session": trace.cost.wall_s, "grading": result.seconds}
        return Rollout(trace, result, reward, seconds, self.note)

    def agent(self, resume: RolloutCheckpoint | None) -> TrialAgent:
        """Return an agent that runs the session, new or resumed; one that does nothing if the session has finished."""
        if resume is not None and resume.finished:
            return self._finished_agent(resume.trace)
        options = self.options
        return session_agent(
            self._open_client,
            tool_set=options.tool_set,
            budget=options.budget.model_copy(update={"seconds": self.session_s}),
            summaries=options.summaries,
            searcher=options.searcher,
            session_id=self.id,
            facts=self.trace_facts(),
            resume_from=ResumedSession(resume.trace, resume.tools) if resume else None,
            on_open=self._on_open,
            on_trace=self._on_trace,
        )

    def trace_facts(self) -> dict[str, Any]:
        """Return the facts recorded in the trace."""
        exposed = exposed_tools(self.options.tool_set)
        return {
            **self.extra_facts,
            "effort": self.options.effort.model_dump(),
            "seed": self.seed,
            "temperature": self.options.temperature,
            "tool_names": {name: each.tool.name for name, each in exposed.items()},
            **({"note": self.note} if self.note else {}),
        }

    def with_earlier_pod_time(self, trace: Trace, resume: RolloutCheckpoint | None) -> Trace:
        """Return the trace with the pod seconds before the checkpoint added."""
        before = resume.trace.cost.pod_s if resume and not resume.finished else 0.0
        return replace(trace, cost=trace.cost.plus(pod_s=before)) if before else trace

    def _finished_agent(self, trace: Trace) -> TrialAgent:
        async def agent(environment: TaskEnvironment, step: TaskStep | None) -> None:
            self.trace = trace

        return agent

    def _on_open(self, environment: TaskEnvironment, session: Session, tools: ToolExecutor) -> None:
        self.opened = environment, session, tools
        self.checkpointed_at, self.checkpointed_turns = time.monotonic(), session.cost.turns
        self.enter("tools")

    def _on_trace(self, trace: Trace) -> None:
        self.trace = trace

    @asynccontextmanager
    async def _open_client(self, id: str) -> AsyncIterator[ModelClient]:
        binding = self.binding
        sampling = Sampling(temperature=self.options.temperature, seed=self.seed)
        policy = CheckpointingPolicy(self)
        yield TokenModelClient(
            policy, binding.dialect, sampling, window=binding.window, session=self.id, model=binding.model or "policy"
        )

    # -- checkpoints

    @property
    def checkpoint_due(self) -> bool:
        interval = self.options.checkpoint_s
        return self.on_checkpoint is not None and interval > 0 and time.monotonic() - self.checkpointed_at >= interval

    async def checkpoint_between_turns(self, force: bool = False) -> None:
        """Write a checkpoint if one is due, or in any case with `force`, if checkpoints are enabled."""
        due = self.checkpoint_due or (force and self.on_checkpoint and self.options.checkpoint_s)
        if self.opened is None or not due:
            return
        environment, session, tools = self.opened
        trace = session.trace("interrupted")
        if trace.cost.turns == self.checkpointed_turns:
            return  # nothing new
        if session.steps[-1].kind == "summary-request" or trace.segments[-1].kind == "compaction":
            return  # a resumed session would request the summary again
        state = tools.state()
        self.enter("checkpoint")
        await tools.stop_server()
        await self._write_checkpoint(environment, trace, state, finished=False)

    async def checkpoint_at_end(self, environment: TaskEnvironment, resume: RolloutCheckpoint | None) -> None:
        """Write a checkpoint of a finished session if one is due."""
        if self.checkpoint_due and self.trace is not None and not (resume and resume.finished):
            self.enter("checkpoint")
            trace = self.with_earlier_pod_time(self.trace, resume)
            await self._write_checkpoint(environment, trace, {}, finished=True)

    async def _write_checkpoint(
        self, environment: TaskEnvironment, trace: Trace, tools: Mapping[str, Any], *, finished: bool
    ) -> None:
        assert self.on_checkpoint is not None
        self.checkpointed_at, self.checkpointed_turns = time.monotonic(), trace.cost.turns
        try:
            saved = await environment.checkpoint()
        except Unsupported:  # by this backend, or because a process is running
            return
        if saved.snapshot.kind != "fs" and (not finished or verified_in_place(self.task)):  # processes would be missing
            await environment.fleet.remove_snapshot(saved.snapshot.id)
            return
        await self.on_checkpoint(RolloutCheckpoint(trace, saved, tools, self.seed, finished))


class CheckpointingPolicy(PolicyBase):
    """The policy of a rollout. It writes a checkpoint, if one is due, before each completion."""

    def __init__(self, runner: RolloutRunner) -> None:
        self.runner, self.policy = runner, runner.binding.policy
        self._since: int | None = None  # weight version of the first sampled token

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        await self.runner.checkpoint_between_turns()
        self.runner.enter("answer")
        started = time.monotonic()
        try:
            # Weights may change between turns as within one: the session keeps the KV cache of the older weights.
            found = await self.policy.complete_many(tokens, replace(sampling, since=self._since), session=session)
            if self._since is None and found[0].versions:
                self._since = found[0].versions[0]
            return found
        except asyncio.CancelledError:
            self.runner.waited = time.monotonic() - started
            raise
        except InputError:  # the request is wrong: a retry would fail too
            raise
        except EtudeError:
            # The next attempt, when there are samplers again, can then continue from here.
            await self.runner.checkpoint_between_turns(force=True)
            raise
        finally:
            self.runner.enter("tools")

    async def load(self, weights: Weights, version: int) -> None:
        raise InputError("a rollout does not load weights; samplers do")

    async def version(self) -> int:
        return await self.policy.version()

    async def close(self) -> None:
        """Do nothing: the wrapped policy is closed by its owner."""


# ------------------------------------------------------------------------------------------- checkpoint files


def save_checkpoint(checkpoint: RolloutCheckpoint, path: Path) -> None:
    """Save a checkpoint as a trace file with the state to resume from among its facts."""
    state = {
        **checkpoint.environment.to_json(),
        "tools": dict(checkpoint.tools),
        "seed": checkpoint.seed,
        "over": checkpoint.finished,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_trace(replace(checkpoint.trace, facts={**checkpoint.trace.facts, CHECKPOINT_KEY: state}), path)


def load_checkpoint(path: Path) -> RolloutCheckpoint:
    """Load a checkpoint; InputError if the file is missing, damaged or not a checkpoint."""
    trace = load_trace(path)
    try:
        state = trace.facts[CHECKPOINT_KEY]
        environment = EnvironmentCheckpoint.from_json(state)
        tools, seed, finished = dict(state["tools"]), int(state["seed"]), bool(state["over"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a rollout checkpoint, or damaged: {error!r}") from error
    facts = {name: value for name, value in trace.facts.items() if name != CHECKPOINT_KEY}
    return RolloutCheckpoint(replace(trace, facts=facts), environment, tools, seed, finished)
