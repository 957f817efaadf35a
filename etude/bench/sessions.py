"""Collect solved sessions as training data: trials of one policy that its tasks' verifiers and the gates accept.

The directory is one of a comparison with a single policy (`etude.bench.directory`), and in addition has

    sessions.jsonl     the accepted sessions as rows of a conversation corpus, one for each segment
    sessions.json      what was tried, solved, left out and paid
    usage.jsonl        the tokens of every reply of an endpoint, also of trials that failed

A collection can be killed at any time: scored trials, their traces and the tokens paid for are kept.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.bench.directory import BenchDirectory, BenchSpec, read_all_results
from etude.bench.policies import BenchPolicy, TokenPrice
from etude.bench.run import ProgressListener, run_trials
from etude.bench.spending import EndpointRates, UsageLedger, endpoint_limits
from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.tokenizer import Tokenizer
from etude.data.conversations import ExactTokens
from etude.data.settings import SESSIONS_FILE
from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.harness.chat_rows import chat_row, is_mistake, sampled_tokens, trace_segments, written_tokens
from etude.harness.trace import Segment, Step, Trace
from etude.harness.trace_store import load_trace
from etude.pods.fleet import Fleet
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import Slot


@dataclass(frozen=True)
class CollectionLimits:
    """When to stop, and how fast to ask an endpoint."""

    max_sessions: int | None = None
    max_cost: float | None = None  # dollars
    price: TokenPrice | None = None
    rates: EndpointRates = field(default_factory=EndpointRates)


async def collect_sessions(
    bench: BenchDirectory,
    spec: BenchSpec,
    limits: CollectionLimits,
    fleet: Fleet,
    report: ProgressListener,
    *,
    at_once: int,
    device: str = "auto",
) -> EtudeError | None:
    """Run the trials that are missing, within the limits; return why the policy failed, if it did."""
    ledger = ledger_of(bench, spec.policies[0].name, limits)

    def may_start(policy: str, slots: RolloutQueue, running: Mapping[str, int]) -> bool:
        scored = slots.counts().get("ready", 0)
        within = limits.max_sessions is None or scored + running.get(policy, 0) < limits.max_sessions
        return within and ledger.may_start(policy, scored, running)

    errors = await run_trials(
        bench,
        spec,
        fleet,
        report,
        at_once=at_once,
        device=device,
        limits=endpoint_limits(spec.policies, {spec.policies[0].name: limits.rates}, ledger),
        may_start=may_start,
    )
    return next(iter(errors.values()), None)


def ledger_of(bench: BenchDirectory, policy: str, limits: CollectionLimits) -> UsageLedger:
    return UsageLedger(bench.usage, {} if limits.price is None else {policy: limits.price}, limits.max_cost)


# ------------------------------------------------------------------------------------------- rows


def target_tokenizer(policy: BenchPolicy, directory: Path | None) -> Tokenizer | None:
    """Return the tokenizer that the rows are exact for: the given one, else that of a checkpoint."""
    chosen = directory or policy.directory
    if chosen is None:
        return None
    if not chosen.is_dir():
        raise InputError(f"--tokenizer {chosen}: no such directory; name a directory with tokenizer.json")
    return Tokenizer.load(chosen)


@dataclass(frozen=True)
class RowWriter:
    """Makes rows from traces. With a dialect they have exact tokens: as sampled if that was the policy's own, else as
    the dialect writes the same turns."""

    dialect: Dialect | None
    own_tokenizer: str = ""  # digest of the policy's tokenizer, if it is sampled by token ids

    @classmethod
    def of(cls, policy: BenchPolicy, directory: Path | None, dialect: str) -> "RowWriter":
        """Return the writer for a policy and the directory of the model that is to be trained."""
        tokenizer = target_tokenizer(policy, directory)
        if tokenizer is None:
            return cls(None)
        own = Tokenizer.load(policy.directory).digest if policy.directory is not None else ""
        return cls(dialect_for(tokenizer, dialect), own)

    def rows(self, trace: Trace, task: str, sample: int) -> list[dict[str, Any]] | str:
        """Return a row for every segment of a solved session, or the reason why it is not used."""
        if trace.ending != "final":
            return f"ended by {trace.ending}"
        if any(call.status != "ok" for step in trace.steps for call in step.message.calls):
            return "malformed call"
        rows = []
        for number, (segment, steps, tools) in enumerate(trace_segments(trace)):
            last = steps[-1] if steps else None

            def is_masked(step: Step, last: Step | None = last) -> bool:
                return is_mistake(step) or (step.kind == "summary" and step is not last)

            row = chat_row(steps, tools, is_masked)
            try:
                exact = self._exact(trace, segment, steps, is_masked)
            except InputError as error:
                return f"not in the dialect: {error}"
            path = f"{task}/{sample:02d}" + (f"-{number}" if number else "")
            rows.append({**row, "path": path, **({"exact": exact.to_json()} if exact else {})})
        return rows

    def _exact(
        self, trace: Trace, segment: Segment, steps: list[Step], is_masked: Callable[[Step], bool]
    ) -> ExactTokens | None:
        if self.dialect is None:
            return None
        digest = self.dialect.tokenizer.digest
        if trace.exact and self.own_tokenizer == digest and trace.dialect == self.dialect.name:
            return sampled_tokens(segment, steps, digest, is_masked)
        tools = () if segment.kind == "compaction" else trace.tools
        return written_tokens(steps, tools, self.dialect, is_masked)


# ------------------------------------------------------------------------------------------- output


def write_sessions(bench: BenchDirectory, writer: RowWriter, limits: CollectionLimits) -> dict[str, Any]:
    """Write sessions.jsonl and sessions.json from the scored trials; return the summary."""
    left_out, kept, tokens, lines = Counter[str](), 0, 0, list[str]()
    _, (results,) = read_all_results(bench)
    slots = sorted(results.graded, key=lambda slot: (slot.task, slot.number))
    for slot in slots:
        rows = _accepted_rows(bench, writer, slot)
        if rows is None:
            continue
        if isinstance(rows, str):
            left_out[rows.partition(":")[0]] += 1
            continue
        kept += 1
        tokens += sum(len(ids) for row in rows for _, ids in row.get("exact", {}).get("runs", ()))
        lines += [json.dumps(row) for row in rows]
    ledger = ledger_of(bench, results.name, limits)
    usage = ledger.of(results.name)
    summary = {
        "file": str(bench.root / SESSIONS_FILE),
        "tried": len(slots),
        "wanted": results.tasks * results.samples,
        "solved": sum(bool(slot.record["solved"]) for slot in slots),
        "hacks": sum(bool(slot.record.get("hack")) for slot in slots),
        "kept": kept,
        "left_out": dict(left_out),
        "rows": len(lines),
        "tokens": tokens or None,
        "failures": results.evaluation.failures,
        "given_up": len(results.evaluation.dropped),
        "replies": usage.replies,
        "endpoint_tokens": {"prompt": usage.prompt, "cached": usage.cached, "sampled": usage.sampled},
        "dollars": ledger.dollars,
        "price": asdict(limits.price) if limits.price else None,
    }
    write_atomically(bench.root / SESSIONS_FILE, "".join(f"{line}\n" for line in lines))
    write_atomically(bench.root / "sessions.json", json.dumps(summary, indent=1) + "\n")
    return summary


def _accepted_rows(bench: BenchDirectory, writer: RowWriter, slot: Slot) -> list[dict[str, Any]] | str | None:
    """Return the rows of a trial that the verifier and the gates accept, or why they are not used; None if refused."""
    if not slot.record["solved"] or slot.record.get("hack"):
        return None
    return writer.rows(load_trace(bench.root / slot.trace), slot.task, slot.number)


def summary_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the summary for people."""
    solved = f"{summary['solved']:,} solved"
    hacks = f"{summary['hacks']:,} hack{'s' if summary['hacks'] != 1 else ''} refused"
    yield f"{summary['tried']:,} of {summary['wanted']:,} sessions tried: {solved}, {hacks}"
    reasons = "".join(f"; {count:,} left out: {reason}" for reason, count in summary["left_out"].items())
    size = f", {summary['tokens']:,} exact tokens" if summary["tokens"] else ""
    yield f"{summary['kept']:,} sessions kept in {summary['rows']:,} rows{size}{reasons}"
    if summary["failures"] or summary["given_up"]:
        yield f"{summary['failures']:,} failures of the infrastructure; {summary['given_up']:,} tasks given up"
    if summary["replies"]:
        used = summary["endpoint_tokens"]
        paid = "" if summary["dollars"] is None else f", {summary['dollars']:.2f} dollars"
        yield f"{summary['replies']:,} replies, {used['prompt']:,} prompt and {used['sampled']:,} sampled tokens{paid}"
    yield f"sessions: {summary['file']}"
