"""Words and numbers that fill the slots of nano programs.

The words are plain enough to be single tokens in a vocabulary of a few thousand. No module name is the name of a
standard library module or of a variable, and no label is a noun, so that no name in a program shadows another.
"""

from random import Random


def split_words(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _pairs(pairs: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, _, second in (pair.partition("/") for pair in pairs.split()))


# Nouns with a numeric value: plural/singular.
NOUNS = _pairs(
    "prices/price scores/score ages/age sizes/size votes/vote points/point counts/count rates/rate costs/cost "
    "hours/hour stages/stage levels/level weights/weight marks/mark sales/sale tips/tip fees/fee bids/bid goals/goal "
    "laps/lap miles/mile loads/load gaps/gap seats/seat tokens/token rents/rent wages/wage depths/depth "
    "heights/height speeds/speed days/day units/unit coins/coin bills/bill boxes/box cups/cup pages/page "
    "tests/test wins/win jumps/jump"
)
# Nouns with a text value: plural/singular.
NAMED = _pairs(
    "names/name labels/label tags/tag titles/title users/user cities/city colors/color pets/pet fruits/fruit "
    "teams/team guests/guest books/book songs/song rooms/room tools/tool plants/plant items/item cards/card "
    "roles/role groups/group"
)
TEXTS = split_words("text line phrase note message heading entry")
LIMITS = split_words("limit bound cap least most start floor base target edge")
AMOUNTS = split_words("amount extra step_size width share offset times size_now piece")
TOTALS = split_words("total result out acc found answer")
TABLES = split_words("stock table index ledger_map catalog amounts store_map register lookup sheet")
INDEX_NAMES = split_words("i j at pos")
LETTERS = split_words("letter char mark_char sign")
# Labels of reported numbers and texts; also prefixes of the names of reporting functions.
LABELS = split_words(
    "due final best net gross bonus grade quota rating balance margin budget payout volume profit summary overview "
    "status review notice receipt quote offer change reward charge"
)
MODULES = split_words(
    "cart shop depot ledger market garden kitchen office school clinic farm hotel bank museum studio harbor track "
    "league billing orders grades stockroom invoice payroll basket rules helpers basics logic maths texts lists shared "
    "support pieces core counter meter travel recipes library_desk games weather traffic survey polls budgeting cinema "
    "bakery parking postal tickets"
)
TOP_MODULES = split_words("main app report runner service desk console panel front board outlet digest_page")
OPPOSITES = _pairs(
    "pass/fail high/low ok/bad big/small open/closed hot/cold full/empty fast/slow near/far yes/no on/off "
    "rich/poor old/new heavy/light"
)
SEPARATORS = (", ", "-", "/", "; ", " + ", "_", " | ", ":")
# Words of the texts and tables in checks.
SAMPLES = split_words(
    "red blue green amber pine oak elm rose lily fig plum pear kiwi lime mint sage fox owl bee ant cat dog hen cow "
    "sun moon star rain snow wind anna bob eve ivan level noon radar apple banana cherry"
)


def number(rng: Random) -> int:
    return rng.randint(1, 12)


def numbers(rng: Random) -> list[int]:
    return [rng.randint(1, 12) for _ in range(rng.randint(2, 4))]


def sample_words(rng: Random) -> list[str]:
    return rng.sample(SAMPLES, rng.randint(2, 3))


def table(rng: Random) -> dict[str, int]:
    return {word: rng.randint(0, 9) for word in rng.sample(SAMPLES, rng.randint(2, 3))}
