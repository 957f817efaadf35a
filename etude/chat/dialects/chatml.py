"""Etude's own dialect: ChatML with Hermes-style tool calls, for models trained here.

The template is append-only. Where the tokenizer has no tokens for the marks (SmolLM2), they are written as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from etude.chat.dialects.json_calls import read_named_call, write_json
from etude.chat.dialects.turns import TurnDialect, TurnLayout
from etude.chat.messages import ToolCall, ToolSchema
from etude.chat.tokenizer import CHAT_TEMPLATE, END_OF_TURN, Tokenizer


class ChatML(TurnDialect):
    name = "chatml"
    layout = TurnLayout(end=END_OF_TURN, call=("<tool_call>", "</tool_call>"))
    template: ClassVar[str | None] = CHAT_TEMPLATE
    text_marks = True
    always_thinks = False

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        """Return whether the tokenizer has ChatML's frame tokens and no template that declares tools differently."""
        template = tokenizer.chat_template
        framed = all(tokenizer.token_id(token) is not None for token in ("<|im_start|>", END_OF_TURN))
        return framed and (template is None or template == CHAT_TEMPLATE or "tools" not in template)

    def _write_call(self, call: ToolCall, number: int) -> tuple[str, ...]:
        return (f'\n{{"name": {write_json(call.name)}, "arguments": {write_json(call.arguments)}}}\n',)

    def _read_call(self, parts: Sequence[str], tools: Sequence[ToolSchema]) -> tuple[str, Mapping[str, Any]]:
        return read_named_call(parts[0])
