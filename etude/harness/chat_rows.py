"""Traces as rows of a conversation corpus, as `etude.data.conversations` reads them.

A row has the messages of one segment and the tools. A turn with weight 0 is in the conversation but not in the loss.
A row may also have the exact tokens of the segment: as they were sampled, or as a dialect writes the same turns.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message, ToolSchema
from etude.data.conversations import ExactTokens
from etude.harness.trace import Segment, Step, Trace

SAMPLED_KINDS = ("turn", "summary")  # of steps that the model wrote


def chat_row(steps: Sequence[Step], tools: Sequence[ToolSchema], is_masked: Callable[[Step], bool]) -> dict[str, Any]:
    """Return the steps of one segment as a row."""
    messages: list[dict[str, Any]] = []
    for step in steps:
        messages.append(_chat_message(step.message))
        if step.kind in SAMPLED_KINDS and is_masked(step):
            messages[-1]["weight"] = 0
        messages += [{"role": "tool", "content": result.content} for result in step.results()]
    return {"messages": messages, "tools": json.loads(json.dumps(list(tools)))}


def trace_segments(trace: Trace) -> Iterator[tuple[Segment, list[Step], Sequence[ToolSchema]]]:
    """Yield each segment of a trace with its steps and the tools that it was shown."""
    for number, segment in enumerate(trace.segments):
        steps = [step for step in trace.steps if step.segment == number]
        yield segment, steps, () if segment.kind == "compaction" else trace.tools


def is_mistake(step: Step) -> bool:
    """Return whether a turn should not be imitated: it was cut off, or one of its calls failed."""
    return not step.closed or any(outcome.error for outcome in step.outcomes)


def sampled_tokens(
    segment: Segment, steps: Sequence[Step], tokenizer: str, is_masked: Callable[[Step], bool]
) -> ExactTokens:
    """Return the tokens of a segment as they were; those that the model sampled are in the loss unless masked."""
    tokens, runs, at = segment.tokens.tolist(), [], 0
    for step in steps:
        if step.kind in SAMPLED_KINDS:
            start, end = step.span
            runs += [(False, tuple(tokens[at:start])), (not is_masked(step), tuple(tokens[start:end]))]
            at = end
    return ExactTokens(tokenizer, tuple(run for run in (*runs, (False, tuple(tokens[at:]))) if run[1]))


def written_tokens(
    steps: Sequence[Step], tools: Sequence[ToolSchema], dialect: Dialect, is_masked: Callable[[Step], bool]
) -> ExactTokens:
    """Return the tokens of a segment as a model with this dialect would have had to sample them.

    Raise InputError for a turn that the dialect cannot represent.
    """
    opening = [step.message for step in steps if step.kind == "prompt"]
    runs: list[tuple[bool, tuple[int, ...]]] = [(False, tuple(dialect.render(opening, tools)))]
    turn: Sequence[int] = ()
    pending: list[Message] = []
    calls = 0
    for step in steps:
        if step.kind in SAMPLED_KINDS:
            if pending:
                runs.append((False, tuple(dialect.bridge(turn, pending))))
            turn = dialect.write(step.message, first_call=calls)
            calls += len(step.message.calls)
            runs.append((not is_masked(step), tuple(turn)))
            pending = step.results()
        elif step.kind != "prompt":
            pending.append(step.message)
    return ExactTokens(dialect.tokenizer.digest, tuple(runs))


def _chat_message(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        row["reasoning_content"] = message.thinking
    if message.calls:
        functions = [{"name": call.name, "arguments": dict(call.arguments or {})} for call in message.calls]
        row["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return row
