"""A policy with fixed turns, for demonstrations and tests.

A script gives the assistant message of each turn; the dialect writes it as tokens, so a demonstration is exactly what a
model would have to sample.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message
from etude.errors import EtudeError, InputError
from etude.inference.policy import PolicyBase, Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling

ScriptLine = Message | Sequence[int]  # a message, or token ids as they are


class ScriptedPolicy(PolicyBase):
    """Returns its lines in order. A function in place of lines gets the prompt tokens of each turn."""

    def __init__(self, dialect: Dialect, lines: Iterable[ScriptLine] | Callable[[Sequence[int]], ScriptLine]) -> None:
        self.dialect = dialect
        self._lines: Iterator[ScriptLine] | Callable[[Sequence[int]], ScriptLine] = (
            lines if callable(lines) else iter(lines)
        )
        self.prompts: list[list[int]] = []

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        self.prompts.append(list(tokens))
        line = self._lines(tokens) if callable(self._lines) else next(self._lines, None)
        if line is None:
            raise EtudeError(f"the script has no more lines, but turn {len(self.prompts)} was requested")
        return [
            scripted_completion(self.dialect.write(line) if isinstance(line, Message) else line, sampling)
        ] * sampling.samples

    async def load(self, weights: Weights, version: int) -> None:
        raise InputError("a script has no weights")

    async def version(self) -> int:
        return 0

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def scripted_completion(tokens: Sequence[int], sampling: Sampling) -> Completion:
    """Return the tokens as a completion with probability 1 and version 0, cut where the sampler would have stopped."""
    kept: list[int] = []
    for token in tokens[: sampling.max_tokens]:
        kept.append(token)
        if token in sampling.stop:
            break
    ending = "stop" if kept and kept[-1] in sampling.stop else "length"
    logprobs = [0.0] * len(kept)
    return Completion(kept, logprobs, list(logprobs), [0] * len(kept), ending)  # type: ignore[arg-type]
