"""Requests as people write them, from the message of a change, a linked issue, or the session that made it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etude.tasks.mining.history import HistoryCommit

MAX_TERSE = 400  # characters; the median of requests in real sessions is 390
MIN_WORDS = 3  # of a request
MAX_COPIED_LINES = 2  # lines of the solution that a message may show
TRAILER = re.compile(
    r"^[A-Z][A-Za-z-]*(-by|-To|-id|-Id|-in|-for|cc)?: .*(<.*>|https?://|#\d+|[0-9a-f]{7,40}).*$"
    r"|^[A-Z][a-z]+(-[a-z]+)*-by: "
)
NUMBER = r"(?:[\w.-]+/[\w.-]+)?(?:#|GH-|gh-|bpo-|issue ?#?|PR ?#?)\d+"
CLOSES = re.compile(
    r"\(?\b(?:clos(?:e[sd]?|ing)|fix(?:e[sd]|ing)?|resolv(?:e[sd]?|ing)|refs?|see(?: also)?|re|addresses|part of"
    rf"|for|from|in|via):? {NUMBER}(?:(?:,| and) {NUMBER})*\)?[.:]?(?= |$)",
    re.I,
)
REFERENCE = re.compile(rf"\(?{NUMBER}(?:(?:,| and|/) ?{NUMBER})*\)?:?(?!\w)", re.I)
LINK = re.compile(r"<?https?://\S+/(?:pull|issues|commit|merge_requests|compare)/\S+>?")
COMMIT_ID = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
CONVENTIONAL = re.compile(r"^(feat|fix|refactor|perf|chore|test|docs|style|build|ci)(\([^)]*\))?!?: +", re.I)
# subjects that do not say what to do
VAGUE = re.compile(
    r"(?:minor|small|some|more|further|misc\w*|various|tiny|final|last|initial|code|general)?[ -]*(?:and |& |, )?"
    r"(?:changes (?:for|in) .*|(?:set|require|bump|upgrade|update) .*(?:version|dependenc|node|python).*"
    r"|clean[ -]?ups?|fix(?:es)?|changes?|improvements?|tweaks?|updates?|corrections?|refactoring|wip|oops|typos?"
    r"|work|stuff|nits?|polish(?:ing)?"
    r"|(?:address|apply|respond to)\w* .*(?:review|feedback|comments?|suggestions?).*"
    r"|(?:fix|update|add|improve|more|correct|adjust)\w* (?:\w+ )?(?:tests?|docs?|documentation|ci|lint\w*|mypy"
    r"|coverage|readme|changelog|typing|formatting|flake8|ruff|black|build|types?|annotations?"
    r"|imports?)(?: \w+)?)[.! ]*",
    re.I,
)


@dataclass(frozen=True)
class MinedRequest:
    """The request of a task. `source` says where it comes from: message, issue, or session."""

    text: str
    source: str


def issue_numbers(commit: HistoryCommit) -> list[str]:
    """Return the numbers of issues and pull requests that a commit mentions, those that it closes first."""
    text = f"{commit.subject}\n{commit.body}"
    closed = [number for found in CLOSES.finditer(text) for number in re.findall(r"\d+", found[0])]
    return list(dict.fromkeys([*closed, *re.findall(r"(?:#|GH-|gh-)(\d+)", text)]))


def clean_text(text: str) -> str:
    """Remove references to pull requests, issues and commits, and trailers: an agent could not look them up."""
    lines = [line.rstrip() for line in text.splitlines() if not TRAILER.match(line)]
    text = "\n".join(line for line in lines if not re.fullmatch(r"-{3,}|Conflicts:.*|#.*\bConflicts\b.*", line))
    for pattern in (LINK, CLOSES, REFERENCE, COMMIT_ID):
        text = pattern.sub("", text)
    text = re.sub(r"(?<![\w`)])(?:\(\s*\)|\[\s*\])|``(?=\s|$)", "", text)
    text = re.sub(r"(?im)^(?:(?:fix(?:e[sd])?|clos(?:e[sd]?)|refs?|see|resolves?)[:,. ]*)+$", "", text)
    text = re.sub(r"[ \t]+([.,;:)])|[ \t]{2,}(?=\S)", lambda found: found[1] or " ", text)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines())).strip(" \n,;:-")


def clean_subject(subject: str) -> str:
    """Return the subject of a commit as a person would ask for it."""
    text = re.sub(rf"^(?:fix(?:e[sd])?|clos(?:e[sd]?)|resolves?) {NUMBER}[:,. -]*", "", subject.strip(), flags=re.I)
    text = CONVENTIONAL.sub("", re.sub(rf"^\[?{NUMBER}\]?[:. -]*", "", text))
    return clean_text(re.sub(r"\.{3}$|…$", "", text)).strip(" .")


def is_vague(subject: str) -> bool:
    """Return whether a cleaned subject does not say what to do."""
    words = re.findall(r"[A-Za-z_][\w.]+", subject)
    named = (
        re.search(r"[a-z]_[a-z]|\w\(|`|[a-z][A-Z]|^(?i:add|drop|remove|support|implement|rename)\b", subject)
        is not None
    )
    return VAGUE.fullmatch(subject) is not None or len(words) < MIN_WORDS - named


def paragraphs(body: str) -> list[str]:
    """Return the paragraphs of prose in a cleaned body; lists of a squash's commits, checklists and code are none."""
    found = []
    for block in re.split(r"\n\s*\n", clean_text(re.sub(r"<!--.*?-->", "", body, flags=re.S))):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        listed = sum(bool(re.match(r"[*+-] |\d+[.)] |#|>|\|", line)) for line in lines)
        if lines and listed * 2 < len(lines) and not block.startswith(("    ", "\t", "```", "@")):
            found.append(" ".join(lines))
    return found


def terse_request(commit: HistoryCommit, solution_lines: Sequence[str] = ()) -> str:
    """Return the request of a commit as people write them: the subject, and prose that says more; "" if it is vague."""
    subject, body = commit.message
    parts = [clean_subject(subject)]
    vague = is_vague(parts[0])
    for paragraph in paragraphs(body):
        if re.sub(r"\W", "", paragraph).lower() == re.sub(r"\W", "", parts[0]).lower():
            continue
        if len("\n\n".join([*parts, paragraph])) > MAX_TERSE or shows_solution(paragraph, solution_lines):
            break
        parts.append(paragraph)
        vague = vague and len(paragraph.split()) < 6
    return "" if vague else "\n\n".join(parts)


def full_request(
    commit: HistoryCommit, files: Sequence[str], interface: Sequence[str], behaviours: Sequence[str], terse: str
) -> str:
    """Return an over-specified request: the whole message, files to change, new names and tested behaviour."""
    body = "\n\n".join(paragraphs(commit.message[1]))
    parts = [terse if len(terse) > len(body) or not body else f"{clean_subject(commit.message[0])}\n\n{body}"]
    parts.append("Change these files:\n" + "\n".join(f"- {path}" for path in files))
    if interface:
        parts.append("New or changed:\n\n" + "\n".join(f"- {line}" for line in interface))
    if behaviours:
        parts.append("It must hold:\n" + "\n".join(f"- {line}" for line in behaviours))
    return "\n\n".join(parts)


def behaviours_of(tests: Sequence[str], limit: int = 20) -> list[str]:
    """Return the names of tests as words."""
    names = (re.sub(r"^tests?_*", "", test.partition("[")[0].rpartition("::")[2].lower()) for test in tests)
    return list(dict.fromkeys(name.replace("_", " ").strip() for name in names if name))[:limit]


def shows_solution(text: str, solution_lines: Sequence[str]) -> bool:
    """Return whether a text contains lines of the solution."""
    squeezed = re.sub(r"\s+", "", text)
    lines = {re.sub(r"\s+", "", line) for line in solution_lines if len(line) > 20}
    return sum(line in squeezed for line in lines) >= MAX_COPIED_LINES


def choose_request(
    commit: HistoryCommit, solution_lines: Sequence[str], issues: Mapping[str, str], session: str = ""
) -> MinedRequest | None:
    """Return the request of a change: of the session that made it, else the linked issue, else the message."""
    if session and not shows_solution(session, solution_lines):
        return MinedRequest(clean_text(session), "session")
    for number in issue_numbers(commit):
        text = clean_text(issues.get(number, ""))
        if text and not shows_solution(text, solution_lines):
            return MinedRequest(text, "issue")
    text = terse_request(commit, solution_lines)
    return MinedRequest(text, "message") if text else None
