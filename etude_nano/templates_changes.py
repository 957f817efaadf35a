"""Templates of functions before and after a requested change: `«after¦before¦»`, all places at once.

The kind is the first part of the id: `add` (a parameter), `fstring`, `none` and `type` (migrations to modern syntax).
The last field of the heading is the user's request (or the old syntax it names); its slots are filled too.
"""

CHANGE_TEMPLATES = '''
# add-start | sum_$xs total_$xs | numbers number? | Give $f a parameter start, 0 by default, that the sum begins with.
def $f($xs«, start=0¦¦»):
    """Sum of the $xs."""
    $t = «start¦0¦»
    for $x in $xs:
        $t += $x
    return $t

# add-least | count_$xs many_$xs | numbers number? | Give $f a parameter least, 0 by default: smaller $xs do not count.
def $f($xs«, least=0¦¦»):
    """How many $xs there are."""
    return «sum(1 for $x in $xs if $x >= least)¦len($xs)¦»

# add-factor | scale_$xs grow_$xs | numbers few? | The factor $a in $f should be a parameter factor, $a by default.
def $f($xs«, factor=$a¦¦»):
    """Each of the $xs times «factor¦$a¦»."""
    return [$x * «factor¦$a¦» for $x in $xs]

# add-sep | join_$ws show_$ws | words letter? | Give $f a parameter sep for what stands between, "$sep" by default.
def $f($ws«, sep="$sep"¦¦»):
    """The $ws in one text."""
    return «sep¦"$sep"¦».join($ws)

# add-end | finish_$s close_$s | text letter? | Let $f take the last character as a parameter end, "." by default.
def $f($s«, end="."¦¦»):
    """The $s with a capital and an end."""
    return $s.capitalize() + «end¦"."¦»

#! add-step | climb_$xs raise_$xs | numbers few? | Give $f a parameter step, 1 by default, that is added in place of 1.
def $f($xs«, step=1¦¦»):
    """Each of the $xs raised by «step¦1¦»."""
    return [$x + «step¦1¦» for $x in $xs]

# add-most | top_$xs best_$xs | numbers count? | $f should take a parameter most, 1 by default: how many it gives.
def $f($xs«, most=1¦¦»):
    """The largest of the $xs, in a list."""
    return sorted($xs, reverse=True)[:«most¦1¦»]

# add-default | find_$x get_$x | table key number? | Give $f a parameter missing, 0 by default, for keys not there.
def $f($d, key«, missing=0¦¦»):
    """The number of key in the $d."""
    return $d.get(key, «missing¦0¦»)

#! add-fill | pad_$s fill_$s | word letter? | Give $f a parameter fill, "." by default, for what is put before the $s.
def $f($s«, fill="."¦¦»):
    """The $s with three characters before it."""
    return «fill¦"."¦» * 3 + $s

# fstring-percent-one | $x_line show_$x | number | old formatting
def $f($x):
    """The $x behind its name."""
    return «f"$x: {$x}"¦"$x: %s" % $x¦»

# fstring-percent-two | $w_line tell_$w | word number | old formatting
def $f($w, $x):
    """What a $w has."""
    return «f"{$w} has {$x} $xs"¦"%s has %d $xs" % ($w, $x)¦»

# fstring-percent-sum | sum_line total_text | number number | old formatting
def $f(a, b):
    """A sum in words."""
    $t = a + b
    return «f"{a} and {b} make {$t}"¦"%d and %d make %d" % (a, b, $t)¦»

# fstring-percent-list | list_$ws $w_lines | words | old formatting
def $f($ws):
    """A line for each of the $ws."""
    return [«f"- {$w}"¦"- %s" % $w¦» for $w in $ws]

# fstring-format-one | greet hello_$w | word | old formatting
def $f($w):
    """Words for a $w."""
    return «f"$l for {$w}!"¦"$l for {}!".format($w)¦»

# fstring-format-two | $x_of_$w assign_$x | word number | old formatting
def $f($w, $x):
    """A $w with its $x."""
    return «f"{$w}$sep{$x}"¦"{}$sep{}".format($w, $x)¦»

#! fstring-format-sum | $l_line $l_of | number number | old formatting
def $f(a, b):
    """The larger number with a name."""
    $t = max(a, b)
    return «f"$l is {$t}"¦"$l is {}".format($t)¦»

#! fstring-percent-text | $l_note note_$w | word number | old formatting
def $f($w, $x):
    """A note on a $w."""
    return «f"$l of {$w}: {$x}"¦"$l of %s: %d" % ($w, $x)¦»

# none-default | $x_or_$l known_$x | maybe | == None
def $f($x):
    """The $x, $k if there is none."""
    if $x «is None¦== None¦»:
        return $k
    return $x

# none-text | show_$x $x_text | maybe | != None
def $f($x):
    """The $x as text, "$no" if there is none."""
    return str($x) if $x «is not None¦!= None¦» else "$no"

#! none-sum | add_$x with_$x | number maybe | != None
def $f($n, $x):
    """The $n and the $x, if there is one."""
    if $x «is not None¦!= None¦»:
        return $n + $x
    return $n

# type-number | as_$x read_$x | mixed | type(...) ==
def $f($x):
    """The $x if it is a number, else $k."""
    if «isinstance($x, int)¦type($x) == int¦»:
        return $x
    return $k

# type-texts | only_$ws texts_in | mixture | type(...) ==
def $f($ws):
    """The texts among the $ws."""
    return [$w for $w in $ws if «isinstance($w, str)¦type($w) == str¦»]

#! type-count | count_$xs numbers_in | mixture | type(...) ==
def $f($xs):
    """How many of the $xs are numbers."""
    return sum(1 for $x in $xs if «isinstance($x, int)¦type($x) == int¦»)
'''
