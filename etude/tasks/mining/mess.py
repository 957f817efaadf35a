"""What a person pastes or points to: a traceback, the log of a CI job, or the log of a service with one cause.

All are made from a failure that a test really had in the parent state. They show code of the product, types and
messages of exceptions, and names of tests, never the text of a hidden test or the values that it compares.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from etude.tasks.generators.executor import WORKSPACE, ExecutionResult, TestOutcome
from etude.tasks.mining.classify import is_test_path
from etude.tasks.mining.evidence import IMPORT_ERROR, TestEvidence

LogKind = Literal["traceback", "ci", "service"]
SERVICE_LOG, CI_LOG = "service.log", "ci.log"
SERVICE_LINES = 1000
MAX_MESSAGE = 300
NOT_PASTED = ("AssertionError", "Failed", "assert ")  # they are the test's own


@dataclass(frozen=True)
class PastedLog:
    """A log: a note for the instruction, and files for the workspace."""

    kind: LogKind
    note: str
    files: Mapping[str, bytes] = field(default_factory=dict)


def make_log(
    evidence: TestEvidence, before: ExecutionResult, seed: str, files: Mapping[str, bytes]
) -> PastedLog | None:
    """Return a log of the failures before a change; None if they show nothing that a person would paste."""
    rng = random.Random(f"log/{seed}")
    failing = {test: before.tests[test] for test in evidence.fail_to_pass if test in before.tests}
    traced = [(test, trace) for test, outcome in failing.items() if (trace := traceback_text(outcome, files))]
    kinds: list[LogKind] = (["traceback", "service"] if traced else []) + (["ci"] if failing else [])  # type: ignore[assignment]
    if not kinds:
        return None
    kind = rng.choice(kinds)
    if kind == "ci":
        return _ci_log(failing, before, rng)
    trace = rng.choice(traced)[1]
    if kind == "traceback":
        return PastedLog(kind, f"```\n{trace}\n```")
    log = service_log(trace, rng)
    note = rng.choice(
        (
            f"The log of the service that uses it is in {SERVICE_LOG}.",
            f"See {SERVICE_LOG}, it is from this morning.",
            f"Log: {SERVICE_LOG}",
        )
    )
    return PastedLog(kind, note, {SERVICE_LOG: log.encode()})


def traceback_text(outcome: TestOutcome, files: Mapping[str, bytes]) -> str:
    """Return the part of a traceback in the code of the product; "" if the exception is the test's own."""
    message = outcome.message.strip()
    frames = [(file.removeprefix(f"{WORKSPACE}/"), line, name) for file, line, name in outcome.frames]
    own = [frame for frame in frames if frame[0] in files and not is_test_path(frame[0])]
    if not own or not message or message.startswith(NOT_PASTED) or IMPORT_ERROR.match(message):
        return ""
    if not frames or is_test_path(frames[-1][0]):
        return ""  # raised by the test
    lines = ["Traceback (most recent call last):"]
    for file, number, name in own:
        text = files[file].decode("utf-8", "replace").splitlines()
        lines.append(f'  File "{file}", line {number}, in {name}')
        if 0 < number <= len(text):
            lines.append(f"    {text[number - 1].strip()}")
    return "\n".join([*lines, message.splitlines()[0][:MAX_MESSAGE]])


def _ci_log(failing: Mapping[str, TestOutcome], before: ExecutionResult, rng: random.Random) -> PastedLog:
    """Return the log of a CI job: statuses of all tests, names and kinds of the failures."""
    start = datetime(2026, 1, 5, 7, 0, tzinfo=UTC) + timedelta(minutes=rng.randrange(600))
    lines = ["##[group]Run tests", "$ python -m pytest", "=" * 29 + " test session starts " + "=" * 29]
    by_file: dict[str, list[str]] = {}
    for test, outcome in before.tests.items():
        by_file.setdefault(test.partition("::")[0], []).append(outcome.status)
    signs = {"passed": ".", "failed": "F", "error": "E", "skipped": "s", "xfailed": "x", "xpassed": "X"}
    lines += [f"{file} {''.join(signs.get(status, '?') for status in found)}" for file, found in by_file.items()]
    lines.append("=" * 27 + " short test summary info " + "=" * 27)
    lines += [f"FAILED {test} - {_kind_of(outcome)}" for test, outcome in failing.items()]
    counts = [outcome.status for outcome in before.tests.values()]
    passed, failed = counts.count("passed"), len(failing)
    lines += [
        f"{failed} failed, {passed} passed in {rng.uniform(1, 40):.2f}s",
        "##[error]Process completed with exit code 1.",
    ]
    stamped = [
        f"{(start + timedelta(milliseconds=170 * number)).isoformat(timespec='milliseconds')} {line}"
        for number, line in enumerate(lines)
    ]
    note = rng.choice(
        (f"CI is red, see {CI_LOG}.", f"The log of the CI job is {CI_LOG}.", f"{CI_LOG} has the failing run.")
    )
    return PastedLog("ci", note, {CI_LOG: ("\n".join(stamped) + "\n").encode()})


def _kind_of(outcome: TestOutcome) -> str:
    """Return the kind of a failure: of an assertion no values, of another exception its first line."""
    first = outcome.message.strip().split("\n")[0]
    if first.startswith(NOT_PASTED):
        return "AssertionError" if not first.startswith("Failed") else "Failed"
    return first[:MAX_MESSAGE] or outcome.status


# ------------------------------------------------------------------------------------------------- service log

_ROUTES = ("GET /health", "GET /v1/items", "POST /v1/items", "GET /v1/report", "PUT /v1/settings", "GET /metrics")
_NOISE = (
    ("INFO", "http", "{route} 200 {ms}ms request={id}"),
    ("INFO", "http", "{route} 304 {ms}ms request={id}"),
    ("DEBUG", "cache", "hit key=item:{number} age={ms}s"),
    ("DEBUG", "cache", "miss key=item:{number}, loading"),
    ("INFO", "worker", "job {id} done in {ms}ms"),
    ("INFO", "scheduler", "next run of cleanup in {ms}s"),
    ("DEBUG", "db", "SELECT took {ms}ms rows={number}"),
)
# things that look like a cause and are none
_DISTRACTIONS = (
    ("WARNING", "db", "slow query ({ms}0ms), request={id}"),
    ("WARNING", "http", "client closed connection before the response was sent, request={id}"),
    ("WARNING", "config", "option `legacy_mode` is deprecated and ignored"),
    ("ERROR", "mailer", "connection to mail host refused, retry in {ms}s"),
    ("WARNING", "worker", "queue length {number} above 100"),
)


def service_log(trace: str, rng: random.Random, count: int = SERVICE_LINES) -> str:
    """Return the log of a service in which an exception occurs several times among noise that has other causes."""
    clock = datetime(2026, 1, 5, 6, 0, tzinfo=UTC) + timedelta(minutes=rng.randrange(600))
    block = trace.splitlines()
    times = rng.randint(2, 4)
    places = sorted(rng.sample(range(count // 5, count - 20), times))
    lines: list[str] = []
    number = 0
    while len(lines) < count - len(block) * (times - sum(place < number for place in places)):
        clock += timedelta(milliseconds=rng.randrange(5, 2500))
        stamp = clock.strftime("%Y-%m-%d %H:%M:%S,") + f"{clock.microsecond // 1000:03d}"
        values = {
            "route": rng.choice(_ROUTES),
            "id": f"{rng.getrandbits(32):08x}",
            "ms": rng.randrange(1, 90),
            "number": rng.randrange(1, 900),
        }
        if number in places:
            lines.append(f"{stamp} ERROR http {values['route']} 500 request={values['id']}")
            lines += block
        else:
            level, name, text = rng.choice(_DISTRACTIONS if rng.random() < 0.04 else _NOISE)
            lines.append(f"{stamp} {level} {name} {text.format(**values)}")
        number += 1
    return "\n".join(lines) + "\n"
