"""The text of a sample while its tokens come: nothing is shown that a later token could change.

Held back are a character whose bytes have not all arrived and the beginning of what may become a stop text; the text
ends before a stop text. Tokens that end a sample are never part of it.
"""

from collections.abc import Collection, Sequence

from etude.chat.tokenizer import Tokenizer

UNFINISHED = "�"  # what a decoder shows for the first bytes of a character
LONG = 32  # tokens decoded again with every new one, at most
CHARACTER = 4  # tokens that hold every byte of one character


class Text:
    """Tokens in, text out. After `stopped` there is nothing more."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), silent: Collection[int] = ()) -> None:
        self.tokenizer, self.stop, self.silent = tokenizer, tuple(stop), silent
        self.stopped = False
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were given out
        self._held = ""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain now."""
        if self.stopped:
            return ""
        self._window += [token for token in tokens if token not in self.silent]
        text = self._decode()
        # No longer than what was shown: a lone last byte of a character looks unfinished too.
        certain = text.removesuffix(UNFINISHED) if len(text) > self._shown else text
        new, self._shown = certain[self._shown :], len(certain)
        if certain == text:
            # The last token stays for decoders that treat a beginning differently.
            self._restart(1)
        elif len(self._window) > LONG:
            self._restart(CHARACTER)
        return self._cut(new)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._decode()[self._shown :]
        return self._cut(rest) + self._take_held()

    def _decode(self) -> str:
        return self.tokenizer.decode(self._window, skip_special=True)

    def _restart(self, keep: int) -> None:
        del self._window[:-keep]
        text = self._decode()
        self._shown = len(text if keep == 1 else text.removesuffix(UNFINISHED))

    def _cut(self, new: str) -> str:
        text = self._take_held() + new
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        size = len(text) - max((overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[size:]
        return text[:size]

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that are the beginning of `mark`, but not all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
