"""The word cache: the ids equal the library's for every text, and only known rules are replaced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from etude.chat.tokenizer import Tokenizer, train_tokenizer
from etude.data.encoder import WordEncoder, word_pattern

TEXT = "def main(x1):\n    return x1 ** 20  # it's what they're here for\n\n\nclass Naïve:\n\t'don't'\r\n"
ODD = "é東\u0301\u00a0\u2028\u0085½٣\u200b🦆ſ\ufeff"
PARTS = ["'s", " 'll", "'VE", "  ", "\n\n    ", "\r\n", " 12", "12 ", "foo", "_x", "<|endoftext|>", "\t", "\x1c\x0b"]
texts = st.lists(
    st.sampled_from(PARTS) | st.text(st.characters(max_codepoint=127), max_size=4) | st.sampled_from(ODD), max_size=30
).map("".join)


def gpt2(**rule: bool) -> Tokenizer:
    """A small vocabulary behind GPT-2's own rule."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **rule})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return Tokenizer(backend)


KNOWN = {"digits alone": train_tokenizer([TEXT], 330), "gpt2": gpt2()}
ENCODERS = {name: WordEncoder(tokenizer) for name, tokenizer in KNOWN.items()}


@pytest.mark.parametrize("name", KNOWN)
@settings(print_blob=True, max_examples=300, deadline=None)
@given(batch=st.lists(texts, max_size=4))
def test_the_ids_are_those_of_the_library(name: str, batch: list[str]) -> None:
    assert word_pattern(KNOWN[name]) is not None
    found = ENCODERS[name].encode_batch(batch)
    assert [list(ids) for ids in found] == KNOWN[name].encode_batch(batch)


@pytest.mark.parametrize("name", KNOWN)
def test_control_tokens_are_parsed_only_in_special_texts(name: str) -> None:
    text = "a <|endoftext|> b"
    end = KNOWN[name].end_of_text
    (plain,) = ENCODERS[name].encode_batch([text])
    (special,) = ENCODERS[name].encode_batch([text], special=True)
    assert end not in list(plain)
    assert list(special).count(end) == 1


def test_clearing_the_cache_changes_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.data.encoder._MAX_CACHED_WORDS", 3)
    tokenizer = KNOWN["digits alone"]
    (found,) = WordEncoder(tokenizer).encode_batch([TEXT * 5 + "x" * 100])
    assert list(found) == tokenizer.encode(TEXT * 5 + "x" * 100)


def normalized() -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.backend.normalizer = normalizers.NFC()
    return tokenizer


def with_runs_of_spaces() -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.backend.add_tokens(["    "])
    return Tokenizer(tokenizer.backend)


@pytest.mark.parametrize(
    "other",
    [gpt2(add_prefix_space=True), gpt2(use_regex=False), normalized(), with_runs_of_spaces()],
    ids=["prefix", "no rule", "normalizer", "added spaces"],
)
def test_a_tokenizer_with_another_rule_is_left_to_the_library(other: Tokenizer) -> None:
    assert word_pattern(other) is None
    assert [list(ids) for ids in WordEncoder(other).encode_batch([TEXT, ""])] == other.encode_batch([TEXT, ""])
