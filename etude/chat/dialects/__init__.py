"""Dialects: how each model family writes turns, thoughts and tool calls, token for token."""

from collections.abc import Mapping

from etude.chat.dialects.chatml import ChatML
from etude.chat.dialects.deepseek_v3 import DeepSeekV3
from etude.chat.dialects.dialect import Dialect
from etude.chat.dialects.kimi_k2 import KimiK2
from etude.chat.dialects.qwen3 import Qwen3
from etude.chat.dialects.qwen3_coder import Qwen3Coder
from etude.chat.dialects.turns import TurnDialect
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError

FAMILIES: tuple[type[TurnDialect], ...] = (ChatML, Qwen3, Qwen3Coder, KimiK2, DeepSeekV3)
DIALECTS: Mapping[str, type[TurnDialect]] = {family.name: family for family in FAMILIES}


def dialect_for(tokenizer: Tokenizer, name: str | None = None) -> Dialect:
    """The dialect of that name or, without one, that of the family whose tokens and chat template these are."""
    names = ", ".join(DIALECTS)
    if name is not None:
        if name not in DIALECTS:
            raise InputError(f"{name} is not a dialect; choose one of {names}")
        return DIALECTS[name](tokenizer)
    fitting = [family for family in FAMILIES if family.fits(tokenizer)]
    if len(fitting) != 1:
        found = " and ".join(family.name for family in fitting) or "none"
        raise InputError(f"the chat template is that of no family known here (fitting: {found}); name one of {names}")
    return fitting[0](tokenizer)
