"""Exact shares, every token once an epoch, targets from the right document, and exact resumption."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import Memory, counting

from etude.data.mixture import Mixture, MixtureSource
from etude.data.packing import next_batch
from etude.errors import InputError
from etude.kernels.loss import IGNORE

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), rows=st.integers(1, 200))
def test_every_source_has_its_share_to_within_a_row(weights: list[float], rows: int) -> None:
    mixture = Mixture([MixtureSource(f"s{i}", counting([40]), w) for i, w in enumerate(weights)], length=8, seed=0)
    for _ in range(rows):
        mixture.next_row()
    for i, weight in enumerate(weights):
        assert abs(mixture.cursors[f"s{i}"].rows - rows * weight / sum(weights)) <= len(weights) / 2 + 0.5


@given(sizes=sizes, length=st.integers(2, 17), seed=st.integers(0, 99))
def test_an_epoch_reads_every_token_once(sizes: list[int], length: int, seed: int) -> None:
    mixture = Mixture([MixtureSource("s", counting(sizes), 1.0)], length=length, seed=seed)
    seen: list[int] = []
    while len(seen) < 2 * sum(sizes):
        seen += next_batch(mixture, 1, padding=0).tokens.flatten().tolist()
    assert sorted(seen[: sum(sizes)]) == list(range(sum(sizes)))
    assert sorted(seen[sum(sizes) : 2 * sum(sizes)]) == list(range(sum(sizes)))


@given(sizes=sizes, length=st.integers(2, 17), seed=st.integers(0, 99))
def test_targets_are_the_next_token_of_the_same_document(sizes: list[int], length: int, seed: int) -> None:
    mixture = Mixture([MixtureSource("s", counting(sizes), 1.0)], length=length, seed=seed)
    ends = set(np.cumsum(sizes) - 1)
    batch = next_batch(mixture, 4, padding=0)
    for token, target in zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True):
        assert target == (IGNORE if token in ends else token + 1)
    assert batch.loss_tokens == int((batch.targets != IGNORE).sum())
    assert all(sum(row) == length for row in batch.lengths)


@given(
    sizes=st.lists(st.integers(2, 30), min_size=2, max_size=12),
    keep_whole=st.booleans(),
    before=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_a_restored_mixture_continues_with_the_same_rows(
    sizes: list[int], keep_whole: bool, before: int, seed: int
) -> None:
    def fresh() -> Mixture:
        sources = [MixtureSource("a", counting(sizes), 0.7), MixtureSource("b", counting(sizes[:2], 1000), 0.3)]
        return Mixture(sources, length=11, seed=seed, keep_whole=keep_whole)

    one, other = fresh(), fresh()
    for _ in range(before):
        one.next_row()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [one.next_row() for _ in range(15)] == [other.next_row() for _ in range(15)]


@given(sizes=st.lists(st.integers(2, 14), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_whole_documents_are_never_cut_unless_longer_than_a_row(sizes: list[int], seed: int) -> None:
    mixture = Mixture([MixtureSource("s", counting(sizes), 1.0)], length=10, seed=seed, keep_whole=True)
    placed = [span for _ in range(40) for span in mixture.next_row()]
    assert all((p.start, p.stop) == (0, min(sizes[p.document], 10)) for p in placed)
    batch = next_batch(mixture, 3, padding=777)
    assert all(sum(row) == 10 for row in batch.lengths)
    assert (batch.targets[batch.tokens == 777] == IGNORE).all()


def test_the_loss_mask_applies_token_by_token() -> None:
    store = Memory([[1, 2, 3, 4, 5, 6]], [[False, False, True, True, False, True]])
    batch = next_batch(Mixture([MixtureSource("s", store, 1.0)], length=6, seed=0, keep_whole=True), 1, padding=0)
    assert batch.targets.tolist() == [[IGNORE, 3, 4, IGNORE, 6, IGNORE]]


def test_conversations_without_a_loss_token_inside_a_row_are_skipped() -> None:
    late, early = [False] * 9 + [True], [False, True] + [False] * 8
    store = Memory([list(range(10)), list(range(10, 20))], [late, early])
    mixture = Mixture([MixtureSource("s", store, 1.0)], length=6, seed=0, keep_whole=True)
    assert {span.document for _ in range(5) for span in mixture.next_row()} == {1}
    assert mixture.truncated == 1
    with pytest.raises(InputError, match="no loss token within the first 6 tokens"):
        Mixture([MixtureSource("s", Memory([list(range(10))], [late]), 1.0)], length=6, seed=0, keep_whole=True)


def test_short_documents_can_be_skipped() -> None:
    store = counting([3, 40, 5, 50])
    mixture = Mixture([MixtureSource("s", store, 1.0)], length=16, seed=0, min_document=40)
    assert {span.document for _ in range(20) for span in mixture.next_row()} == {1, 3}
    with pytest.raises(InputError, match="no document of at least 51"):
        Mixture([MixtureSource("s", store, 1.0)], length=16, seed=0, min_document=51)


def test_a_changed_corpus_or_weight_is_refused_on_restore() -> None:
    state = Mixture([MixtureSource("s", counting([5, 6]), 1.0)], length=4, seed=0).state_dict()
    with pytest.raises(InputError, match="corpus s has changed"):
        Mixture([MixtureSource("s", counting([5, 7]), 1.0)], length=4, seed=0).load_state_dict(state)
    two = [MixtureSource("s", counting([5, 6]), 1.0), MixtureSource("t", counting([5]), 1.0)]
    with pytest.raises(InputError, match="same weights"):
        Mixture(two, length=4, seed=0).load_state_dict(state)


def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    def documents(seed: int, skip: int = 0) -> list[int]:
        mixture = Mixture([MixtureSource("s", counting([4] * 30), 1.0)], length=4, seed=seed)
        return [mixture.next_row()[0].document for _ in range(60)][skip : skip + 30]

    assert documents(0) == documents(0)
    assert documents(0) != documents(1)
    assert documents(0) != documents(0, skip=30)
