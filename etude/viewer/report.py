"""The pages of a run as one self-contained HTML file: the front end of the server, with the API's answers inlined.

The file's content security policy names the digest of its script, so no text of a trace can execute. All rollouts are
listed; those included in full are as many as the size allows, the most interesting first.
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
from etude.files import write_atomically
from etude.viewer.api import RunApi
from etude.viewer.catalogue import RolloutGroup, RolloutRow, all_rows
from etude.viewer.run_reader import JsonObject, is_run
from etude.viewer.server import CONTENT_SECURITY_POLICY, asset, to_json
from etude.viewer.session_view import TextLimit

# Every module comes after those it imports.
MODULES = (
    *("dom", "data", "charts", "list", "lists", "training", "learning", "outcome", "overview", "turns", "tokens"),
    *("rollout", "run", "group", "task", "app"),
)
STYLES = ("sessions.css", "style.css")
MAX_ABOUT_BYTES = 400  # of the note about the file's contents
ENTRY_OVERHEAD = 4  # bytes of punctuation around an address and its answer
MAX_TEXT = 20_000  # characters of one text
MAX_WITH_TOKENS = 24  # rollouts that include their first page of tokens
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


@dataclass(frozen=True)
class ReportSummary:
    """Size of a written report, and how many of the rollouts it has in full."""

    size: int
    rollouts: int
    of: int


def write_report(run: Path, out: Path, *, max_bytes: int = 8_000_000) -> ReportSummary:
    """Write the pages of a run into one file of at most about `max_bytes` bytes."""
    if not is_run(run):
        raise InputError(f"{run} is not a run: it has no recipe.toml; name a directory made by `etude run`")
    packed = pack_answers(RunApi(run, TextLimit(MAX_TEXT)), max_bytes - len(render("", {})) - MAX_ABOUT_BYTES)
    page = render(packed.about, packed.answers)
    try:
        write_atomically(out, page)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    return ReportSummary(len(page), packed.rollouts, packed.of)


# ------------------------------------------------------------------------------------------- selection


@dataclass
class PackedReport:
    """The API's answers by address, as JSON, with a limit on their size."""

    max_bytes: int
    answers: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    rollouts: int = 0
    of: int = 0
    about: str = ""

    def add(self, entries: dict[str, JsonObject]) -> bool:
        """Add all of these entries, or none if they do not fit."""
        new = {
            address: escape_json(to_json(answer)) for address, answer in entries.items() if address not in self.answers
        }
        size = sum(len(address.encode()) + len(answer) + ENTRY_OVERHEAD for address, answer in new.items())
        if self.size + size > self.max_bytes:
            return False
        self.answers |= new
        self.size += size
        return True


def pack_answers(api: RunApi, max_bytes: int) -> PackedReport:
    """Pack the lists, then rollouts with their groups and tasks while there is room."""
    packed = PackedReport(max_bytes)
    for address in ("run", "rollouts", "tasks"):
        packed.answers[address] = escape_json(to_json(api.get(address)))
        packed.size += len(packed.answers[address]) + len(address) + ENTRY_OVERHEAD
    groups = api.groups()
    packed.of = len(all_rows(groups))
    refused = 0
    for row in by_interest(groups):
        if refused >= 8:  # the rest will hardly fit either
            break
        try:
            entries = _rollout_pages(api, row, packed.answers.keys(), tokens=packed.rollouts < MAX_WITH_TOKENS)
        except (EtudeError, OSError):  # a damaged trace; its row is still in the list
            continue
        if packed.add(entries):
            packed.rollouts += 1
        else:
            refused += 1
    date = datetime.now().astimezone().strftime("%d %B %Y, %H:%M")
    whole = "all rollouts" if packed.rollouts == packed.of else f"{packed.rollouts} of {packed.of} rollouts"
    packed.about = f"Written {date}; it contains {whole} in full"
    if packed.rollouts < packed.of:
        packed.about += ": the first and last, the best and worst, those with errors, and some between"
    packed.about += "." if packed.of else " (there are none)."
    return packed


def _rollout_pages(api: RunApi, row: RolloutRow, known: Collection[str], tokens: bool) -> dict[str, JsonObject]:
    """Return the answers for a rollout's page and the pages it links to, except those in `known`."""
    group = f"{row.set}/{row.group}"
    session = f"{group}/{row.number}/{row.attempt}"
    entries = {f"rollout/{session}": api.get(f"rollout/{session}")}
    if tokens:
        segments = len(entries[f"rollout/{session}"]["session"]["segments"])
        addresses = [f"tokens/{session}/{segment}/0" for segment in range(segments)]
        entries |= {address: api.get(address) for address in addresses}
    linked = [address for address in (f"group/{group}", f"task/{row.task}") if address not in known]
    return entries | {address: api.get(address) for address in linked}


def by_interest(groups: Iterable[RolloutGroup]) -> Iterator[RolloutRow]:
    """Yield every rollout once, the most interesting first: first and last, best and worst, errors, then a sample."""
    found = [group for group in groups if group.rows]
    training = [group for group in found if group.set == "training"]
    measured = [group for group in found if group.set == "evaluation"]
    ends = [*training[:1], *training[-1:], *_latest(measured)[:2], *measured[:2]]
    rows = all_rows(found)
    paid = sorted((row for row in rows if row.total is not None), key=lambda row: row.total or 0.0)
    odd = [row for row in rows if row.hack] + [row for row in rows if row.errors or row.ending not in ("final", "")]
    above = sorted((row for row in rows if row.advantage), key=lambda row: -abs(row.advantage or 0.0))
    mixed = [
        row for four in zip_longest(paid[::-1][:8], paid[:8], odd[:8], above[:8]) for row in four if row is not None
    ]
    seen: set[RolloutRow] = set()
    for row in [*all_rows(ends), *mixed, *_spread(rows)]:
        if row not in seen:
            seen.add(row)
            yield row


def _latest(measured: list[RolloutGroup]) -> list[RolloutGroup]:
    newest = max((group.step or 0 for group in measured), default=0)
    return [group for group in measured if group.step == newest]


def _spread(rows: list[RolloutRow]) -> list[RolloutRow]:
    """Return the rows in an order whose every prefix is spread evenly over the run."""
    order: list[RolloutRow] = []
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


# ------------------------------------------------------------------------------------------- the file


def script() -> str:
    """Return the front end as one script, with every module as a function that returns its exports."""
    return "\n".join(_wrap_module(name, asset(f"{name}.js").decode()) for name in MODULES)


def _wrap_module(name: str, text: str) -> str:
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    inside = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = \2_module;", text))
    if re.search(r"^(import|export)\b", inside, re.MULTILINE):
        raise EtudeError(
            f"pages/{name}.js: imports and exports are `import {{...}} from` and `export function ...` only"
        )
    return f"const {name}_module = (() => {{\n{inside}\nreturn {{{exported}}};\n}})();"


def render(about: str, answers: dict[str, bytes]) -> bytes:
    """Return the HTML file; `answers` are JSON that went through `escape_json`."""
    code, style = script(), "".join(asset(name).decode() for name in STYLES)
    policy = {
        name: value for name, value in CONTENT_SECURITY_POLICY.items() if name not in ("frame-ancestors", "connect-src")
    }
    policy |= {"script-src": _digest(code), "style-src": _digest(style), "img-src": "data:"}
    policy["default-src"] = "'none'"
    inside = b",".join(escape_json(to_json(address)) + b":" + answer for address, answer in answers.items())
    data = b'{"about":%b,"answers":{%b}}' % (escape_json(to_json(about)), inside)
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


def escape_json(data: bytes) -> bytes:
    """Escape JSON so that it cannot end the script block that contains it."""
    return data.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
