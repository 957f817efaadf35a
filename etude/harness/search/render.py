"""Renders search results for the model: place, how it was found, and numbered lines, within a size limit."""

from etude.harness.search.index import RankedChunk
from etude.harness.search.searcher import SearchResult

HIT_LINES = 24
LINE_CHARS = 240
TOTAL_CHARS = 16_000

_BY = {"semantic": "by meaning", "lexical": "by words", "both": "by meaning and words"}


def render_result(result: SearchResult, total_chars: int = TOTAL_CHARS) -> str:
    """Return the text shown to the model."""
    parts = [_summary(result)]
    used = len(parts[0])
    for count, hit in enumerate(result.hits):
        part = render_hit(count + 1, hit)
        if used + len(part) > total_chars:
            parts.append(f"({len(result.hits) - count} more results are not shown; ask for fewer, or more precisely)")
            break
        parts.append(part)
        used += len(part) + 2
    return "\n\n".join(parts)


def render_hit(number: int, hit: RankedChunk) -> str:
    """Render one result: a line with its place, and the beginning of the chunk."""
    chunk, shown = hit.chunk, hit.lines[:HIT_LINES]
    name = f"  {_quote_unprintable(chunk.name)}" if chunk.name else ""
    lines = [f"{number}. {_quote_unprintable(chunk.path)}:{chunk.first}-{chunk.last}{name}  [{_BY[hit.found_by]}]"]
    for line_number, line in enumerate(shown, start=chunk.first):
        text = line.rstrip("\r")
        cut = f"{text[:LINE_CHARS]}... ({len(text) - LINE_CHARS} more characters)" if len(text) > LINE_CHARS else text
        lines.append(f"{line_number:6}|{cut}")
    if len(hit.lines) > len(shown):
        lines.append(f"      ... ({len(hit.lines) - len(shown)} more lines, up to {chunk.last})")
    return "\n".join(lines)


def _summary(result: SearchResult) -> str:
    """Describe what was searched and what was left out: an empty result may be due to files left out."""
    count = len(result.hits)
    what = f"{count} result{'' if count == 1 else 's'}" if count else "No results"
    scope = f"{result.files:,} files, {result.chunks:,} chunks"
    if result.lexical_only:
        lines = [f"{what} in {scope}; lexical search only: {result.lexical_only}."]
    elif result.embedded < result.chunks:
        lines = [
            f"{what} in {scope}; {result.embedded:,} chunks were searched by meaning and words, "
            "the others by words only: the embedding model has not read them yet."
        ]
    else:
        lines = [f"{what} in {scope}, searched by meaning and words."]
    if result.too_large or result.too_many:
        left = result.too_large + result.too_many
        lines.append(
            f"{left:,} files were not searched ({result.too_large:,} too large, {result.too_many:,} too many)."
        )
    return " ".join(lines)


def _quote_unprintable(name: str) -> str:
    """Return the name, quoted if it has control characters."""
    return name if name.isprintable() else repr(name)
