"""Who runs when: properties of the plan, over random loads, with a pretended model."""

import random
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.inference.pages import PagePool, Roots
from etude.inference.request import Stream, streams_of
from etude.inference.sampling import Sampling
from etude.inference.scheduler import Scheduler, Step


def scheduler_of(pages: int = 20, size: int = 4, sharing: bool = True, **options: Any) -> Scheduler:
    return Scheduler(PagePool(pages, size, sharing), **{"max_streams": 4, "budget": 12, **options})


def add(
    scheduler: Scheduler, prompt: list[int], max_tokens: int = 5, samples: int = 1, since: int | None = None
) -> list[Stream]:
    streams = streams_of(prompt, Sampling(max_tokens=max_tokens, samples=samples, since=since))
    scheduler.add(streams)
    return streams


def load(scheduler: Scheduler, roots: Roots, version: int) -> None:
    """What the engine does when weights come."""
    roots.begin(version)
    scheduler.renew()


def rooted(scheduler: Scheduler) -> Roots:
    roots = Roots(0)
    scheduler.root_of = lambda stream: roots.of(stream.sampling.since)
    return roots


def pretend(scheduler: Scheduler, step: Step, tokens: random.Random | None = None) -> None:
    """What the engine does with a step, without a model."""
    writers = [*step.decoding, *(piece.stream for piece in step.reading if piece.writes)]
    for stream in step.decoding:
        scheduler.advance(stream, stream.length)
    for piece in step.reading:
        scheduler.advance(piece.stream, piece.end)
    for stream in writers:
        stream.made.append(tokens.randrange(2) if tokens else 0)
        if len(stream.made) == stream.sampling.max_tokens:
            stream.ending = "length"
            scheduler.finish(stream)


def run(scheduler: Scheduler, most: int = 2000) -> int:
    for steps in range(most):
        step = scheduler.plan()
        if not step:
            assert not scheduler.waiting
            assert not scheduler.running
            return steps
        pretend(scheduler, step)
        scheduler.pool.check()
    raise AssertionError("it does not end")


def check_plan(scheduler: Scheduler, step: Step, before: dict[Stream, int]) -> None:
    running = scheduler.running
    assert [s.number for s in running] == sorted(s.number for s in running)
    assert [s.number for s in scheduler.waiting] == sorted(s.number for s in scheduler.waiting)
    assert len(running) <= scheduler.max_streams
    assert all(stream.decoding and stream in running for stream in step.decoding)
    planned = [piece.stream for piece in step.reading]
    assert len(set(planned)) == len(planned)
    left = max(0, scheduler.budget - len(step.decoding))
    spent = sum(piece.end - piece.start for piece in step.reading)
    assert spent <= left or (scheduler.piece and spent - (step.reading[-1].end - step.reading[-1].start) < left)
    for piece in step.reading:
        assert piece.stream in running
        assert piece.start == piece.stream.read < piece.end <= piece.stream.length
        assert len(piece.stream.pages) * scheduler.pool.size >= piece.end + (scheduler.ahead if piece.writes else 0)
    for stream in step.decoding:
        assert len(stream.pages) * scheduler.pool.size >= stream.length + scheduler.ahead
    for stream in scheduler.waiting:
        assert not stream.pages
    # The oldest that held pages is never the one to give them up, and with whole pieces nobody is.
    survivors = [stream for stream in before if stream.ending is None]
    if survivors:
        assert survivors[0].preempted == before[survivors[0]]
    if scheduler.piece:
        assert scheduler.preemptions == 0


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(8, 24),
    options=st.fixed_dictionaries(
        {
            "sharing": st.booleans(),
            "budget": st.integers(1, 20),
            "max_streams": st.integers(1, 6),
            "ahead": st.integers(1, 4),
            "piece": st.sampled_from([0, 8]),
        }
    ),
)
def test_every_plan_keeps_its_promises_and_everybody_ends_once(seed: int, pages: int, options: dict[str, Any]) -> None:
    rng = random.Random(seed)
    scheduler = scheduler_of(pages, 4, **options)
    streams: list[Stream] = []
    roots = rooted(scheduler)
    steps = version = 0
    while steps < 3000:
        if len(streams) < 14 and rng.random() < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            since = rng.choice((None, rng.randint(0, version + 1)))
            streams += add(scheduler, prompt, rng.randint(1, 8), rng.choice((1, 1, 3)), since)
        if streams and rng.random() < 0.1:
            scheduler.cancel(rng.choice(streams))
        if rng.random() < 0.03:
            version = rng.choice((version + 1, version + 1, rng.randint(0, version)))
            rng.choice((scheduler.recompute_all, partial(load, scheduler, roots, version)))()
        before = {stream: stream.preempted for stream in scheduler.running}
        step = scheduler.plan()
        assert all(stream.ending == "cancelled" for stream in step.ended)
        check_plan(scheduler, step, before)
        pretend(scheduler, step, rng)
        scheduler.pool.check()
        steps += 1
        if not step and len(streams) >= 14:
            break
    assert all(stream.ending for stream in streams), f"seed {seed}: some never end"
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.pool.held == 0


def test_one_that_could_never_fit_is_an_error_at_once() -> None:
    scheduler = scheduler_of(pages=4, size=4, ahead=2)
    with pytest.raises(InputError, match="the KV cache holds 16"):
        add(scheduler, [1] * 10, max_tokens=5)
    assert not scheduler.waiting
    add(scheduler, [1] * 10, max_tokens=4)
    run(scheduler)


def test_siblings_wait_until_the_leader_has_read_and_then_share_its_pages() -> None:
    scheduler = scheduler_of(pages=40, budget=4, max_streams=8)
    leader, *others = add(scheduler, list(range(13)), samples=4)
    for _ in range(4):
        step = scheduler.plan()
        assert [piece.stream for piece in step.reading] == [leader]
        pretend(scheduler, step)
    scheduler.plan()
    assert scheduler.running == [leader, *others]
    assert all(stream.pages[:3] == leader.pages[:3] and stream.read == 12 for stream in others)
    run(scheduler)


def test_others_overtake_siblings_that_wait_for_their_leader() -> None:
    scheduler = scheduler_of(pages=40, budget=8)
    leader, _sibling = add(scheduler, list(range(20)), samples=2)
    (other,) = add(scheduler, [1, 2])
    scheduler.plan()
    assert scheduler.running == [leader, other]


def test_a_huge_prompt_gets_its_turn_while_small_ones_keep_coming() -> None:
    scheduler = scheduler_of(pages=10, size=4, max_streams=8, sharing=False)
    for _ in range(3):
        add(scheduler, [1] * 6, 4)
    (huge,) = add(scheduler, [2] * 30, 4)
    for _ in range(40):
        add(scheduler, [1] * 6, 4)
        pretend(scheduler, scheduler.plan())
    assert huge.ending == "length"


def test_decoding_streams_run_in_every_step_while_a_long_prompt_is_read() -> None:
    scheduler = scheduler_of(pages=100, size=4, budget=5, sharing=False)
    (talker,) = add(scheduler, [1], 30)
    pretend(scheduler, scheduler.plan())
    add(scheduler, [2] * 80, 2)
    for _ in range(15):
        step = scheduler.plan()
        assert step.decoding == [talker]
        assert sum(piece.end - piece.start for piece in step.reading) == 4
        pretend(scheduler, step)


def test_streams_admitted_together_never_count_on_the_same_pages() -> None:
    scheduler = scheduler_of(pages=6, size=4, budget=100, sharing=False)
    for _ in range(4):
        add(scheduler, [1] * 10, 1)  # three pages each
    pretend(scheduler, scheduler.plan())
    assert scheduler.preemptions == 0
    run(scheduler)
    assert scheduler.preemptions == 0


def test_a_cancelled_leader_leaves_the_prompt_to_one_sibling_not_to_all() -> None:
    scheduler = scheduler_of(pages=60, budget=4, max_streams=8)
    leader, *others = add(scheduler, list(range(17)), samples=4)
    pretend(scheduler, scheduler.plan())
    scheduler.cancel(leader)
    step = scheduler.plan()
    assert step.ended == [leader]
    assert [piece.stream for piece in step.reading] == others[:1]
    run(scheduler)
    assert [stream.ending for stream in others] == ["length"] * 3


def test_a_preempted_leader_is_read_again_and_its_siblings_still_come() -> None:
    scheduler = scheduler_of(pages=60, budget=4, max_streams=8)
    leader, *others = add(scheduler, list(range(17)), samples=4)
    pretend(scheduler, scheduler.plan())
    scheduler.preempt(leader)
    run(scheduler)
    assert all(stream.ending == "length" for stream in (leader, *others))


def test_nothing_computed_before_new_weights_is_found_after_them() -> None:
    scheduler = scheduler_of(pages=40)
    roots = rooted(scheduler)
    (old,) = add(scheduler, list(range(12)), 8)
    for _ in range(3):
        pretend(scheduler, scheduler.plan())
    load(scheduler, roots, 1)
    assert scheduler.running[0].read == 14
    (late,) = add(scheduler, list(range(12)), 2)
    (member,) = add(scheduler, list(range(12)), 2, since=0)
    run(scheduler)
    assert (late.cached, member.cached) == (0, 8)
    ours, theirs = (scheduler.pool.find(list(range(12)), stream.root).pages for stream in (late, old))
    assert ours
    assert theirs
    assert not set(ours) & set(theirs)


@pytest.mark.parametrize(("since", "cached"), [(None, 0), (0, 12), (1, 0)])
def test_who_waits_while_weights_change_starts_with_the_new_ones_or_where_its_session_is(
    since: int | None, cached: int
) -> None:
    scheduler = scheduler_of(pages=60, max_streams=1)
    roots = rooted(scheduler)
    add(scheduler, list(range(16)), 3)
    first, *others = add(scheduler, list(range(16)), 3, samples=3, since=since)
    pretend(scheduler, scheduler.plan())
    assert first in scheduler.waiting
    load(scheduler, roots, 1)
    run(scheduler)
    assert first.cached == cached
    assert [stream.cached for stream in others] == [12, 12]  # of the first of them


def test_who_loses_its_pages_after_new_weights_starts_again_with_them() -> None:
    scheduler = scheduler_of(pages=60)
    roots = rooted(scheduler)
    mine, sessions = (add(scheduler, list(range(16)), 9, since=since)[0] for since in (None, 0))
    for _ in range(4):
        pretend(scheduler, scheduler.plan())
    load(scheduler, roots, 1)
    for stream, read in ((sessions, 16), (mine, 0)):
        scheduler.preempt(stream)
        scheduler._admit()
        assert stream.read == read


def test_samples_follow_no_leader_whose_pages_are_of_older_weights() -> None:
    scheduler = scheduler_of(pages=60, budget=4)
    roots = rooted(scheduler)
    leader, *others = add(scheduler, list(range(16)), 3, samples=3)
    pretend(scheduler, scheduler.plan())
    assert leader.read == 4
    load(scheduler, roots, 1)
    run(scheduler)
    assert [stream.cached for stream in others] == [0, 12]


def test_a_plan_for_many_streams_costs_no_more_for_each() -> None:
    def seconds(count: int) -> float:
        scheduler = scheduler_of(pages=count * 4, size=16, max_streams=count, budget=count * 16)
        for number in range(count):
            add(scheduler, [number] * 8, 50)
        pretend(scheduler, scheduler.plan())
        best = 9e9
        for _ in range(12):
            start = time.perf_counter()
            step = scheduler.plan()
            best = min(best, time.perf_counter() - start)
            assert len(step.decoding) == count
            pretend(scheduler, step)
        return best / count

    assert seconds(4096) < 6 * seconds(128)  # when every stream was looked for in a list it was thirty times
