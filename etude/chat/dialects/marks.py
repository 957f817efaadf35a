"""Finds where thinking and calls begin and end in the tokens of a model turn.

A mark is a token. Where the vocabulary has no such token, the mark is text and counts only at the start of a line: JSON
escapes newlines, so no argument of a call can contain one. A mark where the layout allows none is text.
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
BlockEnding = Literal["closed", "open", "broken"]
NEWLINE = "Ċ"  # its spelling in byte-level vocabularies


@dataclass(frozen=True)
class ScannedItem:
    """A mark, or the text between two marks; `start` and `end` are token positions."""

    mark: MarkKind | None
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class TurnBlock:
    """A range of tokens of one kind. The text of a call is split into parts at separators; other kinds have one part.

    A block is closed by its mark, left open by the end of the turn, or broken by a mark that does not belong in it.
    A section block is a single mark that opens or closes a list of calls.
    """

    kind: Literal["text", "thinking", "call", "section"]
    start: int
    end: int
    parts: tuple[str, ...] = ("",)
    ending: BlockEnding = "closed"
    in_section: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


class MarkScanner:
    """Finds the marks of a dialect in token ids."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[MarkKind, str], stops: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self._stops = frozenset(stops)
        ids = {kind: tokenizer.token_id(spelling) for kind, spelling in marks.items()}
        self._ids = {token: (kind, marks[kind]) for kind, token in ids.items() if token is not None}
        self._texts = {marks[kind]: kind for kind, token in ids.items() if token is None}
        any_mark = "|".join(map(re.escape, self._texts)) or r"(?!)"
        self._at_line_text = re.compile(f"^(?:{any_mark})", re.MULTILINE)
        self._at_line_spelled = re.compile(f"(?:^|(?<={NEWLINE}))(?:{any_mark})")
        if self._texts and not isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
            missing = ", ".join(self._texts)
            raise InputError(f"the tokenizer has no tokens {missing}; only a byte-level one can do without them")

    def mark_in(self, text: str) -> str | None:
        """Return the first text mark that would be recognized in `text`."""
        found = self._at_line_text.search(text)
        return found[0] if found else None

    def scan(self, tokens: Sequence[int]) -> tuple[list[ScannedItem], int]:
        """Return the marks and texts before the stop token, and its position (len(tokens) if there is none)."""
        items: list[ScannedItem] = []
        start = 0
        for position, token in enumerate(tokens):
            mark = self._ids.get(token)
            if mark is None and token not in self._stops:
                continue
            items += self._texts_between(tokens, start, position)
            if mark is None:
                return items, position
            start = position + 1
            items.append(ScannedItem(*mark, position, start))
        return items + self._texts_between(tokens, start, len(tokens)), len(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may have padding rows beyond the tokenizer's ids and sample them; they have no text.
        size = self._size
        return self._tokenizer.decode([token for token in tokens if 0 <= token < size])

    def _texts_between(self, tokens: Sequence[int], start: int, end: int) -> list[ScannedItem]:
        if start == end:
            return []
        text = self.decode(tokens[start:end])
        if self.mark_in(text) is None:
            return [ScannedItem(None, text, start, end)]
        return self._split_at_text_marks(tokens, start, end)

    def _split_at_text_marks(self, tokens: Sequence[int], start: int, end: int) -> list[ScannedItem]:
        """Split at text marks. A token that is partly a mark, such as ">\\n", counts as part of the mark."""
        id_to_token = self._tokenizer.backend.id_to_token
        spelled = [(id_to_token(token) or "") if 0 <= token < self._size else "" for token in tokens[start:end]]
        ends = list(accumulate(map(len, spelled)))
        joined = "".join(spelled)
        items: list[ScannedItem] = []
        place, taken = 0, start  # the first character and the first token not yet in an item
        for found in self._at_line_spelled.finditer(joined):
            if found.start() == 0 and start > 0:
                continue  # follows a token mark: not the start of a line
            first = max(taken, start + bisect_right(ends, found.start()))
            last = max(first, start + bisect_left(ends, found.end()) + 1)
            if place < found.start():
                items.append(ScannedItem(None, _decode_spelled(spelled, ends, place, found.start()), taken, first))
            items.append(ScannedItem(self._texts[found[0]], found[0], first, last))
            place, taken = found.end(), last
        if place < len(joined) or taken < end:
            items.append(ScannedItem(None, _decode_spelled(spelled, ends, place, len(joined)), taken, end))
        return items


def _decode_spelled(spelled: Sequence[str], ends: Sequence[int], start: int, end: int) -> str:
    """Decode the characters from `start` to `end` of the joined byte-level token spellings."""
    pieces = []
    for token in range(bisect_right(ends, start), min(bisect_left(ends, end) + 1, len(ends))):
        begin = ends[token] - len(spelled[token])
        pieces.append(spelled[token][max(start - begin, 0) : end - begin])
    return str(decoders.ByteLevel().decode(pieces))


def read_blocks(items: Iterable[ScannedItem], *, in_thinking: bool) -> list[TurnBlock]:
    """Group marks and texts into blocks, in order; every token belongs to exactly one block."""
    blocks: list[TurnBlock] = []
    kind: Literal["text", "thinking", "call"] = "thinking" if in_thinking else "text"
    start = end = 0
    parts: list[list[str]] = [[]]
    in_section = False

    def finish(ending: BlockEnding, upto: int) -> None:
        nonlocal start, parts
        if kind != "text" or start < upto or parts != [[]]:
            blocks.append(TurnBlock(kind, start, upto, tuple(map("".join, parts)), ending, in_section))
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
                blocks.append(TurnBlock("section", item.start, end))
                kind, start, in_section = "text", end, item.mark == "section"
            case _:
                parts[-1].append(item.text)
    finish("open", end)
    return blocks
