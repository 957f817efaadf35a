"""Templates of functions that call another function: `$call` passes on `$params`, `$swapped` reverses their order.

The argument field of a heading holds the result kind that the callee must have; a caller takes the callee's arguments.
"""

CALLER_TEMPLATES = '''
# line | $l_line show_$l $l_text | any | str
def $f($params):
    """The $inner behind "$l: "."""
    return f"«$l¦$inner¦constant»: {«$call¦$swapped¦swapped»}"

# entry | $l_entry $l_row pair_$l | any | list
def $f($params):
    """A list of "$l" and the $inner."""
    return [«"$l", $call¦$call, "$l"¦swapped»]

#! record | $l_record $l_fact as_$l | any | dict
def $f($params):
    """The $inner under "$l"."""
    return {"$l": «$call¦$swapped¦swapped»}

# times | $l_times scaled_$l $l_for_all | int | int
def $f($params):
    """$a times the $inner."""
    return «$a¦$aw¦constant» «*¦+¦operator» $call

# plus | $l_with_fee more_$l $l_sum | int | int
def $f($params):
    """The $inner and $k more."""
    $t = $call
    «return $t + $k¦return $t - $k¦operator»

# at-least | $l_at_least safe_$l $l_floor | int | int
def $f($params):
    """The $inner, but $a at least."""
    return «max¦min¦operator»($call, $a)

# judged | $l_verdict $l_class rate_$l | int | str
def $f($params):
    """Gives "$yes" if the $inner is $a or more, else "$no"."""
    if $call «>=¦<¦operator» $a:
        return "$yes"
    return «"$no"¦"$yes"¦branch»

#! left | $l_left rest_of_$l $l_after | int | int
def $f($params):
    """$k less the $inner."""
    return «$k - $call¦$call - $k¦swapped»

# size | $l_size many_in_$l $l_length | list | int
def $f($params):
    """How many the $inner gives, and $a more."""
    return len($call) «+¦-¦operator» «$a¦$aw¦constant»

# joined-up | $l_list listed_$l $l_words | list | str
def $f($params):
    """What the $inner gives, with "$sep" between."""
    parts = [str(part) for part in $call]
    return «"$sep"¦"$sepw"¦constant».join(parts)

# loud | loud_$l $l_heading big_$l | str | str
def $f($params):
    """The $inner in capitals and "$sep$l"."""
    return $call.«upper¦lower¦operator»() + "$sep$l"

# framed | framed_$l $l_box boxed_$l | str | str
def $f($params):
    """The $inner between brackets."""
    return "[" «+ $call +¦+¦variable» "]"

# answer | $l_answer tell_$l say_$l | bool | str
def $f($params):
    """Gives "$yes" if the $inner holds, else "$no"."""
    return «"$yes" if $call else "$no"¦"$no" if $call else "$yes"¦branch»

# keys-of | $l_keys names_in_$l $l_index | dict | list
def $f($params):
    """The keys that the $inner gives, sorted."""
    return sorted($call«¦.values()¦variable»)

# width-of | $l_entries size_of_$l $l_total | dict | int
def $f($params):
    """How many keys the $inner gives, $a times."""
    return len($call) «*¦+¦operator» $a
'''
