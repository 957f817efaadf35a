"""Where thoughts and calls begin and end in the tokens a model wrote.

A mark is a token. Where a vocabulary has no such token the mark is text, and only at the start of a line: in JSON
a newline is escaped, so no argument of a call can hold one. A mark where it means nothing is text.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from tokenizers import decoders

from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError

MarkKind = Literal["think", "/think", "call", "/call", "section", "/section", "separator"]
Fate = Literal["closed", "open", "broken"]
NEWLINE = "Ċ"  # how byte-level vocabularies spell it


@dataclass(frozen=True)
class Item:
    """A mark, or the text between two marks; `start` and `end` are places in the tokens."""

    mark: MarkKind | None
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Block:
    """A run of tokens with one meaning. The text of a call comes in parts, cut at separators; others have one part.

    A block is closed by its mark, left open by the end of the answer, or broken by a mark that does not belong in it.
    A section is one mark around calls.
    """

    kind: Literal["text", "thinking", "call", "section"]
    start: int
    end: int
    parts: tuple[str, ...] = ("",)
    fate: Fate = "closed"
    in_section: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Scanner:
    """Finds the marks of a dialect in the tokens of its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[MarkKind, str], stops: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self._stops = frozenset(stops)
        ids = {kind: tokenizer.token_id(spelling) for kind, spelling in marks.items()}
        self._ids = {token: (kind, marks[kind]) for kind, token in ids.items() if token is not None}
        self._texts = {marks[kind]: kind for kind, token in ids.items() if token is None}
        anyone = "|".join(map(re.escape, self._texts)) or r"(?!)"
        self._at_line = re.compile(f"^(?:{anyone})", re.MULTILINE)
        self._spelt = re.compile(f"(?:^|(?<={NEWLINE}))(?:{anyone})")
        if self._texts and not isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
            missing = ", ".join(self._texts)
            raise InputError(f"the tokenizer has no tokens {missing}; only a byte-level one can do without them")

    def mark_in(self, text: str) -> str | None:
        """The first mark that is text and that `text` would be read as."""
        found = self._at_line.search(text)
        return found[0] if found else None

    def scan(self, tokens: Sequence[int]) -> tuple[list[Item], int]:
        """Marks and texts up to the token that ends the answer, and where that is; len(tokens) if none does."""
        items: list[Item] = []
        start = 0
        for place, token in enumerate(tokens):
            mark = self._ids.get(token)
            if mark is None and token not in self._stops:
                continue
            items += self._texts_between(tokens, start, place)
            if mark is None:
                return items, place
            start = place + 1
            items.append(Item(*mark, place, start))
        return items + self._texts_between(tokens, start, len(tokens)), len(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may have rows beyond the tokenizer's ids, and sample them; they mean no text.
        size = self._size
        return self._tokenizer.decode([token for token in tokens if 0 <= token < size])

    def _texts_between(self, tokens: Sequence[int], start: int, end: int) -> list[Item]:
        if start == end:
            return []
        text = self.decode(tokens[start:end])
        if self.mark_in(text) is None:
            return [Item(None, text, start, end)]
        return self._split_at_text_marks(tokens, start, end)

    def _split_at_text_marks(self, tokens: Sequence[int], start: int, end: int) -> list[Item]:
        """A token that is partly a mark, as that of ">\\n", counts as the mark's."""
        id_to_token = self._tokenizer.backend.id_to_token
        spelt = [(id_to_token(token) or "") if 0 <= token < self._size else "" for token in tokens[start:end]]
        ends = list(accumulate(map(len, spelt)))
        joined = "".join(spelt)
        items: list[Item] = []
        place, taken = 0, start  # the first character, and the first token, that is in no item yet
        for found in self._spelt.finditer(joined):
            if found.start() == 0 and start > 0:
                continue  # behind a mark that is a token: not the start of a line
            first = max(taken, start + bisect_right(ends, found.start()))
            last = max(first, start + bisect_left(ends, found.end()) + 1)
            if place < found.start():
                items.append(Item(None, _decode_spelt(spelt, ends, place, found.start()), taken, first))
            items.append(Item(self._texts[found[0]], found[0], first, last))
            place, taken = found.end(), last
        if place < len(joined) or taken < end:
            items.append(Item(None, _decode_spelt(spelt, ends, place, len(joined)), taken, end))
        return items


def _decode_spelt(spelt: Sequence[str], ends: Sequence[int], start: int, end: int) -> str:
    """The text of the characters from `start` to `end` of what byte-level tokens spell."""
    pieces = []
    for token in range(bisect_right(ends, start), min(bisect_left(ends, end) + 1, len(ends))):
        begin = ends[token] - len(spelt[token])
        pieces.append(spelt[token][max(start - begin, 0) : end - begin])
    return str(decoders.ByteLevel().decode(pieces))


def read_blocks(items: Iterable[Item], *, in_thought: bool) -> list[Block]:
    """The meaning of marks and texts, in the order they were written; every token is in one block."""
    blocks: list[Block] = []
    kind: Literal["text", "thinking", "call"] = "thinking" if in_thought else "text"
    start = end = 0
    parts: list[list[str]] = [[]]
    in_section = False

    def finish(fate: Fate, upto: int) -> None:
        nonlocal start, parts
        if kind != "text" or start < upto or parts != [[]]:
            blocks.append(Block(kind, start, upto, tuple(map("".join, parts)), fate, in_section))
        start, parts = upto, [[]]

    for item in items:
        end = item.end
        match kind, item.mark:
            case "text", "think":
                finish("closed", item.start)
                kind = "thinking"
            case "text", "call":
                finish("closed", item.start)
                kind = "call"
            case ("thinking", "/think") | ("call", "/call"):
                finish("closed", end)
                kind = "text"
            case "call", "call":
                finish("broken", item.start)
            case "call", "separator":
                parts.append([])
            case ("text", "section") | ("text", "/section") | ("call", "/section"):
                finish("broken", item.start)
                blocks.append(Block("section", item.start, end))
                kind, start, in_section = "text", end, item.mark == "section"
            case _:
                parts[-1].append(item.text)
    finish("open", end)
    return blocks
