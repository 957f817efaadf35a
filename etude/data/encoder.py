"""Encode texts in a worker process with a cache of words: BPE never merges across words, and code repeats its words.

The words are those of the tokenizer's pre-tokenizer. For GPT-2's rule (and SmolLM2's, which adds single digits) a
regular expression of the standard library splits ASCII text in the same places. Everything else, lines with other
characters or tokenizers with another rule, goes to the `tokenizers` library. The ids equal the library's in all cases.
"""

import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from etude.chat.tokenizer import Tokenizer

_MAX_CACHED_WORDS = 1 << 17  # per process, about 20 MB
_MAX_WORD_LENGTH = 32  # characters; longer words are not cached

# GPT-2's rule for characters below 128: letters, digits, contractions, symbols, white space except the last character
# before a word, white space. The order differs from GPT-2's only where it makes no difference.
_GPT2 = r" ?[A-Za-z]+| ?[0-9]+|'(?:[stmd]|re|ve|ll)| ?[^\t-\r 0-9A-Za-z]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
# Digits are split off one by one before the rule is applied, so white space before a digit ends its text.
_DIGITS_GPT2 = r" ?[A-Za-z]+|[0-9]|'(?:[stmd]|re|ve|ll)| ?[^\t-\r 0-9A-Za-z]+|[\t-\r ]+(?![^\t-\r 0-9])|[\t-\r ]+"
# In neither rule does a word contain a newline after a visible character, so a text may be split there.
_LINES = re.compile(r"(?<=[!-~])(?=\n)")


class WordEncoder:
    """`Tokenizer.encode_batch` with a cache of words. Texts with control tokens (`special`) go to the library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pattern = word_pattern(tokenizer)
        self._find_words = re.compile(pattern).findall if pattern else None
        self._cache = _WordCache(tokenizer.encode)

    def encode_batch(
        self, texts: Sequence[str], *, special: bool = False
    ) -> Sequence[npt.NDArray[np.uint32]] | Sequence[list[int]]:
        if special or self._find_words is None:
            return self._tokenizer.encode_batch(texts, special=special)
        return [np.frombuffer(b"".join(map(self._cache.__getitem__, self._split(text))), np.uint32) for text in texts]

    def _split(self, text: str) -> list[str]:
        assert self._find_words is not None
        if text.isascii():
            return self._find_words(text)
        words: list[str] = []
        for line in _LINES.split(text):
            if line.isascii():
                words += self._find_words(line)
            else:
                words.append(line)
        return words


class _WordCache(dict[str, bytes]):
    """Ids of words, as bytes; a missing word is encoded on access."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> bytes:
        ids = array("I", self._encode(word)).tobytes()
        if len(word) <= _MAX_WORD_LENGTH:
            if len(self) >= _MAX_CACHED_WORDS:
                self.clear()  # frequent words return soon, and the next repository has other words
            self[word] = ids
        return ids


def word_pattern(tokenizer: Tokenizer) -> str | None:
    """Return the regular expression that splits ASCII like this tokenizer, or None if its rule is not a known one."""
    state = json.loads(tokenizer.backend.to_str())
    if state["normalizer"] is not None or state["model"].get("dropout"):
        return None
    # Control tokens are never parsed in plain text; other added tokens (runs of spaces) would match across words.
    if not all(tokenizer.find_control_token(token["content"]) == token["content"] for token in state["added_tokens"]):
        return None
    match state["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }:
            return _DIGITS_GPT2
    return None


@lru_cache(maxsize=1)
def open_tokenizer(directory: str) -> Tokenizer:
    """Load a tokenizer, cached for the life of a worker."""
    return Tokenizer.load(directory)


@lru_cache(maxsize=1)
def open_encoder(directory: str) -> WordEncoder:
    return WordEncoder(open_tokenizer(directory))
