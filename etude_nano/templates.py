"""The code shapes of nano programs: small functions as templates, with the places where they can be wrong.

A shape stands in one of the books under a heading. In its text `$x` is a slot for a word or a number, and
`«right¦wrong¦kind»` a place that can be wrong: the finished function takes every `right`; a fault takes one `wrong`. A
kind that ends with `!` is a fault that only held-out tasks show in this shape, and a shape whose heading begins with
`#!` is in held-out tasks only: success there means that something was learned, not remembered.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from etude_nano import word_lists
from etude_nano.templates_callers import USERS
from etude_nano.templates_changes import CHANGES
from etude_nano.templates_numbers import NUMBERS
from etude_nano.templates_texts import TEXTS

Split = Literal["train", "held-out"]

_MARK = re.compile("«([^¦]*)¦([^¦]*)¦([^»]*)»")
_SLOT = re.compile(r"\$([a-z]+)")
_PARAMETER = re.compile(r'(?<=[(,])\s?(\w+)(=(?:"[^"]*"|[^,)]+))?')
_HEADING = re.compile(r"^#(!?) (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One thing wrong in a function: the whole text with it, and the few characters that make the difference."""

    kind: str
    id: str  # its kind and place in the shape
    text: str
    wrong: str
    right: str


@dataclass(frozen=True)
class Shape:
    """A function with holes. `pieces` are its text: plain, or (right, wrong, kind)."""

    id: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    result: str  # int, str, list, bool or dict; what it asks for, in the book of changes
    held_out: bool
    pieces: tuple[str | tuple[str, str, str], ...]

    def text(self, wrong: int = -1) -> str:
        """The template with every place right, or the one of that number wrong."""
        return "".join(
            piece if isinstance(piece, str) else piece[place == wrong] for place, piece in enumerate(self.pieces)
        )

    def all_wrong(self) -> str:
        """The template with every place wrong: in the book of changes, the code before the change."""
        return "".join(piece if isinstance(piece, str) else piece[1] for piece in self.pieces)

    def faults(self, split: Split) -> list[int]:
        """The places that may be wrong in a split."""
        marks = [place for place, piece in enumerate(self.pieces) if not isinstance(piece, str)]
        if self.held_out:
            return marks
        return [place for place in marks if self.kind(place).endswith("!") == (split == "held-out")]

    def kind(self, place: int) -> str:
        return self.pieces[place][2]

    def sides(self, place: int) -> tuple[str, str]:
        """What a place is when it is right, and when it is wrong."""
        return self.pieces[place][0], self.pieces[place][1]


@dataclass(frozen=True)
class Function:
    """A finished function, the ways in which it could have been wrong, and how to call it."""

    shape: str
    name: str
    right: str
    faults: tuple[Fault, ...]
    parameters: tuple[str, ...]  # without those that have a default
    kinds: tuple[str, ...]  # of its arguments
    result: str = ""
    before: str = ""  # of a shape from the book of changes: the text before the change
    wish: str = ""  # and what the user asks for

    @property
    def doc(self) -> str:
        """What it is said to do."""
        found = re.search('"""(.*?)"""\n', self.right)
        return found.group(1) if found else ""


def shapes_of(book: str) -> Iterator[Shape]:
    """The shapes of a book."""
    headings = list(_HEADING.finditer(book))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        id, names, arguments, result = (part.strip() for part in heading.group(2).split("|", 3))
        text = book[heading.end() : following.start() if following else None].strip("\n") + "\n"
        pieces: list[str | tuple[str, str, str]] = []
        at = 0
        for mark in _MARK.finditer(text):
            pieces += [text[at : mark.start()], (mark.group(1), mark.group(2), mark.group(3))]
            at = mark.end()
        yield Shape(
            id, tuple(names.split()), tuple(arguments.split()), result, bool(heading.group(1)), (*pieces, text[at:])
        )


@cache
def leaves(split: Split) -> tuple[Shape, ...]:
    """Functions that stand alone. Held-out tasks without a fault have the held-out ones only."""
    both = [*shapes_of(NUMBERS), *shapes_of(TEXTS)]
    return tuple(shape for shape in both if shape.held_out == (split == "held-out"))


@cache
def faulty_leaves(split: Split) -> tuple[Shape, ...]:
    """Functions that have a fault to show in a split: in held-out ones, some shapes are known and the fault is not."""
    both = [*shapes_of(NUMBERS), *shapes_of(TEXTS)]
    return tuple(shape for shape in both if shape.faults(split) and (split == "held-out" or not shape.held_out))


@cache
def users(split: Split, result: str) -> tuple[Shape, ...]:
    """Functions that use another one with such a result."""
    fitting = [shape for shape in shapes_of(USERS) if shape.arguments[0] in (result, "any")]
    return tuple(shape for shape in fitting if split == "held-out" or not shape.held_out)


@cache
def changes(split: Split, kind: str) -> tuple[Shape, ...]:
    """Functions before and after a change of a kind."""
    fitting = [shape for shape in shapes_of(CHANGES) if shape.id.split("-")[0] == kind]
    return tuple(shape for shape in fitting if shape.held_out == (split == "held-out"))


# ------------------------------------------------------------------------------------------- filling the slots


class Slots:
    """The words and numbers of one function; each is drawn when it is first asked for."""

    def __init__(self, chance: Random, given: Mapping[str, str] | None = None) -> None:
        self.chance = chance
        self.values: dict[str, str] = dict(given or {})

    def fill(self, template: str) -> str:
        return _SLOT.sub(lambda slot: self[slot.group(1)], template)

    def __getitem__(self, slot: str) -> str:
        if slot not in self.values:
            self._draw(slot)
        return self.values[slot]

    def _draw(self, slot: str) -> None:
        pick, values = self.chance.choice, self.values
        if slot in ("x", "xs", "y", "ys"):
            others = {values.get("x"), values.get("y")}
            several, one = pick([pair for pair in word_lists.NOUNS if pair[1] not in others])
            values[slot[0] + "s"], values[slot[0]] = several, one
        elif slot in ("w", "ws"):
            values["ws"], values["w"] = pick(word_lists.NAMED)
        elif slot in ("yes", "no"):
            values["yes"], values["no"] = pick(word_lists.VERDICTS)
        elif slot in ("sep", "sepw"):
            values["sep"], values["sepw"] = self.chance.sample(word_lists.SEPARATORS, 2)
        elif slot in ("k", "kw"):
            number = self.chance.randint(5, 30)
            values["k"], values["kw"] = str(number), str(number + pick((-3, -2, -1, 1, 2, 3, 10)))
        elif slot in ("a", "b", "aw"):
            values["a"], values["b"], values["aw"] = map(str, self.chance.sample(range(2, 10), 3))
        else:
            values[slot] = pick(_POOLS[slot])


_POOLS = {
    "s": word_lists.TEXTS,
    "n": word_lists.LIMITS,
    "m": word_lists.AMOUNTS,
    "t": word_lists.TOTALS,
    "d": word_lists.TABLES,
    "i": word_lists.PLACES,
    "c": word_lists.LETTERS,
    "l": word_lists.LABELS,
}


def draw_function(
    shape: Shape, split: Split, chance: Random, taken: set[str], given: Mapping[str, str] | None = None
) -> Function:
    """A function of a shape, under a name that is not `taken`; the name is taken then."""
    slots = Slots(chance, given)
    for _ in range(20):
        name = slots.fill(chance.choice(shape.names))
        if name not in taken:
            break
        slots.values = dict(given or {})
    taken.add(name)
    slots.values["f"] = name
    right = slots.fill(shape.text())
    faults = []
    for place in shape.faults(split):
        fixed, wrong = map(slots.fill, shape.sides(place))
        kind = shape.kind(place).rstrip("!")
        faults.append(Fault(kind, f"{kind}-{place}", slots.fill(shape.text(place)), wrong, fixed))
    return Function(
        shape=shape.id,
        name=name,
        right=right,
        faults=tuple(fault for fault in faults if fault.text != right),
        parameters=tuple(name for name, default in _PARAMETER.findall(right[: right.index("\n")]) if not default),
        kinds=tuple(slots.fill(kind.replace(".", ".$")) for kind in shape.arguments),
        result=shape.result,
        before=slots.fill(shape.all_wrong()),
        wish=slots.fill(shape.result),
    )


# ------------------------------------------------------------------------------------------- arguments for the checks


def draw_arguments(kinds: tuple[str, ...], chance: Random, optional: float = 0.5) -> tuple[Any, ...]:
    """Arguments of these kinds; one that ends with `?` is there with a chance of `optional`."""
    drawn: list[Any] = []
    for kind in kinds:
        if kind.endswith("?") and chance.random() >= optional:
            break
        drawn.append(_draw_argument(kind.rstrip("?"), drawn, chance))
    return tuple(drawn)


def _draw_argument(kind: str, before: list[Any], chance: Random) -> Any:
    name, _, about = kind.partition(".")
    if name == "near":
        return int(about) + chance.choice((-4, -2, -1, 0, 0, 1, 2, 5))
    if name == "wide":
        return chance.randint(0, int(about) + 5)
    if name == "key":  # of the table before it, or not
        return chance.choice([*before[0], chance.choice(word_lists.SAMPLES)])
    if name == "keys":
        known = list(before[0])
        return [chance.choice(known), chance.choice([*known, chance.choice(word_lists.SAMPLES)])]
    return _KINDS[name](chance)


_KINDS: dict[str, Callable[[Random], Any]] = {
    "numbers": word_lists.numbers,
    "number": word_lists.number,
    "few": lambda chance: chance.randint(2, 6),
    "count": lambda chance: chance.randint(1, 3),
    "big": lambda chance: chance.randint(20, 400),
    "word": lambda chance: chance.choice(word_lists.SAMPLES),
    "words": word_lists.some_samples,
    "repeats": lambda chance: [chance.choice(("fig", "plum", "kiwi")) for _ in range(4)],
    "text": lambda chance: " ".join(chance.sample(word_lists.SAMPLES, chance.randint(2, 3))),
    "letter": lambda chance: chance.choice("aeorlb"),
    "table": word_lists.table,
    "maybe": lambda chance: chance.choice((None, chance.randint(1, 9))),
    "mixed": lambda chance: chance.choice((chance.randint(1, 9), chance.choice(word_lists.SAMPLES))),
    "mixture": lambda chance: [
        chance.choice((chance.randint(1, 9), chance.choice(word_lists.SAMPLES))) for _ in range(3)
    ],
}
