"""Decontamination against a naive scan: planted passages are found, clean documents and boilerplate stay."""

import random
import re

import pytest

from etude.data.decontaminate import Contamination, ProtectedNgrams, find_contaminated, informative_words

N = 13
LICENCE = """# Copyright 2024 The Example Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in
# compliance with the License. You may obtain a copy of the License at the usual address.

"""
IMPORTS = (
    "import argparse\nimport json\nimport logging\nimport os\nimport re\nimport sys\nimport time\nimport typing\n"
    "from typing import (\n    Any,\n    Callable,\n    Dict,\n    Iterable,\n    List,\n    Mapping,\n    Optional,\n"
    "    Sequence,\n    Set,\n    Tuple,\n)\n"
)


def sentence(rng: random.Random, words: int) -> str:
    vocabulary = [a + b for a in "bcdfghjklmnp" for b in ("ab", "em", "ir", "on", "ut")]
    return " ".join(rng.choices(vocabulary, k=words))


def find(protected: list[str], texts: list[str], **options: float) -> list[Contamination]:
    index = ProtectedNgrams(((f"bench {i}", text) for i, text in enumerate(protected)), N)
    documents = [(at, f"repo{at}") for at in range(len(texts))]
    return find_contaminated(index, documents, texts.__getitem__, **options)  # type: ignore[arg-type]


def naive_words(text: str) -> list[str]:
    return re.findall(r"[a-z_\x80-\U0010ffff]+|[0-9]+", text.lower())


def grams(text: str) -> list[tuple[str, ...]]:
    words = naive_words(text)
    return [tuple(words[i : i + N]) for i in range(len(words) - N + 1)]


@pytest.mark.parametrize("seed", range(5))
def test_planted_passages_are_found_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    benchmark = [sentence(rng, rng.randint(5, 80)) for _ in range(40)]
    texts = [sentence(rng, rng.randint(0, 300)) for _ in range(150)]
    for at in rng.sample(range(150), 30):
        passage = rng.choice(benchmark).split()
        start = rng.randint(0, max(0, len(passage) - 20))
        planted = passage[start : start + rng.choice([N - 1, N, 20])]
        texts[at] += "\n" + ", ".join(planted).upper() + "();\n" + sentence(rng, 40)
    index = {gram: i for i, text in reversed(list(enumerate(benchmark))) for gram in grams(text)}
    expected = {}
    for at, text in enumerate(texts):
        hits = [gram for gram in grams(text) if gram in index]
        if hits:
            expected[at] = (f"bench {index[hits[0]]}", " ".join(hits[0]), len(hits), len(hits) / len(grams(text)))
    found = find(benchmark, texts)
    assert {one.document: (one.source, one.ngram, one.matches) for one in found} == {
        at: facts[:3] for at, facts in expected.items()
    }, f"seed {seed}"
    assert expected
    for one in found:
        assert one.share == pytest.approx(expected[one.document][3], abs=1e-6)


def test_a_shared_licence_and_imports_are_no_leak() -> None:
    rng = random.Random(7)
    benchmark = LICENCE + IMPORTS + "def solve():\n    " + sentence(rng, 50)
    clean = LICENCE + IMPORTS + "def other():\n    " + sentence(rng, 50)
    leaked = LICENCE + IMPORTS + "def mine():\n    " + benchmark[-150:]
    assert [one.document for one in find([benchmark], [clean, leaked])] == [1]


def test_what_many_repositories_share_is_boilerplate() -> None:
    rng = random.Random(8)
    common, secret = sentence(rng, 30), sentence(rng, 30)
    texts = [f"{sentence(rng, 20)}\n{common}" for _ in range(12)] + [f"{sentence(rng, 20)}\n{secret}\n{common}"]
    found = find([f"{common}\n{secret}"], texts, boilerplate=10)
    assert [one.document for one in found] == [12]
    assert set(found[0].ngram.split()) <= set(secret.split()) | set(common.split())
    assert len(find([f"{common}\n{secret}"], texts, boilerplate=20)) == 13


def test_boilerplate_counts_repositories_not_documents() -> None:
    rng = random.Random(9)
    common = sentence(rng, 30)
    texts = [f"{sentence(rng, 20)}\n{common}" for _ in range(12)]
    index = ProtectedNgrams([("bench", common)], N)
    found = find_contaminated(index, [(at, "one") for at in range(12)], texts.__getitem__, boilerplate=10)
    assert len(found) == 12


def test_a_share_lets_small_overlaps_pass() -> None:
    rng = random.Random(10)
    secret = sentence(rng, 20)
    texts = [secret + " " + sentence(rng, 1000), secret + " " + sentence(rng, 10)]
    assert [one.document for one in find([secret], texts, max_share=0.1)] == [1]


def test_short_texts_protect_nothing_and_are_counted() -> None:
    index = ProtectedNgrams([("a", "two words"), ("b", sentence(random.Random(1), 13))], N)
    assert (index.too_short, len(index)) == (1, 1)
    assert find([], ["anything at all"]) == []


def test_only_headers_and_imports_are_blanked() -> None:
    code = '"""Doc of the module."""\nimport os\nfrom a.b import c, d\nuse std::fmt;\nx = important(1)\n'
    assert informative_words(code).data.split() == b'"""doc of the module.""" x = important(1)'.split()
