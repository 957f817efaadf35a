"""The texts of a chunk: the one that is embedded, and the one whose words are counted.

The embedding model knows English better than code. So it reads the name, docstring and comments of a chunk and the
first sentence of its file, and the code itself only where there is little of them. `benchmarks/search.py --code`
compares the two.
"""

import re
from collections.abc import Sequence

from etude.harness.search.chunks import PROSE, Chunk, chunk_text

ENOUGH_WORDS = 8  # of prose; with fewer, code is added
PROSE_CHARS = 700  # more than the model's input
CODE_CHARS = 400

_DOCSTRING = re.compile(r'[rRbBuUfF]{0,2}("""|\'\'\')(.*?)(?:\1|\Z)', re.DOTALL)
_COMMENT = re.compile(
    r"/\*+(.*?)(?:\*/|\Z)|<!--(.*?)(?:-->|\Z)|(?:^|(?<=\s))(?:#+|//+!?|--|;;+)\s(.*?)$", re.DOTALL | re.MULTILINE
)
_LEGAL = re.compile(r"copyright|licen[sc]e|spdx|all rights reserved|-\*- coding", re.IGNORECASE)
_PYTHON = (".py", ".pyi")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def headline(path: str, lines: Sequence[str]) -> str:
    """Return the first sentence of a file's docstring or comment, or its first heading."""
    head = "\n".join(line[:200] for line in lines[:20])
    if path.endswith(PROSE):
        return next((line.strip("# ") for line in head.split("\n") if line.startswith("#")), "")[:200]
    document = _DOCSTRING.search(head) if path.endswith(_PYTHON) else None
    summary = " ".join(document[2].split()) if document else _prose(head, path)
    return "" if _LEGAL.search(summary) else summary.split(". ")[0][:200]


def embedded_text(chunk: Chunk, lines: Sequence[str], file_headline: str) -> str:
    """Return the text of a chunk for the embedding model."""
    source = chunk_text(chunk, lines)
    prose = _prose(source, chunk.path)[:PROSE_CHARS]
    code = ""
    if len(prose.split()) < ENOUGH_WORDS:
        code = split_identifiers(_COMMENT.sub("", _DOCSTRING.sub("", source)))[:CODE_CHARS]
    about = file_headline or split_identifiers(chunk.path.rpartition(".")[0].replace("/", " "))
    name = f"{split_identifiers(chunk.name)}." if chunk.name else ""
    text = " ".join(f"{name} {prose} {about} {code}".split())
    return text.encode("utf-8", "replace").decode()  # a path may contain a lone surrogate


def counted_text(chunk: Chunk, lines: Sequence[str], file_headline: str) -> str:
    """Return the text of a chunk for BM25."""
    return f"{chunk.path} {chunk.name} {file_headline}\n{chunk_text(chunk, lines)}"


def split_identifiers(text: str) -> str:
    """Split identifiers into words: `readFile` and `read_file` become `read file`."""
    return " ".join(_CAMEL.sub(" ", text).replace("_", " ").split())


def _prose(text: str, path: str) -> str:
    if path.endswith(PROSE):
        return " ".join(text.split())
    texts = [match[2] for match in _DOCSTRING.finditer(text)] if path.endswith(_PYTHON) else []
    bare = _DOCSTRING.sub("", text) if texts else text
    texts.extend(next(group for group in match.groups() if group is not None) for match in _COMMENT.finditer(bare))
    return " ".join(" ".join(texts).split())
