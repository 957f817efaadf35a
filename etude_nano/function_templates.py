"""Draw functions: from written templates, or from templates that are composed at random, of which there are far more.

A composed template is a `FunctionTemplate` made from `data/generated.txt`: a skeleton of the function, a filter, and an
expression for each element. `draw_leaf` and `draw_caller` draw functions that may occur in the tasks of a split.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from random import Random

from etude_nano.sides import SIDES, Split, side_of
from etude_nano.templates import (
    FunctionTemplate,
    NanoFunction,
    caller_templates,
    draw_function,
    leaf_templates,
    parse_templates,
)
from etude_nano.word_lists import split_words

WRITTEN_SHARE = 0.15  # of the functions; the others are composed
COMBINED_SHARE = 0.5  # of the filters and expressions, each of two
_VERBS = split_words(
    "pick take gather collect reckon weigh survey fetch scan trace list_of report_on figure note draw mark_up "
    "run_over work_on inspect derive prepare settle assess judge size_up go_over sum_up look_up make"
)
# How often a group of generated functions is drawn.
_GROUP_WEIGHTS = {"numbers": 5, "words": 4, "table": 3, "number": 4, "text": 3, "two": 2}
# Names of a list and of its elements, by group.
_LIST_NAMES = {"numbers": ("$xs", "$x"), "words": ("$ws", "$w")}


@dataclass(frozen=True)
class Skeleton:
    """A function of `data/generated.txt` before its parts are drawn."""

    groups: tuple[str, ...]
    parameters: str
    argument_kinds: str
    result: str
    variants: tuple[str, ...]  # docstring and body


@dataclass(frozen=True)
class SkeletonFile:
    """The contents of `data/generated.txt`: skeletons, and tables of their parts by "NAME GROUP"."""

    skeletons: tuple[Skeleton, ...]
    tables: Mapping[str, list[list[str]]]

    def of(self, *groups: str) -> list[Skeleton]:
        """Return the skeletons that belong to all of these groups."""
        return [skeleton for skeleton in self.skeletons if set(groups) <= set(skeleton.groups)]


@cache
def read_skeletons() -> SkeletonFile:
    """Read `data/generated.txt`: tables under `== name groups`, skeletons under `# groups | parameters | ...`."""
    skeletons: list[Skeleton] = []
    tables: dict[str, list[list[str]]] = {}
    source = files("etude_nano").joinpath("data/generated.txt").read_text(encoding="utf-8")
    for block in source.strip("\n").split("\n\n"):
        heading, text = block.split("\n", 1)
        if heading.startswith("=="):
            name, *of_groups = heading[2:].split()
            rows = [[field.strip() for field in line.split(" |")] for line in text.splitlines()]
            tables |= {f"{name} {group}": rows for group in of_groups or ("",)}
        else:
            groups, parameters, kinds, result = (field.strip() for field in heading.removeprefix("# ").split("|"))
            skeletons.append(Skeleton(tuple(groups.split()), parameters, kinds, result, tuple(text.split("\nor\n"))))
    return SkeletonFile(tuple(skeletons), tables)


def compose_template(rng: Random) -> FunctionTemplate:
    """Return a random template."""
    while True:
        (group,) = rng.choices(list(_GROUP_WEIGHTS), list(_GROUP_WEIGHTS.values()))
        if (template := _compose(group, rng.choice(read_skeletons().of(group)), rng)) is not None:
            return template


def draw_leaf(
    split: Split,
    rng: Random,
    taken: set[str],
    preset: Mapping[str, str] | None = None,
    *,
    faulty: bool = False,
    result: str = "",
) -> NanoFunction:
    """Draw a function that calls no other, of the split's side; with a fault, and of a kind of result, if asked for."""
    while True:
        template = rng.choice(leaf_templates()) if rng.random() < WRITTEN_SHARE else compose_template(rng)
        if result in ("", template.result):
            function = draw_function(template, split, rng, set(taken), preset)
            if _fits(function, split, taken) and (function.faults or not faulty):
                taken.add(function.name)
                return function


def draw_caller(
    inner: NanoFunction, split: Split, rng: Random, taken: set[str], preset: Mapping[str, str] | None = None
) -> NanoFunction:
    """Draw a function that calls another, with the same arguments.

    A training task has training functions only. In a measured task, callers of other sides have no faults."""
    parameters, swapped = ", ".join(inner.parameters), ", ".join(reversed(inner.parameters))
    words = {
        **(preset or {}),
        "params": parameters,
        "call": f"@{inner.name}({parameters})",
        "swapped": f"@{inner.name}({swapped})",
        "inner": inner.name,
    }
    written, skeletons = caller_templates(inner.result), read_skeletons()
    fitting = [*skeletons.of("caller", "any"), *2 * skeletons.of("caller", inner.result)]
    while True:
        composed = rng.random() >= 2 * WRITTEN_SHARE
        template = _compose("caller", rng.choice(fitting), rng) if composed else rng.choice(written)
        if template is not None:
            caller = draw_function(template, split, rng, set(taken), words)
            own_side = _fits(caller, split, taken)
            if own_side or (split != "train" and caller.name not in taken):
                taken.add(caller.name)
                required = tuple(kind for kind in inner.argument_kinds if not kind.endswith("?"))
                return replace(caller, argument_kinds=required, faults=caller.faults if own_side else ())


def _fits(function: NanoFunction, split: Split, taken: set[str]) -> bool:
    return function.name not in taken and side_of(function.right) == SIDES[split]


# ------------------------------------------------------------------------------------------- composing templates


def mark_faults(text: str, rng: Random) -> str:
    """Turn every `{part}` into a place for a fault, its wrong text drawn from the table `wrong`; `{{` is a brace."""
    wrong = {part: others for part, *others in read_skeletons().tables["wrong "]}

    def mark(found: re.Match[str]) -> str:
        part = found.group(1)
        if part is None:
            return found.group()[0]
        kind = "operator" if not part[-1].isdigit() and "$" not in part else "constant"
        return f"«{part}¦{rng.choice(wrong[part])}¦{kind}»"

    return re.sub(r"\{\{|\}\}|\{([^{}]+)\}", mark, text)


def _compose(group: str, skeleton: Skeleton, rng: Random) -> FunctionTemplate | None:
    """Draw the parts of a skeleton: a variant, a filter and an expression; None if they do not fit together."""
    text = rng.choice(skeleton.variants)
    tables, is_list = read_skeletons().tables, group in _LIST_NAMES
    every, one = _LIST_NAMES.get(group, ("", ""))
    which, test, extra_kind = "", "", ""
    if f"filters {group}" in tables and (not is_list or rng.random() < 0.75):
        which, test, extra_kind = _draw_filter(tables[f"filters {group}"], rng)
    words, made = "", one
    if f"expressions {group}" in tables and (not is_list or not test or rng.random() < 0.55):
        words, made = _draw_expression(tables[f"expressions {group}"], rng)
    if group == "text" and "$w =" not in text:
        made = made.replace("$w", "$s")
    if ("<test>" in text and not test) or _slots(which) & _slots(words):
        return None
    some = f"the {every} {which}".rstrip()
    condition = f" if {test}" if test else ""
    head = f"for {one} in {every}:\n        " + (f"if {test}:\n            " if test else "")
    macros = {
        "all": every, "one": one, "over": group, "some": some, "Some": some.capitalize(), "which": which, "test": test,
        "each": f", each {words}" if words else "", "words": words, "made": made, "plain": _without_marks(made),
        "if": condition, "for": head, "build": f"[{made} for {one} in {every}{condition}]",
    }  # fmt: skip

    def fill(template: str) -> str:
        return re.sub(r"<(\w+)>", lambda macro: macros[macro.group(1)], template)

    extra = "$c" if "$c" in test else "$n" if extra_kind else ""
    parameters = ", ".join(filter(None, (fill(skeleton.parameters), extra)))
    kinds = f"{fill(skeleton.argument_kinds)} {extra_kind}".strip()
    body = _draw_returns(fill(text), rng)
    endings = dict(tables["endings "])["caller" if "caller" in skeleton.groups else group].split()
    names = " ".join(f"{verb}_{rng.choice(endings)}" for verb in rng.sample(_VERBS, 3))
    heading = f"# generated | {names} | {kinds} | {skeleton.result}"
    (template,) = parse_templates(mark_faults(f"{heading}\ndef $f({parameters}):\n{body}\n", rng))
    return template


def _draw_filter(table: list[list[str]], rng: Random) -> tuple[str, str, str]:
    """Draw the words, the test and the extra argument of a filter: one row of the table, or two joined by `and`."""
    which, test, extra = rng.choice(table)
    if rng.random() < COMBINED_SHARE:
        words, more, argument = (part.replace("$a", "$b") for part in rng.choice(table))
        if not _slots(which) & _slots(words) and more != test and not (extra and argument):
            both = (f"({part})" if " or " in part else part for part in (test, more))
            return f"{which} and {words}", " and ".join(both), extra or argument
    return which, test, extra


def _draw_expression(table: list[list[str]], rng: Random) -> tuple[str, str]:
    """Draw the words and the code of an expression: one row of the table, or one applied to another."""
    words, made = rng.choice(table)
    if rng.random() < COMBINED_SHARE:
        then, outer = (part.replace("$a", "$b") for part in rng.choice(table))
        if not _slots(words) & _slots(then) and words != then and "«" not in made + outer:
            return f"{words}, then {then}", re.sub(r"\$[xw]\b", lambda _: f"({made})", outer)
    return words, made


def _slots(text: str) -> set[str]:
    """Return the slots of numbers and texts in a part of a template."""
    return set(re.findall(r"\$(?:[abknlc]|sep)\b", text))


def _draw_returns(text: str, rng: Random) -> str:
    """Draw what `<return RIGHT|WRONG|...>` and `<result EXPRESSION>` stand for: last lines with their faults."""

    def last_line(found: re.Match[str]) -> str:
        right, *wrong = found.group(1).split("|")
        other = rng.choice(wrong)
        return f"«return {right}¦{right}¦return»" if rng.random() < 0.4 else f"return «{right}¦{other}¦variable»"

    def last_lines(found: re.Match[str]) -> str:
        if rng.random() < 0.5:
            return f"return {found.group(1)}"
        end = rng.choice(("«return found¦found¦return»", "return «found¦None¦variable»"))
        return f"found = {found.group(1)}\n    {end}"

    return re.sub(r"<result (.+)>$", last_lines, re.sub(r"<return (.+)>$", last_line, text, flags=re.M), flags=re.M)


def _without_marks(text: str) -> str:
    """Return an expression without its fault marks."""
    return re.sub("«([^¦]*)¦[^»]*»", r"\1", re.sub(r"\{([^{}]+)\}", r"\1", text))
