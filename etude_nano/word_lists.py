"""The words and numbers that nano programs are written with.

Plain words that a vocabulary of a few thousand tokens holds whole. A module is never called like one of Python's own,
nor like a variable, and labels are no nouns, so that no name in a program hides another.
"""

from random import Random


def _all(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _pairs(pairs: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, _, second in (pair.partition("/") for pair in pairs.split()))


# Things with a number: plural and singular.
NOUNS = _pairs(
    "prices/price scores/score ages/age sizes/size votes/vote points/point counts/count rates/rate costs/cost "
    "hours/hour stages/stage levels/level weights/weight marks/mark sales/sale tips/tip fees/fee bids/bid goals/goal "
    "laps/lap miles/mile loads/load gaps/gap seats/seat tokens/token rents/rent wages/wage depths/depth "
    "heights/height speeds/speed days/day units/unit coins/coin bills/bill boxes/box cups/cup pages/page "
    "tests/test wins/win jumps/jump"
)
# Things with a name.
NAMED = _pairs(
    "names/name labels/label tags/tag titles/title users/user cities/city colors/color pets/pet fruits/fruit "
    "teams/team guests/guest books/book songs/song rooms/room tools/tool plants/plant items/item cards/card "
    "roles/role groups/group"
)
TEXTS = _all("text line phrase note message heading entry")
LIMITS = _all("limit bound cap least most start floor base target edge")
AMOUNTS = _all("amount extra step_size width share offset times size_now piece")
TOTALS = _all("total result out acc found answer")
TABLES = _all("stock table index ledger_map catalog amounts store_map register lookup sheet")
PLACES = _all("i j at pos")
LETTERS = _all("letter char mark_char sign")
# What a number or a text of a report is called; also the beginnings of the names of its functions.
LABELS = _all(
    "due final best net gross bonus grade quota rating balance margin budget payout volume profit summary overview "
    "status review notice receipt quote offer change reward charge"
)
MODULES = _all(
    "cart shop depot ledger market garden kitchen office school clinic farm hotel bank museum studio harbor track "
    "league billing orders grades stockroom invoice payroll basket rules helpers basics logic maths texts lists shared "
    "support pieces core counter meter travel recipes library_desk games weather traffic survey polls budgeting cinema "
    "bakery parking postal tickets"
)
TOP_MODULES = _all("main app report runner service desk console panel front board outlet digest_page")
VERDICTS = _pairs(
    "pass/fail high/low ok/bad big/small open/closed hot/cold full/empty fast/slow near/far yes/no on/off "
    "rich/poor old/new heavy/light"
)
SEPARATORS = (", ", "-", "/", "; ", " + ", "_", " | ", ":")
# What texts and tables in the checks are made of.
SAMPLES = _all(
    "red blue green amber pine oak elm rose lily fig plum pear kiwi lime mint sage fox owl bee ant cat dog hen cow "
    "sun moon star rain snow wind anna bob eve ivan level noon radar apple banana cherry"
)


def number(chance: Random) -> int:
    return chance.randint(1, 12)


def numbers(chance: Random) -> list[int]:
    return [chance.randint(1, 12) for _ in range(chance.randint(2, 4))]


def some_samples(chance: Random) -> list[str]:
    return chance.sample(SAMPLES, chance.randint(2, 3))


def table(chance: Random) -> dict[str, int]:
    return {word: chance.randint(0, 9) for word in chance.sample(SAMPLES, chance.randint(2, 3))}
