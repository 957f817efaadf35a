"""Scheduler: properties of every scheduled step under random load, with a pretended model."""

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work import count_calls

from etude.errors import InputError
from etude.inference.pages import PagePool, PrefixRoots
from etude.inference.request import SequenceState, make_sequences
from etude.inference.sampling import Sampling
from etude.inference.scheduler import ScheduledStep, Scheduler


def scheduler_of(pages: int = 20, size: int = 4, prefix_caching: bool = True, **options: Any) -> Scheduler:
    return Scheduler(PagePool(pages, size, prefix_caching), **{"max_sequences": 4, "max_step_tokens": 12, **options})


def add(
    scheduler: Scheduler, prompt: list[int], max_tokens: int = 5, samples: int = 1, since: int | None = None
) -> list[SequenceState]:
    sequences = make_sequences(prompt, Sampling(max_tokens=max_tokens, samples=samples, since=since))
    scheduler.add(sequences)
    return sequences


def load(scheduler: Scheduler, roots: PrefixRoots, version: int) -> None:
    """Do what the engine does when it loads weights."""
    roots.add_version(version)
    scheduler.on_new_weights()


def rooted(scheduler: Scheduler) -> PrefixRoots:
    roots = PrefixRoots(0)
    scheduler.prefix_root_of = lambda sequence: roots.root_for(sequence.sampling.since)
    return roots


def pretend(scheduler: Scheduler, step: ScheduledStep, tokens: random.Random | None = None) -> None:
    """Do what the engine does with a step, without a model."""
    sampling = [*step.decoding, *(chunk.sequence for chunk in step.prefill if chunk.is_last)]
    for sequence in step.decoding:
        scheduler.advance(sequence, sequence.length)
    for chunk in step.prefill:
        scheduler.advance(chunk.sequence, chunk.end)
    for sequence in sampling:
        sequence.output.append(tokens.randrange(2) if tokens else 0)
        if len(sequence.output) == sequence.sampling.max_tokens:
            sequence.ending = "length"
            scheduler.finish(sequence)


def run(scheduler: Scheduler, most: int = 2000) -> int:
    for steps in range(most):
        step = scheduler.schedule()
        if not step:
            assert not scheduler.waiting
            assert not scheduler.running
            return steps
        pretend(scheduler, step)
        scheduler.pool.check_invariants()
    raise AssertionError("it does not end")


def check_step(scheduler: Scheduler, step: ScheduledStep, before: dict[SequenceState, int]) -> None:
    running = scheduler.running
    assert [s.number for s in running] == sorted(s.number for s in running)
    assert [s.number for s in scheduler.waiting] == sorted(s.number for s in scheduler.waiting)
    assert len(running) <= scheduler.max_sequences
    assert all(sequence.decoding and sequence in running for sequence in step.decoding)
    planned = [chunk.sequence for chunk in step.prefill]
    assert len(set(planned)) == len(planned)
    left = max(0, scheduler.max_step_tokens - len(step.decoding))
    spent = sum(chunk.end - chunk.start for chunk in step.prefill)
    assert spent <= left or (scheduler.fixed_chunk and spent - (step.prefill[-1].end - step.prefill[-1].start) < left)
    for chunk in step.prefill:
        assert chunk.sequence in running
        assert chunk.start == chunk.sequence.computed < chunk.end <= chunk.sequence.length
        assert len(chunk.sequence.pages) * scheduler.pool.size >= chunk.end + (
            scheduler.lookahead if chunk.is_last else 0
        )
    for sequence in step.decoding:
        assert len(sequence.pages) * scheduler.pool.size >= sequence.length + scheduler.lookahead
    for sequence in scheduler.waiting:
        assert not sequence.pages
    # The oldest sequence with pages is never preempted, and with fixed chunks none is.
    survivors = [sequence for sequence in before if sequence.ending is None]
    if survivors:
        assert survivors[0].preempted == before[survivors[0]]
    if scheduler.fixed_chunk:
        assert scheduler.preemptions == 0


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(8, 24),
    options=st.fixed_dictionaries(
        {
            "prefix_caching": st.booleans(),
            "max_step_tokens": st.integers(1, 20),
            "max_sequences": st.integers(1, 6),
            "lookahead": st.integers(1, 4),
            "fixed_chunk": st.sampled_from([0, 8]),
        }
    ),
)
def test_every_step_is_valid_and_every_sequence_ends_once(seed: int, pages: int, options: dict[str, Any]) -> None:
    rng = random.Random(seed)
    scheduler = scheduler_of(pages, 4, **options)
    sequences: list[SequenceState] = []
    roots = rooted(scheduler)
    steps = version = 0
    while steps < 3000:
        if len(sequences) < 14 and rng.random() < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            since = rng.choice((None, rng.randint(0, version + 1)))
            sequences += add(scheduler, prompt, rng.randint(1, 8), rng.choice((1, 1, 3)), since)
        if sequences and rng.random() < 0.1:
            scheduler.cancel(rng.choice(sequences))
        if rng.random() < 0.03:
            version = rng.choice((version + 1, version + 1, rng.randint(0, version)))
            rng.choice((scheduler.recompute_all, partial(load, scheduler, roots, version)))()
        before = {sequence: sequence.preempted for sequence in scheduler.running}
        step = scheduler.schedule()
        assert all(sequence.ending == "cancelled" for sequence in step.cancelled)
        check_step(scheduler, step, before)
        pretend(scheduler, step, rng)
        scheduler.pool.check_invariants()
        steps += 1
        if not step and len(sequences) >= 14:
            break
    assert all(sequence.ending for sequence in sequences), f"seed {seed}: some sequences never end"
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.pool.held == 0


def test_a_sequence_that_could_never_fit_is_an_error_at_once() -> None:
    scheduler = scheduler_of(pages=4, size=4, lookahead=2)
    with pytest.raises(InputError, match="the KV cache holds 16"):
        add(scheduler, [1] * 10, max_tokens=5)
    assert not scheduler.waiting
    add(scheduler, [1] * 10, max_tokens=4)
    run(scheduler)


def test_siblings_wait_until_the_leader_is_prefilled_and_then_share_its_pages() -> None:
    scheduler = scheduler_of(pages=40, max_step_tokens=4, max_sequences=8)
    leader, *others = add(scheduler, list(range(13)), samples=4)
    for _ in range(4):
        step = scheduler.schedule()
        assert [chunk.sequence for chunk in step.prefill] == [leader]
        pretend(scheduler, step)
    scheduler.schedule()
    assert scheduler.running == [leader, *others]
    assert all(sequence.pages[:3] == leader.pages[:3] and sequence.computed == 12 for sequence in others)
    run(scheduler)


def test_others_overtake_siblings_that_wait_for_their_leader() -> None:
    scheduler = scheduler_of(pages=40, max_step_tokens=8)
    leader, _sibling = add(scheduler, list(range(20)), samples=2)
    (other,) = add(scheduler, [1, 2])
    scheduler.schedule()
    assert scheduler.running == [leader, other]


def test_a_huge_prompt_gets_its_turn_while_small_ones_keep_coming() -> None:
    scheduler = scheduler_of(pages=10, size=4, max_sequences=8, prefix_caching=False)
    for _ in range(3):
        add(scheduler, [1] * 6, 4)
    (huge,) = add(scheduler, [2] * 30, 4)
    for _ in range(40):
        add(scheduler, [1] * 6, 4)
        pretend(scheduler, scheduler.schedule())
    assert huge.ending == "length"


def test_decoding_sequences_run_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    scheduler = scheduler_of(pages=100, size=4, max_step_tokens=5, prefix_caching=False)
    (talker,) = add(scheduler, [1], 30)
    pretend(scheduler, scheduler.schedule())
    add(scheduler, [2] * 80, 2)
    for _ in range(15):
        step = scheduler.schedule()
        assert step.decoding == [talker]
        assert sum(chunk.end - chunk.start for chunk in step.prefill) == 4
        pretend(scheduler, step)


def test_sequences_admitted_together_never_count_on_the_same_pages() -> None:
    scheduler = scheduler_of(pages=6, size=4, max_step_tokens=100, prefix_caching=False)
    for _ in range(4):
        add(scheduler, [1] * 10, 1)  # three pages each
    pretend(scheduler, scheduler.schedule())
    assert scheduler.preemptions == 0
    run(scheduler)
    assert scheduler.preemptions == 0


def test_a_cancelled_leader_leaves_the_prompt_to_one_sibling_not_to_all() -> None:
    scheduler = scheduler_of(pages=60, max_step_tokens=4, max_sequences=8)
    leader, *others = add(scheduler, list(range(17)), samples=4)
    pretend(scheduler, scheduler.schedule())
    scheduler.cancel(leader)
    step = scheduler.schedule()
    assert step.cancelled == [leader]
    assert [chunk.sequence for chunk in step.prefill] == others[:1]
    run(scheduler)
    assert [sequence.ending for sequence in others] == ["length"] * 3


def test_a_preempted_leader_is_recomputed_and_its_siblings_still_start() -> None:
    scheduler = scheduler_of(pages=60, max_step_tokens=4, max_sequences=8)
    leader, *others = add(scheduler, list(range(17)), samples=4)
    pretend(scheduler, scheduler.schedule())
    scheduler.preempt(leader)
    run(scheduler)
    assert all(sequence.ending == "length" for sequence in (leader, *others))


def test_nothing_computed_before_new_weights_is_found_after_them() -> None:
    scheduler = scheduler_of(pages=40)
    roots = rooted(scheduler)
    (old,) = add(scheduler, list(range(12)), 8)
    for _ in range(3):
        pretend(scheduler, scheduler.schedule())
    load(scheduler, roots, 1)
    assert scheduler.running[0].computed == 14
    (late,) = add(scheduler, list(range(12)), 2)
    (member,) = add(scheduler, list(range(12)), 2, since=0)
    run(scheduler)
    assert (late.cached, member.cached) == (0, 8)
    ours, theirs = (scheduler.pool.find_prefix(list(range(12)), sequence.prefix_root).pages for sequence in (late, old))
    assert ours
    assert theirs
    assert not set(ours) & set(theirs)


@pytest.mark.parametrize(("since", "cached"), [(None, 0), (0, 12), (1, 0)])
def test_a_waiting_sequence_starts_with_the_new_weights_or_with_the_pages_of_its_session(
    since: int | None, cached: int
) -> None:
    scheduler = scheduler_of(pages=60, max_sequences=1)
    roots = rooted(scheduler)
    add(scheduler, list(range(16)), 3)
    first, *others = add(scheduler, list(range(16)), 3, samples=3, since=since)
    pretend(scheduler, scheduler.schedule())
    assert first in scheduler.waiting
    load(scheduler, roots, 1)
    run(scheduler)
    assert first.cached == cached
    assert [sequence.cached for sequence in others] == [12, 12]  # pages of the first of them


def test_a_sequence_preempted_after_new_weights_is_recomputed_with_them() -> None:
    scheduler = scheduler_of(pages=60)
    roots = rooted(scheduler)
    mine, sessions = (add(scheduler, list(range(16)), 9, since=since)[0] for since in (None, 0))
    for _ in range(4):
        pretend(scheduler, scheduler.schedule())
    load(scheduler, roots, 1)
    for sequence, read in ((sessions, 16), (mine, 0)):
        scheduler.preempt(sequence)
        scheduler._admit()
        assert sequence.computed == read


def test_sequences_follow_no_leader_whose_pages_are_of_older_weights() -> None:
    scheduler = scheduler_of(pages=60, max_step_tokens=4)
    roots = rooted(scheduler)
    leader, *others = add(scheduler, list(range(16)), 3, samples=3)
    pretend(scheduler, scheduler.schedule())
    assert leader.computed == 4
    load(scheduler, roots, 1)
    run(scheduler)
    assert [sequence.cached for sequence in others] == [0, 12]


def test_scheduling_many_sequences_costs_no_more_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # A comparison in Python is a call that is counted: a search through a list of sequences makes many.
    monkeypatch.setattr(SequenceState, "__eq__", lambda self, other: self is other)

    def calls(count: int) -> float:
        scheduler = scheduler_of(pages=count * 4, size=16, max_sequences=count, max_step_tokens=count * 16)
        for number in range(count):
            add(scheduler, [number] * 8, 50)
        pretend(scheduler, scheduler.schedule())
        steps: list[Any] = []
        made = count_calls(lambda: steps.append(scheduler.schedule()))
        assert len(steps[0].decoding) == count
        return made / count

    assert calls(1024) < 1.5 * calls(128)
