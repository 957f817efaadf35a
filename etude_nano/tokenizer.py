"""The tokenizer of nano models: code has the same tokens in a file, in a listing and inside the JSON of a call.

A small model copies token for token or not at all, so quotes and escapes are separate tokens: `"` in a file is `\\"` in
a call, one for one, in every context. The constant lines of sessions (their opening, the frames of calls) are one token
each: otherwise they would take most of such a model's window and teach it nothing.
"""

import json
import re
from collections.abc import Iterable
from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TURN,
    FRAME_TOKENS,
    MARKUP_TOKENS,
    Tokenizer,
    train_tokenizer,
)
from etude.harness.prompt import SessionRequest, opening_messages
from etude.harness.tools.executor import exposed_tools
from etude_nano.demonstrator import NANO_TOOL_SET
from etude_nano.task_writer import WORKSPACE

VOCABULARY = 4096
MIN_LINE_TOKEN_CHARS = 24  # from this length on, a line of the opening is one token
# The constant parts of calls and results.
FRAMES = (
    '\n{"name": "read_file", "arguments": {"target_file": "',
    '\n{"name": "search_replace", "arguments": {"file_path": "',
    '\n{"name": "run_terminal_cmd", "arguments": {"command": "',
    '", "old_string": "',
    '", "new_string": "',
    '", "replace_all": true}}\n',
    '"}}\n',
    "[exit code 0]",
    "[exit code 1]",
    'Traceback (most recent call last):\n  File "/work/',
)
# One token each, in code and in JSON.
ESCAPE_TOKENS = ('"""', '\\"\\"\\"', '\\"', "\\n", "\\\\")
# GPT-2's words, but digits are single, and all spaces before a quote, an escape or a digit stay together.
_WORDS = (
    r'"""|\\"\\"\\"|\\.|"|\p{N}|\'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}"\\]+|\s+(?=["\\\p{N}])|\s+(?!\S)|\s+'
)


def train_nano_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens, including those of the frames."""
    frames = (*opening_lines(), *FRAMES, *ESCAPE_TOKENS)
    framed = re.compile("|".join(map(re.escape, sorted(frames, key=len, reverse=True))))
    reserved = (*FRAME_TOKENS, *MARKUP_TOKENS)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = _split(())
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(frames),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in reserved],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Train without the frames; otherwise most merges would be spent on them.
    backend.train_from_iterator((part for text in texts for part in framed.split(text) if part), trainer)
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in FRAME_TOKENS
    # The frames have no merges: look up whole words first.
    state["model"]["ignore_merges"] = True
    vocabulary = state["model"]["vocab"]
    for frame in frames:
        vocabulary[_bytes_of(frame)] = 1 + max(vocabulary.values())
    whole = Backend.from_str(json.dumps(state, ensure_ascii=False))
    whole.pre_tokenizer = _split(frames)
    return Tokenizer(
        whole, chat_template=CHAT_TEMPLATE, config={"eos_token": END_OF_TURN, "pad_token": "<|endoftext|>"}
    )


def _split(frames: Iterable[str]) -> pre_tokenizers.PreTokenizer:
    spelt = [re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", frame) for frame in sorted(frames, key=len, reverse=True)]
    words = pre_tokenizers.Split(Regex("|".join([*spelt, _WORDS])), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _bytes_of(text: str) -> str:
    """Return the spelling of a text in a byte-level vocabulary."""
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(part for part, _ in spelt)


@cache
def opening_lines() -> tuple[str, ...]:
    """Return the long lines that every session begins with, each with its newline."""
    plain = train_tokenizer([], 300)  # any tokenizer can render the text
    tools = [shown.schema for shown in exposed_tools(NANO_TOOL_SET).values()]
    messages = opening_messages(SessionRequest("", id="opening"), NANO_TOOL_SET, WORKSPACE)
    text = plain.decode(dialect_for(plain).render(messages, tools))
    parts = re.split("|".join(map(re.escape, (*FRAME_TOKENS, *MARKUP_TOKENS))), text)
    lines = [line for part in parts for line in part.splitlines(keepends=True)]
    return tuple(dict.fromkeys(line for line in lines if len(line) >= MIN_LINE_TOKEN_CHARS))
