"""A complete session in a real pod; its replay to the same tokens; and its continuation in a fork of the pod."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from replay_policy import ReplayPolicy
from session_helpers import call, chatml, says

from etude.chat.messages import Message
from etude.harness.budget import Budget
from etude.harness.model_client import TokenModelClient
from etude.harness.prompt import SessionRequest
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.session import SessionSpec
from etude.harness.session_factory import open_session
from etude.harness.trace import Trace
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.pods.pod import Pod

FILES = {
    "shop/prices.py": "def total(prices):\n    result = 0\n    for price in prices:\n        result -= price\n"
    "    return result\n",
    "shop/__init__.py": "",
    "check.py": "from shop.prices import total\n\nassert total([2, 3]) == 5, total([2, 3])\nprint('ok')\n",
}
REQUEST = SessionRequest(
    "`total([2, 3])` gives -5. Make it 5; `python3 check.py` tells.", recent=("check.py",), id="shop-1"
)
SOLUTION: list[Message] = [
    says("", call("grep", pattern="def total"), call("read_file", target_file="shop/prices.py"), thinking="Where?"),
    says(
        "",
        call("search_replace", file_path="shop/prices.py", old_string="result -= price", new_string="result += price"),
    ),
    says("", call("run_terminal_cmd", command="python3 check.py")),
    says("The sum subtracted; it adds now. The check prints ok."),
]


def in_fleet(work: Callable[[Fleet], Awaitable[None]], state: Path) -> None:
    async def go() -> None:
        async with open_fleet(state=state) as fleet:
            await work(fleet)

    asyncio.run(go())


async def workspace(fleet: Fleet) -> Pod:
    pod = await fleet.create("host")
    for path, text in FILES.items():
        await pod.write(path, text)
    return pod


async def play(pod: Pod, policy: Policy, budget: Budget | None = None, after: Trace | None = None) -> Trace:
    client = TokenModelClient(policy, chatml(), Sampling(), window=100_000)
    async with open_session(REQUEST, client, pod, SessionSpec(budget=budget or Budget())) as (session, _):
        if after is not None:
            session.restore(after)
        return await session.run()


def tokens(trace: Trace) -> Sequence[int]:
    return trace.segments[0].tokens.tolist()


def test_a_scripted_policy_solves_a_task_and_its_trace_replays_to_the_same_tokens(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        async with await workspace(fleet) as pod:
            trace = await play(pod, ScriptedPolicy(chatml(), SOLUTION))
            assert trace.ending == "final"
            assert not trace.errors
            assert b"result += price" in await pod.read("shop/prices.py")
            ran = trace.steps[-2]
            assert ran.outcomes[0].facts["exit_code"] == 0
            assert "ok" in ran.outcomes[0].text
            assert trace.cost.calls == 4
            assert trace.cost.pod_s > 0
        for policy in (ScriptedPolicy(chatml(), SOLUTION), ReplayPolicy(trace)):
            async with await workspace(fleet) as pod:
                assert tokens(await play(pod, policy)) == tokens(trace)

    in_fleet(work, tmp_path)


def test_a_session_continues_in_a_fork_of_its_pod(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        async with await workspace(fleet) as pod:
            half = await play(pod, ScriptedPolicy(chatml(), SOLUTION), Budget(turns=2))
            assert half.ending == "turns"
            (child,) = await pod.fork(1)
            async with child:
                whole = await play(child, ScriptedPolicy(chatml(), SOLUTION[2:]), after=half)
        assert whole.ending == "final"
        assert tokens(whole)[: len(tokens(half))] == tokens(half)
        async with await workspace(fleet) as pod:
            straight = await play(pod, ScriptedPolicy(chatml(), SOLUTION))
        assert tokens(straight) == tokens(whole)
        assert np.array_equal(straight.segments[0].sampled, whole.segments[0].sampled)

    in_fleet(work, tmp_path)
