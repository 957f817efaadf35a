"""Keeps untrusted text from becoming control tokens on its way through a chat template.

Before the template sees a text, a character from Unicode's private use area is inserted into each control token that
the text spells. After rendering, only control tokens written by the template itself are intact and get their ids;
everything between them is encoded as plain text, as one string, with the inserted characters removed.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from etude.chat.tokenizer import Tokenizer

# BREAK is inserted into a spelled control token. ESCAPE precedes the number of a sentinel that the text contained.
# TURN stands for the text of a model turn. No token spans a BOUNDARY.
BREAK, ESCAPE, TURN, BOUNDARY = SENTINELS = "\ue000\ue001\ue002\ue003"


class ControlTokenGuard:
    """Guards text against the control tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._ids = {t.content: id for id, t in added.items() if tokenizer.find_control_token(t.content) is not None}
        self._frame = re.compile(f"({_any_of(self._ids)}|{BOUNDARY})")
        starts = sorted({token[0] for token in self._ids})
        inside = (f"{re.escape(c)}(?={_any_of(t[1:] for t in self._ids if t[0] == c)})" for c in starts)
        self._spelled = re.compile("|".join((f"[{SENTINELS}]", *inside)))
        self._longest = max(map(len, self._ids), default=0)
        prefixes = {token[:size] for token in self._ids for size in range(1, len(token))}
        self._partial = re.compile(rf"{_any_of(prefixes)}\Z")

    def text(self, text: str) -> str:
        """Return `text` so that a template can include it without forming a control token."""
        guarded = self._spelled.sub(_break_up, text)
        # A text may also start a control token that the template completes, such as a name "<think" before a ">".
        return guarded + BREAK if self._partial.search(text[-self._longest :]) else guarded

    def value(self, value: Any) -> Any:
        """Guard all text in a JSON value, including keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list | tuple) else value

    def _key(self, key: str) -> str:
        # Qwen3-Coder's template turns the keys of a schema into tags.
        tags = {f"<{key}>", f"</{key}>"}
        return self.text(key) + BREAK if tags & self._ids.keys() else self.text(key)

    def encode(self, rendered: str) -> list[int]:
        """Return the tokens of a template's output that contains guarded text."""
        tokens: list[int] = []
        for index, part in enumerate(self._frame.split(rendered)):
            if index % 2 and part != BOUNDARY:
                tokens.append(self._ids[part])
            elif part and part != BOUNDARY:
                tokens += self._tokenizer.encode(_unguard(part))
        return tokens


def _break_up(found: re.Match[str]) -> str:
    return f"{ESCAPE}{SENTINELS.index(found[0])}" if found[0] in SENTINELS else found[0] + BREAK


def _unguard(guarded: str) -> str:
    text = guarded.replace(BREAK, "")
    return re.sub(f"{ESCAPE}(.)", lambda found: SENTINELS[int(found[1])], text) if ESCAPE in text else text


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern for the longest of `texts`, built as a trie: DeepSeek adds 800 tokens with a common prefix."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(c) + pattern(child) for c, child in sorted(node.items()) if c]
        joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
        return f"(?:{joined})?" if "" in node and joined else joined

    return pattern(trie) or r"(?!)"
