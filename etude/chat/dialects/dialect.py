"""The contract of a dialect: how one model family writes turns, thoughts and tool calls, token for token.

A dialect renders a conversation once, at the start of a segment. From then on tokens are only ever appended: the
model's own as they were sampled, and what `bridge` adds between two answers. Text never becomes a control token,
whatever it spells, and a call is read from the model's tokens only, so a tag in a file is text.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from etude.chat.messages import Answer, Message, ToolSchema
from etude.chat.tokenizer import Tokenizer


class Dialect(ABC):
    """One chat format over one tokenizer."""

    name: str
    stops: frozenset[int]  # tokens that end an answer; the sampler is told to stop at them

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, answer: bool = True
    ) -> list[int]:
        """The tokens of a conversation; with `answer`, up to where the model begins to write.

        Equal to the family's own chat template, except that no text in a message can spell a control token.
        """

    @abstractmethod
    def parse(self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, first_call: int = 0) -> Answer:
        """What an answer means. Never fails: whatever a model may write, every call in it gets a status.

        `first_call` numbers the calls over the whole session, so that ids are the same in every run.
        """

    @abstractmethod
    def bridge(self, answer: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens between the model's last answer and its next: whatever closes the turn, then the new messages.

        `answer` are the tokens of the last answer as sampled; when it was cut off, the first token returned closes
        it. The messages are a user's, or a tool's, in the order of the calls; never an assistant's.
        """

    @abstractmethod
    def write(self, message: Message, *, first_call: int = 0) -> list[int]:
        """The tokens with which a model would write an assistant's message, the end of its turn included.

        For scripted policies and demonstrations: `parse` reads the same message back. What the dialect has no way to
        write is an InputError.
        """
