"""The session loop: what it records, when it ends, and that sampled tokens are never re-tokenized."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError
from replay_policy import ReplayDiverged, ReplayPolicy
from session_helpers import FakeTools, call, chatml, says, scripted_client

from etude.chat.messages import Message
from etude.errors import EtudeError
from etude.harness.budget import Budget
from etude.harness.model_client import TokenModelClient, turn_seed
from etude.harness.prompt import SessionRequest, opening_messages
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.session import Session, SessionSpec
from etude.harness.summary import SUMMARY_PROMPT, SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.trace import Trace
from etude.inference.sampling import Sampling

REQUEST = SessionRequest("Fix the bug.", recent=("src/a.py",), id="bug-1")
SCRIPT = [
    says("Looking.", call("echo", text="x = 1"), call("fail"), thinking="Where is it?"),
    says("", call("echo", text="done")),
    says("Fixed."),
]


def play(session: Session) -> Trace:
    return asyncio.run(session.run())


def model_tokens(trace: Trace) -> list[int]:
    return [int(token) for segment in trace.segments for token in segment.tokens[segment.sampled]]


def text_of(trace: Trace, segment: int) -> str:
    return chatml().tokenizer.decode(trace.segments[segment].tokens.tolist())


def test_a_session_is_one_token_sequence_with_sampled_tokens_marked() -> None:
    mouth, bench = scripted_client(SCRIPT), FakeTools()
    trace = play(Session(REQUEST, mouth, bench, SessionSpec(id="s")))
    (segment,) = trace.segments
    dialect = chatml()
    assert trace.ending == "final"
    assert trace.final == "Fixed."
    expected = [
        token for number, line in enumerate(SCRIPT) for token in dialect.write(line, first_call=2 * (number > 0))
    ]
    assert model_tokens(trace) == expected
    # what the sampler was asked with is what the trace holds, prompt by prompt
    assert isinstance(mouth.policy, ScriptedPolicy)
    turns = [step for step in trace.steps if step.kind == "turn"]
    assert [segment.tokens[: step.span[0]].tolist() for step in turns] == mouth.policy.prompts
    # and the whole is what the template says of the whole conversation
    said: list[Message] = [step.message for step in trace.steps if step.kind == "prompt"]
    for step in turns:
        said += [step.message, *step.results()]
    assert segment.tokens.tolist() == dialect.render(said, bench.schemas, add_generation_prompt=False)[: len(segment)]
    assert (segment.versions[segment.sampled] == 0).all()
    assert (segment.versions[~segment.sampled] == -1).all()
    assert trace.versions() == (0, 0)


def test_the_prompt_has_its_parts_in_order() -> None:
    past = (Message("user", "Earlier."), Message("assistant", "Yes."))
    request = replace(REQUEST, past=past)
    messages = opening_messages(request, ToolSet(instructions="Use tabs."), "/w")
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert "/w" in messages[0].content
    assert messages[0].content.endswith("Use tabs.")
    assert messages[-1].content == "<recent_files>\nsrc/a.py\n</recent_files>\n\nFix the bug."


def test_costs_are_counted_by_kind() -> None:
    trace = play(Session(REQUEST, scripted_client(SCRIPT), FakeTools()))
    cost = trace.cost
    assert (cost.calls, cost.turns, cost.summaries) == (3, 3, 0)
    assert cost.sampled == len(model_tokens(trace))
    assert min(cost.thinking, cost.call, cost.commentary, cost.final, cost.output) > 0
    assert cost.output < len(trace.segments[0]) - cost.sampled
    assert trace.errors == {"environment": 1}


def test_two_runs_with_the_same_policy_give_the_same_tokens() -> None:
    one, two = (play(Session(REQUEST, scripted_client(SCRIPT), FakeTools())) for _ in range(2))
    assert np.array_equal(one.segments[0].tokens, two.segments[0].tokens)
    assert np.array_equal(one.segments[0].sampled, two.segments[0].sampled)


def test_a_trace_replays_to_the_same_tokens_and_raises_on_a_difference() -> None:
    trace = play(Session(REQUEST, scripted_client(SCRIPT), FakeTools()))

    def again(bench: FakeTools) -> Trace:
        mouth = TokenModelClient(ReplayPolicy(trace), chatml(), Sampling(), window=100_000)
        return play(Session(REQUEST, mouth, bench))

    assert np.array_equal(again(FakeTools()).segments[0].tokens, trace.segments[0].tokens)

    class Other(FakeTools):
        async def run(self, calls):  # type: ignore[no-untyped-def]
            return [replace(outcome, text=outcome.text + "!") for outcome in await super().run(calls)]

    with pytest.raises(ReplayDiverged, match="segment 0: the prompt differs at token"):
        again(Other())


def test_a_malformed_call_gets_an_error_and_stays_in_the_trace() -> None:
    dialect = chatml()
    broken = dialect.write(says("", call("echo", text="x")))
    place = next(i for i, token in enumerate(broken) if dialect.tokenizer.decode([token]).strip().startswith("{"))
    broken = broken[:place] + broken[place + 1 :]
    trace = play(Session(REQUEST, scripted_client([broken, says("Sorry.")]), FakeTools()))
    first = next(step for step in trace.steps if step.kind == "turn")
    assert first.message.calls[0].status != "ok"
    assert first.outcomes[0].error == "malformed_call"
    assert trace.errors == {"malformed_call": 1}
    assert model_tokens(trace)[: len(broken)] == broken
    assert trace.ending == "final"


@pytest.mark.parametrize(
    ("budget", "ending"),
    [
        (Budget(turns=2), "turns"),
        (Budget(tokens=30), "tokens"),
        (Budget(seconds=0.3), "time"),
        (Budget(max_turn_tokens=5), "length"),
    ],
)
def test_budgets_end_a_session(budget: Budget, ending: str) -> None:
    lines = [says("", call("sleep", seconds=0.2)) for _ in range(50)]
    script = [says("A long final message that is cut off before its end.")] if ending == "length" else lines
    trace = play(Session(REQUEST, scripted_client(script), FakeTools(), SessionSpec(budget=budget)))
    assert trace.ending == ending
    if budget.tokens:
        assert trace.cost.sampled == 30


def test_the_time_budget_stops_a_running_tool() -> None:
    trace = play(
        Session(
            REQUEST,
            scripted_client([says("", call("sleep", seconds=600))]),
            FakeTools(),
            SessionSpec(budget=Budget(seconds=0.2)),
        )
    )
    assert trace.ending == "time"
    assert trace.steps[-1].outcomes[0].error == "aborted"


def test_a_full_window_ends_a_session_without_summaries() -> None:
    lines = [says("", call("echo", text="word " * 30)) for _ in range(100)]
    mouth = scripted_client(lines, window=1200)
    trace = play(Session(REQUEST, mouth, FakeTools(), SessionSpec(summaries=SummarySettings(mode="off"))))
    assert trace.ending == "context"
    assert len(trace.segments[0]) <= 1200


def test_a_result_that_does_not_fit_is_cut_and_says_so() -> None:
    lines = [says("", call("echo", text="0123456789", times=5000), call("echo", text="short")), says("Enough.")]
    trace = play(
        Session(
            REQUEST,
            scripted_client(lines, window=2000),
            FakeTools(),
            SessionSpec(summaries=SummarySettings(reserve=500)),
        )
    )
    (first, *_) = (step for step in trace.steps if step.kind == "turn")
    assert first.outcomes[0].text.endswith("does not fit in the context]")
    assert first.outcomes[1].text == "short"
    assert trace.ending == "final"
    assert all(len(segment) <= 2000 for segment in trace.segments)


def test_results_of_hundreds_of_calls_are_cut_all_at_once() -> None:
    lines = [says("", *(call("echo", text="0123456789", times=50) for _ in range(300))), says("Enough.")]
    client, tokenized = scripted_client(lines, window=60_000), 0
    count_tokens = client.count_tokens

    def count(messages: Sequence[Message]) -> int:
        nonlocal tokenized
        tokenized += 1
        return count_tokens(messages)

    client.count_tokens = count  # type: ignore[method-assign]
    trace = play(Session(REQUEST, client, FakeTools(), SessionSpec(budget=Budget(max_turn_tokens=50_000, turns=1))))
    assert tokenized < 20, "to cut them one by one takes minutes, and nothing else runs meanwhile"
    assert all("does not fit" in outcome.text for outcome in trace.steps[-1].outcomes)


# ------------------------------------------------------------------------------------------------- people


async def until_called(tools: FakeTools) -> None:
    """Wait until a tool runs."""
    while not tools.ran:
        await asyncio.sleep(0)


def test_an_interruption_with_a_message_stops_the_tool_and_continues() -> None:
    bench = FakeTools()
    session = Session(REQUEST, scripted_client([says("", call("sleep", seconds=600)), says("All right.")]), bench)

    async def go() -> Trace:
        running = asyncio.create_task(session.run())
        await until_called(bench)
        session.say("Stop that, just answer.")
        session.interrupt()
        return await asyncio.wait_for(running, 120)

    trace = asyncio.run(go())
    assert trace.ending == "final"
    assert trace.steps[-3].outcomes[0].error == "aborted"
    said = trace.steps[-2]
    assert (said.kind, said.message.content) == ("message", "Stop that, just answer.")
    heard = chatml().tokenizer.decode(trace.segments[0].tokens[slice(*said.span)].tolist())
    assert "Stop that, just answer." in heard
    assert heard.count("interrupted this call") == 1


def test_an_interruption_without_a_message_ends_the_session_until_the_next_message() -> None:
    bench = FakeTools()
    script = [says("", call("sleep", seconds=600)), says("Going on."), says("Again.")]
    session = Session(REQUEST, scripted_client(script), bench)

    async def go() -> list[Trace]:
        running = asyncio.create_task(session.run())
        await until_called(bench)
        session.interrupt()
        traces = [await asyncio.wait_for(running, 120)]
        for text in ("Go on.", "And again."):
            session.say(text)
            traces.append(await asyncio.wait_for(session.run(), 120))
        return traces

    first, second, third = asyncio.run(go())
    assert [trace.ending for trace in (first, second, third)] == ["interrupted", "final", "final"]
    assert second.segments[0].tokens.tolist()[: len(first.segments[0])] == first.segments[0].tokens.tolist()
    assert third.segments[0].tokens.tolist()[: len(second.segments[0])] == second.segments[0].tokens.tolist()
    assert text_of(third, 0).count("<|im_start|>") == text_of(third, 0).count("<|im_end|>")


def test_a_cancelled_session_is_cancelled() -> None:
    async def go() -> None:
        bench = FakeTools()
        client = scripted_client([says("", call("sleep", seconds=600))])
        running = asyncio.create_task(Session(REQUEST, client, bench).run())
        await until_called(bench)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(go())


def test_an_infrastructure_failure_is_raised() -> None:
    class Lost(FakeTools):
        async def run(self, calls):  # type: ignore[no-untyped-def]
            raise EtudeError("the pod is gone")

    with pytest.raises(EtudeError, match="the pod is gone"):
        play(Session(REQUEST, scripted_client(SCRIPT), Lost()))


@pytest.mark.parametrize("after", range(1, 4))
def test_a_session_restored_from_its_trace_goes_on_to_the_same_tokens(after: int) -> None:
    whole = play(Session(REQUEST, scripted_client(SCRIPT), FakeTools()))
    before = play(Session(REQUEST, scripted_client(SCRIPT), FakeTools(), SessionSpec(budget=Budget(turns=after))))
    session = Session(REQUEST, scripted_client(SCRIPT[after:]), FakeTools())
    session.restore(before)
    if after == len(SCRIPT):
        return
    trace = play(session)
    assert np.array_equal(trace.segments[0].tokens, whole.segments[0].tokens)
    assert np.array_equal(trace.segments[0].sampled, whole.segments[0].sampled)
    assert [step.span for step in trace.steps] == [step.span for step in whole.steps]
    assert trace.cost.calls == whole.cost.calls


def test_every_turn_has_its_own_seed() -> None:
    seeds = {turn_seed(seed, turn) for seed in range(100) for turn in range(100)}
    assert len(seeds) == 100 * 100
    assert all(0 <= turn_seed(seed, 3) < 2**62 for seed in (0, 1, 2**61, 2**62 - 1))


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"tokens": -1}, {"seconds": 0}, {"max_turn_tokens": 0}])
def test_an_empty_budget_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="greater than"):
        Budget(**wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- summaries

LONG = "a fact about the code, number {}; "


def opening_size() -> int:
    return len(chatml().render(opening_messages(REQUEST, ToolSet(), FakeTools.root), FakeTools().schemas))


def result_size(text: str) -> int:
    return len(chatml().bridge((), [Message("tool", text)]))


def chain(*summaries: object, mode: str = "self") -> Trace:
    """Run a session: three turns fill the first segment, then come the summaries and two more turns."""
    facts = [LONG.format(i) * 12 for i in range(3)]
    lines = [*(says("", call("echo", text=fact)) for fact in facts), *summaries]
    lines += [says("", call("echo", text="after")), says("Finished.")]
    trigger = opening_size() + 5 * result_size(facts[0])  # each fact is there twice: in its call and in its result
    options = SummarySettings(mode=mode, trigger=trigger, reserve=900)  # type: ignore[arg-type]
    return play(Session(REQUEST, scripted_client(lines, window=6000), FakeTools(), SessionSpec(summaries=options)))  # type: ignore[arg-type]


def test_a_summary_ends_a_segment_and_the_next_starts_from_it() -> None:
    trace = chain(says("Three facts were read.", thinking="What matters?"))
    assert trace.ending == "final"
    assert [segment.kind for segment in trace.segments] == ["start", "summary"]
    first, second = (text_of(trace, index) for index in range(2))
    assert SUMMARY_PROMPT in first
    assert "number 2" in first
    assert '<summary number="1">\nThree facts were read.\n</summary>\n<plan>\n- [ ] finish\n</plan>' in second
    assert "Fix the bug." in second
    assert "a fact about" not in second
    assert SUMMARY_PROMPT not in second
    assert "What matters?" not in second  # thinking is scratch space
    assert trace.cost.summaries == 1


def test_every_sampled_token_is_in_exactly_one_segment() -> None:
    summary = says("Three facts were read.", thinking="What matters?")
    trace = chain(summary)
    dialect = chatml()
    made = [dialect.tokenizer.decode(segment.tokens[segment.sampled].tolist()) for segment in trace.segments]
    assert "".join(made).count("Three facts were read.") == 1  # shown again in the second segment, but not made there
    assert made[0].endswith(dialect.tokenizer.decode(dialect.write(summary)))
    assert trace.cost.sampled == len(model_tokens(trace))
    assert trace.cost.summary == len(dialect.write(summary))
    copied = [step for step in trace.steps if step.copied]
    assert [step.kind for step in copied] == ["prompt", "prompt"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [(says(" \n"), "it is empty"), (says("x", call("echo", text="y")), "it calls tools")],
)
def test_an_unusable_summary_is_requested_again(bad: Message, why: str) -> None:
    trace = chain(bad, says("Now in words."))
    assert trace.ending == "final"
    assert why in text_of(trace, 0)
    assert trace.cost.summaries == 1
    assert "Now in words." in text_of(trace, 1)


def test_without_a_usable_summary_the_session_ends() -> None:
    assert chain(*[says("")] * 3).ending == "context"


def test_several_summaries_count_up() -> None:
    lines: list[Message] = []
    for number in range(3):
        lines += [says("", call("echo", text=LONG.format(number), times=40)), says(f"Summary of {number}.")]
    trigger = opening_size() + 300
    trace = play(
        Session(
            REQUEST,
            scripted_client([*lines, says("Done.")], window=6000),
            FakeTools(),
            SessionSpec(summaries=SummarySettings(trigger=trigger, reserve=700)),
        )
    )
    assert [segment.kind for segment in trace.segments] == ["start", "summary", "summary", "summary"]
    assert '<summary number="3">\nSummary of 2.' in text_of(trace, 3)
    assert "Summary of 1." not in text_of(trace, 3)
    assert trace.final == "Done."


def test_compaction_uses_a_separate_segment_with_a_long_prompt() -> None:
    trace = chain(says("1. SessionRequest and intent: ..."), mode="compaction")
    assert [segment.kind for segment in trace.segments] == ["start", "compaction", "summary"]
    prompt = text_of(trace, 1)
    assert "Errors and fixes" in prompt
    assert "number 2" in prompt
    assert SUMMARY_PROMPT not in text_of(trace, 0)
    assert "1. SessionRequest and intent: ..." in text_of(trace, 2)
