"""BM25 compared with a direct implementation of the formula."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.harness.search.bm25 import K1, B, count_words, question_words, score, stem, words

VOCABULARY = ["read", "file", "cache", "pod", "token", "readFile"]
FILES = st.lists(st.lists(st.lists(st.sampled_from(VOCABULARY), max_size=8).map(" ".join), max_size=5), max_size=4)


def twin(texts: list[str], query: list[str]) -> list[float]:
    bags = [Counter(words(text)) for text in texts]
    mean = max(1.0, sum(bag.total() for bag in bags) / max(1, len(bags)))
    scores = []
    for bag in bags:
        total = 0.0
        for word in query:
            holders = sum(word in other for other in bags)
            rarity = math.log(1 + (len(bags) - holders + 0.5) / (holders + 0.5))
            total += rarity * bag[word] * (K1 + 1) / (bag[word] + K1 * (1 - B + B * bag.total() / mean))
        scores.append(total)
    return scores


@given(FILES, st.lists(st.sampled_from([*VOCABULARY, "absent"]), unique=True))
def test_scores_over_any_split_into_files_are_those_of_the_formula(files: list[list[str]], query: list[str]) -> None:
    asked = list(dict.fromkeys(word for text in query for word in words(text)))
    got = score([count_words(texts) for texts in files], asked)
    assert np.allclose(got, twin([text for texts in files for text in texts], asked), atol=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("read_file", ["read_file", "read", "fil"]),
        ("readFile", ["readfile", "read", "fil"]),
        ("HTTPServer2", ["httpserver2", "http", "server", "2"]),
        ("_private", ["privat"]),
        ("Größe = 3", ["größ", "3"]),
        ("a" * 100, []),
    ],
)
def test_identifiers_are_split_into_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_forms_of_a_word_have_the_same_stem() -> None:
    for forms in ("cache caches cached caching", "query queries", "stop stops stopped stopping", "file files"):
        assert len({stem(form) for form in forms.split()}) == 1, forms
    assert stem("class") == "class"
    assert stem("bus") == "bus"


def test_stop_words_of_a_question_are_dropped() -> None:
    assert question_words("Where is the cache of the file?") == ["cach"]
    assert question_words("how is it") == ["how", "is", "it"]
