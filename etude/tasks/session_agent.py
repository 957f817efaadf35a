"""A session of the harness as an actor on a task's ground: the same code that training and people run."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from etude.harness.model_client import Speaker
from etude.harness.open_session import open_session
from etude.harness.prompt import Request
from etude.harness.search.searcher import Searcher
from etude.harness.session import Budget, Session
from etude.harness.summary import Summaries
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import Toolbox
from etude.harness.trace import Step, Trace
from etude.tasks.environment import Ground
from etude.tasks.task import TaskStep
from etude.tasks.trial import Actor

Speaking = Callable[[str], AbstractAsyncContextManager[Speaker]]  # of a session's id


@dataclass(frozen=True)
class Begun:
    """A session to go on with: what had happened, and what of its tools was not in the pod."""

    trace: Trace
    tools: Mapping[str, Any]


def in_session(
    speaking: Speaking,
    *,
    environment: ToolSet | None = None,
    budget: Budget | None = None,
    summaries: Summaries | None = None,
    searcher: Searcher | None = None,
    session_id: str = "",
    facts: Mapping[str, Any] | None = None,
    begun: Begun | None = None,
    on_open: Callable[[Ground, Session, Toolbox], None] = lambda ground, session, tools: None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> Actor:
    """Whoever speaks works on the task until it is over; the final message is left where verifiers look for it.

    The task's own time limit counts where the budget has none. `begun` is an earlier session of the same task, on a
    ground that is as it left it.
    """

    async def act(ground: Ground, step: TaskStep | None) -> None:
        task = ground.task
        id = f"{task.name}/{step.name}" if step else task.name
        limit = (step.agent.timeout_s if step else None) or task.agent.timeout_s
        spent = budget or Budget()
        spent = spent if spent.seconds is not None else replace(spent, seconds=limit)
        where = replace(environment or ToolSet(), root=ground.workspace)
        request = Request(step.instruction if step else task.instruction, id=id)
        async with speaking(id) as speaker:
            opened = open_session(
                request,
                speaker,
                ground.pod,
                environment=where,
                budget=spent,
                summaries=summaries,
                searcher=searcher,
                id=session_id,
                facts=facts,
                on_step=on_step,
            )
            async with opened as (session, tools):
                if begun is not None:
                    session.restore(begun.trace)
                    tools.restore(begun.tools)
                on_open(ground, session, tools)
                trace = await session.run()
        await ground.leave_message(trace.final)
        on_trace(trace)

    return act
