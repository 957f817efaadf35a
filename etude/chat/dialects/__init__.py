"""Dialects: how each model family writes turns, thinking and tool calls, token for token.

`dialect_for(tokenizer)` picks the dialect by the tokenizer's control tokens and chat template.
"""

from etude.chat.dialects.chatml import ChatML
from etude.chat.dialects.deepseek_v3 import DeepSeekV3
from etude.chat.dialects.dialect import Dialect
from etude.chat.dialects.kimi_k2 import KimiK2
from etude.chat.dialects.qwen3 import Qwen3
from etude.chat.dialects.qwen3_coder import Qwen3Coder
from etude.chat.dialects.turns import TurnDialect
from etude.chat.tokenizer import Tokenizer
from etude.config import Registry
from etude.errors import InputError

__all__ = ["DIALECTS", "Dialect", "chat_dialect", "dialect_for"]

DIALECTS = Registry[type[TurnDialect]]("dialect")
chat_dialect = DIALECTS.add  # decorator of a class with the attribute `name`
for _builtin in (ChatML, Qwen3, Qwen3Coder, KimiK2, DeepSeekV3):
    DIALECTS.add(_builtin)


def dialect_for(tokenizer: Tokenizer, name: str | None = None) -> TurnDialect:
    """Return the named dialect or, without a name or with "auto", the one that matches tokens and chat template."""
    if name not in (None, "", "auto"):
        return DIALECTS[name](tokenizer)
    matching = [family for family in DIALECTS.values() if family.fits(tokenizer)]
    if len(matching) != 1:
        names, found = ", ".join(DIALECTS), " and ".join(family.name for family in matching) or "none"
        raise InputError(f"the chat template must match exactly one dialect (matching: {found}); name one of {names}")
    return matching[0](tokenizer)
