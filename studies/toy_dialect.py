"""A dialect for policies of a hundred thousand parameters: what the harness always says is one token, the rest letters.

The session, the speaker and the summaries of a study are the real ones; only here a whole sentence that never changes
costs one token, so that a session of ten turns is a hundred tokens long and a laptop trains on thousands of them. Any
printable text can be read and written. A call is its mark and the name of a tool; there are no arguments.
"""

import re
import string
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Call, Message, ParsedTurn, ToolSchema, tool_names
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.harness.prompt import BRIEF
from etude.harness.summary import ASK, ASK_AGAIN, COMPACT

CONTROL = ("<end>", "<system>", "<user>", "<assistant>", "<tool>", "<call>")
# What the harness says around a summary, in the pieces that stay the same.
SAID = (BRIEF, ASK, *ASK_AGAIN.split("{why}"), *COMPACT.split("{session}"))
RECAP = (
    '\n\n<summary number="',
    '">\n',
    "\n</summary>\nWork done before the summary is in the workspace. Go on from there.",
)
WRITTEN = ("\n\n[user]\n", "\n\n[assistant]\n", "[system]\n", "[call ", "\n[result] ", "] ")


class Shorthand(Dialect):
    """Control tokens, then phrases, then every printable character. `words` are the study's own phrases."""

    name = "shorthand"

    def __init__(self, words: Sequence[str]) -> None:
        phrases = dict.fromkeys((*words, *SAID, *RECAP, *WRITTEN))
        texts = [phrase for phrase in phrases if len(phrase) > 1] + [*string.printable[:95], "\n"]
        self.tokenizer = cast(Tokenizer, None)  # there is none: a text is cut where a phrase is
        self._texts = {text: len(CONTROL) + index for index, text in enumerate(texts)}
        self._spelt = [*CONTROL, *texts]
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self.end, _, _, self.assistant, _, self.call = range(len(CONTROL))
        self.stops = frozenset({self.end})

    def __len__(self) -> int:
        return len(self._spelt)

    def encode(self, text: str) -> list[int]:
        """The longest phrase first; no text becomes a control token."""
        found = self._pattern.findall(text)
        if sum(map(len, found)) != len(text):
            raise InputError(f"shorthand: {text!r} has characters outside printable ASCII")
        return [self._texts[part] for part in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._spelt[token] for token in tokens)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The messages. Tools are not shown: a policy this small knows them or does not."""
        tokens = [token for message in messages for token in self._say(message)]
        return [*tokens, self.assistant] if add_generation_prompt else tokens

    def bridge(self, completion: Sequence[int], messages: Sequence[Message]) -> list[int]:
        closing = [] if completion and completion[-1] == self.end else [self.end]
        return [*closing, *self.render(messages)]

    def write(self, message: Message, *, first_call: int = 0) -> list[int]:
        return self._say(message)[1:]

    def parse(self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, first_call: int = 0) -> ParsedTurn:
        closed = self.end in tokens
        said = list(tokens[: tokens.index(self.end)] if closed else tokens)
        starts = [at for at, token in enumerate(said) if token == self.call]
        text = said[: starts[0]] if starts else said
        calls = []
        for number, (start, stop) in enumerate(pairwise([*starts, len(said)])):
            name = self.decode(said[start + 1 : stop])
            known = name in tool_names(tools)
            calls.append(
                Call(
                    name,
                    {} if known else None,
                    f"call_{first_call + number}",
                    "ok" if known else "unknown_tool",
                    name,
                    (start, stop),
                    "" if known else "no such tool",
                )
            )
        spent = len(said) - len(text)
        return ParsedTurn("", self.decode(text), tuple(calls), closed, 0, spent, len(tokens) - spent)

    def _say(self, message: Message) -> list[int]:
        role = CONTROL.index(f"<{message.role}>")
        calls = [token for call in message.calls for token in (self.call, *self.encode(call.name))]
        return [role, *self.encode(message.content), *calls, self.end]
