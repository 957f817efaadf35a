"""Templates of small functions over texts and tables, with their faults. `templates.py` describes the syntax."""

TEXT_TEMPLATES = '''
# initials | initials first_letters short_form | text | str
def $f($s):
    """The first letters of the words in $s."""
    return "".join(word[«0¦-1¦constant»] for word in $s.split())

# shout | shout call_out cheer | word count | str
def $f($s, $m):
    """The $s in capitals and $m exclamation marks."""
    return $s.«upper¦lower¦operator»() + "!" * «$m¦1¦variable»

# headline | headline title_of nice_$s | words | str
def $f($ws):
    """The $ws with capitals, and a space between."""
    return «" "¦""¦constant».join($w.«capitalize¦lower¦operator»() for $w in $ws)

# slug | slug link_of short_$s | text | str
def $f($s):
    """The $s in small letters, with "$sep" for each space."""
    return $s.«lower¦upper¦operator»().replace(" ", «"$sep"¦"$sepw"¦constant»)

#! reversed-words | backwards turn_words from_the_end | text | str
def $f($s):
    """The words of $s in reverse order."""
    parts = $s.split()
    return «" "¦""¦constant».join(«reversed(parts)¦parts¦variable»)

# mirror | is_mirror same_both_ways is_palindrome | word | bool
def $f($s):
    """Whether $s reads the same from its end."""
    return $s «==¦!=¦operator» $s[«::-1¦::1¦constant!»]

# count-letter | count_letter letter_count times_in | word letter | int
def $f($s, $c):
    """How often $c is in $s."""
    $t = 0
    for each in $s:
        if each «==¦!=¦operator» $c:
            $t += 1
    return $t

# longest | longest_$w long_$w widest_$w | words | str
def $f($ws):
    """The longest of the $ws, the first if there are several."""
    return «max¦min¦operator»($ws, key=len)

# short-words | short_$ws brief_$ws fitting_$ws | words few | list
def $f($ws, $n):
    """The $ws of at most $n letters."""
    $t = []
    for $w in $ws:
        if len($w) «<=¦<¦operator» $n:
            $t.append(«$w¦len($w)¦variable»)
    «return $t¦$t¦return!»

#! pad | pad_$s right_align fill_$s | word number | str
def $f($s, $m):
    """The $s with spaces before it, $m wide in all; never cut."""
    missing = $m - len($s)
    return «" " * missing + $s¦$s + " " * missing¦swapped»

# cut | cut_$s shorten preview | word few | str
def $f($s, $n):
    """The first $n letters of $s, and ".." if it is longer."""
    if len($s) «<=¦<¦operator» $n:
        return $s
    return «$s[:$n]¦$s[$n:]¦operator» + ".."

# full-name | full_name sign_as listed_as | word word | str
def $f(first, last):
    """Last name, "$sep", first name."""
    return «last + "$sep" + first¦first + "$sep" + last¦swapped»

# joined | join_$ws $w_list show_$ws | words | str
def $f($ws, sep=«"$sep"¦"$sepw"¦default»):
    """The $ws, sorted, in one text; "$sep" between unless told."""
    return sep.join(«sorted($ws)¦$ws¦variable»)

# starting | starting_with $ws_with match_$ws | words letter | list
def $f($ws, $c):
    """The $ws that begin with $c."""
    return [$w for $w in $ws if $w.«startswith¦endswith¦operator»($c)]

# vowels | vowels count_vowels open_sounds | word | int
def $f($s):
    """How many letters of $s are vowels."""
    return sum(1 for each in $s if each «in¦not in¦operator» «"aeiou"¦"aei"¦constant»)

# camel | camel camel_case hump | text | str
def $f($s):
    """The words of $s in one, each but the first with a capital."""
    first, *rest = $s.split()
    return first + "".join(word.«capitalize¦upper¦operator»() for word in «rest¦rest[1:]¦off-by-one»)

# tagged | tagged wrap_$s as_tag | word word | str
def $f($w, $s):
    """The $s between <$w> and </$w>."""
    opening = "<" + «$w¦$s¦variable» + ">"
    closing = "</" + $w + ">"
    return «opening + $s + closing¦closing + $s + opening¦swapped»

# repeated | repeat_$s echo_$s $s_again | word count | str
def $f($s, $m):
    """The $s $m times, with "$sep" between."""
    return «"$sep"¦"$sepw"¦constant».join([$s] * «$m¦($m + 1)¦off-by-one»)

# word-count | word_count words_in size_of_$s | text | int
def $f($s):
    """How many words $s has, and $a for the title."""
    return len($s«.split()¦¦variable») «+¦-¦operator» $a

# mask | mask_$s hide_$s cover_$s | word | str
def $f($s):
    """The $s with all but the last two letters as stars."""
    hidden = len($s) - «2¦1¦constant»
    return "*" * hidden + $s[«-2:¦:2¦constant!»]

#! capitals | swap_ends ends_of edge_$s | word | str
def $f($s):
    """The last letter of $s, then the first."""
    return «$s[-1] + $s[0]¦$s[0] + $s[-1]¦swapped»

# sorted-by-size | by_size sort_$ws order_$ws | words | list
def $f($ws):
    """The $ws, shortest first; equal ones by name."""
    return sorted($ws, key=lambda $w: («len($w)¦-len($w)¦operator», $w))

# lookup | get_$x find_$x $x_of | table key | int
def $f($d, key):
    """The number of key in the $d, $k if it is not there."""
    if key «in¦not in¦operator» $d:
        return $d[key]
    return «$k¦$kw¦default»

# lookup-get | read_$x $x_for fetch_$x | table key | int
def $f($d, key):
    """The number of key in the $d and $a more; just $a if it is not there."""
    return $d.get(key, «0¦1¦default») «+¦-¦operator» $a

# tally | tally count_$ws $w_counts | repeats | dict
def $f($ws):
    """How often each of the $ws is there."""
    $t = {}
    for $w in $ws:
        $t[$w] = $t.get($w, «0¦1¦default») + «1¦2¦constant!»
    return $t

#! invert | invert swap_sides by_number | table | dict
def $f($d):
    """From the numbers of the $d to their keys."""
    return {«value: key¦key: value¦swapped» for key, value in $d.items()}

# values-over | $ws_over rich_$ws many_of | table few | list
def $f($d, $n):
    """The keys of the $d with more than $n, sorted."""
    $t = []
    for key, value in $d.items():
        if value «>¦>=¦operator» $n:
            $t.append(«key¦value¦variable»)
    return sorted($t)

# best-key | best_$w leader top_$w | table | str
def $f($d):
    """The key with the largest number."""
    return «max¦min¦operator»($d, key=$d.get)

# table-total | stock_total all_in count_all | table | int
def $f($d):
    """All numbers of the $d together, less $a."""
    return sum($d.«values()¦keys()¦variable») «-¦+¦operator» $a

# merged | merge_$xs join_tables combine | table table | dict
def $f(old, new):
    """Both tables in one; the new number counts."""
    $t = dict(«old¦new¦swapped»)
    $t.update(new)
    «return $t¦$t¦return»

# by-length | by_length group_$ws shelves | words | dict
def $f($ws):
    """The $ws by how many letters they have."""
    $t = {}
    for $w in $ws:
        $t.setdefault(«len($w)¦$w¦variable», []).append($w)
    return $t

# added | add_$x put_in restock | table key few | dict
def $f($d, key, $m):
    """The $d with $m more of key."""
    $t = dict($d)
    $t[key] = $t.get(key, 0) «+¦-¦operator» «$m¦1¦variable»
    return $t

# non-zero | left_over in_stock clean_$ws | table | dict
def $f($d):
    """The $d without what has less than $a."""
    return {key: value for key, value in $d.items() if value «>=¦<¦operator» «$a¦0¦constant!»}

#! cheapest | cheapest lowest_$w least_of | table | list
def $f($d):
    """The key with the smallest number, and that number."""
    key = «min¦max¦operator»($d, key=$d.get)
    return [«key, $d[key]¦$d[key], key¦swapped»]

# basket | basket_cost order_cost sum_for | table keys | int
def $f($d, $ws):
    """The numbers of the $ws together; $k for one that is not in the $d."""
    $t = 0
    for $w in $ws:
        $t «+=¦=¦operator» $d.get($w, «$k¦0¦default»)
    return $t

# ranking | ranking order_by_$x podium | table | list
def $f($d):
    """The keys of the $d, largest number first."""
    return sorted($d, key=$d.get, reverse=«True¦False¦constant»)
'''
