"""From texts to token ids: what surrounds a file or a repository, fill-in-the-middle, and encoding in batches.

A document is a stream of pieces: text, encoded as untrusted unless it says otherwise, and single control tokens, named
by id. A file is its text; a repository is its files in reading order behind the markers that the vocabulary was trained
with. Every document ends with the end of text. What is random is decided by a hash of the seed and the name.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from etude.data.documents import Document
from etude.data.worker_pool import ALONE, Crew
from etude.errors import InputError

if TYPE_CHECKING:  # the model room loads torch
    from etude.chat.tokenizer import Tokenizer

LAYOUTS = ("file", "repository")
# (repository, file) and (prefix, suffix, middle) in the spellings of Qwen, of StarCoder 2 with SmolLM2, of StarCoder.
REPOSITORY_MARKERS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))
FIM_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)
_BATCH_CHARACTERS = 1 << 20  # of text that is encoded in one call

_SLASHES = (".js", ".jsx", ".ts", ".tsx", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".java", ".kt", ".go", ".rs")
_ANGLES = (".md", ".html", ".xml", ".vue", ".svelte")


@dataclass(frozen=True)
class Piece:
    """Part of a document: a text, or a control token when `token` is set. `written` is what a loss may count."""

    text: str = ""
    token: int | None = None
    written: bool = True
    special: bool = False  # control tokens in the text are meant: it was rendered by a chat template


@dataclass(frozen=True)
class Encoded:
    """A finished document: ids, what the loss counts, and the bytes of text it was made from."""

    name: str
    tokens: npt.NDArray[np.uint32]
    written: npt.NDArray[np.bool_]
    bytes: int


class _Part(NamedTuple):
    """An encoded piece: its text is no longer needed."""

    tokens: npt.NDArray[np.uint32]
    written: bool
    bytes: int


@dataclass(frozen=True)
class Markers:
    """The control tokens of one vocabulary; None where it has none."""

    end_of_text: int
    repository: tuple[int, ...] | None
    fim: tuple[int, ...] | None

    @classmethod
    def find(cls, tokenizer: "Tokenizer", *, fim: bool) -> "Markers":
        found = cls(tokenizer.end_of_text, _ids(tokenizer, REPOSITORY_MARKERS), _ids(tokenizer, FIM_MARKERS))
        if fim and found.fim is None:
            wanted = " or ".join(spelling[0] for spelling in FIM_MARKERS)
            raise InputError(f"--fim needs a vocabulary with fill-in-the-middle tokens ({wanted}); this one has none")
        return found


def file_pieces(document: Document, markers: Markers, fim: float, seed: int) -> Iterator[Piece]:
    yield from _body(document, markers, fim, seed)
    yield Piece(token=markers.end_of_text)


def repository_pieces(
    repository: str, documents: Iterable[Document], markers: Markers, fim: float, seed: int
) -> Iterator[Piece]:
    """Files one after another, each behind its path; a vocabulary without markers gets a comment line."""
    if markers.repository is not None:
        yield Piece(token=markers.repository[0])
        yield Piece(text=f"{repository}\n")
    for document in documents:
        if markers.repository is not None:
            yield Piece(token=markers.repository[1])
            yield Piece(text=f"{document.path}\n")
        else:
            yield Piece(text=_comment(document.path))
        yield from _body(document, markers, fim, seed)
        if not document.text.endswith("\n"):
            yield Piece(text="\n")
    yield Piece(token=markers.end_of_text)


def reading_order(paths: Sequence[str]) -> list[int]:
    """Positions of the paths as one would read them: the README, then by path, a package before its modules."""
    parts = [PurePosixPath(path).parts for path in paths]
    readmes = [len(part) for part in parts if part[-1].lower().startswith("readme")]
    top = min(readmes, default=0)

    def key(position: int) -> tuple[bool, tuple[str, ...], int]:
        *folders, name = parts[position]
        is_readme = len(parts[position]) == top and name.lower().startswith("readme")
        return not is_readme, (*folders, "" if name == "__init__.py" else name), position

    return sorted(range(len(paths)), key=key)


def split_for_fim(document: Document, rate: float, seed: int) -> tuple[str, str, str] | None:
    """Prefix, middle and suffix at two random characters, or None when this document stays as it is."""
    digest = hashlib.blake2b(f"{seed}\0{document.repository}\0{document.path}".encode(), digest_size=24).digest()
    draw, first, second = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8, 16))
    if draw >= rate * 2**64:
        return None
    places = len(document.text) + 1
    start, stop = sorted((first % places, second % places))
    return document.text[:start], document.text[start:stop], document.text[stop:]


def encode_documents(
    documents: Iterable[tuple[str, Iterable[Piece]]], tokenizer: "Tokenizer", crew: Crew = ALONE
) -> Iterator[Encoded]:
    """Token ids of each document, in order. Holds a few batches of text and the ids of the documents in them."""

    def with_the_tokenizer() -> Callable[[list[Piece]], list[_Part]]:
        tokenizer.save(crew.directory / "tokenizer")
        return partial(_encode_elsewhere, str(crew.directory / "tokenizer"))

    ended: deque[str | None] = deque()  # for each piece under way: the document that it is the last of

    def pieces() -> Iterator[Piece]:
        for name, own in documents:
            last = None
            for piece in own:
                if last is not None:
                    ended.append(None)
                    yield last
                last = piece
            assert last is not None, name
            ended.append(name)
            yield last

    here = partial(_encode, tokenizer.encode_batch)
    batches = crew.map(
        here, pieces(), lambda piece: len(piece.text), batch=_BATCH_CHARACTERS, elsewhere=with_the_tokenizer
    )
    parts: list[_Part] = []
    for part in chain.from_iterable(batches):
        parts.append(part)
        if (name := ended.popleft()) is not None:
            yield _assemble(name, parts)
            parts = []


def _encode(encode_batch: Callable[..., Sequence[Any]], pieces: Sequence[Piece]) -> list[_Part]:
    ids: dict[int, Any] = {}
    for special in (False, True):
        places = [at for at, piece in enumerate(pieces) if piece.token is None and piece.special == special]
        found = encode_batch([pieces[at].text for at in places], special=special) if places else []
        ids.update(zip(places, found, strict=True))
    return [
        _Part(
            np.asarray(ids[at] if piece.token is None else [piece.token], dtype=np.uint32),
            piece.written,
            len(piece.text.encode()),
        )
        for at, piece in enumerate(pieces)
    ]


def _encode_elsewhere(directory: str, pieces: Sequence[Piece]) -> list[_Part]:
    from etude.data.encoder import open_encoder

    return _encode(open_encoder(directory).encode_batch, pieces)


def _assemble(name: str, parts: list[_Part]) -> Encoded:
    tokens = np.concatenate([part.tokens for part in parts])
    written = np.repeat([part.written for part in parts], [len(part.tokens) for part in parts])
    return Encoded(name, tokens, written, sum(part.bytes for part in parts))


def _body(document: Document, markers: Markers, fim: float, seed: int) -> Iterator[Piece]:
    split = split_for_fim(document, fim, seed) if fim else None
    if split is None or markers.fim is None:
        yield Piece(text=document.text)
        return
    before, middle, after = split
    for token, text in zip(markers.fim, (before, after, middle), strict=True):  # prefix, suffix, middle
        yield Piece(token=token)
        yield Piece(text=text)


def _comment(path: str) -> str:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _ANGLES:
        return f"<!-- {path} -->\n"
    return f"{'//' if suffix in _SLASHES else '#'} {path}\n"


def _ids(tokenizer: "Tokenizer", spellings: Sequence[tuple[str, ...]]) -> tuple[int, ...] | None:
    for spelling in spellings:
        found = tuple(token for token in map(tokenizer.token_id, spelling) if token is not None)
        if len(found) == len(spelling):
            return found
    return None
