"""Text of a completion while its tokens arrive, without anything that a later token could change.

Held back are characters whose bytes have not all arrived and the beginning of a possible stop text. The text ends
before a stop text and never contains the tokens that end a completion.
"""

from collections.abc import Collection, Sequence

from etude.chat.tokenizer import Tokenizer

UNFINISHED = "�"  # how a decoder shows the first bytes of a character
MAX_WINDOW = 32  # tokens decoded again with every new one, at most
CHARACTER = 4  # tokens that hold every byte of one character


class StopTextFilter:
    """Ends a text before the first stop text in it. Once `stopped`, it returns nothing more."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stop, self.stopped = tuple(stop), False
        self._held = ""

    def feed(self, new: str, *, last: bool = False) -> str:
        """Return the text that is certain now; with the `last` text, also what was held back."""
        if self.stopped:
            return ""
        text, self._held = self._held + new, ""
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        size = len(text) if last else len(text) - max((overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[size:]
        return text[:size]


class IncrementalDetokenizer:
    """Turns tokens into text."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int] = (), *, skip_special: bool = True) -> None:
        self.tokenizer, self.hidden_ids, self.skip_special = tokenizer, hidden_ids, skip_special
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were returned

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the new text that is certain now; with the `last` tokens, all of it."""
        self._window += [token for token in tokens if token not in self.hidden_ids]
        text = self._decode()
        # Only if it is longer than what was shown: a lone last byte of a character looks unfinished too.
        certain = text.removesuffix(UNFINISHED) if len(text) > self._shown and not last else text
        new, self._shown = certain[self._shown :], len(certain)
        if certain == text:
            # The last token stays for decoders that treat the beginning of a text differently.
            self._restart(1)
        elif len(self._window) > MAX_WINDOW:
            self._restart(CHARACTER)
        return new

    def _decode(self) -> str:
        return self.tokenizer.decode(self._window, skip_special=self.skip_special)

    def _restart(self, keep: int) -> None:
        del self._window[:-keep]
        text = self._decode()
        self._shown = len(text if keep == 1 else text.removesuffix(UNFINISHED))


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `mark`, but not all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
