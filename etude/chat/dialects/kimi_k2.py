"""Kimi K2: a control token before every turn, calls in a section, and results labelled with the id of their call.

A call id is `functions.NAME:NUMBER`, numbered over the conversation. The model writes the id and the template repeats
it at the head of the result, so it is kept as written.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.chat.dialects.json_calls import MalformedCall, read_arguments, write_json
from etude.chat.dialects.turns import TurnDialect, TurnLayout
from etude.chat.messages import Message, ToolCall, ToolSchema
from etude.chat.tokenizer import END_OF_TURN, Tokenizer
from etude.errors import InputError

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
ID = re.compile(r"\s*(functions\.(.*):\d+)\s*", re.DOTALL)


class KimiK2(TurnDialect):
    name = "kimi-k2"
    layout = TurnLayout(
        end=END_OF_TURN,
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        section=SECTION,
        separator="<|tool_call_argument_begin|>",
        around_thinking="",
        after_thinking="",
        before_calls="",
        between_calls="",
    )

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        return SECTION[0] in (tokenizer.chat_template or "")

    def _write_call(self, call: ToolCall, number: int) -> tuple[str, ...]:
        own = ID.fullmatch(call.id)
        id = call.id if own and own[2] == call.name else f"functions.{call.name}:{number}"
        return id, write_json(call.arguments)

    def _read_call(self, parts: Sequence[str], tools: Sequence[ToolSchema]) -> tuple[str, Mapping[str, Any]]:
        id = ID.fullmatch(parts[0])
        if id is None:
            raise MalformedCall("bad_structure", f"a call begins with functions.NAME:NUMBER, not {parts[0][:40]!r}")
        name = id[2]
        if not name:
            raise MalformedCall("missing_name", "the call has no tool's name; it begins with functions.NAME:NUMBER")
        if len(parts) != 2:
            problem = f"one {self.layout.separator} stands between functions.NAME:NUMBER and the arguments"
            raise MalformedCall("bad_structure", problem, name)
        return name, read_arguments(parts[1], name)

    def _call_id(self, parts: Sequence[str], name: str, number: int) -> str:
        own = ID.fullmatch(parts[0])
        return own[1] if own else f"functions.{name or 'unknown'}:{number}"

    def _to_template(self, message: Message) -> dict[str, Any]:
        for id in (*(call.id for call in message.calls), *((message.call,) if message.role == "tool" else ())):
            if ID.fullmatch(id) is None:
                raise InputError(f"{self.name}: call ids must have the form functions.NAME:NUMBER, not {id!r}")
        return super()._to_template(message)
