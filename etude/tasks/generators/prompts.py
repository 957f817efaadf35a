"""Templates of requests: terse, in several registers, as people write them. Failure reports fill them in.

symptom      actual and expected behaviour           log          output of a failing run
imperative   an instruction                          issue        a report with code
tests        names of failing tests
"""

import random
from collections.abc import Sequence

from etude.tasks.generators.failure_report import FailureReport

SINCE_WHEN = ("Since yesterday", "Since the last refactoring", "After updating", "As of the current main", "Lately")


def choose(rng: random.Random, *choices: str) -> str:
    return rng.choice(choices)


def fenced(text: str, language: str = "") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def quoted(text: str) -> str:
    """Format code within a sentence."""
    return f"``{text}``" if "`" in text else f"`{text}`"


def symptom(rng: random.Random, report: FailureReport) -> str:
    """Describe actual and expected behaviour in a sentence or two; "" when the report lacks the values."""
    return _in_context(rng, report, _symptom(rng, report)) or _values_only(rng, report)


def _values_only(rng: random.Random, report: FailureReport) -> str:
    """Combine the title of a test with its values; for tests whose code means little out of context."""
    if not 2 <= len(report.title.split()) <= 8:
        return ""
    title = choose(
        rng,
        f"{report.title[0].upper()}{report.title[1:]}:",
        f"Something is off with {report.title}:",
        f"Re {report.title}:",
    )
    if report.error:
        return f"{title} {quoted(report.error)}."
    if all(report.compared) and report.compared[0] != report.compared[1]:
        actual, expected = map(quoted, report.compared)
        return f"{title} {choose(rng, f'I get {actual}, should be {expected}.', f'{actual} instead of {expected}.')}"
    return ""


def _in_context(rng: random.Random, report: FailureReport, sentence: str) -> str:
    """Add the surrounding code if the call is not self-contained."""
    if not sentence or report.self_contained:
        return sentence
    if report.error or report.not_raised:  # the call itself is the last line of the snippet
        return issue(rng, report)
    head = choose(rng, "With", "Given", "In", "Take")
    return (
        f"{head}\n\n{fenced(report.snippet, 'python')}\n\n{sentence[0].lower() + sentence[1:]}"
        if report.snippet
        else ""
    )


def _symptom(rng: random.Random, report: FailureReport) -> str:
    if not report.call or len(report.call) > 160 or len(report.expected) > 160:
        return ""
    call, expected, actual = quoted(report.call), quoted(report.expected), quoted(report.actual)
    if report.not_raised:
        return choose(
            rng,
            f"{call} should raise {report.not_raised}; it goes through without a word now.",
            f"{rng.choice(SINCE_WHEN)} {call} does not raise {report.not_raised} any more.",
            f"No {report.not_raised} from {call}. It used to be one.",
        )
    if report.error:
        return choose(
            rng,
            f"{rng.choice(SINCE_WHEN)} {call} fails with {quoted(report.error)}. It should work.",
            f"{call} gives me {quoted(report.error)}. Worked before.",
            f"Getting {quoted(report.error)} out of {call}.",
        )
    if report.expected and report.actual and report.actual != report.expected:
        return choose(
            rng,
            f"{call} should be {expected}. It is {actual}.",
            f"{rng.choice(SINCE_WHEN)} {call} comes out as {actual}; {expected} is right.",
            f"Expected {expected} from {call}, got {actual}.",
        )
    if report.expected:
        return choose(
            rng, f"{call} is not {expected} any more.", f"{rng.choice(SINCE_WHEN)} {call} is no longer {expected}."
        )
    return choose(
        rng, f"{call} does not hold any more.", f"{rng.choice(SINCE_WHEN)}, {call} is false. It must be true."
    )


def issue(rng: random.Random, report: FailureReport) -> str:
    """Write a report with code that reproduces the failure."""
    if not report.snippet:
        return ""
    if report.not_raised:
        end = f"Expected {report.not_raised}, nothing is raised."
    elif report.error:
        end = f"Ends in {quoted(report.error)}."
    elif report.expected and report.actual:
        end = f"{quoted(report.call)} is {quoted(report.actual)} instead of {quoted(report.expected)}."
    else:
        end = "The last line fails."
    head = choose(rng, "This used to work:", "Wrong result:", "To reproduce:", "This is broken:", "Please have a look:")
    return f"{head}\n\n{fenced(report.snippet, 'python')}\n\n{end}"


def imperative(rng: random.Random, report: FailureReport) -> str:
    return _in_context(rng, report, _imperative(rng, report))


def _imperative(rng: random.Random, report: FailureReport) -> str:
    if not report.call or len(report.call) > 160 or len(report.expected) > 160:
        return ""
    call = quoted(report.call)
    if report.not_raised:
        return choose(
            rng, f"Make {call} raise {report.not_raised} again.", f"{call} must raise {report.not_raised}. Fix."
        )
    if report.error:
        return choose(
            rng, f"Make {call} work again ({quoted(report.error)}).", f"Fix {quoted(report.error)} in {call}."
        )
    if report.expected:
        return choose(
            rng,
            f"Make {call} give {quoted(report.expected)} again.",
            f"{call} has to be {quoted(report.expected)}; fix it.",
        )
    return f"Make sure that {call} holds again."


def log(rng: random.Random, reports: Sequence[FailureReport]) -> str:
    text = "\n\n".join(f"{'_' * 12} {each.test} {'_' * 12}\n{each.log}" for each in reports)
    head = choose(rng, "", "", "CI is red:", "Fix:", "From the nightly run:", "pytest says")
    return (f"{head}\n\n" if head else "") + fenced(text)


def failing_tests(rng: random.Random, tests: Sequence[str]) -> str:
    """Write a request that only names failing tests."""
    shown = sorted({test.partition("[")[0] for test in tests})
    if len(shown) == 1:
        return choose(rng, f"{shown[0]} fails. Fix the code, not the test.", f"Get {shown[0]} to pass.")
    listed = "\n".join(f"- {name}" for name in shown[:6])
    more = f"\n\nand {len(shown) - 6} more." if len(shown) > 6 else ""
    head = choose(
        rng, "These fail on main:", "Make these pass again; the tests are right:", "Broken since the last merge:"
    )
    return f"{head}\n\n{listed}{more}"


def numbered_list(parts: Sequence[str]) -> str:
    """Join several requests into one numbered list."""
    if len(parts) == 1:
        return parts[0]
    heads = [f"{number}.\n\n" if part.startswith("`" * 3) else f"{number}. " for number, part in enumerate(parts, 1)]
    return "\n\n".join(head + part for head, part in zip(heads, parts, strict=True))
