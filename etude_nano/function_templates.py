"""Generated function templates, far more than the written ones: the material of a base model's exercises.

A generated template is a `FunctionTemplate` composed at random from `data/generated.txt`: a skeleton of the function, a
filter, and an expression for each element. Reading many teaches a model how docstrings and code correspond without
showing it a template of a held-out task: `is_held_out` recognizes those by their structure, whatever their names and
numbers, and no exercise shows one.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random

from etude_nano.templates import (
    TEMPLATE_FILES,
    FunctionTemplate,
    NanoFunction,
    draw_function,
    parse_templates,
    read_templates,
)
from etude_nano.word_lists import split_words

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


def generate_template(rng: Random) -> FunctionTemplate:
    """Return a random template that is not held out."""
    while True:
        (group,) = rng.choices(list(_GROUP_WEIGHTS), list(_GROUP_WEIGHTS.values()))
        template = _compose(group, rng.choice(read_skeletons().of(group)), rng)
        if template is not None and not is_held_out(template.text()):
            return template


def draw_generated_function(rng: Random, taken: set[str], preset: dict[str, str]) -> NanoFunction:
    """Draw a function of a generated template, with its faults; `preset` gives words for its slots."""
    function = draw_function(generate_template(rng), "train", rng, taken, preset)
    return _without_held_out_faults(function)


def draw_generated_caller(inner: NanoFunction, rng: Random, taken: set[str], preset: dict[str, str]) -> NanoFunction:
    """Draw a function that calls another with its arguments."""
    parameters, swapped = ", ".join(inner.parameters), ", ".join(reversed(inner.parameters))
    words = {
        **preset,
        "params": parameters,
        "call": f"@{inner.name}({parameters})",
        "swapped": f"@{inner.name}({swapped})",
        "inner": inner.name,
    }
    skeletons = read_skeletons()
    fitting = [*skeletons.of("caller", "any"), *2 * skeletons.of("caller", inner.result)]
    while (template := _compose("caller", rng.choice(fitting), rng)) is None or is_held_out(template.text()):
        pass
    caller = draw_function(template, "train", rng, taken, words)
    required = tuple(kind for kind in inner.argument_kinds if not kind.endswith("?"))
    made = NanoFunction(
        caller.template, caller.name, caller.right, caller.faults, caller.parameters, required, caller.result
    )
    return _without_held_out_faults(made)


def _without_held_out_faults(function: NanoFunction) -> NanoFunction:
    faults = tuple(fault for fault in function.faults if not is_held_out_fault(function.right, fault.text))
    return NanoFunction(**{**vars(function), "faults": faults})


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
        which, test, extra_kind = rng.choice(tables[f"filters {group}"])
    words, made = "", one
    if f"expressions {group}" in tables and (not is_list or not test or rng.random() < 0.55):
        words, made = rng.choice(tables[f"expressions {group}"])
    if group == "text" and "$w =" not in text:
        made = made.replace("$w", "$s")
    if ("<test>" in text and not test) or any(slot in which and slot in words for slot in ("$a", "$k")):
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


# ------------------------------------------------------------------------------------------- held-out structures


def is_held_out(text: str) -> bool:
    """Return whether a correct template has the structure of one that is held out."""
    return structural_form(_fill_slots(text)) in _held_out_forms()


def is_held_out_fault(right: str, wrong: str) -> bool:
    """Return whether only held-out tasks show this fault."""
    return structural_form(_fill_slots(right), _fill_slots(wrong)) in _held_out_forms()


@cache
def _held_out_forms() -> frozenset[tuple[str, ...]]:
    forms = set()
    for template in read_templates(*TEMPLATE_FILES):
        if template.held_out:
            forms.add(structural_form(_fill_slots(template.text())))
        else:
            wrong = [template.text(place) for place in template.fault_places("held-out")]
            forms |= {structural_form(_fill_slots(template.text()), _fill_slots(each)) for each in wrong}
    return frozenset(forms)


def _fill_slots(template: str) -> str:
    """Return code that parses, with one fixed name or number for each slot."""
    text = re.sub(r"@?\$(call|swapped)", "called(given)", template).replace("@", "").replace("$params", "given")
    numbers = {"a": "2", "aw": "3", "b": "5", "k": "7", "kw": "11"}
    return re.sub(r"\$([a-z]+)", lambda slot: numbers.get(slot.group(1), f"slot_{slot.group(1)}"), text)


def structural_form(*texts: str) -> tuple[str, ...]:
    """Return the syntax trees of functions with names, numbers and strings numbered, and without docstrings."""
    marks: dict[str, str] = {}

    def mark(kind: str, value: object) -> str:
        return marks.setdefault(f"{kind} {value!r}", f"{kind}{len(marks)}")

    forms = []
    for text in texts:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.name = "f"
                node.body = [line for line in node.body if not _is_docstring(line)] or [ast.Pass()]
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in _BUILTINS:
                node.id = mark("name", node.id)
            elif isinstance(node, ast.arg):
                node.arg = mark("name", node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, int | str) and node.value not in (0, 1):
                node.value = mark(type(node.value).__name__, node.value)
        forms.append(ast.dump(tree))
    return tuple(forms)


def _is_docstring(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


_BUILTINS = frozenset(
    split_words("sum len max min sorted range enumerate zip any all str int list dict set reversed abs isinstance type")
)
