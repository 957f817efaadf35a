"""A run's pages as one file: the same front end and the same answers, with everything inside and nothing outside.

Scripts run only if their digest is the one written into the file's own security policy, so no text of a trace can.
All rollouts are listed; in full are as many as the size allows, those one would look at first before the others.
"""

import base64
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path

from etude.errors import EtudeError, InputError
from etude.runs.layout import write_whole
from etude.viewer.api import Answers
from etude.viewer.catalogue import Group, Row, rows_of
from etude.viewer.run_reader import Facts, is_run
from etude.viewer.server import POLICY, asset, dump
from etude.viewer.session_view import Cut

# Every module after those it imports from.
MODULES = (
    *("dom", "data", "charts", "list", "lists", "training", "learning", "overview", "turns", "tokens", "rollout"),
    *("run", "group", "task", "app"),
)
STYLES = ("sessions.css", "style.css")
MOST_ABOUT = 400  # bytes of what the file says of itself
PUNCTUATION = 4  # bytes around an address and its answer
MOST_TEXT = 20_000  # characters of any one text
TOKENS = 24  # rollouts with a page of their tokens
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


@dataclass(frozen=True)
class Written:
    """What came of a report."""

    size: int
    rollouts: int
    of: int


def write_report(run: Path, out: Path, *, most: int = 8_000_000) -> Written:
    """Write the pages of a run into one file of about `most` bytes."""
    if not is_run(run):
        raise InputError(f"{run} is not a run: it has no recipe.toml; name a directory made by `etude run`")
    answers = Answers(run, Cut(MOST_TEXT))
    packed = pack(answers, most - len(render("", {})) - MOST_ABOUT)
    page = render(packed.about, packed.answers)
    try:
        write_whole(out, page)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    return Written(len(page), packed.rollouts, packed.of)


# ------------------------------------------------------------------------------------------- what goes in


@dataclass
class Packed:
    """Answers by address, as JSON, under a bound on their size."""

    most: int
    answers: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    rollouts: int = 0
    of: int = 0
    about: str = ""

    def add(self, told: dict[str, Facts]) -> bool:
        """All of these, or none when they do not fit."""
        new = {address: harmless(dump(answer)) for address, answer in told.items() if address not in self.answers}
        size = sum(len(address.encode()) + len(answer) + PUNCTUATION for address, answer in new.items())
        if self.size + size > self.most:
            return False
        self.answers |= new
        self.size += size
        return True


def pack(answers: Answers, most: int) -> Packed:
    """The lists whole, then rollouts with their groups and tasks for as long as there is room."""
    packed = Packed(most)
    for address in ("run", "rollouts", "tasks"):
        packed.answers[address] = harmless(dump(answers.answer(address)))
        packed.size += len(packed.answers[address]) + len(address) + PUNCTUATION
    groups = answers.groups()
    packed.of = len(rows_of(groups))
    refused = 0
    for row in in_order(groups):
        if refused >= 8:  # the rest would hardly fit either
            break
        try:
            told = _around(answers, row, packed.answers.keys(), tokens=packed.rollouts < TOKENS)
        except (EtudeError, OSError):  # a damaged trace; the list still has its row
            continue
        if packed.add(told):
            packed.rollouts += 1
        else:
            refused += 1
    date = datetime.now().astimezone().strftime("%d %B %Y, %H:%M")
    whole = "all rollouts" if packed.rollouts == packed.of else f"{packed.rollouts} of {packed.of} rollouts"
    packed.about = f"Written {date}; it holds {whole} in full"
    if packed.rollouts < packed.of:
        packed.about += ": the first and last, the best and worst, those with errors, and some between"
    packed.about += "." if packed.of else ", for there are none."
    return packed


def _around(answers: Answers, row: Row, known: Collection[str], tokens: bool) -> dict[str, Facts]:
    """A rollout and what its page leads to, as far as that is not known."""
    place = f"{row.set}/{row.group}"
    session = f"{place}/{row.number}/{row.attempt}"
    told = {f"rollout/{session}": answers.answer(f"rollout/{session}")}
    if tokens:
        segments = len(told[f"rollout/{session}"]["story"]["segments"])
        addresses = [f"tokens/{session}/{segment}/0" for segment in range(segments)]
        told |= {address: answers.answer(address) for address in addresses}
    around = [address for address in (f"group/{place}", f"task/{row.task}") if address not in known]
    return told | {address: answers.answer(address) for address in around}


def in_order(groups: Iterable[Group]) -> Iterator[Row]:
    """Every rollout once: those one would look at first before the others."""
    found = [group for group in groups if group.rows]
    training = [group for group in found if group.set == "training"]
    measured = [group for group in found if group.set == "evaluation"]
    ends = [*training[:1], *training[-1:], *_last_try(measured)[:2], *measured[:2]]
    rows = rows_of(found)
    paid = sorted((row for row in rows if row.total is not None), key=lambda row: row.total or 0.0)
    odd = [row for row in rows if row.hack] + [row for row in rows if row.errors or row.ending not in ("final", "")]
    above = sorted((row for row in rows if row.advantage), key=lambda row: -abs(row.advantage or 0.0))
    mixed = [
        row for four in zip_longest(paid[::-1][:8], paid[:8], odd[:8], above[:8]) for row in four if row is not None
    ]
    seen: set[Row] = set()
    for row in [*rows_of(ends), *mixed, *_spread(rows)]:
        if row not in seen:
            seen.add(row)
            yield row


def _last_try(measured: list[Group]) -> list[Group]:
    newest = max((group.step or 0 for group in measured), default=0)
    return [group for group in measured if group.step == newest]


def _spread(rows: list[Row]) -> list[Row]:
    """In an order that has covered all of the run, thinly, wherever one stops."""
    order: list[Row] = []
    step = 1
    while step < len(rows):
        step *= 2
    seen: set[int] = set()
    while step >= 1:
        new = [at for at in range(0, len(rows), step) if at not in seen]
        seen.update(new)
        order += [rows[at] for at in new]
        step //= 2
    return order


# ------------------------------------------------------------------------------------------- one file


def script() -> str:
    """The front end as one script: every module a function that is called once and gives what it exports."""
    return "\n".join(_enclosed(name, asset(f"{name}.js").decode()) for name in MODULES)


def _enclosed(name: str, text: str) -> str:
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    inside = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = \2_module;", text))
    if re.search(r"^(import|export)\b", inside, re.MULTILINE):
        raise EtudeError(
            f"pages/{name}.js: imports and exports are `import {{...}} from` and `export function ...` only"
        )
    return f"const {name}_module = (() => {{\n{inside}\nreturn {{{exported}}};\n}})();"


def render(about: str, answers: dict[str, bytes]) -> bytes:
    """The file; the answers are JSON that was made harmless."""
    code, style = script(), "".join(asset(name).decode() for name in STYLES)
    policy = {name: value for name, value in POLICY.items() if name not in ("frame-ancestors", "connect-src")}
    policy |= {"script-src": _digest(code), "style-src": _digest(style), "img-src": "data:"}
    policy["default-src"] = "'none'"
    inside = b",".join(harmless(dump(address)) + b":" + answer for address, answer in answers.items())
    data = b'{"about":%b,"answers":{%b}}' % (harmless(dump(about)), inside)
    icon = base64.b64encode(asset("icon.svg")).decode()
    page = asset("index.html").decode()
    rules = "; ".join(f"{name} {value}" for name, value in policy.items())
    charset = '<meta charset="utf-8">'
    changes = {
        'data-mode="run"': 'data-mode="file"',
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{rules}">',
        'href="/pages/icon.svg"': f'href="data:image/svg+xml;base64,{icon}"',
        "\n".join(f'<link rel="stylesheet" href="/pages/{name}">' for name in STYLES): f"<style>{style}</style>",
        '<script type="module" src="/pages/app.js"></script>': f'<script type="module">{code}</script>',
    }
    for old, new in changes.items():
        if page.count(old) != 1:
            raise EtudeError(f"pages/index.html: expected {old} once")
        page = page.replace(old, new)
    block = b'<script type="application/json" id="data">' + data + b"</script>\n</body>"
    head, _, tail = page.encode().rpartition(b"</body>")
    return head + block + tail


def harmless(data: bytes) -> bytes:
    """JSON in which nothing can end the block it stands in."""
    return data.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
