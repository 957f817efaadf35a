"""A byte-level BPE tokenizer with its chat template, stored in Hugging Face files.

Ordinary text is untrusted: without `special=True`, no text becomes a control token, whatever it spells. transformers
loads what `save` writes and produces the same ids.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from etude.chat.template import render_template
from etude.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"

# Tokens with a role, by their keys in tokenizer_config.json; templates see them under these names.
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")

# End-of-document tokens by family: Qwen and GPT-2, Llama 3, DeepSeek, Kimi, Llama 2.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[EOS]", "</s>")
END_OF_TURN = "<|im_end|>"

# Spelled and split as in Qwen: `decode(skip_special=True)` hides the frame of a chat and keeps the markup, so the
# text still shows thinking and tool calls.
FRAME_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)

# ChatML with Hermes-style tools. Append-only: a chat renders to a prefix of any longer chat that begins with it, so
# earlier thinking stays, no text is trimmed, and a turn of tool results stays open until a message of another role (or
# the generation prompt) closes it.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is sequence and content is not mapping -%}
        {%- for part in content -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('only text parts can be rendered, not ' ~ part.type) -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- elif content is defined and content is not none -%}
        {{- raise_exception('the content of a message is text or a list of text parts') -}}
    {%- endif -%}
{%- endmacro -%}
{%- if not messages -%}
    {{- raise_exception('a chat has at least one message') -}}
{%- endif -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}
        {{- text_of(messages[0].content) + '\\n\\n' -}}
    {%- endif -%}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\\n' + tool | tojson -}}
    {%- endfor -%}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' -}}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first and tools -%}
        {#- Rendered above, together with the tools. -#}
    {%- elif message.role in ('system', 'user') -%}
        {{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) + '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {%- set content = text_of(message.content) -%}
        {{- content -}}
        {%- for tool_call in message.tool_calls or [] -%}
            {%- set call = tool_call.function or tool_call -%}
            {{- '\\n' if content or not loop.first -}}
            {{- '<tool_call>\\n{"name": ' + call.name | tojson + ', "arguments": ' -}}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + text_of(message.content) + '\\n</tool_response>' -}}
        {%- if (add_generation_prompt if loop.last else loop.nextitem.role != 'tool') -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- raise_exception('a role is system, user, assistant or tool, not ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


class Tokenizer:
    """A `tokenizers` tokenizer, its chat template, and the ids that matter to training and sampling.

    `config` is the content of tokenizer_config.json without the template. `stop_ids` are added to those of the
    tokenizer itself (its eos token, the end of a turn, the end of a document).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        config: Mapping[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        # A tokenizer.json may carry truncation or padding settings from earlier use; text is never cut or padded here.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.config = dict(config or {})
        self.roles = _roles(self.config, backend)
        self.end_of_text = self._find_end_of_text()
        # The token put before every text (by DeepSeek and Llama, not by Qwen); `encode` leaves it out.
        self.prefix = backend.encode("", add_special_tokens=True).ids[:1]
        own = (self.token_id(END_OF_TURN), self._role_id("eos_token"), self.end_of_text)
        self.stop_ids = frozenset(stop_ids) | {token for token in own if token is not None}

    @classmethod
    def load(cls, directory: Path | str) -> "Tokenizer":
        """Load from a Hugging Face directory; raise InputError naming the file that is missing or wrong."""
        directory = Path(directory)
        if not directory.is_dir():
            raise InputError(f"{directory}: no such directory; a tokenizer is loaded from a directory")
        backend = _read_backend(directory / TOKENIZER_FILE)
        config = _read_json(directory / CONFIG_FILE)
        template = _read_template(directory, config.pop("chat_template", None))
        stop_ids = _read_eos_ids(directory / GENERATION_FILE) | _read_eos_ids(directory / "config.json")
        try:
            return cls(backend, chat_template=template, config=config, stop_ids=stop_ids)
        except InputError as error:
            raise InputError(f"{directory / CONFIG_FILE}: {error}") from None

    def save(self, directory: Path | str) -> None:
        """Write the files that `load` and transformers read; of generation_config.json, only the token ids."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # Without a class, transformers may rebuild the tokenizer by the model's type and lose parts of it.
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        } | self.config
        ids = {f"{role}_id": self._role_id(role) for role in ("bos_token", "pad_token")}
        generation = _read_json(directory / GENERATION_FILE) | {
            "eos_token_id": sorted(self.stop_ids),
            **{key: value for key, value in ids.items() if value is not None},
        }
        (directory / TOKENIZER_FILE).write_text(self._serialized, encoding="utf-8")
        _write_json(directory / CONFIG_FILE, config)
        _write_json(directory / GENERATION_FILE, generation)
        if self.chat_template is None:
            (directory / TEMPLATE_FILE).unlink(missing_ok=True)
        else:
            (directory / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode `text`; `special=True` recognizes control tokens in it and is for rendered chats only."""
        try:
            return self._encoder(special).encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise InputError(_not_unicode(text)) from error

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Encode many texts at once, on all cores."""
        try:
            encodings = self._encoder(special).encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise InputError(next(filter(None, map(_not_unicode, texts)), str(error))) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Decode `ids`; bytes that are not UTF-8 (a character cut in half) become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling, None if it is not in the vocabulary."""
        return self.backend.token_to_id(token)

    @property
    def start(self) -> int:
        """The token from which a document's first token is predicted: the prefix token, else the end of a document."""
        return self.prefix[0] if self.prefix else self.end_of_text

    @cached_property
    def _control(self) -> re.Pattern[str]:
        added = self.backend.get_added_tokens_decoder().values()
        spellings = sorted(token.content for token in added if _is_control(token.content))
        return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    def find_control_token(self, text: str) -> str | None:
        """Return the first control token that `text` spells, None if it spells none."""
        found = self._control.search(text)
        return found[0] if found else None

    def __len__(self) -> int:
        """Return the highest id plus one: the rows an embedding needs."""
        return self._length

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a chat with the chat template; `variables` are template variables such as `enable_thinking`."""
        if self.chat_template is None:
            raise InputError("this tokenizer has no chat template; add a chat_template.jinja next to tokenizer.json")
        if tools and "tools" not in self.chat_template:
            raise InputError("tools were given, but the chat template of this tokenizer does not render tools")
        values = self.roles | {"messages": list(messages), "tools": list(tools) if tools else None} | variables
        values |= {"documents": None, "add_generation_prompt": add_generation_prompt}
        return render_template(self.chat_template, values)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of tokenizer.json as `save` writes it: equal digests mean equal ids."""
        return hashlib.sha256(self._serialized.encode()).hexdigest()

    @cached_property
    def _serialized(self) -> str:
        return self.backend.to_str(pretty=True)

    @cached_property
    def _length(self) -> int:
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def _plain(self) -> Backend:
        return _without_control_tokens(self._serialized)

    def _encoder(self, special: bool) -> Backend:
        return self.backend if special else self._plain

    def _role_id(self, role: str) -> int | None:
        return self.token_id(self.roles[role]) if role in self.roles else None

    def _find_end_of_text(self) -> int:
        for token in (*END_OF_TEXT, self.roles.get("eos_token")):
            if token is not None and (found := self.token_id(token)) is not None:
                return found
        raise InputError(
            f"the tokenizer has no token that ends a document: none of {', '.join(END_OF_TEXT)} and no eos_token"
        )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raise InputError if the tokenizer has ids beyond the model's vocabulary; unused model rows are normal padding."""
    if (highest := len(tokenizer) - 1) >= vocab_size:
        raise InputError(f"{where}: the tokenizer has ids up to {highest}, but the model's vocab_size is {vocab_size}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; the same texts give the same tokenizer.json."""
    reserved = (*FRAME_TOKENS, *MARKUP_TOKENS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(reserved) + len(alphabet)
    if vocab_size > 2**24:
        raise InputError(f"vocab_size = {vocab_size} is too large: expected at most {2**24}")
    if vocab_size < smallest:
        raise InputError(
            f"vocab_size = {vocab_size} is too small: "
            f"{len(reserved)} special tokens and {len(alphabet)} bytes need at least {smallest}"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = split_digits_then_words()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in reserved],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # The trainer marks all of them special; markup must stay visible when special tokens are skipped.
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in FRAME_TOKENS
    return Tokenizer(
        Backend.from_str(json.dumps(state, ensure_ascii=False)),
        chat_template=CHAT_TEMPLATE,
        config={"eos_token": END_OF_TURN, "pad_token": "<|endoftext|>"},
    )


def split_digits_then_words() -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of new tokenizers: single digits, then GPT-2's byte-level words, as in SmolLM2."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([digits, words])


def _without_control_tokens(serialized: str) -> Backend:
    """Return the tokenizer without control tokens: they are neither matched in text nor merged from bytes.

    The library's `encode_special_tokens` is not enough: it still matches added tokens that are not marked special, and
    Qwen's <tool_call> is one of those.
    """
    state = json.loads(serialized)
    control = {token["content"] for token in state["added_tokens"] if _is_control(token["content"])}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in control]
    state["post_processor"] = None
    model = state["model"]
    model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in control}
    # On loading, an added token gets the next free id unless the vocabulary already assigns one.
    model["vocab"] |= {token["content"]: token["id"] for token in state["added_tokens"]}
    model["merges"] = [pair for pair in model["merges"] if control.isdisjoint((*pair, "".join(pair)))]
    if model["unk_token"] in control:
        model["unk_token"] = None
    return Backend.from_str(json.dumps(state, ensure_ascii=False))


def _is_control(added: str) -> bool:
    # Families add runs of spaces (GPT-NeoX) or use a single "!" as padding; those must stay text.
    return len(added.strip()) > 1


def _not_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"text is not valid Unicode: lone surrogate at character {error.start}; replace it first"
    return ""


def _roles(config: Mapping[str, Any], backend: Backend) -> dict[str, str]:
    """Return the tokens with a role; each is a string or, in older files, an object with its `content`."""
    roles = {}
    for role in ROLES:
        value = config.get(role)
        token = value.get("content") if isinstance(value, dict) else value
        if token is None:
            continue
        if not isinstance(token, str) or backend.token_to_id(token) is None:
            raise InputError(f"{role} {token!r} is not in the vocabulary of {TOKENIZER_FILE}")
        roles[role] = token
    return roles


def _read_backend(path: Path) -> Backend:
    text = _read_text(path)
    if text is None:
        raise InputError(f"{path}: no such file; a tokenizer needs it")
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises the bare class
        raise InputError(f"{path}: not a tokenizer: {error}") from error
    if not isinstance(backend.model, models.BPE):
        raise InputError(f"{path}: a {type(backend.model).__name__} tokenizer; only BPE is supported")
    return backend


def _read_template(directory: Path, in_config: object) -> str | None:
    """Return the template; chat_template.jinja overrides the key in tokenizer_config.json, as in transformers."""
    if (text := _read_text(directory / TEMPLATE_FILE)) is not None:
        return text
    if in_config is None or isinstance(in_config, str):
        return in_config
    raise InputError(
        f"{directory / CONFIG_FILE}: chat_template is not a single template; put the one to use in {TEMPLATE_FILE}"
    )


def _read_eos_ids(path: Path) -> frozenset[int]:
    value = _read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise InputError(f"{path}: eos_token_id is an id or a list of ids, not {value!r}")
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in an optional file, {} when there is no such file."""
    text = _read_text(path)
    try:
        value = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
