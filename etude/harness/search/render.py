"""The result of a search as the model reads it: where, what found it, and numbered lines; within a budget."""

from etude.harness.search.searcher import Hit, SearchResult

HIT_LINES = 24
LINE_CHARS = 240
TOTAL_CHARS = 16_000

_BY = {"semantic": "by meaning", "lexical": "by words", "both": "by meaning and words"}


def show(found: SearchResult, total_chars: int = TOTAL_CHARS) -> str:
    """The text for the model."""
    parts = [_summary(found)]
    used = len(parts[0])
    for count, hit in enumerate(found.hits):
        part = show_hit(count + 1, hit)
        if used + len(part) > total_chars:
            parts.append(f"({len(found.hits) - count} more results are not shown; ask for fewer, or more precisely)")
            break
        parts.append(part)
        used += len(part) + 2
    return "\n\n".join(parts)


def show_hit(number: int, hit: Hit) -> str:
    """One result: a line that says where, and the beginning of the chunk."""
    shown = hit.lines[:HIT_LINES]
    name = f"  {_plain(hit.name)}" if hit.name else ""
    lines = [f"{number}. {_plain(hit.path)}:{hit.first}-{hit.last}{name}  [{_BY[hit.found_by]}]"]
    for line_number, line in enumerate(shown, start=hit.first):
        text = line.rstrip("\r")
        cut = f"{text[:LINE_CHARS]}... ({len(text) - LINE_CHARS} more characters)" if len(text) > LINE_CHARS else text
        lines.append(f"{line_number:6}|{cut}")
    if len(hit.lines) > len(shown):
        lines.append(f"      ... ({len(hit.lines) - len(shown)} more lines, up to {hit.last})")
    return "\n".join(lines)


def _summary(found: SearchResult) -> str:
    """What was searched and how; what was left out is said, so that nothing found is not taken for nothing there."""
    count = len(found.hits)
    what = f"{count} result{'' if count == 1 else 's'}" if count else "No results"
    scope = f"{found.files:,} files, {found.chunks:,} chunks"
    if found.lexical_only:
        lines = [f"{what} in {scope}; lexical search only: {found.lexical_only}."]
    elif found.embedded < found.chunks:
        lines = [
            f"{what} in {scope}; {found.embedded:,} chunks were searched by meaning and words, "
            "the others by words only: the embedding model has not read them yet."
        ]
    else:
        lines = [f"{what} in {scope}, searched by meaning and words."]
    if found.too_large or found.too_many:
        left = found.too_large + found.too_many
        lines.append(f"{left:,} files were not searched ({found.too_large:,} too large, {found.too_many:,} too many).")
    return " ".join(lines)


def _plain(name: str) -> str:
    """A name that cannot be taken for anything else: one with control characters is shown quoted."""
    return name if name.isprintable() else repr(name)
