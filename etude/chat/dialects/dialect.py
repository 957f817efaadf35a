"""The contract of a dialect: how one model family writes turns, thinking and tool calls, token for token.

A dialect renders a conversation once, at the start of a segment. After that tokens are only appended: sampled tokens
as they are, and the tokens of `bridge` between two turns. Text never becomes a control token, whatever it spells, and
calls are parsed only from sampled token ids, so a tag in a file stays text.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from etude.chat.messages import Message, ParsedTurn, ToolSchema
from etude.chat.tokenizer import Tokenizer


class Dialect(ABC):
    """One chat format over one tokenizer."""

    name: str
    stops: frozenset[int]  # token ids that end a turn; passed to the sampler as stop tokens

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of a conversation, by default with the generation prompt.

        Equal to the family's own chat template, except that no text in a message can spell a control token.
        """

    @abstractmethod
    def parse(self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, first_call: int = 0) -> ParsedTurn:
        """Parse the sampled tokens of one turn. Never fails: every call gets a status, whatever the model wrote.

        `first_call` numbers the calls over the whole session, so that ids are the same in every run.
        """

    @abstractmethod
    def bridge(self, completion: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between two model turns: the rest of the closing turn, new messages, generation prompt.

        `completion` is the last turn as sampled; if it was cut off, the first token returned closes it. The messages
        are from the user or from tools, in the order of the calls; never from the assistant.
        """

    @abstractmethod
    def write(self, message: Message, *, first_call: int = 0) -> list[int]:
        """Return the tokens a model would sample to write an assistant message, including the end of the turn.

        For scripted policies and demonstrations: `parse` returns the same message. Raise InputError for a message
        that the dialect cannot represent.
        """
