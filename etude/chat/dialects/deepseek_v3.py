"""DeepSeek-V3: unframed turns, and calls in a section with their arguments in a JSON code fence.

The template is Etude's. The one V3 ships declares no tools, drops the calls of a turn that also has text, opens a
section only for the first call and closes one after every call but the first. Conversations that it renders
completely (those without calls, and one turn of two calls) render identically here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.chat.dialects.json_calls import MalformedCall, read_arguments, write_json
from etude.chat.dialects.turns import TurnDialect, TurnLayout
from etude.chat.messages import ToolCall, ToolSchema
from etude.chat.tokenizer import Tokenizer

SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)

TEMPLATE = """\
{%- set state = namespace(system='', results=false) -%}
{%- for message in messages if message.role == 'system' -%}
    {%- set state.system = state.system + ('' if loop.first else '\\n\\n') + message.content -%}
{%- endfor -%}
{{- bos_token + state.system -}}
{%- if tools -%}
    {{- '\\n\\n' if state.system else '' -}}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query. ' -}}
    {{- 'These are their signatures, one JSON object per line:\\n' -}}
    {%- for tool in tools -%}
        {{- '\\n' + tool | tojson -}}
    {%- endfor -%}
    {{- '\\n\\nTo call functions, end your message with their names and arguments in this form:\\n\\n' -}}
    {{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{"KEY": VALUE}\\n```' -}}
    {{- '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<｜User｜>' + message.content -}}
        {%- set state.results = false -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<｜tool▁outputs▁end｜>' if state.results else '<｜Assistant｜>' -}}
        {%- set state.results = false -%}
        {{- message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' -}}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name -}}
            {{- '\\n```json\\n' + call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' -}}
            {{- '<｜tool▁calls▁end｜>' if loop.last else '' -}}
        {%- endfor -%}
        {{- '<｜end▁of▁sentence｜>' -}}
    {%- elif message.role == 'tool' -%}
        {{- '\\n' if state.results else '<｜tool▁outputs▁begin｜>' -}}
        {%- set state.results = true -%}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if state.results -%}
    {{- '<｜tool▁outputs▁end｜>' -}}
{%- elif add_generation_prompt -%}
    {{- '<｜Assistant｜>' -}}
{%- endif -%}
"""


class DeepSeekV3(TurnDialect):
    name = "deepseek-v3"
    layout = TurnLayout(end="<｜end▁of▁sentence｜>", call=CALL, section=SECTION, separator=SEPARATOR, before_calls="")
    template = TEMPLATE

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        """Return whether the template is V3's; V3.1 has the same tokens, but no fence and no type of a call."""
        template = tokenizer.chat_template or ""
        return SEPARATOR in template and "```json" in template

    def _write_call(self, call: ToolCall, number: int) -> tuple[str, ...]:
        return "function", f"{call.name}\n```json\n{write_json(call.arguments)}\n```"

    def _read_call(self, parts: Sequence[str], tools: Sequence[ToolSchema]) -> tuple[str, Mapping[str, Any]]:
        if len(parts) != 2 or parts[0].strip() != "function":
            raise MalformedCall("bad_structure", f"a call begins with function{SEPARATOR}NAME, not {parts[0][:40]!r}")
        fenced = FENCED.fullmatch(parts[1])
        name = fenced[1] if fenced else parts[1].partition("\n")[0]
        if fenced is None:
            raise MalformedCall("bad_structure", "the arguments must stand in a fence: NAME\n```json\n{...}\n```", name)
        if not name.strip():
            raise MalformedCall("missing_name", f"the call has no tool's name behind function{SEPARATOR}")
        return name, read_arguments(fenced[2], name)
