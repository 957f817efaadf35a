"""Whether a message states a value or a name, or denies it, bounds it or leaves it open.

The rules are about words near the value, in the clause that has it; words that refuse it elsewhere ("That is not so.")
are looked for in clauses of their own. They read no meaning: a message that says the opposite in other words is stated.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_MENTIONS = 20  # of the value in one message
MAX_CLAUSE = 400  # characters of a clause that are read on each side of the value
# A number with its sign, point, separators, exponent and unit: no part of it is a number of its own.
NUMBER = re.compile(r"(?<!\w)(?<!\w\.)[-+]?\.?\d(?:,\d{3}(?!\d)|\.(?=\d)|(?<=\d[eE])[-+](?=\d)|\w)*%?")
WHOLE_NUMBER = re.compile(r"[-+]?(?:\d{1,20}|\d{1,3}(?:,\d{3}){1,6}|\d{1,3}(?:_\d{3}){1,6})")

FILLER = (
    r"(?:a|an|the|in|at|on|of|to|it|its|is|be|are|by|for|that|this|one|file|function|module|line|number|value|result|"
    r"answer|returns?|returned|gives?|given|equals?|equal|defined|located|found|called|named|necessarily|quite|really|"
    r"exactly|simply|actually|just|only|even|close|wrong|bug|buggy|faulty|broken|culprit)"
)
NEGATION = r"(?:\b(?:not|no|never|neither|nor|cannot|hardly|scarcely|barely|nowhere)\b|n['’]t\b)"
OTHER_THAN = (
    r"\b(?:except|excluding|unlike|besides?|near|outside|before|after|instead of|rather than|other than|apart from|"
    r"next to|far from|(?:any|every|all|no)\w*(?: \w+)? but)\b"
)
DENIED_BEFORE = re.compile(rf"(?:{NEGATION}|{OTHER_THAN})(?:[\s:]+{FILLER}\b){{0,4}}[\s:]*$", re.IGNORECASE)
BOUND_BEFORE = re.compile(
    r"(?:[<>~≈≤≥±≠]=?|!=|[\w)\]]\s*[-+*/%^]|\d,)\s*$|"
    r"\b(?:at least|at most|(?:more|less|fewer|greater|larger|smaller|higher|lower) than|over|under|above|below|up to|"
    r"as (?:many|much|high|low) as|between|about|around|roughly|approximately|approx|nearly|almost|close to|"
    r"(?:minimum|maximum) of|circa|between .{1,20} and)(?:[\s.:]+(?:a|an|the|line|number|value|of)){0,2}\s*$",
    re.IGNORECASE,
)
BOUND_AFTER = re.compile(
    r"^(?:,\d|\.\.+\d|\s*[-+*/^]+\s*[\d(]|[-+*/^~]\S|\+|\s*±)|"
    r"^[,\s]*(?:or|to \d|through|up|upwards?|onwards?|plus|minus|times|percent|point|squared|hundred|thousand|million|"
    r"dozen|tops|ish|more or less|give or take|at (?:least|most|best|worst|the (?:least|most|best|worst))|"
    r"and (?:up|more|above|over|higher|lower|less|below|something|some|a half|a bit|then some))\b",
    re.IGNORECASE,
)
ALTERNATIVE_AFTER = re.compile(
    r"^[,\s]*(?:or|and (?:also|another|others?|elsewhere|somewhere|maybe|perhaps|not))\b", re.IGNORECASE
)
OPEN = (
    r"\b(?:maybe|perhaps|possibly|probably|presumably|supposedly|allegedly|(?:un)?likely|might|may|could|either|unless|"
    r"unsure|uncertain|unclear|unknown|guess(?:ing|ed)?|whether|depends|doubt|not sure)\b|n['’]t (?:know|tell|sure)\b"
)
OPEN_BEFORE = re.compile(rf"{OPEN}|\bif\b", re.IGNORECASE)
OPEN_NEAR = re.compile(rf"^\W*(?:\w+\W+){{0,3}}?(?:{OPEN})", re.IGNORECASE)
REFUSED = re.compile(rf"{NEGATION}|{OPEN}|\b(?:wrong|incorrect|false|untrue)\b", re.IGNORECASE)
# Of code that the message calls faulty, "it is not right" affirms and "it is right" denies.
CLEARED = re.compile(
    rf"^(?:(?!{NEGATION}|wrong|incorrect)[^.]){{0,40}}?"
    r"\b(?:correct|right|fine|ok|okay|innocent|blameless|works)\b(?! (?:answer|one|name|choice))|"
    rf"{NEGATION}\s+(?:(?:the|a|an|at|to|in|any)\s+)*"
    r"(?:wrong|faulty|buggy|broken|bug|bugs|incorrect|blame|fault|culprit|guilty|problem|it|one|answer|that)\b",
    re.IGNORECASE,
)
RETRACTED = (
    r"^\W*(?:no|not|nope|never|(?:just )?(?:kidding|joking)|(?:no,? )?wait)\W*$|"
    r"\b(?:that|this|it|which|(?:the|this|that|my) "
    r"(?:answer|above|value|number|result|line|file|statement|example|name))"
    r"(?: is| was|['’]s)(?:(?: not|n['’]t)(?: (?:so|true|it|the case|meant|(?:the |my |an )?answer|any ?more))?"
    r"| (?:\w+ )?(?:false|untrue|a lie|a joke)| no longer\b.*)\W*$"
)
RETRACTED_FAULT = re.compile(RETRACTED, re.IGNORECASE)
RETRACTED_VALUE = re.compile(
    RETRACTED + r"|^\W*(?:wrong|false|incorrect)\W*$|"
    r"\b(?:that|this|it|which|(?:the|this|that|my) (?:answer|above|value|number|result))(?: is| was|['’]s) "
    r"(?:(?:\w+ )?(?:wrong|incorrect)|not (?:right|correct|what .*))\W*$",
    re.IGNORECASE,
)
UNSEEN = re.compile(
    rf"(?:{NEGATION}|\bwithout)\s+(?:\w+\s+){{0,2}}?"
    r"(?:look|check|read|r[au]n|test|verif|examin|inspect|try|tried|know|clear|certain)\w*",
    re.IGNORECASE,
)
NOTHING_RIGHT = re.compile(
    r"\bnothing\s+(?:(?:is|was|here|there|seems|looks|at all)\s+){0,3}(?:works|right|correct|fine|ok|passes)\b",
    re.IGNORECASE,
)
DENIAL_WORDS = re.compile(
    rf"{NEGATION}|\b(?:wrong|false|incorrect|untrue|instead|rather|outdated|obsolete|stale|except|ignore)\b",
    re.IGNORECASE,
)
END_OF_SENTENCE = re.compile(r"[.!?…]+(?=\s|$)|\n")
BREAK_BEFORE = re.compile(r"[;:,()]\s|\s[-–—]\s|[(]")
BREAK_AFTER = re.compile(r"[;:,()]|\s[-–—]\s|\b(?:because|since|where|which|so|as)\b")


def plain_text(text: str) -> str:
    """Return a message without marks of layout and quotation; a minus and an arrow are spelt in one way."""
    text = re.sub(r"(?<!\w)\*\*([^*\n]{1,400}?)\*\*(?!\w)", r"\1", text.replace("−", "-"))
    return re.sub(r"(?<![-=–<>])[-=–]{1,3}>|→|⇒", " = ", re.sub(r"[`'\"“”](?!t\b)|(?<=\s)[‘’]", "", text))


def numbers(text: str) -> Iterator[tuple[re.Match[str], int | None]]:
    """Yield the numbers of a text, with None for those that are not whole."""
    for found in NUMBER.finditer(text):
        whole = WHOLE_NUMBER.fullmatch(found.group())
        yield found, int(found.group().replace(",", "").replace("_", "")) if whole else None


def states_number(text: str, value: int, given: Iterable[int], *, faulty: bool = False) -> bool:
    """Whether a message states the value and has no other number than it and the given ones.

    `faulty`: the number is that of a line which is wrong, so that "it is not right" does not deny it."""
    text = plain_text(text)
    found = list(numbers(text))
    if not {number for _, number in found} <= {value, *given}:
        return False
    return _states(text, [match.span() for match, number in found if number == value], faulty=faulty, number=True)


def states_name(text: str, name: str, *, faulty: bool = False) -> bool:
    """Whether a message states a name; `faulty` as in `states_number`."""
    text = plain_text(text)
    pattern = rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])"
    return _states(text, [match.span() for match in re.finditer(pattern, text)], faulty=faulty, number=False)


def _states(text: str, places: list[tuple[int, int]], *, faulty: bool, number: bool) -> bool:
    if not 0 < len(places) <= MAX_MENTIONS:
        return False
    for start, end in places:
        first, last = _sentence(text, start, end)
        before, after = text[max(first, start - MAX_CLAUSE) : start], text[end : min(last, end + MAX_CLAUSE)]
        clause_before = BREAK_BEFORE.split(before)[-1]
        clause_after = BREAK_AFTER.split(after)[0]
        refused = [
            text[last : last + 1] == "?",
            DENIED_BEFORE.search(before),
            OPEN_BEFORE.search(clause_before),
            OPEN_NEAR.search(after),
            (BOUND_AFTER if number else ALTERNATIVE_AFTER).search(after),
            number and BOUND_BEFORE.search(before),
        ]
        if faulty:
            refused.append(CLEARED.search(clause_after))
        else:
            refused += [re.search(NEGATION, clause_before, re.IGNORECASE), REFUSED.search(clause_after)]
        if any(refused):
            return False
    return not is_retracted(text, faulty=faulty)


def _sentence(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of the sentence around a part of a text, without the mark at its end."""
    low = max(0, start - MAX_CLAUSE)
    first = max((found.end() + low for found in END_OF_SENTENCE.finditer(text[low:start])), default=low)
    following = END_OF_SENTENCE.search(text, end)
    return first, following.start() if following else len(text)


def is_retracted(text: str, *, faulty: bool = False) -> bool:
    """Whether a clause of a message takes back what the others say."""
    pattern = RETRACTED_FAULT if faulty else RETRACTED_VALUE
    clauses = re.split(r"[.!?…]+(?=\s|$)|\n|[;:()]|,\s|\s[-–—]\s", text)
    return any(pattern.search(clause[:MAX_CLAUSE]) for clause in clauses)


def claims(text: str, pattern: str) -> bool:
    """Whether a message says, and does not deny or leave open, what the pattern matches."""
    text = re.sub(r"`[^`\n]*[(\[{'\"=+*/<>][^`\n]*`", "it", text)  # code is quoted, not said
    text = plain_text(text)
    if UNSEEN.search(text) or NOTHING_RIGHT.search(text) or is_retracted(text):
        return False
    said = 0
    for number, found in enumerate(re.finditer(pattern, text, re.IGNORECASE)):
        first, _ = _sentence(text, *found.span())
        before = text[max(first, found.start() - MAX_CLAUSE) : found.start()]
        if number == 10 * MAX_MENTIONS or DENIED_BEFORE.search(before):
            return False
        said += not OPEN_BEFORE.search(BREAK_BEFORE.split(before)[-1])
    return said > 0


def introduces_denial(line: str) -> bool:
    """Whether a line denies the one that follows it: it has a negation and does not end."""
    return not END_OF_SENTENCE.search(line.strip()) and re.search(NEGATION, line, re.IGNORECASE) is not None


def denials(text: str) -> int:
    """Return how many words of a text deny something."""
    return len(DENIAL_WORDS.findall(text))


def number_texts(text: str) -> list[str]:
    """Return the numbers of a text as they are written."""
    return [found.group() for found in NUMBER.finditer(text)]
