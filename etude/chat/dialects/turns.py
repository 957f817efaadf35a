"""What the families share: turns written by a chat template, and answers of thoughts, then text, then calls.

A template is the one place that says how a family's turns look. `render` runs it on the conversation; `bridge` runs
it on a stand-in for the answer and the new messages, and takes what it puts behind the answer. How an answer itself
looks is the `Layout`, once for writing and for reading.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from etude.chat.dialects.dialect import Dialect
from etude.chat.dialects.guard import ANSWER, CUT, Guard
from etude.chat.dialects.json_calls import Malformed
from etude.chat.dialects.marks import Block, MarkKind, Scanner, read_blocks
from etude.chat.messages import Answer, Call, Message, ToolSchema, names_of
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError

# A question and its answer, for templates to continue.
STAND_INS: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "-"},
    {"role": "assistant", "content": ANSWER, "reasoning_content": ""},
)


@dataclass(frozen=True)
class Layout:
    """How a family writes an answer: its marks, and the blank around them."""

    end: str  # of a turn
    call: tuple[str, str]
    section: tuple[str, str] | None = None  # around all calls
    separator: str | None = None  # between the parts of a call
    think: tuple[str, str] = ("<think>", "</think>")
    around_thought: str = "\n"
    after_thought: str = "\n\n"
    before_calls: str = "\n"
    between_calls: str = "\n"


class TurnDialect(Dialect):
    """A dialect by a template and a layout; a family adds how it writes and reads one call."""

    layout: ClassVar[Layout]
    # The family's own; None stands for the tokenizer's.
    template: ClassVar[str | None] = None
    # Where the vocabulary has no tokens for the marks, they may be text.
    text_marks: ClassVar[bool] = False
    # An answer without a thought has an empty one, if the model thinks at all.
    always_thinks: ClassVar[bool] = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.stops = tokenizer.stop_ids
        self._scribe = copy(tokenizer)
        self._scribe.chat_template = self.template or tokenizer.chat_template
        self._guard = Guard(tokenizer)
        self._end = self._token(self.layout.end)
        self.thinks = "reasoning_content" in (self._scribe.chat_template or "")
        self._scanner = Scanner(tokenizer, self._marks(), self.stops)
        self._opening = self._find_opening()
        self._in_thought = self._opening.endswith(self._thought_opening)  # the template writes it for the model

    def _marks(self) -> dict[MarkKind, str]:
        layout = self.layout
        marks: dict[MarkKind, str] = {"call": layout.call[0], "/call": layout.call[1]}
        if layout.section:
            marks |= {"section": layout.section[0], "/section": layout.section[1]}
        if layout.separator:
            marks["separator"] = layout.separator
        # A model that is not asked to think may still have the marks in its vocabulary, and use them.
        if self.thinks or all(self.tokenizer.token_id(mark) is not None for mark in layout.think):
            marks |= {"think": layout.think[0], "/think": layout.think[1]}
        if not self.text_marks:
            for mark in marks.values():
                self._token(mark)
        return marks

    @property
    def _thought_opening(self) -> str:
        return self.layout.think[0] + self.layout.around_thought

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, answer: bool = True
    ) -> list[int]:
        said = [self._say(message) for message in messages]
        return self._guard.encode(self._apply_template(said, self._guard.value(list(tools)), answer))

    def bridge(self, answer: Sequence[int], messages: Sequence[Message]) -> list[int]:
        for message in messages:
            if message.role not in ("user", "tool"):
                raise InputError(f"after an answer come messages of a user or a tool, not of the {message.role}")
        tokens = self._guard.encode(self._after_answer(messages))
        return tokens[1:] if answer and answer[-1] == self._end else tokens

    def parse(self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, first_call: int = 0) -> Answer:
        items, end = self._scanner.scan(tokens)
        blocks = read_blocks(items, in_thought=self._in_thought)
        calls = [block for block in blocks if block.kind == "call"]
        thoughts = [block for block in blocks if block.kind == "thinking"]
        thinking_tokens = sum(block.end - block.start for block in thoughts)
        call_tokens = sum(block.end - block.start for block in blocks if block.kind in ("call", "section"))
        return Answer(
            thinking="\n\n".join(filter(None, map(self._read_thought, thoughts))),
            text=self._read_text(blocks),
            calls=tuple(self._judge(block, tokens, tools, first_call + n) for n, block in enumerate(calls)),
            closed=end < len(tokens),
            thinking_tokens=thinking_tokens,
            call_tokens=call_tokens,
            text_tokens=len(tokens) - thinking_tokens - call_tokens,
        )

    def write(self, message: Message, *, first_call: int = 0) -> list[int]:
        if message.role != "assistant":
            raise InputError(f"only an assistant writes answers, not the {message.role}")
        layout, guard = self.layout, self._guard.text
        for text in (message.thinking, message.content):
            if (mark := self._scanner.mark_in(text)) is not None:
                raise InputError(f"{self.name}: a line that begins with {mark} would be read as a mark, not as text")
        written = guard(message.content)
        if message.calls:
            written += layout.before_calls if written else ""
            written += layout.section[0] if layout.section else ""
            for number, call in enumerate(message.calls):
                parts = self._write_call(_runnable(call), first_call + number)
                written += layout.between_calls if number else ""
                written += layout.call[0] + (layout.separator or "").join(map(guard, parts)) + layout.call[1]
            written += layout.section[1] if layout.section else ""
        return self._guard.encode(self._write_thought(message.thinking) + written + layout.end)

    @classmethod
    @abstractmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer's tokens and chat template are those of this family."""

    @abstractmethod
    def _write_call(self, call: Call, number: int) -> tuple[str, ...]:
        """The text of a call between its marks, in the parts that separators join."""

    @abstractmethod
    def _read_call(self, parts: Sequence[str], tools: Sequence[ToolSchema]) -> tuple[str, Mapping[str, Any]]:
        """The name and the arguments in what `_write_call` writes; raise Malformed for anything else."""

    def _call_id(self, parts: Sequence[str], name: str, number: int) -> str:
        return f"call_{number}"

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """What the template writes from the end of an answer on."""
        text = self._apply_template([*STAND_INS, *map(self._say, messages)], (), True)
        return text[text.index(self.layout.end, text.index(ANSWER)) :]

    def _apply_template(self, said: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], answer: bool) -> str:
        text = self._scribe.render(said, tools or None, add_generation_prompt=answer)
        # A token never spans what the model saw and what it wrote, in turns of the past neither.
        return text.replace(self._opening, self._opening + CUT)

    def _find_opening(self) -> str:
        """What the template puts where the model begins to write."""
        before, after = (self._scribe.render(STAND_INS[:1], add_generation_prompt=asked) for asked in (False, True))
        whole = self._scribe.render(STAND_INS, add_generation_prompt=False)
        if not after.startswith(before) or before == after or self.layout.end not in whole.partition(ANSWER)[2]:
            raise InputError(f"{self.name}: the chat template does not open and close turns in the way of this dialect")
        return after[len(before) :]

    def _token(self, spelling: str) -> int:
        token = self.tokenizer.token_id(spelling)
        if token is None:
            raise InputError(f"{self.name}: the tokenizer has no token {spelling}; is this the model's dialect?")
        return token

    def _say(self, message: Message) -> dict[str, Any]:
        """A message as templates know it, guarded."""
        guard = self._guard.text
        said: dict[str, Any] = {"role": message.role, "content": guard(message.content)}
        if message.role == "tool":
            said["tool_call_id"] = guard(message.call)
            if message.name:
                said["name"] = guard(message.name)
        if message.role == "assistant":
            # Always there: without it, Qwen3's template looks for a thought in the content.
            said["reasoning_content"] = guard(message.thinking)
            if message.calls:
                said["tool_calls"] = [self._say_call(_runnable(call)) for call in message.calls]
        return said

    def _say_call(self, call: Call) -> dict[str, Any]:
        function = {"name": self._guard.text(call.name), "arguments": self._guard.value(call.arguments)}
        return {"id": self._guard.text(call.id), "type": "function", "function": function}

    def _write_thought(self, thinking: str) -> str:
        layout = self.layout
        if thinking and not self.thinks:
            raise InputError(f"{self.name}: this model's template has no place for thoughts; leave thinking empty")
        if not thinking and not (self.thinks and self.always_thinks):
            return ""
        written = self._thought_opening + self._guard.text(thinking) + layout.around_thought + layout.think[1]
        return (written.removeprefix(self._thought_opening) if self._in_thought else written) + layout.after_thought

    def _read_thought(self, block: Block) -> str:
        blank = self.layout.around_thought
        begun = self._in_thought and block.start == 0
        text = block.text if begun else block.text.removeprefix(blank)
        return text.removesuffix(blank) if block.fate == "closed" else text

    def _read_text(self, blocks: Sequence[Block]) -> str:
        """All text, without the blank that the layout puts around thoughts and calls."""
        found = []
        calls = ("call", "section")
        for place, block in enumerate(blocks):
            if block.kind != "text":
                continue
            before = blocks[place - 1].kind if place else ""
            after = blocks[place + 1].kind if place + 1 < len(blocks) else ""
            text = block.text
            if not text.strip() and (before in calls or after == "thinking"):
                continue
            if before == "thinking":
                text = _without_prefix(text, self.layout.after_thought)
            if after in calls and before not in calls:
                text = _without_suffix(text, self.layout.before_calls)
            found.append(text)
        return "".join(found)

    def _judge(self, block: Block, tokens: Sequence[int], tools: Sequence[ToolSchema], number: int) -> Call:
        arguments: Mapping[str, Any] | None = None
        fault = self._misplaced(block)
        try:
            name, read = self._read_call(block.parts, tools)
            if fault is None:
                arguments = read
                if tools and name not in (known := names_of(tools)):
                    fault = Malformed("unknown_tool", _no_such_tool(name, known))
        except Malformed as error:
            name, fault = error.name, fault or error
        return Call(
            name=name,
            arguments=arguments,
            id=self._call_id(block.parts, name, number),
            status=fault.status if fault else "ok",
            raw=self._scanner.decode(tokens[block.start : block.end]),
            span=(block.start, block.end),
            problem=fault.problem if fault else "",
        )

    def _misplaced(self, block: Block) -> Malformed | None:
        """What is wrong around a call, whatever is in it."""
        begin, end = self.layout.call
        if block.fate == "open":
            where = " at the start of a line" if self._scanner.mark_in(end) else ""
            return Malformed("unclosed", f"the answer ended inside the call, before {end}{where}")
        if block.fate == "broken":
            return Malformed("bad_structure", f"something else began inside the call, before {end}")
        if self.layout.section and not block.in_section:
            first, last = self.layout.section
            return Malformed("bad_structure", f"calls, each from {begin} to {end}, stand between {first} and {last}")
        return None


def _runnable(call: Call) -> Call:
    if call.arguments is None:
        raise InputError(f"call {call.id} is {call.status}: it has no arguments to write; only its own tokens show it")
    return replace(call, arguments=dict(call.arguments))


def _no_such_tool(name: str, known: Iterable[str]) -> str:
    # In order, as the model reads this: the same call must have the same answer in every run.
    known, name = sorted(known), name[:80]
    close = get_close_matches(name, known, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"there is no tool {name!r}{meant}; the tools are {', '.join(known)}"


def _without_prefix(text: str, blank: str) -> str:
    return text[next((size for size in range(len(blank), 0, -1) if text.startswith(blank[:size])), 0) :]


def _without_suffix(text: str, blank: str) -> str:
    size = next((size for size in range(len(blank), 0, -1) if text.endswith(blank[:size])), 0)
    return text[: len(text) - size]
