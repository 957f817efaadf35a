"""Chat messages, tool calls, tokenizers and dialects: the token-exact format of each model family.

    dialect = dialect_for(Tokenizer.load(directory))
    tokens = dialect.render([Message("user", "Fix the failing test.")], tools)

Names are imported on first use, so that reading messages does not load the tokenizer library.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.chat.dialects import chat_dialect as chat_dialect

__getattr__ = lazy_exports(__name__)
