"""Function templates: the small functions that nano programs consist of, with the places where they can be wrong.

The templates are text files in `data/`. A template stands under a heading `# id | names | argument kinds | result
kind`. In its text `$x` is a slot for a word or a number and `«right¦wrong¦kind»` a place for a fault: the correct
function takes every `right`, a faulty one takes one `wrong`. `sides.py` decides which task sets a drawn function may
occur in.

    numbers.txt, texts.txt    functions that call no other
    callers.txt               functions that call another one: `$call` passes on `$params`, `$swapped` reverses their
                              order; the argument field holds the result kind that the callee must have
    changes.txt               functions before and after a requested change, `«after¦before¦»`, all places at once; the
                              kind is the first part of the id, the last field of the heading is the user's request
"""

import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

from etude_nano import word_lists
from etude_nano.sides import Split, is_trained_fault, side_of

_MARK = re.compile("«([^¦]*)¦([^¦]*)¦([^»]*)»")
_WORD = re.compile(r"(?<!\$)\b[A-Za-z_]\w*")
_SLOT = re.compile(r"\$([a-z]+)")
_PARAMETER = re.compile(r'(?<=[(,])\s?(\w+)(=(?:"[^"]*"|[^,)]+))?')
_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One fault of a function: the whole faulty text, and the characters in which it differs from the correct one."""

    kind: str
    id: str  # kind and place in the template
    text: str
    wrong: str
    right: str


@dataclass(frozen=True)
class FunctionTemplate:
    """A function with slots. `parts` are its text: plain, or (right, wrong, kind) where a fault is possible."""

    id: str
    names: tuple[str, ...]
    argument_kinds: tuple[str, ...]
    result: str  # int, str, list, bool or dict; in changes.txt the user's request
    parts: tuple[str | tuple[str, str, str], ...]

    def text(self, wrong: int = -1) -> str:
        """Return the template with every place right, except the place numbered `wrong`."""
        return "".join(part if isinstance(part, str) else part[place == wrong] for place, part in enumerate(self.parts))

    def text_before_change(self) -> str:
        """Return the template with every place wrong: in changes.txt, the code before the change."""
        return "".join(part if isinstance(part, str) else part[1] for part in self.parts)

    def fault_places(self) -> list[int]:
        """Return the places that may be wrong."""
        return [place for place, part in enumerate(self.parts) if not isinstance(part, str)]

    def fault_kind(self, place: int) -> str:
        return self.parts[place][2]

    def alternatives(self, place: int) -> tuple[str, str]:
        """Return the right and the wrong text of a place."""
        return self.parts[place][0], self.parts[place][1]


@dataclass(frozen=True)
class NanoFunction:
    """A function drawn from a template, its possible faults, and how to call it."""

    template: str
    name: str
    right: str
    faults: tuple[Fault, ...]
    parameters: tuple[str, ...]  # without those that have a default
    argument_kinds: tuple[str, ...]
    result: str = ""
    before: str = ""  # from changes.txt: the text before the change
    request: str = ""  # from changes.txt: the user's request

    @property
    def doc(self) -> str:
        """The docstring, or an empty string."""
        found = re.search('"""(.*?)"""\n', self.right)
        return found.group(1) if found else ""


def parse_templates(source: str) -> Iterator[FunctionTemplate]:
    """Yield the templates of one source text."""
    headings = list(_HEADING.finditer(source))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        id, names, arguments, result = (field.strip() for field in heading.group(1).split("|", 3))
        text = source[heading.end() : following.start() if following else None].strip("\n") + "\n"
        parts: list[str | tuple[str, str, str]] = []
        at = 0
        for mark in _MARK.finditer(text):
            parts += [text[at : mark.start()], (mark.group(1), mark.group(2), mark.group(3))]
            at = mark.end()
        yield FunctionTemplate(id, tuple(names.split()), tuple(arguments.split()), result, (*parts, text[at:]))


@cache
def read_templates(*names: str) -> tuple[FunctionTemplate, ...]:
    """Return the templates of these files of `data/`."""
    sources = (files("etude_nano").joinpath(f"data/{name}.txt").read_text(encoding="utf-8") for name in names)
    return tuple(template for source in sources for template in parse_templates(source))


@cache
def template_words() -> frozenset[str]:
    """Return Python's keywords and every word of the template files outside slots: names for slots must differ."""
    names = (each for each in files("etude_nano").joinpath("data").iterdir() if each.name.endswith(".txt"))
    return frozenset(keyword.kwlist).union(*(_WORD.findall(each.read_text(encoding="utf-8")) for each in names))


def leaf_templates() -> tuple[FunctionTemplate, ...]:
    """Return the written functions that call no other."""
    return read_templates("numbers", "texts")


def caller_templates(result: str) -> list[FunctionTemplate]:
    """Return the written functions that call another one with this kind of result."""
    return [each for each in read_templates("callers") if each.argument_kinds[0] in (result, "any")]


def change_templates(kind: str) -> list[FunctionTemplate]:
    """Return the functions before and after a change of a kind."""
    return [each for each in read_templates("changes") if each.id.split("-")[0] == kind]


# ------------------------------------------------------------------------------------------- filling the slots


class TemplateSlots:
    """The words and numbers of one function; each is drawn when it is first used."""

    def __init__(self, rng: Random, preset: Mapping[str, str] | None = None) -> None:
        self.rng = rng
        self.values: dict[str, str] = dict(preset or {})

    def fill(self, template: str) -> str:
        return _SLOT.sub(lambda slot: self[slot.group(1)], template)

    def __getitem__(self, slot: str) -> str:
        if slot not in self.values:
            self._draw(slot)
        return self.values[slot]

    def _draw(self, slot: str) -> None:
        choice, values = self.rng.choice, self.values
        if slot in ("x", "xs", "y", "ys"):
            others = {values.get("x"), values.get("y")}
            several, one = choice([pair for pair in word_lists.NOUNS if pair[1] not in others])
            values[slot[0] + "s"], values[slot[0]] = several, one
        elif slot in ("w", "ws"):
            values["ws"], values["w"] = choice(word_lists.NAMED)
        elif slot in ("yes", "no"):
            values["yes"], values["no"] = choice(word_lists.OPPOSITES)
        elif slot in ("sep", "sepw"):
            values["sep"], values["sepw"] = self.rng.sample(word_lists.SEPARATORS, 2)
        elif slot in ("k", "kw"):
            number = self.rng.randint(5, 30)
            values["k"], values["kw"] = str(number), str(number + choice((-3, -2, -1, 1, 2, 3, 10)))
        elif slot in ("a", "b", "aw"):
            values["a"], values["b"], values["aw"] = map(str, self.rng.sample(range(2, 10), 3))
        else:
            values[slot] = choice(_SLOT_WORDS[slot])


_SLOT_WORDS = {
    "s": word_lists.TEXTS,
    "n": word_lists.LIMITS,
    "m": word_lists.AMOUNTS,
    "t": word_lists.TOTALS,
    "d": word_lists.TABLES,
    "i": word_lists.INDEX_NAMES,
    "c": word_lists.LETTERS,
    "l": word_lists.LABELS,
}


def draw_function(
    template: FunctionTemplate, split: Split, rng: Random, taken: set[str], preset: Mapping[str, str] | None = None
) -> NanoFunction:
    """Draw a function under a name that is not in `taken`, and add the name to it. Its faults are those of the split.

    A training task shows a function with its fault: both must be of the training side.
    """
    slots = TemplateSlots(rng, preset)
    for _ in range(20):
        name = slots.fill(rng.choice(template.names))
        if name not in taken:
            break
        slots.values = dict(preset or {})
    taken.add(name)
    slots.values["f"] = name
    right = slots.fill(template.text())
    faults = []
    for place in template.fault_places():
        fixed, wrong = map(slots.fill, template.alternatives(place))
        kind, text = template.fault_kind(place), slots.fill(template.text(place))
        shown = text != right and is_trained_fault(kind, split)
        if shown and (split != "train" or side_of(text) == "train"):
            faults.append(Fault(kind, f"{kind}-{place}", text, wrong, fixed))
    return NanoFunction(
        template=template.id,
        name=name,
        right=right,
        faults=tuple(faults),
        parameters=tuple(name for name, default in _PARAMETER.findall(right[: right.index("\n")]) if not default),
        argument_kinds=tuple(slots.fill(kind.replace(".", ".$")) for kind in template.argument_kinds),
        result=template.result,
        before=slots.fill(template.text_before_change()),
        request=slots.fill(template.result),
    )


# ------------------------------------------------------------------------------------------- arguments for the checks


def draw_arguments(kinds: tuple[str, ...], rng: Random, optional: float = 0.5) -> tuple[Any, ...]:
    """Draw arguments of these kinds; a kind that ends with `?` is passed with probability `optional`."""
    drawn: list[Any] = []
    for kind in kinds:
        if kind.endswith("?") and rng.random() >= optional:
            break
        drawn.append(_draw_argument(kind.rstrip("?"), drawn, rng))
    return tuple(drawn)


def draw_large_arguments(kinds: tuple[str, ...], rng: Random) -> tuple[Any, ...]:
    """Draw arguments of these kinds with large numbers and long texts, lists and tables; small counts stay small."""
    drawn = draw_arguments(kinds, rng)
    return tuple(
        _enlarge(value, kind.rstrip("?").partition(".")[0], rng) for kind, value in zip(kinds, drawn, strict=False)
    )


def _enlarge(value: Any, kind: str, rng: Random) -> Any:
    if isinstance(value, bool) or kind in ("few", "count", "letter", "key", "keys"):
        return value
    if isinstance(value, int):
        return value + rng.randint(1100, 9900)
    if isinstance(value, str):
        return (value + " ") * (100 // (len(value) + 1)) + value if " " in value else value * (120 // len(value) + 1)
    if isinstance(value, list):
        return [
            _enlarge(each, "", rng) if rng.random() < 0.2 else each for each in value * (100 // len(value or "-") + 1)
        ]
    if isinstance(value, dict):
        return {**value, **{f"{key}{number}": each for key, each in value.items() for number in range(40)}}
    return value


def _draw_argument(kind: str, before: list[Any], rng: Random) -> Any:
    name, _, about = kind.partition(".")
    if name == "near":
        return int(about) + rng.choice((-4, -2, -1, 0, 0, 1, 2, 5))
    if name == "wide":
        return rng.randint(0, int(about) + 5)
    if name == "key":  # in the preceding table, or missing from it
        return rng.choice([*before[0], rng.choice(word_lists.SAMPLES)])
    if name == "keys":
        known = list(before[0])
        return [rng.choice(known), rng.choice([*known, rng.choice(word_lists.SAMPLES)])]
    return _ARGUMENT_KINDS[name](rng)


_ARGUMENT_KINDS: dict[str, Callable[[Random], Any]] = {
    "numbers": word_lists.numbers,
    "number": word_lists.number,
    "few": lambda rng: rng.randint(2, 6),
    "count": lambda rng: rng.randint(1, 3),
    "big": lambda rng: rng.randint(20, 400),
    "word": lambda rng: rng.choice(word_lists.SAMPLES),
    "words": word_lists.sample_words,
    "repeats": lambda rng: [rng.choice(("fig", "plum", "kiwi")) for _ in range(4)],
    "text": lambda rng: " ".join(rng.sample(word_lists.SAMPLES, rng.randint(2, 3))),
    "letter": lambda rng: rng.choice("aeorlb"),
    "table": word_lists.table,
    "maybe": lambda rng: rng.choice((None, rng.randint(1, 9))),
    "mixed": lambda rng: rng.choice((rng.randint(1, 9), rng.choice(word_lists.SAMPLES))),
    "mixture": lambda rng: [rng.choice((rng.randint(1, 9), rng.choice(word_lists.SAMPLES))) for _ in range(3)],
}
