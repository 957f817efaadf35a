"""Streams a model turn for display while it is sampled: thinking, text, and the name of each call.

The tokens so far are parsed by the dialect itself, so no markup is ever shown. Text that the next token could change
is held back: half a character, whitespace that may belong to a mark, a line that may become a mark.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from etude.chat.messages import ParsedTurn, PartListener, StreamPart

MIN_INTERVAL_S = 0.03  # between two parses of a turn; more often would not be visible to a reader
PARSE_INTERVAL_RATIO = 5  # limits parsing to about a fifth of the time, however long the turns and however many
MARK = re.compile(r"<[^\s>]*")  # start of a mark that is spelled as text, which stands at the start of a line


class TurnStreamer:
    """Parses the tokens so far with `parse` as they arrive, and passes new text to `listener`."""

    _parser_free_at: ClassVar[float] = 0.0  # no turn of this process is parsed before

    def __init__(self, parse: Callable[[Sequence[int]], ParsedTurn], listener: PartListener) -> None:
        self.parse, self.listener = parse, listener
        self.tokens: list[int] = []
        self._emitted: dict[StreamPart, str] = {"thinking": "", "text": ""}
        self._calls = 0
        self._next_parse = 0.0

    def feed(self, tokens: Sequence[int]) -> ParsedTurn | None:
        """Add sampled tokens; return all of them parsed, or None if the last parse was too recent."""
        self.tokens += tokens
        now = time.monotonic()
        if not tokens or now < max(self._next_parse, TurnStreamer._parser_free_at):
            return None
        turn = self.parse(self.tokens)
        for part, text in (("thinking", turn.thinking), ("text", turn.text)):
            self._emit(part, _stable_prefix(text))  # type: ignore[arg-type]
        if len(turn.calls) > self._calls:
            self._calls = len(turn.calls)
            self.listener("call", turn.calls[-1].name)
        after = time.monotonic()
        self._next_parse = after + MIN_INTERVAL_S
        TurnStreamer._parser_free_at = after + PARSE_INTERVAL_RATIO * (after - now)
        return turn

    def finish(self, turn: ParsedTurn) -> None:
        """Emit the text of the complete turn that was held back."""
        self._emit("thinking", turn.thinking)
        self._emit("text", turn.text)

    def _emit(self, part: StreamPart, text: str) -> None:
        emitted = self._emitted[part]
        if len(text) > len(emitted) and text.startswith(emitted):
            self._emitted[part] = text
            self.listener(part, text[len(emitted) :])


def _stable_prefix(text: str) -> str:
    """Return the text without the end that the next token could change."""
    line = text.rfind("\n") + 1
    if MARK.fullmatch(text, line):
        return text[:line].rstrip()
    # A decoder shows the first bytes of an incomplete character as U+FFFD.
    return text.rstrip() if text[-1:].isspace() else text.rstrip("\ufffd")
