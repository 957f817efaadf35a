"""Generated function templates, far more than the written ones: the material of a base model's exercises.

A generated template is a `FunctionTemplate` composed at random: an iterable, a filter, an expression for each element,
and a reduction. Reading many teaches a model how docstrings and code correspond without showing it a template of a
held-out task: `is_held_out` recognizes those by their structure, whatever their names and numbers, and no
exercise shows one.
"""

import ast
import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

from etude_nano.templates import FunctionTemplate, NanoFunction, draw_function, parse_templates
from etude_nano.templates_callers import CALLER_TEMPLATES
from etude_nano.templates_changes import CHANGE_TEMPLATES
from etude_nano.templates_numbers import NUMBER_TEMPLATES
from etude_nano.templates_texts import TEXT_TEMPLATES


def _split_words(words: str) -> tuple[str, ...]:
    return tuple(words.split())


# Plausible wrong replacements of each part.
_WRONG_PARTS = {
    ">": (">=", "<", "<="),
    ">=": (">", "<", "<="),
    "<": ("<=", ">", ">="),
    "<=": ("<", ">", ">="),
    "==": ("!=", ">="),
    "!=": ("==",),
    "+": ("-", "*"),
    "-": ("+",),
    "*": ("+", "-"),
    "//": ("*", "%", "/"),
    "%": ("//",),
    "+=": ("=", "-="),
    "-=": ("+=",),
    "*=": ("+=",),
    "min": ("max",),
    "max": ("min",),
    "in": ("not in",),
    "not in": ("in",),
    "upper": ("lower", "title"),
    "lower": ("upper",),
    "capitalize": ("upper", "lower"),
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "any": ("all",),
    "all": ("any",),
    "True": ("False",),
    "and": ("or",),
    "0": ("1",),
    "1": ("0", "2"),
    "2": ("3", "1"),
    "10": ("9", "100"),
    "60": ("24", "100"),
    "100": ("10", "1000"),
    "$k": ("$kw", "$k + 1"),
    "$a": ("$aw", "$a + 1"),
    "$n": ("$k",),
}

# Filters: words after the noun, a condition on the slot, and the kind of a further argument ($n or $c).
_NUMBER_FILTERS = (
    ("above $n", "$x {>} $n", "number"),
    ("of at least $n", "$x {>=} $n", "number"),
    ("below $n", "$x {<} $n", "number"),
    ("up to $n", "$x {<=} $n", "number"),
    ("other than $n", "$x {!=} $n", "number"),
    ("above $a", "$x {>} {$a}", ""),
    ("under $k", "$x {<} {$k}", ""),
    ("from $a to $k", "$a <= $x {<=} $k", ""),
    ("that are odd", "$x % {2} {==} 1", ""),
    ("that $a divides", "$x % $a {==} {0}", ""),
    ("that end in $a", "$x % {10} {==} $a", ""),
    ("outside of $a to $k", "$x < $a or $x {>} $k", ""),
)
_WORD_FILTERS = (
    ("longer than $n", "len($w) {>} $n", "few"),
    ("of $n letters or more", "len($w) {>=} $n", "few"),
    ("shorter than $n", "len($w) {<} $n", "few"),
    ("that end with $c", "$w.{endswith}($c)", "letter"),
    ("that hold $c", "$c {in} $w", "letter"),
    ("without $c", "$c {not in} $w", "letter"),
    ("with an even number of letters", "len($w) % {2} {==} 0", ""),
    ("after $c in the alphabet", "$w {>} $c", "letter"),
    ("that begin as they end", "$w[{0}] {==} $w[-1]", ""),
)
# Expressions for each element: words, and code.
_NUMBER_EXPRESSIONS = (
    ("times $a", "$x {*} {$a}"),
    ("plus $a", "$x {+} {$a}"),
    ("less $a", "$x {-} {$a}"),
    ("doubled", "$x {*} {2}"),
    ("squared", "$x {*} $x"),
    ("halved", "$x {//} {2}"),
    ("taken from $k", "«$k - $x¦$x - $k¦swapped»"),
    ("but at most $k", "{min}($x, {$k})"),
    ("but at least $a", "{max}($x, {$a})"),
    ("without its last digit", "$x {//} {10}"),
    ("in percent of $k", "$x {*} {100} // $k"),
)
_WORD_EXPRESSIONS = (
    ("in capitals", "$w.{upper}()"),
    ("with a capital", "$w.{capitalize}()"),
    ("backwards", "$w[«::-1¦::1¦constant»]"),
    ("twice", "$w {*} {2}"),
    ('with "$sep" behind it', '«$w + "$sep"¦"$sep" + $w¦swapped»'),
    ('behind "$l "', '«"$l " + $w¦$w + " $l"¦swapped»'),
    ("without its first letter", "$w[«1:¦:1¦constant»]"),
    ("cut to $a letters", "$w[«:$a¦$a:¦operator»]"),
    ("by its last letter", "$w[«-1¦0¦constant»]"),
)
_VERBS = _split_words(
    "pick take gather collect reckon weigh survey fetch scan trace list_of report_on figure note draw mark_up "
    "run_over work_on inspect derive prepare settle assess judge size_up go_over sum_up look_up make"
)


def generate_template(rng: Random) -> FunctionTemplate:
    """Return a random template that is not held out."""
    kinds: Sequence[tuple[Callable[[Random], FunctionTemplate], int]] = (
        (_number_list_template, 5),
        (_word_list_template, 4),
        (_table_template, 3),
        (_number_template, 4),
        (_text_template, 3),
        (_two_arguments_template, 2),
    )
    while True:
        (draw,) = rng.choices([draw for draw, _ in kinds], [weight for _, weight in kinds])
        template = draw(rng)
        if not is_held_out(template.text()):
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
    while True:
        template = _caller_template(inner.result, rng)
        if not is_held_out(template.text()):
            break
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
    """Turn every `{part}` into a place for a fault, with a random wrong replacement of that part."""

    def mark(found: re.Match[str]) -> str:
        part = found.group(1)
        kind = "operator" if not part[-1].isdigit() and "$" not in part else "constant"
        return f"«{part}¦{rng.choice(_WRONG_PARTS[part])}¦{kind}»"

    return re.sub(r"\{([^{}]+)\}", mark, text)


def _build_template(
    rng: Random, names: str, parameters: Sequence[str], kinds: Sequence[str], result: str, doc: str, body: str
) -> FunctionTemplate:
    text = f'def $f({", ".join(parameters)}):\n    """{doc}"""\n{body}'
    heading = f"# generated | {names} | {' '.join(kinds)} | {result}\n"
    (template,) = parse_templates("\n" + heading + mark_faults(text, rng))
    return template


def _draw_names(rng: Random, *endings: str) -> str:
    return " ".join(f"{verb}_{rng.choice(endings)}" for verb in rng.sample(_VERBS, 3))


def _return_line(rng: Random, right: str, wrong: Sequence[str]) -> str:
    """Return a last line whose fault is a missing `return` or another value."""
    other = rng.choice(wrong)
    if rng.random() < 0.4:
        return f"    «return {right}¦{right}¦return»\n"
    return f"    return «{right}¦{other}¦variable»\n"


def _number_list_template(rng: Random) -> FunctionTemplate:
    which, test, kind = rng.choice(_NUMBER_FILTERS) if rng.random() < 0.75 else ("", "", "")
    each, made = rng.choice(_NUMBER_EXPRESSIONS) if rng.random() < 0.55 or not test else ("", "$x")
    if "$a" in which and "$a" in each:
        each, made = "", "$x"
    some = f"the $xs {which}".strip() if which else "the $xs"
    each = f", each {each}" if each else ""
    name = _draw_names(rng, "$xs", "$x", "all_$xs")
    return _list_template(rng, "$xs", "$x", some, each, test, made, kind, name, "numbers")


def _word_list_template(rng: Random) -> FunctionTemplate:
    which, test, kind = rng.choice(_WORD_FILTERS) if rng.random() < 0.75 else ("", "", "")
    each, made = rng.choice(_WORD_EXPRESSIONS) if rng.random() < 0.6 or not test else ("", "$w")
    some = f"the $ws {which}".strip() if which else "the $ws"
    each = f", each {each}" if each else ""
    name = _draw_names(rng, "$ws", "$w", "all_$ws")
    return _list_template(rng, "$ws", "$w", some, each, test, made, kind, name, "words")


def _list_template(
    rng: Random, all_: str, one: str, some: str, each: str, test: str, made: str, kind: str, names: str, over: str
) -> FunctionTemplate:
    """Compose a function over a list: a filter, an expression for each element, and a reduction."""
    numbers = over == "numbers"
    parameters = [all_] + (["$c"] if kind == "letter" else ["$n"] if kind else [])
    kinds = [over] + ([kind] if kind else [])
    reductions = ["list", "count", "first", "last", "any"]
    reductions += ["sum", "largest", "smallest", "text"] if numbers else ["joined", "letters", "sorted", "table"]
    reduction = rng.choice(reductions)
    if reduction in ("count", "any") and not test:
        reduction = "list"
    inner = f" if {test}" if test else ""
    build = f"[{made} for {one} in {all_}{inner}]"
    loop = rng.random() < 0.55
    guard = f"        if {test}:\n" if test else ""
    pad = "            " if test else "        "
    through = f"    for {one} in {all_}:\n{guard}{pad}"
    doc, body, result = "", "", "list"
    if reduction == "list":
        doc = rng.choice((f"{some}{each}, in a list.", f"{some}{each}."))
        body = f"    $t = []\n{through}$t.append({made})\n" + _return_line(rng, "$t", (one, all_))
        body = body if loop else _return_lines(rng, build, (f"{build}[1:]",))
    elif reduction in ("sum", "letters"):
        part = made if reduction == "sum" else f"len({made})"
        doc = f"The sum of {some}{each}." if reduction == "sum" else f"How many letters {some} have together{each}."
        body = f"    $t = {{0}}\n{through}$t {{+=}} {part}\n" + _return_line(rng, "$t", (one, f"len({all_})"))
        body = body if loop else f"    return sum({part} for {one} in {all_}{inner})\n"
        result = "int"
    elif reduction == "count":
        doc = rng.choice((f"How many of the {all_} there are: {some}.", f"The number of {some}."))
        body = f"    $t = {{0}}\n{through}$t {{+=}} {{1}}\n" + _return_line(rng, "$t", (one, f"len({all_})"))
        body = body if loop else f"    return len([{one} for {one} in {all_}{inner}]) «¦+ 1¦off-by-one»".rstrip() + "\n"
        body, result = body.replace(" «¦+ 1", "«¦ + 1"), "int"
    elif reduction in ("first", "last"):
        none = "{0}" if numbers else '«"$no"¦"$yes"¦default»'
        doc = f"The {reduction} of {some}{each}; {'0' if numbers else chr(34) + '$no' + chr(34)} if there is none."
        place = "«0¦-1¦constant»" if reduction == "first" else "«-1¦0¦constant»"
        body = f"    $t = {build}\n    if not $t:\n        return {none}\n    return $t[{place}]\n"
        result = "int" if numbers else "str"
    elif reduction == "any":
        word = rng.choice(("any", "all"))
        doc = f"Whether {word} of the {all_} {'is' if word == 'any' else 'are'} one of {some}."
        body, result = f"    return {{{word}}}({test} for {one} in {all_})\n", "bool"
    elif reduction in ("largest", "smallest"):
        call = "max" if reduction == "largest" else "min"
        doc = f"The {reduction} of {some}{each}; $k if there is none."
        body = f"    $t = {build}\n    return {{{call}}}($t, default={{$k}})\n"
        result = "int"
    elif reduction in ("text", "joined"):
        part = f"str({made})" if numbers else made
        doc = f'{some}{each}, in one text with "$sep" between.'
        mark = '«"$sep"¦"$sepw"¦constant»'
        body, result = f"    return {mark}.join({part} for {one} in {all_}{inner})\n", "str"
    elif reduction == "sorted":
        back = rng.random() < 0.5
        doc = f"{some}{each}, sorted{', the last first' if back else ''}."
        body = f"    return sorted({build}{', reverse={True}' if back else ''})\n"
        body = body if back else _return_lines(rng, f"sorted({build})", (build,))
    else:
        doc, result = f"How long {some} are, by name{each}.", "dict"
        body = f"    return {{{{{made}: «len({one})¦{one}¦variable» for {one} in {all_}{inner}}}}}\n"
        body = body.replace("{{", "\x00").replace("}}", "\x01")
    capitalized = doc[0].upper() + doc[1:]
    template = _build_template(rng, names, parameters, kinds, result, capitalized, body)
    return _restore_braces(template)


def _return_lines(rng: Random, right: str, wrong: Sequence[str]) -> str:
    """Return one line, or two with a name for the result."""
    if rng.random() < 0.5:
        return f"    return {right}\n"
    return f"    found = {right}\n    " + rng.choice(
        ("«return found¦found¦return»\n", "return «found¦None¦variable»\n")
    )


def _restore_braces(template: FunctionTemplate) -> FunctionTemplate:
    """Put back the braces of dicts, which had placeholders while `{part}` was marked."""

    def back(text: str) -> str:
        return text.replace("\x00", "{").replace("\x01", "}")

    parts = tuple(
        back(part) if isinstance(part, str) else (back(part[0]), back(part[1]), part[2]) for part in template.parts
    )
    return FunctionTemplate(**{**vars(template), "parts": parts})


def _table_template(rng: Random) -> FunctionTemplate:
    """Compose a function over the entries of a dict."""
    which, test, kind = rng.choice(
        (
            ("with less than $n", "value {<} $n", "few"),
            ("with $n or more", "value {>=} $n", "few"),
            ("with just $n", "value {==} $n", "few"),
            ("longer than $n letters", "len(key) {>} $n", "few"),
            ("that begin with $c", "key.{startswith}($c)", "letter"),
            ("with an odd number", "value % {2} {==} 1", ""),
            ("other than $c", "key {!=} $c", "word"),
        )
    )
    parameters = ["$d"] + (["$c"] if "$c" in test else ["$n"] if kind else [])
    kinds = ["table"] + ([kind] if kind else [])
    variant = rng.choice(("keys", "sum", "count", "table", "lines", "largest"))
    loop = "for key, value in $d.items()"
    names = _draw_names(rng, "$d", "$x", "keys", "table")
    if variant == "keys":
        doc, result = f"The keys of the $d {which}, sorted.", "list"
        body = f"    $t = [«key¦value¦variable» {loop} if {test}]\n    «return sorted($t)¦return $t¦variable»\n"
    elif variant == "sum":
        doc, result = f"The numbers of the keys of the $d {which}, added up.", "int"
        body = f"    $t = {{0}}\n    {loop}:\n        if {test}:\n            $t {{+=}} value\n"
        body += _return_line(rng, "$t", ("value", "len($d)"))
    elif variant == "count":
        doc, result = f"How many keys of the $d there are {which}.", "int"
        body = f"    return sum(«1¦value¦variable» {loop} if {test})\n"
    elif variant == "table":
        each, made = rng.choice(
            (("", "value"), (", with $a more of each", "value {+} {$a}"), (", twice", "value {*} {2}"))
        )
        doc, result = f"The part of the $d {which}{each}.", "dict"
        body = f"    $t = \x00\x01\n    {loop}:\n        if {test}:\n            $t[key] = {made}\n"
        body += _return_line(rng, "$t", ("$d",))
    elif variant == "lines":
        doc, result = f'Key, "$sep" and number for each of the $d {which}.', "list"
        body = f'    return [«key + "$sep" + str(value)¦str(value) + "$sep" + key¦swapped» {loop} if {test}]\n'
    else:
        doc, result = f"The largest number of a key of the $d {which}; $k without any.", "int"
        body = f"    return {{max}}([«value¦len(key)¦variable» {loop} if {test}], default={{$k}})\n"
    return _restore_braces(_build_template(rng, names, parameters, kinds, result, doc, body))


def _number_template(rng: Random) -> FunctionTemplate:
    """Compose a function of one number."""
    each, made = rng.choice(_NUMBER_EXPRESSIONS)
    names = _draw_names(rng, "$x", "the_$x", "one_$x")
    bound, test = rng.choice((("above $k", "$x {>} $k"), ("of $k or less", "$x {<=} $k"), ("below $k", "$x {<} $k")))
    variant = rng.choice(("plain", "if", "else", "word", "steps", "loop", "clock", "pair", "both"))
    if "$k" in each and variant in ("if", "else"):
        each, made = "plus $a", "$x {+} {$a}"
    result, parameters, kinds = "int", ["$x"], ["near.k"]
    if variant == "plain":
        doc = f"The $x {each}, and $b more."
        body = f"    $t = {made}\n    return $t {{+}} $b\n"
    elif variant == "if":
        doc = f"The $x; a $x {bound} is {each}."
        body = f"    if {test}:\n        return {made}\n    return «$x¦0¦branch»\n"
    elif variant == "else":
        doc = f"0 for a $x {bound}; any other is {each}."
        body = f"    if {test}:\n        return {{0}}\n    return {made}\n"
    elif variant == "word":
        doc, result = f'"$yes" for a $x {bound}, "$no" for any other.', "str"
        body = f'    if {test}:\n        return «"$yes"¦"$no"¦branch»\n    return «"$no"¦"$yes"¦branch»\n'
    elif variant == "steps":
        doc, parameters, kinds = "How many steps of $m it takes to reach $x.", ["$x", "$m"], ["number", "count"]
        # The loop condition is never faulty: the loop might not end.
        body = "    $t = 0\n    at = {0}\n    while at < $x:\n        at += $m\n        $t += {1}\n"
        body += "    return «$t¦at¦variable»\n"
    elif variant == "loop":
        doc, parameters, kinds = f"The sum of the numbers below $m, each {each}.", ["$m"], ["few"]
        body = f"    $t = {{0}}\n    for $x in range($m):\n        $t {{+=}} {made}\n" + _return_line(
            rng, "$t", ("$x", "$m")
        )
    elif variant == "clock":
        doc, result = "The $x in hours of 60 and a rest, as text.", "str"
        body = '    return str($x {//} {60}) + «":"¦"$sep"¦constant» + str($x {%} 60)\n'
    elif variant == "pair":
        doc, result = f"The $x and the $x {each}, in a list.", "list"
        body = f"    return [«$x, {_without_marks(made)}¦{_without_marks(made)}, $x¦swapped»]\n"
    else:
        doc, result = f"Whether the $x is {bound} and even.".replace("of $k", "$k"), "bool"
        body = f"    return {test} {{and}} $x % {{2}} == 0\n"
    return _build_template(rng, names, parameters, kinds, result, doc, body)


def _without_marks(text: str) -> str:
    """Return an expression without its fault marks."""
    return re.sub("«([^¦]*)¦[^»]*»", r"\1", re.sub(r"\{([^{}]+)\}", r"\1", text))


def _text_template(rng: Random) -> FunctionTemplate:
    """Compose a function of one text."""
    names = _draw_names(rng, "$s", "the_$s", "one_$s")
    each, made = rng.choice(_WORD_EXPRESSIONS)
    made = made.replace("$w", "$s")
    parameters, kinds, result = ["$s"], ["word"], "str"
    variant = rng.choice(("made", "around", "end", "size", "swap", "many", "part", "cut"))
    if variant == "made":
        doc, body = f'The $s {each}, then "$l".', f'    return {made} + «"$l"¦"$no"¦constant»\n'
    elif variant == "around":
        doc, parameters, kinds = "The $s with $c on both sides.", ["$s", "$c"], ["word", "letter"]
        body = "    return «$c + $s + $c¦$c + $s¦operator»\n"
    elif variant == "end":
        doc, parameters, kinds = "The last $n letters of $s.", ["$s", "$n"], ["word", "count"]
        body = "    return $s[«-$n:¦:-$n¦operator»]\n"
    elif variant == "size":
        doc, result = "How many letters $s has, times $a.", "int"
        body = "    $t = len($s)\n    return $t {*} {$a}\n"
    elif variant == "swap":
        doc, parameters, kinds = "The $s with $c for each e.", ["$s", "$c"], ["word", "letter"]
        body = '    return $s.replace(«"e", $c¦$c, "e"¦swapped»)\n'
    elif variant == "many":
        doc, result, kinds = "How many words of $s are longer than $a.", "int", ["text"]
        body = "    $t = [word for word in $s.split() if len(word) {>} {$a}]\n    return «len($t)¦len($s)¦variable»\n"
    elif variant == "part":
        doc, kinds = f"The {{first}} word of $s {each}.", ["text"]
        place = rng.choice((("first", "«0¦-1¦constant»"), ("last", "«-1¦0¦constant»")))
        doc = doc.replace("{first}", place[0])
        body = f"    word = $s.split()[{place[1]}]\n    return {made.replace('$s', 'word')}\n"
    else:
        doc, result = "Whether $s is longer than $a and has an a.", "bool"
        body = '    return len($s) {>} {$a} {and} "a" in $s\n'
    return _build_template(rng, names, parameters, kinds, result, doc, body)


def _two_arguments_template(rng: Random) -> FunctionTemplate:
    """Compose a function of two numbers or two lists."""
    variant = rng.choice(("mix", "order", "lists", "more", "share"))
    result = "int"
    if variant == "mix":
        doc = "$a times $x, and $y."
        body, parameters, kinds = "    return «$a¦$aw¦constant» {*} $x {+} $y\n", ["$x", "$y"], ["number", "number"]
    elif variant == "order":
        doc, result = "The two numbers, the smaller first.", "list"
        body = "    if $x {<} $y:\n        return [«$x, $y¦$y, $x¦swapped»]\n    return [$y, $x]\n"
        parameters, kinds = ["$x", "$y"], ["number", "number"]
    elif variant == "lists":
        doc, result = "Each of the $xs {+} the one of the $ys beside it.", "list"
        word, sign = rng.choice((("plus", "+"), ("less", "-")))
        doc = doc.replace("{+}", word)
        body = f"    $t = []\n    for $x, $y in zip($xs, $ys):\n        $t.append($x {{{sign}}} $y)\n"
        body += _return_line(rng, "$t", ("$xs", "$x"))
        parameters, kinds = ["$xs", "$ys"], ["numbers", "numbers"]
    elif variant == "more":
        doc, result = 'Which is more: "$yes" for $x, "$no" for $y or if they are equal.', "str"
        body = '    if $x {>} $y:\n        return «"$yes"¦"$no"¦branch»\n    return "$no"\n'
        parameters, kinds = ["$x", "$y"], ["number", "number"]
    else:
        doc = "What is left of $x when $y is taken away $m times; never below 0."
        body = "    $t = $x {-} $y {*} $m\n    return {max}($t, {0})\n"
        parameters, kinds = ["$x", "$y", "$m"], ["big", "few", "count"]
    names = _draw_names(rng, "both", "$x", "two", "$x_and_$y")
    return _build_template(rng, names, parameters, kinds, result, doc, body)


def _caller_template(result: str, rng: Random) -> FunctionTemplate:
    """Compose a function that calls one with this kind of result."""
    anything = (
        ('The $inner and the word "$l", in a list.', "list", '    return [«$call, "$l"¦"$l", $call¦swapped»]\n'),
        (
            'The $inner as text, "$l" behind it.',
            "str",
            '    $t = str(«$call¦$swapped¦swapped»)\n    return $t + " $l"\n',
        ),
        ("The $inner twice, in a list.", "list", "    $t = $call\n    return [$t] {*} {2}\n"),
    )
    special = {
        "int": (
            ("Twice the $inner.", "int", "    return {2} {*} $call\n"),
            ("The $inner less $a.", "int", "    $t = $call\n    return $t {-} {$a}\n"),
            ("The $inner, but at most $k.", "int", "    return {min}($call, {$k})\n"),
            ("Whether the $inner is above $a.", "bool", "    return $call {>} {$a}\n"),
            ("The $inner halved, and $b.", "int", "    return $call {//} {2} {+} $b\n"),
        ),
        "list": (
            (
                "How many things the $inner has.",
                "int",
                "    return len($call) «¦+ 1¦off-by-one»\n".replace(" «¦+", "«¦ +"),
            ),
            ("The $inner backwards.", "list", "    return $call[«::-1¦::1¦constant»]\n"),
            ("Whether the $inner has more than $a things.", "bool", "    return len($call) {>} {$a}\n"),
        ),
        "str": (
            ('"$l " and the $inner.', "str", '    return «"$l " + $call¦$call + "$l "¦swapped»\n'),
            (
                "How long the $inner is.",
                "int",
                "    $t = $call\n    return len($t) «¦- 1¦off-by-one»\n".replace(" «¦-", "«¦ -"),
            ),
        ),
        "bool": (("1 if the $inner holds, else 0.", "int", "    if $call:\n        return {1}\n    return {0}\n"),),
        "dict": (
            ("The numbers of the $inner, sorted.", "list", "    return sorted($call.«values¦keys¦variable»())\n"),
        ),
    }
    doc, gives, body = rng.choice((*anything, *special[result], *special[result]))
    return _build_template(rng, _draw_names(rng, "$l", "$l_too", "the_$l"), ["$params"], ["any"], gives, doc, body)


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
    for source in (NUMBER_TEMPLATES, TEXT_TEMPLATES, CALLER_TEMPLATES, CHANGE_TEMPLATES):
        for template in parse_templates(source):
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
    _split_words(
        "sum len max min sorted range enumerate zip any all str int list dict set reversed abs isinstance type"
    )
)
