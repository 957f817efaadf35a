"""Qwen3: ChatML with calls in the way of Hermes, and a thought before every answer.

Its template takes thoughts out of answers before the last question of a user, so rendering a longer conversation
again changes its beginning. A bridge does not: what the model wrote stays in its context, to the token.
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
        """Any published ChatML with such calls, so also Qwen3's models that do not think, and Qwen2.5's."""
        template = tokenizer.chat_template or ""
        hermes = "<|im_start|>" in template and "<tool_call>" in template and "<function=" not in template
        return hermes and not ChatML.fits(tokenizer)
