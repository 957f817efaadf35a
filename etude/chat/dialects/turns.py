"""Base class of all dialects: turns rendered by a chat template, each turn being thinking, then text, then calls.

The template alone defines how a family frames its turns. `render` applies it to the conversation; `bridge` applies it
to a placeholder turn and the new messages, and returns what follows the placeholder. `TurnLayout` is the format inside
a turn, for both writing and parsing.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from etude.chat.dialects.dialect import Dialect
from etude.chat.dialects.guard import BOUNDARY, TURN, ControlTokenGuard
from etude.chat.dialects.json_calls import MalformedCall
from etude.chat.dialects.marks import MarkKind, MarkScanner, TurnBlock, read_blocks
from etude.chat.messages import Message, ParsedTurn, ToolCall, ToolSchema, tool_names
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError

# A user message and a model turn, for templates to continue.
PLACEHOLDERS: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "-"},
    {"role": "assistant", "content": TURN, "reasoning_content": ""},
)


@dataclass(frozen=True)
class TurnLayout:
    """How a family writes one turn: its marks, and the whitespace around them."""

    end: str  # token that ends a turn
    call: tuple[str, str]
    section: tuple[str, str] | None = None  # around all calls
    separator: str | None = None  # between the parts of a call
    think: tuple[str, str] = ("<think>", "</think>")
    around_thinking: str = "\n"
    after_thinking: str = "\n\n"
    before_calls: str = "\n"
    between_calls: str = "\n"


class TurnDialect(Dialect):
    """A dialect defined by a template and a layout; subclasses add how one call is written and parsed."""

    layout: ClassVar[TurnLayout]
    # The chat template; None: the tokenizer's own.
    template: ClassVar[str | None] = None
    # Marks may be text where the vocabulary has no tokens for them.
    text_marks: ClassVar[bool] = False
    # A turn without thinking has an empty thinking block, if the template supports thinking.
    always_thinks: ClassVar[bool] = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.stops = tokenizer.stop_ids
        self._template_tokenizer = copy(tokenizer)
        self._template_tokenizer.chat_template = self.template or tokenizer.chat_template
        self._guard = ControlTokenGuard(tokenizer)
        self._end = self._token(self.layout.end)
        self.thinks = "reasoning_content" in (self._template_tokenizer.chat_template or "")
        self._scanner = MarkScanner(tokenizer, self._marks(), self.stops)
        self._generation_prompt = self._find_generation_prompt()
        # the generation prompt contains the opening mark
        self._prompt_opens_thinking = self._generation_prompt.endswith(self._thinking_opening)

    def _marks(self) -> dict[MarkKind, str]:
        layout = self.layout
        marks: dict[MarkKind, str] = {"call": layout.call[0], "/call": layout.call[1]}
        if layout.section:
            marks |= {"section": layout.section[0], "/section": layout.section[1]}
        if layout.separator:
            marks["separator"] = layout.separator
        # A model whose template has no thinking may still have the marks in its vocabulary and use them.
        if self.thinks or all(self.tokenizer.token_id(mark) is not None for mark in layout.think):
            marks |= {"think": layout.think[0], "/think": layout.think[1]}
        if not self.text_marks:
            for mark in marks.values():
                self._token(mark)
        return marks

    @property
    def _thinking_opening(self) -> str:
        return self.layout.think[0] + self.layout.around_thinking

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        chat = [self._to_template(message) for message in messages]
        return self._guard.encode(self._apply_template(chat, self._guard.value(list(tools)), add_generation_prompt))

    def bridge(self, completion: Sequence[int], messages: Sequence[Message]) -> list[int]:
        for message in messages:
            if message.role not in ("user", "tool"):
                raise InputError(
                    f"after a model turn, expected messages from the user or a tool, not from the {message.role}"
                )
        tokens = self._guard.encode(self._render_after_turn(messages))
        return tokens[1:] if completion and completion[-1] == self._end else tokens

    def parse(self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, first_call: int = 0) -> ParsedTurn:
        items, end = self._scanner.scan(tokens)
        blocks = read_blocks(items, in_thinking=self._prompt_opens_thinking)
        calls = [block for block in blocks if block.kind == "call"]
        parsed = [self._parse_call(block, tokens, tools, first_call + n) for n, block in enumerate(calls)]
        return self._make_turn(blocks, parsed, len(tokens), closed=end < len(tokens))

    def parse_reply(
        self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, first_call: int = 0, partial: bool = False
    ) -> ParsedTurn:
        """Parse the sampled tokens of one turn for a chat API: what is not a valid call stays text, as it was written.

        Without `tools` there are no calls. A `partial` turn is still being sampled: a call that has begun is left out.
        """
        items, end = self._scanner.scan(tokens)
        blocks = read_blocks(items, in_thinking=self._prompt_opens_thinking)
        if partial and tools and blocks and blocks[-1].kind == "call" and blocks[-1].ending == "open":
            blocks.pop()
        calls: list[ToolCall] = []
        for index, block in enumerate(blocks):
            call = self._parse_call(block, tokens, tools, first_call + len(calls)) if block.kind == "call" else None
            if call is not None and tools and call.arguments is not None:
                calls.append(call)
            elif call is not None or (block.kind == "section" and not tools):
                blocks[index] = replace(
                    block, kind="text", parts=(self._scanner.decode(tokens[block.start : block.end]),)
                )
        return self._make_turn(blocks, calls, len(tokens), closed=end < len(tokens))

    def _make_turn(
        self, blocks: Sequence[TurnBlock], calls: Sequence[ToolCall], size: int, *, closed: bool
    ) -> ParsedTurn:
        thinking = [block for block in blocks if block.kind == "thinking"]
        thinking_tokens = sum(block.end - block.start for block in thinking)
        call_tokens = sum(block.end - block.start for block in blocks if block.kind in ("call", "section"))
        return ParsedTurn(
            thinking="\n\n".join(filter(None, map(self._read_thinking, thinking))),
            text=self._read_text(blocks),
            calls=tuple(calls),
            closed=closed,
            thinking_tokens=thinking_tokens,
            call_tokens=call_tokens,
            text_tokens=size - thinking_tokens - call_tokens,
        )

    def write(self, message: Message, *, first_call: int = 0) -> list[int]:
        if message.role != "assistant":
            raise InputError(f"expected an assistant message to write, not one from the {message.role}")
        layout, guard = self.layout, self._guard.text
        for text in (message.thinking, message.content):
            if (mark := self._scanner.mark_in(text)) is not None:
                raise InputError(f"{self.name}: a line that begins with {mark} would be parsed as a mark, not as text")
        written = guard(message.content)
        if message.calls:
            written += layout.before_calls if written else ""
            written += layout.section[0] if layout.section else ""
            for number, call in enumerate(message.calls):
                parts = self._write_call(_with_arguments(call), first_call + number)
                written += layout.between_calls if number else ""
                written += layout.call[0] + (layout.separator or "").join(map(guard, parts)) + layout.call[1]
            written += layout.section[1] if layout.section else ""
        return self._guard.encode(self._write_thinking(message.thinking) + written + layout.end)

    @classmethod
    @abstractmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        """Return whether the tokenizer's tokens and chat template are those of this family."""

    @abstractmethod
    def _write_call(self, call: ToolCall, number: int) -> tuple[str, ...]:
        """Return the text of a call between its marks, as the parts that separators join."""

    @abstractmethod
    def _read_call(self, parts: Sequence[str], tools: Sequence[ToolSchema]) -> tuple[str, Mapping[str, Any]]:
        """Return name and arguments from the format of `_write_call`; raise MalformedCall for anything else."""

    def _call_id(self, parts: Sequence[str], name: str, number: int) -> str:
        return f"call_{number}"

    def _render_after_turn(self, messages: Sequence[Message]) -> str:
        """Return what the template writes from the end of a turn on."""
        text = self._apply_template([*PLACEHOLDERS, *map(self._to_template, messages)], (), True)
        return text[text.index(self.layout.end, text.index(TURN)) :]

    def _apply_template(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], add_generation_prompt: bool
    ) -> str:
        text = self._template_tokenizer.render(chat, tools or None, add_generation_prompt=add_generation_prompt)
        # No token spans the end of a prompt and the start of a turn, in past turns either.
        return text.replace(self._generation_prompt, self._generation_prompt + BOUNDARY)

    def _find_generation_prompt(self) -> str:
        """Return the text that the template adds as its generation prompt."""
        before, after = (
            self._template_tokenizer.render(PLACEHOLDERS[:1], add_generation_prompt=add) for add in (False, True)
        )
        whole = self._template_tokenizer.render(PLACEHOLDERS, add_generation_prompt=False)
        if not after.startswith(before) or before == after or self.layout.end not in whole.partition(TURN)[2]:
            raise InputError(f"{self.name}: the chat template does not open and close turns as this dialect expects")
        return after[len(before) :]

    def _token(self, spelling: str) -> int:
        token = self.tokenizer.token_id(spelling)
        if token is None:
            raise InputError(f"{self.name}: the tokenizer has no token {spelling}; is this the model's dialect?")
        return token

    def _to_template(self, message: Message) -> dict[str, Any]:
        """Return a message in the form templates expect, with its text guarded."""
        guard = self._guard.text
        out: dict[str, Any] = {"role": message.role, "content": guard(message.content)}
        if message.role == "tool":
            out["tool_call_id"] = guard(message.call)
            if message.name:
                out["name"] = guard(message.name)
        if message.role == "assistant":
            # Always set: without it, Qwen3's template searches the content for thinking.
            out["reasoning_content"] = guard(message.thinking)
            if message.calls:
                out["tool_calls"] = [self._call_to_template(_with_arguments(call)) for call in message.calls]
        return out

    def _call_to_template(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": self._guard.text(call.name), "arguments": self._guard.value(call.arguments)}
        return {"id": self._guard.text(call.id), "type": "function", "function": function}

    def _write_thinking(self, thinking: str) -> str:
        layout = self.layout
        if thinking and not self.thinks:
            raise InputError(f"{self.name}: this model's template does not support thinking; leave it empty")
        if not thinking and not (self.thinks and self.always_thinks):
            return ""
        written = self._thinking_opening + self._guard.text(thinking) + layout.around_thinking + layout.think[1]
        return (
            written.removeprefix(self._thinking_opening) if self._prompt_opens_thinking else written
        ) + layout.after_thinking

    def _read_thinking(self, block: TurnBlock) -> str:
        space = self.layout.around_thinking
        opened = self._prompt_opens_thinking and block.start == 0
        text = block.text if opened else block.text.removeprefix(space)
        return text.removesuffix(space) if block.ending == "closed" else text

    def _read_text(self, blocks: Sequence[TurnBlock]) -> str:
        """Return all text, without the whitespace that the layout puts around thinking and calls."""
        found = []
        calls = ("call", "section")
        for index, block in enumerate(blocks):
            if block.kind != "text":
                continue
            before = blocks[index - 1].kind if index else ""
            after = blocks[index + 1].kind if index + 1 < len(blocks) else ""
            text = block.text
            if not text.strip() and (before in calls or after == "thinking"):
                continue
            if before == "thinking":
                text = _without_prefix(text, self.layout.after_thinking)
            if after in calls and before not in calls:
                text = _without_suffix(text, self.layout.before_calls)
            found.append(text)
        return "".join(found)

    def _parse_call(
        self, block: TurnBlock, tokens: Sequence[int], tools: Sequence[ToolSchema], number: int
    ) -> ToolCall:
        arguments: Mapping[str, Any] | None = None
        error = self._check_placement(block)
        try:
            name, parsed = self._read_call(block.parts, tools)
            if error is None:
                arguments = parsed
                if tools and name not in (known := tool_names(tools)):
                    error = MalformedCall("unknown_tool", _no_such_tool(name, known))
        except MalformedCall as malformed:
            name, error = malformed.name, error or malformed
        return ToolCall(
            name=name,
            arguments=arguments,
            id=self._call_id(block.parts, name, number),
            status=error.status if error else "ok",
            raw=self._scanner.decode(tokens[block.start : block.end]),
            span=(block.start, block.end),
            problem=error.problem if error else "",
        )

    def _check_placement(self, block: TurnBlock) -> MalformedCall | None:
        """Return what is wrong with the marks around a call, regardless of its content."""
        begin, end = self.layout.call
        if block.ending == "open":
            where = " at the start of a line" if self._scanner.mark_in(end) else ""
            return MalformedCall("unclosed", f"the answer ended inside the call, before {end}{where}")
        if block.ending == "broken":
            return MalformedCall("bad_structure", f"something else began inside the call, before {end}")
        if self.layout.section and not block.in_section:
            first, last = self.layout.section
            return MalformedCall(
                "bad_structure", f"calls, each from {begin} to {end}, stand between {first} and {last}"
            )
        return None


def _with_arguments(call: ToolCall) -> ToolCall:
    if call.arguments is None:
        raise InputError(
            f"call {call.id} is {call.status}: it has no arguments to write; only its sampled tokens represent it"
        )
    return replace(call, arguments=dict(call.arguments))


def _no_such_tool(name: str, known: Iterable[str]) -> str:
    # Sorted, as the model reads this: the same call must get the same result in every run.
    known, name = sorted(known), name[:80]
    close = get_close_matches(name, known, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"there is no tool {name!r}{meant}; the tools are {', '.join(known)}"


def _without_prefix(text: str, space: str) -> str:
    return text[next((size for size in range(len(space), 0, -1) if text.startswith(space[:size])), 0) :]


def _without_suffix(text: str, space: str) -> str:
    size = next((size for size in range(len(space), 0, -1) if text.endswith(space[:size])), 0)
    return text[: len(text) - size]
