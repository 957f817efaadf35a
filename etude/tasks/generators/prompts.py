"""How requests are put: terse, in several registers, as people write them. Templates only; what fills them is evidence.

symptom      what is seen and what was expected      log          the output of a failing run, and little else
imperative   make this so                            issue        a report with code
tests        names of failing tests
"""

import random
from collections.abc import Sequence

from etude.tasks.generators.failure_report import Evidence

SINCE = ("Since yesterday", "Since the last refactoring", "After updating", "As of the current main", "Lately")


def pick(rng: random.Random, *choices: str) -> str:
    return rng.choice(choices)


def fenced(text: str, language: str = "") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def quoted(text: str) -> str:
    """Code within a sentence."""
    return f"``{text}``" if "`" in text else f"`{text}`"


def symptom(rng: random.Random, seen: Evidence) -> str:
    """What happens and what should, in a sentence or two; "" when the failure has no such words."""
    return _in_context(rng, seen, _symptom(rng, seen)) or _in_values(rng, seen)


def _in_values(rng: random.Random, seen: Evidence) -> str:
    """What a test is about, and the values alone; for tests whose code says little outside of them."""
    if not 2 <= len(seen.title.split()) <= 8:
        return ""
    title = pick(
        rng, f"{seen.title[0].upper()}{seen.title[1:]}:", f"Something is off with {seen.title}:", f"Re {seen.title}:"
    )
    if seen.error:
        return f"{title} {quoted(seen.error)}."
    if all(seen.sides) and seen.sides[0] != seen.sides[1]:
        got, wanted = map(quoted, seen.sides)
        return f"{title} {pick(rng, f'I get {got}, should be {wanted}.', f'{got} instead of {wanted}.')}"
    return ""


def _in_context(rng: random.Random, seen: Evidence, sentence: str) -> str:
    """With the code around it where it takes that to understand the call."""
    if not sentence or seen.closed:
        return sentence
    if seen.error or seen.not_raised:  # the last line of the code is the call itself
        return issue(rng, seen)
    head = pick(rng, "With", "Given", "In", "Take")
    return f"{head}\n\n{fenced(seen.snippet, 'python')}\n\n{sentence[0].lower() + sentence[1:]}" if seen.snippet else ""


def _symptom(rng: random.Random, seen: Evidence) -> str:
    if not seen.call or len(seen.call) > 160 or len(seen.wanted) > 160:
        return ""
    call, wanted, got = quoted(seen.call), quoted(seen.wanted), quoted(seen.got)
    if seen.not_raised:
        return pick(
            rng,
            f"{call} should raise {seen.not_raised}; it goes through without a word now.",
            f"{rng.choice(SINCE)} {call} does not raise {seen.not_raised} any more.",
            f"No {seen.not_raised} from {call}. It used to be one.",
        )
    if seen.error:
        return pick(
            rng,
            f"{rng.choice(SINCE)} {call} fails with {quoted(seen.error)}. It should work.",
            f"{call} gives me {quoted(seen.error)}. Worked before.",
            f"Getting {quoted(seen.error)} out of {call}.",
        )
    if seen.wanted and seen.got and seen.got != seen.wanted:
        return pick(
            rng,
            f"{call} should be {wanted}. It is {got}.",
            f"{rng.choice(SINCE)} {call} comes out as {got}; {wanted} is right.",
            f"Expected {wanted} from {call}, got {got}.",
        )
    if seen.wanted:
        return pick(rng, f"{call} is not {wanted} any more.", f"{rng.choice(SINCE)} {call} is no longer {wanted}.")
    return pick(rng, f"{call} does not hold any more.", f"{rng.choice(SINCE)}, {call} is false. It must be true.")


def issue(rng: random.Random, seen: Evidence) -> str:
    """A report with code that shows it."""
    if not seen.snippet:
        return ""
    if seen.not_raised:
        end = f"Expected {seen.not_raised}, nothing is raised."
    elif seen.error:
        end = f"Ends in {quoted(seen.error)}."
    elif seen.wanted and seen.got:
        end = f"{quoted(seen.call)} is {quoted(seen.got)} instead of {quoted(seen.wanted)}."
    else:
        end = "The last line fails."
    head = pick(rng, "This used to work:", "Wrong result:", "To reproduce:", "This is broken:", "Please have a look:")
    return f"{head}\n\n{fenced(seen.snippet, 'python')}\n\n{end}"


def imperative(rng: random.Random, seen: Evidence) -> str:
    return _in_context(rng, seen, _imperative(rng, seen))


def _imperative(rng: random.Random, seen: Evidence) -> str:
    if not seen.call or len(seen.call) > 160 or len(seen.wanted) > 160:
        return ""
    call = quoted(seen.call)
    if seen.not_raised:
        return pick(rng, f"Make {call} raise {seen.not_raised} again.", f"{call} must raise {seen.not_raised}. Fix.")
    if seen.error:
        return pick(rng, f"Make {call} work again ({quoted(seen.error)}).", f"Fix {quoted(seen.error)} in {call}.")
    if seen.wanted:
        return pick(
            rng, f"Make {call} give {quoted(seen.wanted)} again.", f"{call} has to be {quoted(seen.wanted)}; fix it."
        )
    return f"Make sure that {call} holds again."


def log(rng: random.Random, seen: Sequence[Evidence]) -> str:
    text = "\n\n".join(f"{'_' * 12} {each.test} {'_' * 12}\n{each.log}" for each in seen)
    head = pick(rng, "", "", "CI is red:", "Fix:", "From the nightly run:", "pytest says")
    return (f"{head}\n\n" if head else "") + fenced(text)


def failing(rng: random.Random, tests: Sequence[str]) -> str:
    """Names of tests, no more."""
    shown = sorted({test.partition("[")[0] for test in tests})
    if len(shown) == 1:
        return pick(rng, f"{shown[0]} fails. Fix the code, not the test.", f"Get {shown[0]} to pass.")
    listed = "\n".join(f"- {name}" for name in shown[:6])
    more = f"\n\nand {len(shown) - 6} more." if len(shown) > 6 else ""
    head = pick(
        rng, "These fail on main:", "Make these pass again; the tests are right:", "Broken since the last merge:"
    )
    return f"{head}\n\n{listed}{more}"


def listed(parts: Sequence[str]) -> str:
    """Several requests as one."""
    if len(parts) == 1:
        return parts[0]
    heads = [f"{number}.\n\n" if part.startswith("`" * 3) else f"{number}. " for number, part in enumerate(parts, 1)]
    return "\n\n".join(head + part for head, part in zip(heads, parts, strict=True))
