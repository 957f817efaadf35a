"""A dialect for toy policies: every fixed text of the harness is one token, everything else is single characters.

Session, model client and summaries of a study are the real ones. Because a sentence that never changes costs one
token, a session of ten turns is a hundred tokens long, and a laptop trains on thousands of them. Any printable text can
be encoded and decoded. A tool call is a control token and the name of a tool; there are no arguments.
"""

import re
import string
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message, ParsedTurn, ToolCall, ToolSchema, tool_names
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.harness.prompt import SHORT_SYSTEM_PROMPT
from etude.harness.summary import COMPACTION_PROMPT, SUMMARY_PROMPT, SUMMARY_RETRY_PROMPT

CONTROL = ("<end>", "<system>", "<user>", "<assistant>", "<tool>", "<call>")
# The constant parts of the harness's texts: prompts, the recap of a summary, and the transcript for a compaction.
PROMPTS = (
    SHORT_SYSTEM_PROMPT,
    SUMMARY_PROMPT,
    *SUMMARY_RETRY_PROMPT.split("{why}"),
    *COMPACTION_PROMPT.split("{session}"),
)
RECAP = (
    '\n\n<summary number="',
    '">\n',
    "\n</summary>\nWork done before the summary is in the workspace. Go on from there.",
)
TRANSCRIPT = ("\n\n[user]\n", "\n\n[assistant]\n", "[system]\n", "[call ", "\n[result] ", "] ")


class ToyDialect(Dialect):
    """Token ids are the control tokens, then phrases, then every printable character. `words` adds phrases."""

    name = "toy"

    def __init__(self, words: Sequence[str]) -> None:
        phrases = dict.fromkeys((*words, *PROMPTS, *RECAP, *TRANSCRIPT))
        texts = [phrase for phrase in phrases if len(phrase) > 1] + [*string.printable[:95], "\n"]
        self.tokenizer = cast(Tokenizer, None)  # a toy dialect has none: text is split at phrases
        self._token_of = {text: len(CONTROL) + index for index, text in enumerate(texts)}
        self._text_of = [*CONTROL, *texts]
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self.end, _, _, self.assistant, _, self.call = range(len(CONTROL))
        self.stops = frozenset({self.end})

    def __len__(self) -> int:
        return len(self._text_of)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, longest phrase first; no text becomes a control token."""
        parts = self._pattern.findall(text)
        if sum(map(len, parts)) != len(text):
            raise InputError(f"toy dialect: {text!r} has characters outside printable ASCII")
        return [self._token_of[part] for part in parts]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._text_of[token] for token in tokens)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of the messages. Tools are not described: a toy policy learns them from demonstrations."""
        tokens = [token for message in messages for token in self._render(message)]
        return [*tokens, self.assistant] if add_generation_prompt else tokens

    def bridge(self, completion: Sequence[int], messages: Sequence[Message]) -> list[int]:
        closing = [] if completion and completion[-1] == self.end else [self.end]
        return [*closing, *self.render(messages)]

    def write(self, message: Message, *, first_call: int = 0) -> list[int]:
        return self._render(message)[1:]

    def parse(self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, first_call: int = 0) -> ParsedTurn:
        closed = self.end in tokens
        content = list(tokens[: tokens.index(self.end)] if closed else tokens)
        starts = [at for at, token in enumerate(content) if token == self.call]
        text = content[: starts[0]] if starts else content
        calls = []
        for number, (start, stop) in enumerate(pairwise([*starts, len(content)])):
            name = self.decode(content[start + 1 : stop])
            known = name in tool_names(tools)
            calls.append(
                ToolCall(
                    name,
                    {} if known else None,
                    f"call_{first_call + number}",
                    "ok" if known else "unknown_tool",
                    name,
                    (start, stop),
                    "" if known else "no such tool",
                )
            )
        call_tokens = len(content) - len(text)
        return ParsedTurn("", self.decode(text), tuple(calls), closed, 0, call_tokens, len(tokens) - call_tokens)

    def _render(self, message: Message) -> list[int]:
        role = CONTROL.index(f"<{message.role}>")
        calls = [token for call in message.calls for token in (self.call, *self.encode(call.name))]
        return [role, *self.encode(message.content), *calls, self.end]
