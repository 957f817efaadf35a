"""A session of the harness as the agent of a trial; training, evaluation and `etude tasks run` share it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from etude.harness.model_client import ModelClient
from etude.harness.open_client import OpenedModel
from etude.harness.prompt import SessionRequest
from etude.harness.session import Session, SessionSpec
from etude.harness.session_factory import open_session
from etude.harness.tools.executor import ToolExecutor
from etude.harness.trace import Trace
from etude.tasks.environment import TaskEnvironment
from etude.tasks.task import TaskStep
from etude.tasks.trial import TrialAgent

OpenModel = Callable[[str], AbstractAsyncContextManager[OpenedModel]]  # called with the session's id


def session_agent(open_model: OpenModel) -> TrialAgent:
    """Return an agent that runs one session and writes its final message where verifiers read it."""

    async def run(environment: TaskEnvironment, step: TaskStep | None) -> Trace:
        async with open_model(_name(environment, step)) as model:
            spec = SessionSpec.of(model.profile)
            async with open_task_session(environment, step, model.client, spec) as (session, _):
                trace = await session.run()
        await environment.write_final_message(trace.final)
        return trace

    return run


@asynccontextmanager
async def open_task_session(
    environment: TaskEnvironment, step: TaskStep | None, client: ModelClient, spec: SessionSpec
) -> AsyncIterator[tuple[Session, ToolExecutor]]:
    """Open the session of a task or of one of its steps. The task's time limit applies if the budget has none."""
    task = environment.task
    tool_set, budget = spec.tool_set.model_copy(update={"root": environment.workspace}), spec.budget
    if budget.seconds is None:
        limit = (step.agent.timeout_s if step else None) or task.agent.timeout_s
        budget = budget.model_copy(update={"seconds": limit})
    request = SessionRequest(step.instruction if step else task.instruction, id=_name(environment, step))
    spec = replace(spec, tool_set=tool_set, budget=budget)
    async with open_session(request, client, environment.pod, spec) as opened:
        yield opened


def _name(environment: TaskEnvironment, step: TaskStep | None) -> str:
    return f"{environment.task.name}/{step.name}" if step else environment.task.name
