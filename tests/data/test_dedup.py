"""Near duplicates against brute force: sets of shingles compared pair by pair, in plain Python."""

import random
import re

import numpy as np
import pytest
import rensa

from etude.data.dedup import (
    PERMUTATIONS,
    choose_bands,
    find_exact_duplicates,
    find_near_duplicates,
    jaccard,
    minhash_signatures,
    shingles,
    text_digest,
)
from etude.data.text_hash import hash_ngrams, split_words

THRESHOLD, SHINGLE = 0.7, 5


def words_of(text: str) -> list[str]:
    """Return the words as text_hash.py defines them, by a regular expression."""
    return re.findall(r"[a-z_\x80-\U0010ffff]+|[0-9]+", text.lower())


def true_jaccard(first: str, second: str) -> float:
    def grams(text: str) -> set[tuple[str, ...]]:
        words = words_of(text)
        size = min(SHINGLE, max(1, len(words)))
        return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}

    a, b = grams(first), grams(second)
    return len(a & b) / len(a | b) if a | b else 0.0


def variants(seed: int, families: int = 25, size: int = 6) -> list[str]:
    """Families of texts that differ from their first by a few words, more and more."""
    rng = random.Random(seed)
    vocabulary = [f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)]
    texts = []
    for _ in range(families):
        words = rng.choices(vocabulary, k=rng.randint(60, 400))
        for edits in range(size):
            changed = list(words)
            for _ in range(edits * len(words) // 100):
                changed[rng.randrange(len(changed))] = rng.choice(vocabulary)
            texts.append(" ".join(changed))
    rng.shuffle(texts)
    return texts


def test_words_and_ngrams_are_those_of_a_plain_reading() -> None:
    text = "Class Foo_Bar2(x): # naïve 東京\n\treturn x**10+FOO_bar 2"
    words = split_words(text)
    assert [words.join(i, 1) for i in range(len(words))] == words_of(text)
    by_word: dict[str, int] = {}
    for word, value in zip(words_of(text), words.hashes.tolist(), strict=True):
        assert by_word.setdefault(word, value) == value
    assert len(set(by_word.values())) == len(by_word)
    grams = hash_ngrams(words.hashes, 3)
    assert len(set(grams.tolist())) == len(words_of(text)) - 2
    assert hash_ngrams(split_words("a b").hashes, 3).size == 0


def plain_ngram_hash(words: list[str]) -> int:
    """text_hash.py in Python integers: splitmix64 numbers, a sum over bytes, a weighted sum over words."""
    top = 2**64 - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & top
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & top
        return value ^ (value >> 31)

    def number(place: int, stream: int) -> int:
        return mix(((place + 1 + (stream << 32)) * 0x9E3779B97F4A7C15) & top)

    def word_hash(word: str) -> int:
        return sum(number((at % 64) * 256 + byte, 1) for at, byte in enumerate(word.encode())) & top

    return mix(sum(word_hash(word) * (number(step, 2) | 1) for step, word in enumerate(words)) & top)


def test_the_hashes_depend_on_nothing_but_the_words() -> None:
    text = "def main(): return 0  # naïve " + "x" * 100
    found = hash_ngrams(split_words(text).hashes, 4)
    words = words_of(text)
    assert found.tolist() == [plain_ngram_hash(words[i : i + 4]) for i in range(len(words) - 3)]


def test_similarity_is_the_true_one() -> None:
    texts = variants(1, families=4)
    for first in texts[:8]:
        for second in texts[:8]:
            ours = jaccard(shingles(first, SHINGLE), shingles(second, SHINGLE))
            assert ours == pytest.approx(true_jaccard(first, second), abs=1e-12)


def test_a_signature_is_that_of_the_set_whatever_else_is_in_the_batch() -> None:
    texts = [*variants(2, families=2), "one two", "", "a b c d e f g " * 50]
    together = minhash_signatures(SHINGLE, list(enumerate(texts)))
    for at, text in enumerate(texts):
        members = shingles(text, SHINGLE) if words_of(text) else np.array([at], dtype=np.uint64)
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            members, np.array([0, len(members)], dtype=np.uint64), PERMUTATIONS, 0
        )
        assert together[at].tolist() == matrix.to_rows()[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_near_duplicates_are_those_of_brute_force(seed: int) -> None:
    texts = variants(seed)
    found = find_near_duplicates(range(len(texts)), texts.__getitem__, threshold=THRESHOLD, shingle=SHINGLE)
    expected: dict[int, int] = {}
    for at, text in enumerate(texts):
        kept = [k for k in range(at) if k not in expected and true_jaccard(text, texts[k]) >= THRESHOLD]
        if kept:
            expected[at] = kept[0]
    assert len(expected) > 30
    assert {one.document: one.kept for one in found} == expected, f"seed {seed}"
    assert all(one.similarity == pytest.approx(true_jaccard(texts[one.document], texts[one.kept])) for one in found)


def test_the_order_decides_which_one_is_kept() -> None:
    texts = variants(3, families=3)
    forward = find_near_duplicates(range(len(texts)), texts.__getitem__, threshold=THRESHOLD)
    backward = find_near_duplicates(range(len(texts) - 1, -1, -1), texts.__getitem__, threshold=THRESHOLD)
    assert all(one.kept < one.document for one in forward)
    assert all(one.kept > one.document for one in backward)


def test_texts_without_words_are_not_near_anything() -> None:
    assert find_near_duplicates(range(3), ["", "+ - *", "(((("].__getitem__) == []
    assert find_near_duplicates([], str) == []


def test_exact_duplicates_ignore_white_space_only() -> None:
    digests = [text_digest(text) for text in ("a b\n", "a  b", "A b", "a\tb ")]
    assert [(one.document, one.kept) for one in find_exact_duplicates(digests)] == [(1, 0), (3, 0)]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
def test_bands_miss_less_than_one_pair_in_a_thousand_at_the_threshold(threshold: float) -> None:
    bands = choose_bands(threshold)
    assert (1 - threshold ** (PERMUTATIONS // bands)) ** bands <= 1e-3 or bands == PERMUTATIONS
    assert np.floor(PERMUTATIONS / bands) >= 1
