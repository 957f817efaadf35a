"""Text of people and tools on its way through a chat template: whatever it spells, none of it becomes a control token.

Before the template sees a text, a sign from Unicode's private use area is put into each control token that it spells.
What the template wrote itself is still whole afterwards and becomes control tokens; everything between those is
encoded as plain text, in one piece, without the signs.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from etude.chat.tokenizer import Tokenizer

# BREAK stands inside a spelt control token; ESCAPE before what stands for a sign that the text brought along itself;
# ANSWER for what a model wrote; no token goes across a CUT.
BREAK, ESCAPE, ANSWER, CUT = SIGNS = "\ue000\ue001\ue002\ue003"


class Guard:
    """What one tokenizer reads as control tokens, and how text is kept from being read as them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._ids = {t.content: id for id, t in added.items() if tokenizer.control_in(t.content) is not None}
        self._frame = re.compile(f"({_any_of(self._ids)}|{CUT})")
        starts = sorted({token[0] for token in self._ids})
        inside = (f"{re.escape(c)}(?={_any_of(t[1:] for t in self._ids if t[0] == c)})" for c in starts)
        self._spelt = re.compile("|".join((f"[{SIGNS}]", *inside)))
        self._longest = max(map(len, self._ids), default=0)
        beginnings = {token[:size] for token in self._ids for size in range(1, len(token))}
        self._begun = re.compile(rf"{_any_of(beginnings)}\Z")

    def text(self, text: str) -> str:
        """`text` as a template may have it."""
        guarded = self._spelt.sub(_disarm, text)
        # A text may also begin what the template then ends: the "<think" of a name that stands before a ">".
        return guarded + BREAK if self._begun.search(text[-self._longest :]) else guarded

    def value(self, value: Any) -> Any:
        """All text in a JSON value, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list | tuple) else value

    def _key(self, key: str) -> str:
        # Qwen3-Coder's template makes tags of the keys of a schema.
        tags = {f"<{key}>", f"</{key}>"}
        return self.text(key) + BREAK if tags & self._ids.keys() else self.text(key)

    def encode(self, rendered: str) -> list[int]:
        """The tokens of what a template made of guarded text."""
        tokens: list[int] = []
        for place, part in enumerate(self._frame.split(rendered)):
            if place % 2 and part != CUT:
                tokens.append(self._ids[part])
            elif part and part != CUT:
                tokens += self._tokenizer.encode(_plain(part))
        return tokens


def _disarm(found: re.Match[str]) -> str:
    return f"{ESCAPE}{SIGNS.index(found[0])}" if found[0] in SIGNS else found[0] + BREAK


def _plain(guarded: str) -> str:
    text = guarded.replace(BREAK, "")
    return re.sub(f"{ESCAPE}(.)", lambda found: SIGNS[int(found[1])], text) if ESCAPE in text else text


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of `texts`, as a tree: DeepSeek adds 800 tokens that all begin alike."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(c) + pattern(child) for c, child in sorted(node.items()) if c]
        joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
        return f"(?:{joined})?" if "" in node and joined else joined

    return pattern(tree) or r"(?!)"
