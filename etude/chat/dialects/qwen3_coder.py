"""Qwen3-Coder and Qwen3.5: ChatML with calls as tags, and parameter values as bare text.

The text carries no types; they come from the tool's schema. A value ends at the first `</parameter>` that is followed
by another parameter or by the end of the call; `write` refuses a value that contains such a sequence.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.chat.dialects.json_calls import MalformedCall, read_json, write_json
from etude.chat.dialects.turns import TurnDialect, TurnLayout
from etude.chat.messages import ToolCall, ToolSchema
from etude.chat.tokenizer import END_OF_TURN, Tokenizer
from etude.errors import InputError

FORM = "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>"
FUNCTION = re.compile(r"\s*<function=([^\n>]*)>")
PARAMETER = re.compile(
    r"\s*<parameter=([^\n>]*)>(.*?)</parameter>(?=\s*(?:<parameter=[^\n>]*>|</function>\s*\Z))", re.DOTALL
)
END = re.compile(r"\s*</function>\s*")


class Qwen3Coder(TurnDialect):
    name = "qwen3-coder"
    layout = TurnLayout(end=END_OF_TURN, call=("<tool_call>", "</tool_call>"), before_calls="\n\n")

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        return "<function=" in (tokenizer.chat_template or "")

    def _write_call(self, call: ToolCall, number: int) -> tuple[str, ...]:
        texts = {key: _write_value(value) for key, value in (call.arguments or {}).items()}
        parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        written = f"\n<function={call.name}>\n{parameters}</function>\n"
        try:
            ambiguous = read_tags(written) != (call.name, texts)
        except MalformedCall:
            ambiguous = True
        if ambiguous:
            raise InputError(
                f"{self.name}: call {call.id} of {call.name} contains the dialect's own tags and cannot be written"
            )
        return (written,)

    def _read_call(self, parts: Sequence[str], tools: Sequence[ToolSchema]) -> tuple[str, Mapping[str, Any]]:
        name, texts = read_tags(parts[0])
        schemas = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
        properties = _object(_object(next(schemas, None)).get("properties"))
        return name, {key: _read_value(text, _types(properties.get(key)), key, name) for key, text in texts.items()}


def read_tags(text: str) -> tuple[str, dict[str, str]]:
    """Return the name, and the parameters as text; raise MalformedCall for tags that do not follow FORM."""
    begin = FUNCTION.match(text)
    if begin is None:
        raise MalformedCall(
            "bad_structure", f"a call has the form {FORM!r}; this one does not begin with <function=NAME>"
        )
    name, place = begin[1], begin.end()
    if not name:
        raise MalformedCall("missing_name", f"the call has no tool's name; expected the form {FORM!r}")
    texts: dict[str, str] = {}
    while parameter := PARAMETER.match(text, place):
        key, place = parameter[1], parameter.end()
        if key in texts:
            raise MalformedCall("bad_structure", f"the parameter {key} is given twice", name)
        texts[key] = parameter[2].removeprefix("\n").removesuffix("\n")
    if not END.fullmatch(text, place):
        rest = text[place:].strip()[:40]
        expected = "</function>, or a parameter from <parameter=KEY> to </parameter>"
        raise MalformedCall("bad_structure", f"expected {expected}, and nothing else, at {rest!r}", name)
    return name, texts


def _write_value(value: Any) -> str:
    # As the template does: str() of anything but a list or object, so True and None have Python's spelling.
    return write_json(value) if isinstance(value, dict | list | tuple) else str(value)


def _read_value(text: str, types: set[str], key: str, name: str) -> Any:
    """Convert `text` to a type that its schema allows; keep it as text if the schema has no type or allows strings."""
    for kind, read in READERS.items():
        if kind in types and (value := read(text)) is not None:
            return value[0]
    if not types or "string" in types:
        return text
    if types & {"object", "array"}:
        read_json(text, f"the parameter {key}", name)  # raises with the position of a JSON error
    raise MalformedCall("bad_structure", f"the parameter {key} must be of type {' or '.join(sorted(types))}", name)


def _types(schema: Any) -> set[str]:
    schema = _object(schema)
    own = schema.get("type") or ()
    types = {own} if isinstance(own, str) else set(own)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(choice)
    return types


def _object(value: Any) -> Mapping[str, Any]:
    # A schema may also be `true`, which allows anything.
    return value if isinstance(value, Mapping) else {}


def _json_of(*types: type) -> Callable[[str], tuple[Any] | None]:
    def read(text: str) -> tuple[Any] | None:
        try:
            value = read_json(text, "")
        except MalformedCall:
            return None
        return (value,) if type(value) in types else None

    return read


# Each returns the value in a tuple, or None when the text is of another type.
READERS: Mapping[str, Callable[[str], tuple[Any] | None]] = {
    "null": lambda text: (None,) if text.strip().lower() in ("null", "none") else None,
    "boolean": lambda text: {"true": (True,), "false": (False,)}.get(text.strip().lower()),
    "integer": _json_of(int),
    "number": _json_of(int, float),
    "array": _json_of(list),
    "object": _json_of(dict),
}
