"""An answer while its tokens come, as a person may watch it: thoughts and text, and of calls that there is one.

What has come so far is read as any answer is, by the dialect itself, so no markup is ever shown. Held back is what the
next token could change: half a character, blank that may belong to a mark, a line that may become one.
"""

import re
import time
from collections.abc import Sequence

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Answer
from etude.inference.chat_format import Listener, Part

PAUSE_S = 0.03  # between two looks; nobody reads faster
SHARE = 5  # looking takes at most a fifth of the time, however long the answer
MARK = re.compile(r"<[^\s>]*")  # the beginning of one, where marks are text: then they begin a line


class Live:
    """Tokens in; what they say, for `listen`."""

    def __init__(self, dialect: Dialect, listen: Listener) -> None:
        self.dialect, self.listen = dialect, listen
        self._tokens: list[int] = []
        self._said: dict[Part, str] = {"thinking": "", "text": ""}
        self._calls = 0
        self._next_look = 0.0

    def feed(self, tokens: Sequence[int]) -> None:
        """New tokens."""
        self._tokens += tokens
        now = time.monotonic()
        if not tokens or now < self._next_look:
            return
        answer = self.dialect.parse(self._tokens)
        for part, text in (("thinking", answer.thinking), ("text", answer.text)):
            self._say(part, _certain(text))  # type: ignore[arg-type]
        if len(answer.calls) > self._calls:
            self._calls = len(answer.calls)
            self.listen("call", answer.calls[-1].name)
        after = time.monotonic()
        self._next_look = after + max(PAUSE_S, SHARE * (after - now))

    def finish(self, answer: Answer) -> None:
        """The whole answer: what was held back of it."""
        self._say("thinking", answer.thinking)
        self._say("text", answer.text)

    def _say(self, part: Part, text: str) -> None:
        said = self._said[part]
        if len(text) > len(said) and text.startswith(said):
            self._said[part] = text
            self.listen(part, text[len(said) :])


def _certain(text: str) -> str:
    """The text without what the next token could change."""
    line = text.rfind("\n") + 1
    if MARK.fullmatch(text, line):
        return text[:line].rstrip()
    # A decoder shows the first bytes of a character as U+FFFD.
    return text.rstrip() if text[-1:].isspace() else text.rstrip("\ufffd")
