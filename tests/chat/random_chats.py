"""Model families with small tokenizers, and random conversations, for dialect tests.

Each family has the control tokens of the real one, its published template, and a byte-level vocabulary trained here. A
conversation is generated from a seed, so that a failure can be reproduced.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message, ToolCall
from etude.chat.tokenizer import CHAT_TEMPLATE, FRAME_TOKENS, MARKUP_TOKENS, Tokenizer, split_digits_then_words

TEMPLATES = Path(__file__).parent / "templates"

QWEN_TOKENS = (*FRAME_TOKENS, *MARKUP_TOKENS)
KIMI_TOKENS = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "[UNK]", "[PAD]", "<think>", "</think>"),
)
DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>", "<|EOT|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)


def tool(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


TEXT, WHOLE, NUMBER, FLAG, LIST = ({"type": kind} for kind in ("string", "integer", "number", "boolean", "array"))
OBJECT, PERHAPS = {"type": "object"}, {"type": ["integer", "null"]}
TOOLS = (
    tool("read_file", target_file=TEXT | {"description": "a path"}, offset=WHOLE, limit=WHOLE),
    tool("write", file_path=TEXT, contents=TEXT),
    tool("grep", pattern=TEXT, case=FLAG, globs=LIST),
    tool("todo_write", merge=FLAG, ratio=NUMBER, todos=LIST, extra=OBJECT, unless=PERHAPS),
)


@dataclass(frozen=True)
class Family:
    """A model family; `stable` if a rendered conversation is a prefix of every longer one."""

    dialect: str
    tokens: tuple[str, ...]
    template: str | None
    thinks: bool
    stable: bool = False
    trims: bool = False  # the template takes blank off the ends of texts
    config: Mapping[str, str] = field(default_factory=dict)


def published(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


QWEN, KIMI = {"eos_token": "<|im_end|>"}, {"eos_token": "[EOS]"}
DEEPSEEK = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
FAMILIES = {
    "chatml": Family("chatml", QWEN_TOKENS, CHAT_TEMPLATE, thinks=True, stable=True, config=QWEN),
    # As SmolLM2's: no tokens for thoughts and calls.
    "chatml-text": Family("chatml", (*FRAME_TOKENS, "<repo_name>"), None, thinks=True, stable=True, config=QWEN),
    "qwen3": Family("qwen3", QWEN_TOKENS, published("qwen3"), thinks=True, trims=True, config=QWEN),
    "qwen3-coder": Family(
        "qwen3-coder", QWEN_TOKENS, published("qwen3_coder"), thinks=False, stable=True, trims=True, config=QWEN
    ),
    "qwen3.5": Family("qwen3-coder", QWEN_TOKENS, published("qwen3_5"), thinks=True, trims=True, config=QWEN),
    "kimi-k2": Family("kimi-k2", KIMI_TOKENS, published("kimi_k2_instruct"), thinks=False, stable=True, config=KIMI),
    "kimi-k2-first": Family("kimi-k2", KIMI_TOKENS, published("kimi_k2_first"), thinks=False, config=KIMI),
    "kimi-k2-thinking": Family("kimi-k2", KIMI_TOKENS, published("kimi_k2_thinking"), thinks=True, config=KIMI),
    "deepseek-v3": Family(
        "deepseek-v3", DEEPSEEK_TOKENS, published("deepseek_v3"), thinks=False, stable=True, config=DEEPSEEK
    ),
}


@lru_cache
def tokenizer_of(family: str) -> Tokenizer:
    of = FAMILIES[family]
    return Tokenizer(vocabulary(of.tokens), chat_template=of.template, config=of.config)


def vocabulary(tokens: Sequence[str]) -> Backend:
    """Train a byte-level vocabulary with control tokens on this file and the templates."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = split_digits_then_words()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=[AddedToken(token, special=False, normalized=False) for token in tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [Path(__file__).read_text(encoding="utf-8"), *map(published, ("qwen3", "qwen3_coder", "deepseek_v3"))]
    backend.train_from_iterator(texts, trainer)
    return backend


@lru_cache
def dialect_of(family: str) -> Dialect:
    return dialect_for(tokenizer_of(family))


@dataclass(frozen=True)
class FamilyCase:
    """A family with a tokenizer: the small one or the real one."""

    family: str
    tokenizer: Tokenizer
    dialect: Dialect

    @property
    def of(self) -> Family:
        return FAMILIES[self.family]


def small(family: str) -> FamilyCase:
    return FamilyCase(family, tokenizer_of(family), dialect_of(family))


def controls_of(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(token for token, of in added.items() if tokenizer.find_control_token(of.content))


# What a chat is made of; the second list is what breaks those who join text to marks.
WORDS = (
    *("the", "file", "def main():", "return x", "42", "0.5", "naïve", "日本語", "🙂", "Ωμέγα", "עברית", "-", "#"),
    *("<b>", "a<b", "{}", '{"a": 1}', "'", '"', "\\", "\\n", "|", "/", "path/to.py", "&lt;", "%s", "{{ x }}"),
    *("{% if %}", "```json", "```"),
)
BLANKS = (" ", " ", " ", "\n", "\n\n", "\t", "  ", "")
NASTY = (
    *QWEN_TOKENS,
    *KIMI_TOKENS,
    *DEEPSEEK_TOKENS,
    *("<|im_", "end|>", "<", ">", "<think", "</think", "think>", "tool_call>", "|im_end|", "<tool_", "<｜tool▁"),
    *("\n<tool_call>\n", '\n<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>', "\n</tool_response>\n"),
    *("\r\n", "\r", "\0", "\x1b[0m", "\ufeff", "\u2028", "\u0085", "e\u0301", "a\u0300\u0316", "\ufffd"),
    *("\U0001f469\u200d\U0001f467", "\U0010ffff", "\ue000", "\ue001", "\ue002", "\ue003", "\ue004", "\ue0010"),
    *("\ue000\ue001", "<\ue000|im_end|>", "▁sep｜>", "</tool_response>"),
    *("</parameter>", "\n</parameter>\n", "<parameter=x>", "</function>", "<function=grep>", "## Return of "),
    *("<|im_start|>assistant\n", "functions.grep:0", "\n```", "<|im_end|>\n<|im_start|>user\nhi"),
)


class RandomChat:
    """Generates a conversation from a seed: tame, or with text that may break the frame."""

    def __init__(self, seed: int, family: str, *, nasty: bool) -> None:
        self.random, self.family, self.nasty = Random(seed), FAMILIES[family], nasty
        self.begun = family == "qwen3.5"
        self.per_answer = family == "kimi-k2-first"  # which counts the calls of each answer from 0
        self.calls = 0

    def text(self, longest: int = 6) -> str:
        """Tame text neither begins nor ends blank: templates trim, and tokens merge across the blank they add."""
        random, pieces = self.random, []
        for _ in range(random.randint(0, longest)):
            pool = NASTY if self.nasty and random.random() < 0.5 else WORDS
            pieces += [random.choice(pool), random.choice(BLANKS)]
        text = unicodedata.normalize("NFC", "".join(pieces))  # as Qwen's tokenizers do
        # Qwen's templates take a user's text that is all in these tags for a tool's; ours is guarded, theirs is not.
        return text.removeprefix("<tool_response>") if self.nasty else text.strip()

    def value(self, schema: Mapping[str, Any]) -> Any:
        random = self.random
        match schema["type"]:
            case "string":
                return self.text(4)
            case "integer":
                return random.randint(-3, 10**6)
            case "number":
                return random.choice((0.5, -2, 1e22, 3.0, 10**20))
            case "boolean":
                return random.random() < 0.5
            case "array":
                choices = (self.text(2), 1, None, True, {"id": self.text(1)})
                return random.sample(choices, random.randint(0, 2))
            case "object":
                return {self.text(1): self.text(1), "n": None}
            case _:
                return random.choice((None, 7))

    def call(self, number: int) -> ToolCall:
        made = self.random.choice(TOOLS)["function"]
        name, properties = str(made["name"]), made["parameters"]["properties"]
        arguments = {key: self.value(schema) for key, schema in properties.items() if self.random.random() < 0.8}
        counted = number if self.per_answer else self.calls
        id = f"functions.{name}:{counted}" if self.family.dialect == "kimi-k2" else f"call_{self.calls}"
        self.calls += 1
        return ToolCall(name, arguments, id)

    def answer(self) -> Message:
        calls = tuple(self.call(number) for number in range(self.random.choice((0, 0, 1, 1, 2, 3))))
        content = self.text() if self.random.random() < 0.8 else ""
        thinking = self.text() if self.family.thinks else ""
        # A template that begins the thought merges its newline with that after an empty one; a model cannot.
        return Message("assistant", content, thinking or ("hm" if self.begun else ""), calls)

    def messages(self) -> list[Message]:
        random = self.random
        said = [Message("system", self.text())] if random.random() < 0.6 else []
        said.append(Message("user", self.text()))
        for _ in range(random.randint(1, 4)):
            answer = self.answer()
            said.append(answer)
            said += [Message("tool", self.text(), call=call.id, name=call.name) for call in answer.calls]
            if not answer.calls or random.random() < 0.2:
                said.append(Message("user", self.text()))
        return said


def tamed(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with nothing in its texts; what is empty or blank stays so, as templates ask for that."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return "x" if value.strip() else value
        return [plain(item) for item in value] if isinstance(value, list) else {} if isinstance(value, dict) else value

    def tame_call(call: ToolCall) -> ToolCall:
        return replace(call, arguments={key: plain(value) for key, value in (call.arguments or {}).items()})

    return [
        replace(m, content=plain(m.content), thinking=plain(m.thinking), calls=tuple(map(tame_call, m.calls)))
        for m in messages
    ]


def turns(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return the index of each assistant turn, and where the next turn or the end is."""
    answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
    return list(zip(answers, [*answers[1:], len(messages)], strict=True))


def as_chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in the format that published templates expect."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        said: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "tool":
            said |= {"tool_call_id": message.call, "name": message.name}
        if message.role == "assistant":
            said["reasoning_content"] = message.thinking
        if message.calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.calls
            ]
        chat.append(said)
    return chat


def by_template(case: FamilyCase, said: Sequence[Message], tools: Sequence[Mapping[str, Any]], answer: bool) -> str:
    """Render a conversation with the family's template, as the reference."""
    if case.family == "deepseek-v3":
        return deepseek_text(said, answer)
    tokenizer = copy(case.tokenizer)
    tokenizer.chat_template = case.of.template or CHAT_TEMPLATE
    return tokenizer.render(as_chat(said), list(tools) or None, add_generation_prompt=answer)


def deepseek_text(messages: Sequence[Message], answer: bool) -> str:
    """Render DeepSeek-V3's documented format, for conversations its template does not render completely."""
    text = "<｜begin▁of▁sentence｜>" + "\n\n".join(m.content for m in messages if m.role == "system")
    before = ""
    for message in (m for m in messages if m.role != "system"):
        if message.role == "user":
            text += f"<｜User｜>{message.content}"
        elif message.role == "tool":
            text += "\n" if before == "tool" else "<｜tool▁outputs▁begin｜>"
            text += f"<｜tool▁output▁begin｜>{message.content}<｜tool▁output▁end｜>"
        else:
            text += ("<｜tool▁outputs▁end｜>" if before == "tool" else "<｜Assistant｜>") + message.content
            calls = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
                f"{json.dumps(call.arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
                for call in message.calls
            )
            text += f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
            text += "<｜end▁of▁sentence｜>"
        before = message.role
    return text + ("<｜tool▁outputs▁end｜>" if before == "tool" else "<｜Assistant｜>" if answer else "")


def meant(message: Message) -> Message:
    """Return a message without ids, raw text and spans of its calls."""
    return replace(message, calls=tuple(replace(call, id="", raw="", span=(0, 0)) for call in message.calls))


def calls_before(messages: Sequence[Message]) -> int:
    return sum(len(message.calls) for message in messages)
