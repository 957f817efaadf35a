"""Our own dialect: ChatML with calls in the way of Hermes, for models we train ourselves.

Its template only ever grows at its end. A tokenizer without tokens for the marks, as SmolLM2's, has them as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from etude.chat.dialects.json_calls import read_named_call, write_json
from etude.chat.dialects.turns import Layout, TurnDialect
from etude.chat.messages import Call, ToolSchema
from etude.chat.tokenizer import CHAT_TEMPLATE, END_OF_TURN, Tokenizer


class ChatML(TurnDialect):
    name = "chatml"
    layout = Layout(end=END_OF_TURN, call=("<tool_call>", "</tool_call>"))
    template: ClassVar[str | None] = CHAT_TEMPLATE
    text_marks = True
    always_thinks = False

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        """ChatML's frame, and no template that shows a model tools in another way."""
        template = tokenizer.chat_template
        framed = all(tokenizer.token_id(token) is not None for token in ("<|im_start|>", END_OF_TURN))
        return framed and (template is None or template == CHAT_TEMPLATE or "tools" not in template)

    def _write_call(self, call: Call, number: int) -> tuple[str, ...]:
        return (f'\n{{"name": {write_json(call.name)}, "arguments": {write_json(call.arguments)}}}\n',)

    def _read_call(self, parts: Sequence[str], tools: Sequence[ToolSchema]) -> tuple[str, Mapping[str, Any]]:
        return read_named_call(parts[0])
