"""Small functions put together from parts, more of them than any book holds: what a base model practises on.

A sketch is a `Shape` like those of the books, drawn instead of written: what it goes over, which of it counts, what is
made of each, and what of all of them. So a model that has read many knows how the words of a docstring and the code
under it belong together, and has met no shape of a held-out task: `is_held_out` knows those by their form, whatever
their names and numbers, and no practice shows one.
"""

import ast
import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

from etude_nano.templates import Function, Shape, draw_function, shapes_of
from etude_nano.templates_callers import USERS
from etude_nano.templates_changes import CHANGES
from etude_nano.templates_numbers import NUMBERS
from etude_nano.templates_texts import TEXTS


def _all(words: str) -> tuple[str, ...]:
    return tuple(words.split())


# Another operator that somebody could have meant.
_SLIPS = {
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

# What counts: words after the noun, a condition on the slot, and the kind of a further argument ($n or $c).
_OF_NUMBERS = (
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
_OF_WORDS = (
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
# What is made of each: words, and an expression.
_MADE_OF_NUMBERS = (
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
_MADE_OF_WORDS = (
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
_VERBS = _all(
    "pick take gather collect reckon weigh survey fetch scan trace list_of report_on figure note draw mark_up "
    "run_over work_on inspect derive prepare settle assess judge size_up go_over sum_up look_up make"
)


def sketch_shape(chance: Random) -> Shape:
    """A shape of no book."""
    kinds: Sequence[tuple[Callable[[Random], Shape], int]] = (
        (_over_numbers, 5),
        (_over_words, 4),
        (_over_table, 3),
        (_of_one_number, 4),
        (_of_one_text, 3),
        (_of_two, 2),
    )
    while True:
        (draw,) = chance.choices([draw for draw, _ in kinds], [weight for _, weight in kinds])
        shape = draw(chance)
        if not is_held_out(shape.text()):
            return shape


def draw_sketch(chance: Random, taken: set[str], given: dict[str, str]) -> Function:
    """A function of a drawn shape, with the faults it may have; `given` are words for its slots."""
    function = draw_function(sketch_shape(chance), "train", chance, taken, given)
    return _without_held_out(function)


def draw_caller(inner: Function, chance: Random, taken: set[str], given: dict[str, str]) -> Function:
    """A function that uses another, with its arguments."""
    parameters, swapped = ", ".join(inner.parameters), ", ".join(reversed(inner.parameters))
    words = {
        **given,
        "params": parameters,
        "call": f"@{inner.name}({parameters})",
        "swapped": f"@{inner.name}({swapped})",
        "inner": inner.name,
    }
    while True:
        shape = _caller(inner.result, chance)
        if not is_held_out(shape.text()):
            break
    user = draw_function(shape, "train", chance, taken, words)
    required = tuple(kind for kind in inner.kinds if not kind.endswith("?"))
    made = Function(user.shape, user.name, user.right, user.faults, user.parameters, required, user.result)
    return _without_held_out(made)


def _without_held_out(function: Function) -> Function:
    faults = tuple(fault for fault in function.faults if not is_held_out_fault(function.right, fault.text))
    return Function(**{**vars(function), "faults": faults})


# ------------------------------------------------------------------------------------------- the parts put together


def marked(text: str, chance: Random) -> str:
    """`{part}` as a place that can be wrong, in one of the ways in which that part can."""

    def mark(found: re.Match[str]) -> str:
        part = found.group(1)
        kind = "operator" if not part[-1].isdigit() and "$" not in part else "constant"
        return f"«{part}¦{chance.choice(_SLIPS[part])}¦{kind}»"

    return re.sub(r"\{([^{}]+)\}", mark, text)


def _shape(
    chance: Random, names: str, parameters: Sequence[str], kinds: Sequence[str], result: str, doc: str, body: str
) -> Shape:
    text = f'def $f({", ".join(parameters)}):\n    """{doc}"""\n{body}'
    heading = f"# sketch | {names} | {' '.join(kinds)} | {result}\n"
    (shape,) = shapes_of("\n" + heading + marked(text, chance))
    return shape


def _names(chance: Random, *endings: str) -> str:
    return " ".join(f"{verb}_{chance.choice(endings)}" for verb in chance.sample(_VERBS, 3))


def _returned(chance: Random, right: str, wrong: Sequence[str]) -> str:
    """A last line, which may lack its `return` or give another thing."""
    other = chance.choice(wrong)
    if chance.random() < 0.4:
        return f"    «return {right}¦{right}¦return»\n"
    return f"    return «{right}¦{other}¦variable»\n"


def _over_numbers(chance: Random) -> Shape:
    which, test, kind = chance.choice(_OF_NUMBERS) if chance.random() < 0.75 else ("", "", "")
    each, made = chance.choice(_MADE_OF_NUMBERS) if chance.random() < 0.55 or not test else ("", "$x")
    if "$a" in which and "$a" in each:
        each, made = "", "$x"
    some = f"the $xs {which}".strip() if which else "the $xs"
    each = f", each {each}" if each else ""
    name = _names(chance, "$xs", "$x", "all_$xs")
    return _gathered(chance, "$xs", "$x", some, each, test, made, kind, name, "numbers")


def _over_words(chance: Random) -> Shape:
    which, test, kind = chance.choice(_OF_WORDS) if chance.random() < 0.75 else ("", "", "")
    each, made = chance.choice(_MADE_OF_WORDS) if chance.random() < 0.6 or not test else ("", "$w")
    some = f"the $ws {which}".strip() if which else "the $ws"
    each = f", each {each}" if each else ""
    name = _names(chance, "$ws", "$w", "all_$ws")
    return _gathered(chance, "$ws", "$w", some, each, test, made, kind, name, "words")


def _gathered(
    chance: Random, all_: str, one: str, some: str, each: str, test: str, made: str, kind: str, names: str, over: str
) -> Shape:
    """A function over a list: those that pass a test, something of each, and one thing of all."""
    numbers = over == "numbers"
    parameters = [all_] + (["$c"] if kind == "letter" else ["$n"] if kind else [])
    kinds = [over] + ([kind] if kind else [])
    ways = ["list", "count", "first", "last", "any"]
    ways += ["sum", "largest", "smallest", "text"] if numbers else ["joined", "letters", "sorted", "table"]
    way = chance.choice(ways)
    if way in ("count", "any") and not test:
        way = "list"
    inner = f" if {test}" if test else ""
    build = f"[{made} for {one} in {all_}{inner}]"
    loop = chance.random() < 0.55
    guard = f"        if {test}:\n" if test else ""
    pad = "            " if test else "        "
    through = f"    for {one} in {all_}:\n{guard}{pad}"
    doc, body, result = "", "", "list"
    if way == "list":
        doc = chance.choice((f"{some}{each}, in a list.", f"{some}{each}."))
        body = f"    $t = []\n{through}$t.append({made})\n" + _returned(chance, "$t", (one, all_))
        body = body if loop else _direct(chance, build, (f"{build}[1:]",))
    elif way in ("sum", "letters"):
        part = made if way == "sum" else f"len({made})"
        doc = f"The sum of {some}{each}." if way == "sum" else f"How many letters {some} have together{each}."
        body = f"    $t = {{0}}\n{through}$t {{+=}} {part}\n" + _returned(chance, "$t", (one, f"len({all_})"))
        body = body if loop else f"    return sum({part} for {one} in {all_}{inner})\n"
        result = "int"
    elif way == "count":
        doc = chance.choice((f"How many of the {all_} there are: {some}.", f"The number of {some}."))
        body = f"    $t = {{0}}\n{through}$t {{+=}} {{1}}\n" + _returned(chance, "$t", (one, f"len({all_})"))
        body = body if loop else f"    return len([{one} for {one} in {all_}{inner}]) «¦+ 1¦off-by-one»".rstrip() + "\n"
        body, result = body.replace(" «¦+ 1", "«¦ + 1"), "int"
    elif way in ("first", "last"):
        none = "{0}" if numbers else '«"$no"¦"$yes"¦default»'
        doc = f"The {way} of {some}{each}; {'0' if numbers else chr(34) + '$no' + chr(34)} if there is none."
        place = "«0¦-1¦constant»" if way == "first" else "«-1¦0¦constant»"
        body = f"    $t = {build}\n    if not $t:\n        return {none}\n    return $t[{place}]\n"
        result = "int" if numbers else "str"
    elif way == "any":
        word = chance.choice(("any", "all"))
        doc = f"Whether {word} of the {all_} {'is' if word == 'any' else 'are'} one of {some}."
        body, result = f"    return {{{word}}}({test} for {one} in {all_})\n", "bool"
    elif way in ("largest", "smallest"):
        call = "max" if way == "largest" else "min"
        doc = f"The {way} of {some}{each}; $k if there is none."
        body = f"    $t = {build}\n    return {{{call}}}($t, default={{$k}})\n"
        result = "int"
    elif way in ("text", "joined"):
        part = f"str({made})" if numbers else made
        doc = f'{some}{each}, in one text with "$sep" between.'
        mark = '«"$sep"¦"$sepw"¦constant»'
        body, result = f"    return {mark}.join({part} for {one} in {all_}{inner})\n", "str"
    elif way == "sorted":
        back = chance.random() < 0.5
        doc = f"{some}{each}, sorted{', the last first' if back else ''}."
        body = f"    return sorted({build}{', reverse={True}' if back else ''})\n"
        body = body if back else _direct(chance, f"sorted({build})", (build,))
    else:
        doc, result = f"How long {some} are, by name{each}.", "dict"
        body = f"    return {{{{{made}: «len({one})¦{one}¦variable» for {one} in {all_}{inner}}}}}\n"
        body = body.replace("{{", "\x00").replace("}}", "\x01")
    shape_doc = doc[0].upper() + doc[1:]
    text = _shape(chance, names, parameters, kinds, result, shape_doc, body)
    return _braced(text)


def _direct(chance: Random, right: str, wrong: Sequence[str]) -> str:
    """One line, or two with a name for what is given."""
    if chance.random() < 0.5:
        return f"    return {right}\n"
    return f"    found = {right}\n    " + chance.choice(
        ("«return found¦found¦return»\n", "return «found¦None¦variable»\n")
    )


def _braced(shape: Shape) -> Shape:
    """With the braces of a table, which stood for nothing while places were marked."""

    def back(text: str) -> str:
        return text.replace("\x00", "{").replace("\x01", "}")

    pieces = tuple(
        back(piece) if isinstance(piece, str) else (back(piece[0]), back(piece[1]), piece[2]) for piece in shape.pieces
    )
    return Shape(**{**vars(shape), "pieces": pieces})


def _over_table(chance: Random) -> Shape:
    """A function over the entries of a table."""
    which, test, kind = chance.choice(
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
    way = chance.choice(("keys", "sum", "count", "table", "lines", "largest"))
    loop = "for key, value in $d.items()"
    names = _names(chance, "$d", "$x", "keys", "table")
    if way == "keys":
        doc, result = f"The keys of the $d {which}, sorted.", "list"
        body = f"    $t = [«key¦value¦variable» {loop} if {test}]\n    «return sorted($t)¦return $t¦variable»\n"
    elif way == "sum":
        doc, result = f"The numbers of the keys of the $d {which}, added up.", "int"
        body = f"    $t = {{0}}\n    {loop}:\n        if {test}:\n            $t {{+=}} value\n"
        body += _returned(chance, "$t", ("value", "len($d)"))
    elif way == "count":
        doc, result = f"How many keys of the $d there are {which}.", "int"
        body = f"    return sum(«1¦value¦variable» {loop} if {test})\n"
    elif way == "table":
        each, made = chance.choice(
            (("", "value"), (", with $a more of each", "value {+} {$a}"), (", twice", "value {*} {2}"))
        )
        doc, result = f"The part of the $d {which}{each}.", "dict"
        body = f"    $t = \x00\x01\n    {loop}:\n        if {test}:\n            $t[key] = {made}\n"
        body += _returned(chance, "$t", ("$d",))
    elif way == "lines":
        doc, result = f'Key, "$sep" and number for each of the $d {which}.', "list"
        body = f'    return [«key + "$sep" + str(value)¦str(value) + "$sep" + key¦swapped» {loop} if {test}]\n'
    else:
        doc, result = f"The largest number of a key of the $d {which}; $k without any.", "int"
        body = f"    return {{max}}([«value¦len(key)¦variable» {loop} if {test}], default={{$k}})\n"
    return _braced(_shape(chance, names, parameters, kinds, result, doc, body))


def _of_one_number(chance: Random) -> Shape:
    """A rule about one number."""
    each, made = chance.choice(_MADE_OF_NUMBERS)
    names = _names(chance, "$x", "the_$x", "one_$x")
    bound, test = chance.choice((("above $k", "$x {>} $k"), ("of $k or less", "$x {<=} $k"), ("below $k", "$x {<} $k")))
    way = chance.choice(("plain", "if", "else", "word", "steps", "loop", "clock", "pair", "both"))
    if "$k" in each and way in ("if", "else"):
        each, made = "plus $a", "$x {+} {$a}"
    result, parameters, kinds = "int", ["$x"], ["near.k"]
    if way == "plain":
        doc = f"The $x {each}, and $b more."
        body = f"    $t = {made}\n    return $t {{+}} $b\n"
    elif way == "if":
        doc = f"The $x; a $x {bound} is {each}."
        body = f"    if {test}:\n        return {made}\n    return «$x¦0¦branch»\n"
    elif way == "else":
        doc = f"0 for a $x {bound}; any other is {each}."
        body = f"    if {test}:\n        return {{0}}\n    return {made}\n"
    elif way == "word":
        doc, result = f'"$yes" for a $x {bound}, "$no" for any other.', "str"
        body = f'    if {test}:\n        return «"$yes"¦"$no"¦branch»\n    return «"$no"¦"$yes"¦branch»\n'
    elif way == "steps":
        doc, parameters, kinds = "How many steps of $m it takes to reach $x.", ["$x", "$m"], ["number", "count"]
        # The sign of the loop is never wrong: it might not end.
        body = "    $t = 0\n    at = {0}\n    while at < $x:\n        at += $m\n        $t += {1}\n"
        body += "    return «$t¦at¦variable»\n"
    elif way == "loop":
        doc, parameters, kinds = f"The sum of the numbers below $m, each {each}.", ["$m"], ["few"]
        body = f"    $t = {{0}}\n    for $x in range($m):\n        $t {{+=}} {made}\n" + _returned(
            chance, "$t", ("$x", "$m")
        )
    elif way == "clock":
        doc, result = "The $x in hours of 60 and a rest, as text.", "str"
        body = '    return str($x {//} {60}) + «":"¦"$sep"¦constant» + str($x {%} 60)\n'
    elif way == "pair":
        doc, result = f"The $x and the $x {each}, in a list.", "list"
        body = f"    return [«$x, {_plain(made)}¦{_plain(made)}, $x¦swapped»]\n"
    else:
        doc, result = f"Whether the $x is {bound} and even.".replace("of $k", "$k"), "bool"
        body = f"    return {test} {{and}} $x % {{2}} == 0\n"
    return _shape(chance, names, parameters, kinds, result, doc, body)


def _plain(text: str) -> str:
    """An expression with nothing marked in it."""
    return re.sub("«([^¦]*)¦[^»]*»", r"\1", re.sub(r"\{([^{}]+)\}", r"\1", text))


def _of_one_text(chance: Random) -> Shape:
    """Something made of a text."""
    names = _names(chance, "$s", "the_$s", "one_$s")
    each, made = chance.choice(_MADE_OF_WORDS)
    made = made.replace("$w", "$s")
    parameters, kinds, result = ["$s"], ["word"], "str"
    way = chance.choice(("made", "around", "end", "size", "swap", "many", "part", "cut"))
    if way == "made":
        doc, body = f'The $s {each}, then "$l".', f'    return {made} + «"$l"¦"$no"¦constant»\n'
    elif way == "around":
        doc, parameters, kinds = "The $s with $c on both sides.", ["$s", "$c"], ["word", "letter"]
        body = "    return «$c + $s + $c¦$c + $s¦operator»\n"
    elif way == "end":
        doc, parameters, kinds = "The last $n letters of $s.", ["$s", "$n"], ["word", "count"]
        body = "    return $s[«-$n:¦:-$n¦operator»]\n"
    elif way == "size":
        doc, result = "How many letters $s has, times $a.", "int"
        body = "    $t = len($s)\n    return $t {*} {$a}\n"
    elif way == "swap":
        doc, parameters, kinds = "The $s with $c for each e.", ["$s", "$c"], ["word", "letter"]
        body = '    return $s.replace(«"e", $c¦$c, "e"¦swapped»)\n'
    elif way == "many":
        doc, result, kinds = "How many words of $s are longer than $a.", "int", ["text"]
        body = "    $t = [word for word in $s.split() if len(word) {>} {$a}]\n    return «len($t)¦len($s)¦variable»\n"
    elif way == "part":
        doc, kinds = f"The {{first}} word of $s {each}.", ["text"]
        place = chance.choice((("first", "«0¦-1¦constant»"), ("last", "«-1¦0¦constant»")))
        doc = doc.replace("{first}", place[0])
        body = f"    word = $s.split()[{place[1]}]\n    return {made.replace('$s', 'word')}\n"
    else:
        doc, result = "Whether $s is longer than $a and has an a.", "bool"
        body = '    return len($s) {>} {$a} {and} "a" in $s\n'
    return _shape(chance, names, parameters, kinds, result, doc, body)


def _of_two(chance: Random) -> Shape:
    """Something made of two numbers, or of two lists."""
    way = chance.choice(("mix", "order", "lists", "more", "share"))
    result = "int"
    if way == "mix":
        doc = "$a times $x, and $y."
        body, parameters, kinds = "    return «$a¦$aw¦constant» {*} $x {+} $y\n", ["$x", "$y"], ["number", "number"]
    elif way == "order":
        doc, result = "The two numbers, the smaller first.", "list"
        body = "    if $x {<} $y:\n        return [«$x, $y¦$y, $x¦swapped»]\n    return [$y, $x]\n"
        parameters, kinds = ["$x", "$y"], ["number", "number"]
    elif way == "lists":
        doc, result = "Each of the $xs {+} the one of the $ys beside it.", "list"
        word, sign = chance.choice((("plus", "+"), ("less", "-")))
        doc = doc.replace("{+}", word)
        body = f"    $t = []\n    for $x, $y in zip($xs, $ys):\n        $t.append($x {{{sign}}} $y)\n"
        body += _returned(chance, "$t", ("$xs", "$x"))
        parameters, kinds = ["$xs", "$ys"], ["numbers", "numbers"]
    elif way == "more":
        doc, result = 'Which is more: "$yes" for $x, "$no" for $y or if they are equal.', "str"
        body = '    if $x {>} $y:\n        return «"$yes"¦"$no"¦branch»\n    return "$no"\n'
        parameters, kinds = ["$x", "$y"], ["number", "number"]
    else:
        doc = "What is left of $x when $y is taken away $m times; never below 0."
        body = "    $t = $x {-} $y {*} $m\n    return {max}($t, {0})\n"
        parameters, kinds = ["$x", "$y", "$m"], ["big", "few", "count"]
    names = _names(chance, "both", "$x", "two", "$x_and_$y")
    return _shape(chance, names, parameters, kinds, result, doc, body)


def _caller(result: str, chance: Random) -> Shape:
    """A shape that uses a function with such a result."""
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
    doc, gives, body = chance.choice((*anything, *special[result], *special[result]))
    return _shape(chance, _names(chance, "$l", "$l_too", "the_$l"), ["$params"], ["any"], gives, doc, body)


# ------------------------------------------------------------------------------------------- what is held out


def is_held_out(text: str) -> bool:
    """Whether a template, every place of it right, has the form of one that is kept for held-out tasks."""
    return form(_filled(text)) in _held_out_forms()


def is_held_out_fault(right: str, wrong: str) -> bool:
    """Whether a function that is wrong like this is what only held-out tasks show."""
    return form(_filled(right), _filled(wrong)) in _held_out_forms()


@cache
def _held_out_forms() -> frozenset[tuple[str, ...]]:
    forms = set()
    for book in (NUMBERS, TEXTS, USERS, CHANGES):
        for shape in shapes_of(book):
            if shape.held_out:
                forms.add(form(_filled(shape.text())))
            else:
                wrong = [shape.text(place) for place in shape.faults("held-out")]
                forms |= {form(_filled(shape.text()), _filled(each)) for each in wrong}
    return frozenset(forms)


def _filled(template: str) -> str:
    """Code that can be parsed, one name for each slot."""
    text = re.sub(r"@?\$(call|swapped)", "called(given)", template).replace("@", "").replace("$params", "given")
    numbers = {"a": "2", "aw": "3", "b": "5", "k": "7", "kw": "11"}
    return re.sub(r"\$([a-z]+)", lambda slot: numbers.get(slot.group(1), f"slot_{slot.group(1)}"), text)


def form(*texts: str) -> tuple[str, ...]:
    """What functions are without their names, numbers, texts and docstrings; the same ones have the same marks."""
    marks: dict[str, str] = {}

    def mark(kind: str, value: object) -> str:
        return marks.setdefault(f"{kind} {value!r}", f"{kind}{len(marks)}")

    forms = []
    for text in texts:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.name = "f"
                node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in _BUILT_IN:
                node.id = mark("name", node.id)
            elif isinstance(node, ast.arg):
                node.arg = mark("name", node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, int | str) and node.value not in (0, 1):
                node.value = mark(type(node.value).__name__, node.value)
        forms.append(ast.dump(tree))
    return tuple(forms)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


_BUILT_IN = frozenset(
    _all("sum len max min sorted range enumerate zip any all str int list dict set reversed abs isinstance type")
)
