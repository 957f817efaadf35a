"""The tokenizer of nano models: code is the same tokens in a file, in a listing and inside the JSON of a call.

A small model copies token for token or not at all. So quotes and escapes stand alone: `"` in a file is `\\"` in a call,
one for one, whatever is around it. And what sessions always say in the same words (their opening, the frames of calls)
is a token for each line: it costs a model of this size most of its window otherwise, and teaches it nothing.
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
from etude.harness.prompt import Request, opening
from etude.harness.tools.executor import shown_tools
from etude_nano.demonstrator import NANO_ENVIRONMENT
from etude_nano.task_writer import WORKSPACE

VOCABULARY = 4096
LONG = 24  # characters from which a line of the opening is a token of its own
# What calls and results begin, join and end with.
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
PAIRS = ('"""', '\\"\\"\\"', '\\"', "\\n", "\\\\")
# GPT-2's words, every digit alone; all spaces before a quote, an escape or a digit together.
_WORDS = (
    r'"""|\\"\\"\\"|\\.|"|\p{N}|\'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}"\\]+|\s+(?=["\\\p{N}])|\s+(?!\S)|\s+'
)


def train_nano_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of `size` tokens, those of the frames among them."""
    frames = (*opening_lines(), *FRAMES, *PAIRS)
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
    # Without the frames, or most merges would go into them.
    backend.train_from_iterator((part for text in texts for part in framed.split(text) if part), trainer)
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in FRAME_TOKENS
    # A word that is a token as a whole needs no merges that lead to it.
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
    """Text as a byte-level vocabulary spells it."""
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(part for part, _ in spelt)


@cache
def opening_lines() -> tuple[str, ...]:
    """The long lines that every session begins with, each with the end of line that follows it."""
    plain = train_tokenizer([], 300)  # any tokenizer will do to write it
    tools = [shown.schema for shown in shown_tools(NANO_ENVIRONMENT).values()]
    messages = opening(Request("", id="opening"), NANO_ENVIRONMENT, WORKSPACE)
    text = plain.decode(dialect_for(plain).render(messages, tools))
    parts = re.split("|".join(map(re.escape, (*FRAME_TOKENS, *MARKUP_TOKENS))), text)
    lines = [line for part in parts for line in part.splitlines(keepends=True)]
    return tuple(dict.fromkeys(line for line in lines if len(line) >= LONG))
