"""One rollout: a trial of a task, scored, with checkpoints to resume from.

    task -> environment -> session -> trace -> workspace diff -> verifier -> reward

The same for a policy sampled by token ids and for a chat API, in training, evaluation and `etude bench`. An
infrastructure failure (pod, host, samplers, verifier, time limit of the infrastructure) is RolloutFailed: there is no
reward, and the slot is retried. Cancelling a rollout closes its pod.

Between two turns a session is idle. At intervals its pod is snapshotted there and its trace saved; after a crash,
another worker continues from that checkpoint to the same tokens. A snapshot has files but no processes, so a session
with a running background command is not checkpointed until the command has ended.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from etude.chat.dialects.dialect import Dialect
from etude.errors import EtudeError, InputError
from etude.harness.model_client import SEED_LIMIT, ChatModelClient, ModelClient, TokenModelClient, turn_seed
from etude.harness.session import Session, SessionSpec
from etude.harness.tools.executor import ToolExecutor, exposed_tools
from etude.harness.trace import Trace
from etude.harness.trace_store import pack_trace, unpack_trace
from etude.inference.clients.openai import OpenAIChat
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError, Unsupported
from etude.rewards.effort import EffortSettings
from etude.rewards.monitors import behaviour_rates
from etude.rewards.reward import Reward, VerifiedTrial, grade, score
from etude.tasks.base_images import HostSettings
from etude.tasks.environment import (
    EnvironmentCheckpoint,
    EnvironmentCheckpointLost,
    PreparedEnvironments,
    TaskEnvironment,
)
from etude.tasks.schema import DEFAULT_VERIFIER_TIMEOUT_S
from etude.tasks.session_agent import open_task_session
from etude.tasks.task import TASK_LABELS, Task, TaskStep
from etude.tasks.trial import DEFAULT_AGENT_TIMEOUT_S, run_trial
from etude.tasks.verifier import verified_in_place
from etude.tasks.verifier_result import VerifierFailed, VerifierResult

RolloutPhase = Literal["environment", "session", "checkpoint", "grading"]

SESSION_S = 3600.0  # time limit of a session if neither the budget nor the task has one
SETUP_S = 900.0  # to open the environment, including image build and admission; again for the verifier's
ENDING_PROCESSES_S = (0.05, 0.2, 1.0)  # delays before a pod is asked again for the checkpoint of a failing session
CHECKPOINT_KEY = "checkpoint"  # in the facts of a saved trace that can be resumed


class RolloutFailed(EtudeError):
    """The infrastructure failed, not the agent: there is no reward. The message says what failed."""


class ModelBinding(ABC):
    """A model that sessions can use: a policy sampled by token ids, or a chat API."""

    @abstractmethod
    def open_client(self, session: str, sampling: Sampling) -> ModelClient:
        """Return the model client of one session."""


@dataclass(frozen=True)
class PolicyBinding(ModelBinding):
    """A policy with the dialect and context window in which sessions use it."""

    policy: Policy
    dialect: Dialect
    window: int  # tokens
    model: str = "policy"  # name recorded in traces

    def open_client(self, session: str, sampling: Sampling) -> ModelClient:
        return TokenModelClient(
            self.policy, self.dialect, sampling, window=self.window, session=session, model=self.model
        )


@dataclass(frozen=True)
class ChatBinding(ModelBinding):
    """A chat API with its context window."""

    chat: OpenAIChat
    window: int  # tokens

    def open_client(self, session: str, sampling: Sampling) -> ModelClient:
        # no seed: not every endpoint accepts one, and those that do guarantee nothing
        return ChatModelClient(self.chat, Sampling(temperature=sampling.temperature), window=self.window)


@dataclass(frozen=True)
class RolloutOptions:
    """The options shared by all rollouts of a run."""

    session: SessionSpec = field(default_factory=SessionSpec)  # its id and facts are those of each rollout
    temperature: float = 1.0
    effort: EffortSettings = field(default_factory=EffortSettings)
    checkpoint_s: float = 60.0  # seconds between checkpoints of one rollout, if its caller keeps them
    host_settings: HostSettings = field(default_factory=HostSettings)
    prepared: PreparedEnvironments | None = None


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
            **{name: str(task.metadata.get(name, "")) for name in TASK_LABELS},
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
    model: ModelBinding,
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

    `weights` returns the reward weights for a weight version. Checkpoints are made only for an `on_checkpoint` that
    keeps them. If the snapshot of `resume` is lost, the rollout starts from the beginning. An InputError is raised as
    it is: a retry would fail the same way.
    """
    if task.steps:
        raise InputError(f"{task.name} is a multi-step task; a rollout supports one session only")
    budget = options.session.budget
    session_s = budget.seconds or task.agent.timeout_s or SESSION_S
    session = replace(
        options.session, budget=budget.model_copy(update={"seconds": session_s}), id=id, facts=dict(facts or {})
    )
    runner = RolloutRunner(
        task, model, replace(options, session=session), resume.seed if resume else seed, resume, on_checkpoint, on_phase
    )
    verifier_s = 2 * SETUP_S + (task.verifier.timeout_s or DEFAULT_VERIFIER_TIMEOUT_S)
    control_s = verifier_s + (task.agent.timeout_s or DEFAULT_AGENT_TIMEOUT_S)  # only if the verifier is stopped
    limit = verifier_s + session_s + control_s
    try:
        async with asyncio.timeout(limit):
            try:
                return await runner.run(fleet, weights)
            except EnvironmentCheckpointLost as error:
                again = replace(runner, seed=seed, resume=None, note=f"restarted from the beginning: {error}")
                return await again.run(fleet, weights)
    except TimeoutError:
        raise RolloutFailed(f"{task.name}: not finished after {limit:.0f} s") from None
    except RolloutFailed:
        raise
    except InputError as error:
        raise InputError(f"{task.name}: {error}") from error
    except VerifierFailed as error:
        raise RolloutFailed(f"{error.cause}: {error}") from error
    except (EtudeError, OSError) as error:
        raise RolloutFailed(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class RolloutRunner:
    """One attempt at a rollout, from the beginning or from a checkpoint."""

    task: Task
    model: ModelBinding
    options: RolloutOptions
    seed: int
    resume: RolloutCheckpoint | None
    on_checkpoint: Callable[[RolloutCheckpoint], Awaitable[None]] | None
    on_phase: Callable[[RolloutPhase], None]
    note: str = ""

    @property
    def temperature(self) -> float:
        """The sampling temperature: a resumed session keeps the one that it began with."""
        began_with = self.resume.trace.facts.get("temperature") if self.resume else None
        return self.options.temperature if began_with is None else float(began_with)

    async def run(self, fleet: Fleet, weights: Callable[[int], Mapping[str, float]]) -> Rollout:
        """Run the trial and score it."""
        self.on_phase("environment")
        resume, started = self.resume, time.monotonic()
        ready = started

        async def agent(environment: TaskEnvironment, step: TaskStep | None) -> Trace:
            nonlocal ready
            ready = time.monotonic()
            trace = resume.trace if resume and resume.finished else await self.run_session(environment)
            self.on_phase("grading")
            return trace

        trial = await run_trial(
            fleet,
            self.task,
            agent,
            host_settings=self.options.host_settings,
            prepared=self.options.prepared,
            checkpoint=resume.environment if resume else None,
        )
        (trace,), result = trial.traces, trial.result
        versions = trace.versions()
        in_force = weights(versions[1])
        graded = await grade(VerifiedTrial(self.task, trace, result), in_force)
        reward = await asyncio.to_thread(score, graded, in_force)  # a gate parses the changed code
        recorded = {"total": reward.total, "parts": dict(reward.parts), "hack": reward.hack, "score": result.score}
        sampled = {"versions": list(versions)} if trace.exact else {}
        trace = replace(trace, facts={**trace.facts, **sampled, "reward": recorded})
        seconds = {"ground": ready - started, "session": trace.cost.wall_s, "grading": result.seconds}
        return Rollout(trace, result, reward, seconds, self.note)

    async def run_session(self, environment: TaskEnvironment) -> Trace:
        """Run the session, new or resumed, with checkpoints between its turns and at its end."""
        sampling = Sampling(temperature=self.temperature, seed=self.seed)
        client = self.model.open_client(self.options.session.id, sampling)
        spec = replace(self.options.session, facts=self.trace_facts(client))
        async with open_task_session(environment, None, client, spec) as (session, tools):
            if self.resume is not None:
                session.restore(self.resume.trace)
                tools.restore(self.resume.tools)
            checkpoints = CheckpointWriter(self, environment, session, tools)
            self.on_phase("session")
            try:
                trace = await session.run(checkpoints.between_turns)
            except (InputError, PodError):
                raise
            except EtudeError:  # the next attempt, when there are samplers again, can then continue from here
                await checkpoints.between_turns(force=True)
                raise
        limit = self.options.session.budget.seconds or SESSION_S
        if trace.ending == "time" and session.unanswered_s > limit / 2:
            waited = f"no completion for {session.unanswered_s:.0f} s, until the session's time limit"
            raise RolloutFailed(f"{self.task.name}: {waited}")
        await environment.write_final_message(trace.final)
        await checkpoints.at_end(trace)
        return trace

    def trace_facts(self, client: ModelClient) -> dict[str, Any]:
        """Return the facts recorded in the trace."""
        exposed = exposed_tools(self.options.session.tool_set)
        return {
            **self.options.session.facts,
            "effort": self.options.effort.model_dump(),
            **({"seed": self.seed} if client.exact else {}),
            "temperature": self.temperature,
            "tool_names": {name: each.tool.name for name, each in exposed.items()},
            **({"note": self.note} if self.note else {}),
        }


class CheckpointWriter:
    """Writes the checkpoints of one session, at most one in `checkpoint_s` seconds. A shorter session has none."""

    def __init__(
        self, runner: RolloutRunner, environment: TaskEnvironment, session: Session, tools: ToolExecutor
    ) -> None:
        self.runner, self.environment, self.session, self.tools = runner, environment, session, tools
        self.interval = runner.options.checkpoint_s if runner.on_checkpoint is not None else 0.0
        self.written_at, self.written_turns = time.monotonic(), session.cost.turns

    @property
    def is_due(self) -> bool:
        return self.interval > 0 and time.monotonic() - self.written_at >= self.interval

    async def between_turns(self, force: bool = False) -> None:
        """Write a checkpoint if one is due, or in any case with `force`, if checkpoints are enabled."""
        if not self.is_due and not (force and self.interval):
            return
        trace = self.session.trace("interrupted")
        if trace.cost.turns == self.written_turns:
            return  # nothing new
        if self.session.steps[-1].kind == "summary-request" or trace.segments[-1].kind == "compaction":
            return  # a resumed session would request the summary again
        state = self.tools.state()
        await self.tools.stop_server()
        written = await self._write(trace, state, finished=False)
        for delay_s in ENDING_PROCESSES_S if force else ():  # the last chance to keep this session
            if not written:
                await asyncio.sleep(delay_s)
                written = await self._write(trace, state, finished=False)
        self.runner.on_phase("session")

    async def at_end(self, trace: Trace) -> None:
        """Write a checkpoint of the finished session if one is due: then it only has to be verified."""
        if self.is_due:
            await self._write(trace, {}, finished=True)

    async def _write(self, trace: Trace, tools: Mapping[str, Any], *, finished: bool) -> bool:
        """Write a checkpoint; return whether the pod allowed one, which a running process does not."""
        assert self.runner.on_checkpoint is not None
        self.runner.on_phase("checkpoint")
        self.written_at = time.monotonic()
        try:
            saved = await self.environment.checkpoint()
        except Unsupported:  # by this backend, or because a process is running
            return False
        if saved.snapshot.kind != "fs" and (not finished or verified_in_place(self.runner.task)):
            await self.environment.fleet.remove_snapshot(saved.snapshot.id)  # processes would be missing
            return False
        await self.runner.on_checkpoint(RolloutCheckpoint(trace, saved, tools, self.runner.seed, finished))
        self.written_turns = trace.cost.turns
        return True


# ------------------------------------------------------------------------------------------- stored checkpoints


def pack_checkpoint(checkpoint: RolloutCheckpoint) -> bytes:
    """Return a checkpoint as the content of a trace file, with the state to resume from among its facts."""
    state = {
        **checkpoint.environment.to_json(),
        "tools": dict(checkpoint.tools),
        "seed": checkpoint.seed,
        "over": checkpoint.finished,
    }
    return pack_trace(replace(checkpoint.trace, facts={**checkpoint.trace.facts, CHECKPOINT_KEY: state}))


def unpack_checkpoint(data: bytes, name: str) -> RolloutCheckpoint:
    """Return the checkpoint from the output of `pack_checkpoint`; InputError if it is damaged or not a checkpoint."""
    trace = unpack_trace(data, name)
    try:
        state = trace.facts[CHECKPOINT_KEY]
        environment = EnvironmentCheckpoint.from_json(state)
        tools, seed, finished = dict(state["tools"]), int(state["seed"]), bool(state["over"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{name}: not a rollout checkpoint, or damaged: {error!r}") from error
    facts = {name: value for name, value in trace.facts.items() if name != CHECKPOINT_KEY}
    return RolloutCheckpoint(replace(trace, facts=facts), environment, tools, seed, finished)
