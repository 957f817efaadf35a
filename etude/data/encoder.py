"""Texts to token ids in a worker process: BPE never looks beyond a word, and code repeats its words, so each is encoded
once and remembered.

The words are those that the tokenizer itself cuts a text into before it merges bytes. For GPT-2's rule (and SmolLM2's,
which is the same behind single digits) a regular expression of the standard library cuts ASCII in the same places;
everything else, a line with other characters or a tokenizer with another rule, goes to the library as it is. The ids
are the library's in all cases.
"""

import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from etude.chat.tokenizer import Tokenizer

_REMEMBERED = 1 << 17  # words of one process, some 20 MB
_LONGEST = 32  # characters of a word worth remembering

# GPT-2's rule for characters below 128: letters, digits, contractions, signs, white space but the last of it before a
# word, white space. The order differs from GPT-2's where no text can tell.
_GPT2 = r" ?[A-Za-z]+| ?[0-9]+|'(?:[stmd]|re|ve|ll)| ?[^\t-\r 0-9A-Za-z]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
# Digits are cut out one by one before the rule sees the text, so white space before one is at an end.
_DIGITS_GPT2 = r" ?[A-Za-z]+|[0-9]|'(?:[stmd]|re|ve|ll)| ?[^\t-\r 0-9A-Za-z]+|[\t-\r ]+(?![^\t-\r 0-9])|[\t-\r ]+"
# In neither rule has a word a newline behind something visible, so a text may be cut there.
_LINES = re.compile(r"(?<=[!-~])(?=\n)")


class WordEncoder:
    """`Tokenizer.encode_batch` with a memory. Texts whose control tokens are meant are left to the library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        rule = word_rule(tokenizer)
        self._words = re.compile(rule).findall if rule else None
        self._memory = _Memory(tokenizer.encode)

    def encode_batch(
        self, texts: Sequence[str], *, special: bool = False
    ) -> Sequence[npt.NDArray[np.uint32]] | Sequence[list[int]]:
        if special or self._words is None:
            return self._tokenizer.encode_batch(texts, special=special)
        return [np.frombuffer(b"".join(map(self._memory.__getitem__, self._cut(text))), np.uint32) for text in texts]

    def _cut(self, text: str) -> list[str]:
        assert self._words is not None
        if text.isascii():
            return self._words(text)
        cut: list[str] = []
        for line in _LINES.split(text):
            if line.isascii():
                cut += self._words(line)
            else:
                cut.append(line)
        return cut


class _Memory(dict[str, bytes]):
    """The ids of words, as bytes; a word that is not there is encoded when it is asked for."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> bytes:
        ids = array("I", self._encode(word)).tobytes()
        if len(word) <= _LONGEST:
            if len(self) >= _REMEMBERED:
                self.clear()  # the frequent ones are soon back, and the words of another repository are others
            self[word] = ids
        return ids


def word_rule(tokenizer: Tokenizer) -> str | None:
    """The regular expression that cuts ASCII as this tokenizer does, None when its rule is not a known one."""
    state = json.loads(tokenizer.backend.to_str())
    if state["normalizer"] is not None or state["model"].get("dropout"):
        return None
    # Control tokens are never read in plain text; what else was added (runs of spaces) would be matched across words.
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
    """For the life of a worker; the builder has its own."""
    return Tokenizer.load(directory)


@lru_cache(maxsize=1)
def open_encoder(directory: str) -> WordEncoder:
    return WordEncoder(open_tokenizer(directory))
