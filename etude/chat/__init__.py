"""Chat messages, tool calls, tokenizers and dialects: the token-exact format of each model family.

    dialect = dialect_for(Tokenizer.load(directory))
    tokens = dialect.render([Message("user", "Fix the failing test.")], tools)

Names are imported on first use, so that reading messages does not load the tokenizer library.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.chat.dialects import chat_dialect, dialect_for
    from etude.chat.dialects.dialect import Dialect
    from etude.chat.messages import Message, ParsedTurn, ToolCall
    from etude.chat.tokenizer import Tokenizer, train_tokenizer

_MODULES = {
    "ToolCall": "etude.chat.messages",
    "Dialect": "etude.chat.dialects.dialect",
    "Message": "etude.chat.messages",
    "ParsedTurn": "etude.chat.messages",
    "Tokenizer": "etude.chat.tokenizer",
    "chat_dialect": "etude.chat.dialects",
    "dialect_for": "etude.chat.dialects",
    "train_tokenizer": "etude.chat.tokenizer",
}
__all__ = [
    "Dialect",
    "Message",
    "ParsedTurn",
    "Tokenizer",
    "ToolCall",
    "chat_dialect",
    "dialect_for",
    "train_tokenizer",
]
__getattr__ = lazy_exports(__name__, _MODULES)
