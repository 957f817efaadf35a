"""Qwen3: ChatML with Hermes-style tool calls, and thinking at the start of every turn.

Its template removes the thinking of turns before the last user message, so rendering a longer conversation again
changes its beginning. `bridge` does not: all sampled tokens stay in the context.
"""

from etude.chat.dialects.chatml import ChatML
from etude.chat.tokenizer import Tokenizer


class Qwen3(ChatML):
    name = "qwen3"
    template = None
    text_marks = False
    always_thinks = True

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        """Return whether this is a published ChatML template with Hermes calls, such as those of Qwen2.5 and Qwen3."""
        template = tokenizer.chat_template or ""
        hermes = "<|im_start|>" in template and "<tool_call>" in template and "<function=" not in template
        return hermes and not ChatML.fits(tokenizer)
