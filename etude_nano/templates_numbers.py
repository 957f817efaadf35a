"""Templates of small functions over numbers, with their possible faults. `templates.py` describes the syntax.

A heading is `# id | names | argument kinds | result kind`; templates whose heading begins with `#!` are held out.
"""

NUMBER_TEMPLATES = '''
# sum-from | sum_$xs total_$xs $xs_sum add_$xs | numbers number | int
def $f($xs, $n):
    """Sum of the $xs that are at least $n."""
    $t = 0
    for $x in $xs:
        if $x «>=¦>¦operator» $n:
            $t «+=¦=¦operator» $x
    return «$t¦$x¦variable!»

# count-over | count_$xs many_$xs $xs_count | numbers number | int
def $f($xs, $n):
    """How many of the $xs are above $n."""
    $t = 0
    for $x in $xs:
        if $x «>¦<¦operator» $n:
            $t «+=¦-=¦operator!» 1
    «return $t¦$t¦return»

# sum-below | sum_low low_$xs small_$xs_sum | numbers number | int
def $f($xs, $n):
    """Sum of the $xs below $n."""
    return sum($x for $x in $xs if $x «<¦<=¦operator» «$n¦$k¦variable»)

# average | average_$xs mean_$xs usual_$x | numbers | int
def $f($xs):
    """Average of the $xs, rounded down; 0 without any."""
    if not $xs:
        return 0
    return sum($xs) «//¦*¦operator» «len($xs)¦(len($xs) + 1)¦off-by-one»

# largest | largest_$x max_$x top_$x | numbers | int
def $f($xs):
    """The largest of the $xs."""
    $t = $xs[0]
    for $x in $xs:
        if $x «>¦<¦operator» $t:
            $t = $x
    return «$t¦$x¦variable»

#! smallest-at | low_at smallest_at where_low | numbers | int
def $f($xs):
    """Place of the first smallest of the $xs."""
    $t = 0
    for $i in range(len($xs)):
        if $xs[$i] «<¦>¦operator» $xs[$t]:
            $t = $i
    return «$t¦$xs[$t]¦variable»

# span | span_$xs spread_$xs $x_range | numbers | int
def $f($xs):
    """The largest of the $xs less the smallest."""
    return «max($xs) - min($xs)¦max($xs) + min($xs)¦operator»

# span-two | gap_$xs $x_gap $xs_apart | numbers | int
def $f($xs):
    """How far the last of the $xs is above the first."""
    first = $xs[0]
    last = $xs[«-1¦1¦constant»]
    return «last - first¦first - last¦swapped»

# clamp | clamp_$x limit_$x keep_$x | wide.k few | int
def $f($x, low):
    """The $x, but at least low and at most $k."""
    if $x < low:
        return «low¦$x¦branch»
    if $x > $k:
        return «$k¦$kw¦constant»
    «return $x¦$x¦return!»

# running | running_$xs sums_$xs $xs_so_far | numbers | list
def $f($xs):
    """The sum of the $xs up to each of them."""
    $t = 0
    sums = []
    for $x in $xs:
        $t «+=¦-=¦operator» $x
        sums.append(«$t¦$x¦variable»)
    return sums

#! changes | changes_$xs $x_changes moves_$xs | numbers | list
def $f($xs):
    """Each of the $xs less the one before it."""
    return [«b - a¦a - b¦swapped» for a, b in zip($xs, $xs[«1¦2¦off-by-one»:])]

# lowest-few | lowest_$xs cheap_$xs least_$xs | numbers count | list
def $f($xs, $m):
    """The $m smallest $xs, in order."""
    return sorted($xs)[«:$m¦$m:¦operator»]

# highest-few | highest_$xs top_$xs leading_$xs | numbers count | list
def $f($xs, $m):
    """The $m largest $xs, largest first."""
    ordered = sorted($xs, reverse=«True¦False¦constant»)
    return ordered[:«$m¦$m - 1¦off-by-one»]

# scaled | scale_$xs grow_$xs raise_$xs | numbers | list
def $f($xs):
    """Each of the $xs times $k."""
    $t = []
    for $x in $xs:
        $t.append($x «*¦+¦operator» «$k¦$kw¦constant!»)
    return $t

# percent | add_tax with_tax $x_with_fee | big | int
def $f($x):
    """The $x with $k percent added, rounded down."""
    tax = $x * $k // «100¦10¦constant»
    return $x «+¦-¦operator» tax

# discount | discount reduced_$x $x_after_deal | near.k | int
def $f($x):
    """The $x, less $a if it is $k or more."""
    if $x «>=¦>¦operator» $k:
        $x -= «$a¦$aw¦constant»
    return $x

#! two-rates | cost_of $x_cost charge_for | near.k | int
def $f($x):
    """$a for each $x up to $k, $b for each above that."""
    if $x <= $k:
        return $x * «$a¦$b¦branch»
    return $k * $a «+¦-¦operator» ($x - $k) * $b

# evens | even_$xs pick_even only_even | numbers | list
def $f($xs):
    """Those of the $xs that are even."""
    return [$x for $x in $xs if $x % «2¦3¦constant» «==¦!=¦operator» 0]

# multiples | count_multiples multiples_of | numbers few | int
def $f($xs, $m):
    """How many of the $xs are multiples of $m."""
    $t = 0
    for $x in $xs:
        if $x % $m == «0¦1¦constant»:
            $t += 1
    «return $t¦$t¦return»

# product | product_$xs multiply_$xs times_$xs | numbers | int
def $f($xs):
    """All the $xs multiplied."""
    $t = «1¦0¦constant»
    for $x in $xs:
        $t «*=¦+=¦operator» $x
    return $t

# power | power raise_$x $x_power | few count | int
def $f($x, $m):
    """The $x multiplied by itself, $m times in all."""
    $t = 1
    for _ in range(«$m¦$m - 1¦off-by-one»):
        $t *= «$x¦$m¦variable»
    return $t

# upto | sum_upto add_upto climb | few | int
def $f($m):
    """The sum of the numbers from 1 to $m."""
    $t = 0
    for $i in range(1, «$m + 1¦$m¦off-by-one»):
        $t += «$i¦1¦variable»
    return $t

#! factorial | factorial ways orderings | few | int
def $f($m):
    """The product of the numbers from 1 to $m."""
    $t = 1
    for $i in range(1, «$m + 1¦$m¦off-by-one»):
        $t «*=¦+=¦operator» $i
    return $t

# countdown | countdown count_down launch | few | list
def $f($m):
    """The numbers from $m down to 1."""
    $t = []
    while $m «>¦>=¦off-by-one» 0:
        $t.append($m)
        $m -= 1
    return $t

# every | every_few sample_$xs thin_$xs | numbers count | list
def $f($xs, $m):
    """Every $m-th of the $xs, from the first on."""
    return $xs[«::$m¦:$m¦operator»]

# dot | bill_for $x_bill sum_of_parts | numbers numbers | int
def $f($xs, $ys):
    """The sum of the $xs, each times the one of the $ys in its place."""
    $t = 0
    for $x, $y in zip($xs, $ys):
        $t += $x «*¦+¦operator» «$y¦$x¦variable»
    return $t

# first-over | first_over first_$x_over find_$x | numbers number | int
def $f($xs, $n):
    """The first of the $xs above $n; -1 if there is none."""
    for $x in $xs:
        if $x «>¦>=¦operator» $n:
            return $x
    return «-1¦0¦default»

# index-of | place_of find_$x $x_at | numbers number | int
def $f($xs, $y):
    """Where $y first stands among the $xs; -1 if nowhere."""
    for $i, $x in enumerate($xs):
        if $x «==¦!=¦operator» $y:
            return «$i¦$x¦variable»
    return «-1¦None¦default!»

# all-under | all_under fits safe_$xs | numbers number | bool
def $f($xs, $n):
    """Whether all of the $xs are below $n."""
    return «all¦any¦operator»($x «<¦<=¦operator» $n for $x in $xs)

# unique | unique_$xs distinct_$xs once | numbers | list
def $f($xs):
    """The $xs without repeats, in their order."""
    $t = []
    for $x in $xs:
        if $x «not in¦in¦operator» $t:
            $t.append($x)
    «return $t¦$t¦return»

#! rotate | rotate_$xs turn_$xs shift_$xs | numbers count | list
def $f($xs, $m):
    """The $xs with the first $m moved to the end."""
    return «$xs[$m:] + $xs[:$m]¦$xs[:$m] + $xs[$m:]¦swapped»

# chunks | split_$xs $x_groups chunk_$xs | numbers count | list
def $f($xs, $m):
    """The $xs in lists of $m; the last may be shorter."""
    return [$xs[$i : $i + «$m¦1¦constant»] for $i in range(0, len($xs), $m)]

# inner | inner_$xs middle_$xs trim_$xs | numbers | list
def $f($xs):
    """The $xs without the first and the last."""
    return $xs[«1¦0¦off-by-one»:«-1¦-2¦off-by-one»]

# at-most | at_most capped_$x hold_$x | number number? | int
def $f($x, $n=«$k¦$kw¦default»):
    """The smaller of $x and $n; $n is $k unless given."""
    return «min¦max¦operator»($x, $n)

# step-up | next_$x step_$x advance | number number? | int
def $f($x, $n=«$k¦$kw¦default»):
    """The $x raised by $n; by $k unless told."""
    return $x «+¦-¦operator» $n

# verdict | rate_$x judge_$x check_$x | near.k | str
def $f($x):
    """Gives "$yes" for a $x of $k or more, else "$no"."""
    if $x «>=¦>¦operator» $k:
        return «"$yes"¦"$no"¦branch»
    return "$no"

# verdict-below | $x_state $x_class sort_$x | near.k | str
def $f($x):
    """Gives "$no" for a $x below $k, else "$yes"."""
    return «"$no" if $x < $k else "$yes"¦"$yes" if $x < $k else "$no"¦branch»

#! three-way | $x_band $x_zone place_$x | near.k | str
def $f($x):
    """Gives "$no" for a $x below $k, "$yes" above it, "even" at it."""
    if $x «<¦<=¦operator» $k:
        return "$no"
    return «"$yes"¦"$no"¦branch» if $x > $k else "even"

# minutes | all_minutes in_minutes to_minutes | few few | int
def $f(hours, minutes):
    """All of it in minutes."""
    return hours * «60¦100¦constant» «+¦-¦operator» minutes

# clock | clock split_minutes hours_and_minutes | big | list
def $f(minutes):
    """Whole hours, and the minutes left over."""
    return [minutes // 60, minutes «%¦//¦operator» «60¦24¦constant!»]

# outline | outline fence border | number number | int
def $f(width, height):
    """The length around a box."""
    return 2 * «(width + height)¦width + height¦operator»

# box-area | floor_area tiles cover | number number | int
def $f(width, height):
    """The area of a box with an edge of $k around it."""
    return (width + «2 * $k¦$k¦constant») * (height + 2 * $k)

# apart | distance apart between_$xs | number number | int
def $f(a, b):
    """How far a and b are apart."""
    if a «>¦<¦operator» b:
        return a - b
    return «b - a¦a - b¦swapped»

# digit-sum | digit_sum add_digits cross_sum | big | int
def $f($x):
    """The sum of the digits of $x."""
    $t = 0
    while $x:
        $t += $x % «10¦9¦constant»
        $x //= 10
    return «$t¦$x¦variable»

# share | share_out per_$x split_even | big few | int
def $f($y, $m):
    """What each of $m gets of the $y, rounded down; $a less for costs."""
    return «$y // $m¦$m // $y¦swapped» «-¦+¦operator» $a

# over-by | over_by excess beyond | near.k | int
def $f($x):
    """How much the $x is above $k; 0 if it is not."""
    if $x «>¦<¦operator» $k:
        return «$x - $k¦$k - $x¦swapped»
    return 0

# best-two | best_two top_pair two_best | numbers | int
def $f($xs):
    """The sum of the two largest $xs."""
    ordered = sorted($xs)
    return ordered[-1] «+¦-¦operator» ordered[«-2¦-3¦off-by-one»]
'''
