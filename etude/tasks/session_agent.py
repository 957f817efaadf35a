"""A session of the harness as the agent of a trial; training, evaluation and `etude tasks run` share it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from etude.harness.budget import Budget
from etude.harness.model_client import ModelClient
from etude.harness.prompt import SessionRequest
from etude.harness.search.searcher import CodebaseSearcher
from etude.harness.session import Session
from etude.harness.session_factory import open_session
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import ToolExecutor
from etude.harness.trace import Step, Trace
from etude.tasks.environment import TaskEnvironment
from etude.tasks.task import TaskStep
from etude.tasks.trial import TrialAgent

OpenModelClient = Callable[[str], AbstractAsyncContextManager[ModelClient]]  # called with the session's id


@dataclass(frozen=True)
class ResumedSession:
    """An interrupted session to continue: its trace, and the tool state that is not in the pod."""

    trace: Trace
    tools: Mapping[str, Any]


def session_agent(
    open_client: OpenModelClient,
    *,
    tool_set: ToolSet | None = None,
    budget: Budget | None = None,
    summaries: SummarySettings | None = None,
    searcher: CodebaseSearcher | None = None,
    session_id: str = "",
    facts: Mapping[str, Any] | None = None,
    resume_from: ResumedSession | None = None,
    on_open: Callable[[TaskEnvironment, Session, ToolExecutor], None] = lambda environment, session, tools: None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> TrialAgent:
    """Return an agent that runs one session and writes its final message where verifiers read it.

    The task's time limit applies if the budget has none. `resume_from` continues a session in its restored environment.
    """

    async def run(environment: TaskEnvironment, step: TaskStep | None) -> None:
        task = environment.task
        id = f"{task.name}/{step.name}" if step else task.name
        limit = (step.agent.timeout_s if step else None) or task.agent.timeout_s
        session_budget = budget or Budget()
        if session_budget.seconds is None:
            session_budget = session_budget.model_copy(update={"seconds": limit})
        request = SessionRequest(step.instruction if step else task.instruction, id=id)
        async with open_client(id) as client:
            opened = open_session(
                request,
                client,
                environment.pod,
                tool_set=(tool_set or ToolSet()).model_copy(update={"root": environment.workspace}),
                budget=session_budget,
                summaries=summaries,
                searcher=searcher,
                id=session_id,
                facts=facts,
                on_step=on_step,
            )
            async with opened as (session, tools):
                if resume_from is not None:
                    session.restore(resume_from.trace)
                    tools.restore(resume_from.tools)
                on_open(environment, session, tools)
                trace = await session.run()
        await environment.write_final_message(trace.final)
        on_trace(trace)

    return run
