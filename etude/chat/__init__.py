"""Chat messages, tool calls, tokenizers and dialects: the token-exact format of each model family.

    dialect = dialect_for(Tokenizer.load(directory))
    tokens = dialect.render([Message("user", "Fix the failing test.")], tools)

Names are imported on first use, so that reading messages does not load the tokenizer library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.chat.dialects import dialect_for
    from etude.chat.dialects.dialect import Dialect
    from etude.chat.messages import Message, ParsedTurn, ToolCall
    from etude.chat.tokenizer import Tokenizer, train_tokenizer

_HOMES = {
    "ToolCall": "etude.chat.messages",
    "Dialect": "etude.chat.dialects.dialect",
    "Message": "etude.chat.messages",
    "ParsedTurn": "etude.chat.messages",
    "Tokenizer": "etude.chat.tokenizer",
    "dialect_for": "etude.chat.dialects",
    "train_tokenizer": "etude.chat.tokenizer",
}
__all__ = [
    "Dialect",
    "Message",
    "ParsedTurn",
    "Tokenizer",
    "ToolCall",
    "dialect_for",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.chat' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
