"""The format of training documents: files, repositories and fill-in-the-middle, and their encoding in batches.

A document is a stream of parts: text, encoded without control tokens unless `special` is set, and tokens, given by
id. A file is its text; a repository is its files in reading order, each after the marker that the
vocabulary was trained with. Every document ends with the end-of-text token. Random choices are hashes of seed and name.
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
from etude.data.worker_pool import IN_PROCESS, WorkerPool
from etude.errors import InputError

if TYPE_CHECKING:
    from etude.chat.tokenizer import Tokenizer

LAYOUTS = ("file", "repository")
# (repository, file) and (prefix, suffix, middle) tokens of Qwen, of StarCoder 2 and SmolLM2, and of StarCoder.
REPOSITORY_MARKERS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))
FIM_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)
_BATCH_CHARACTERS = 1 << 20  # characters encoded in one call

_SLASHES = (".js", ".jsx", ".ts", ".tsx", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".java", ".kt", ".go", ".rs")
_ANGLES = (".md", ".html", ".xml", ".vue", ".svelte")


@dataclass(frozen=True)
class DocumentPart:
    """Part of a document: a text, or tokens when one of `token` and `tokens` is set; `text` is then what they spell."""

    text: str = ""
    token: int | None = None
    tokens: tuple[int, ...] | None = None
    in_loss: bool = True
    special: bool = False  # the text contains control tokens: it was rendered by a chat template

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The tokens of a part that is given by ids."""
        return self.tokens if self.token is None else (self.token,)


@dataclass(frozen=True)
class EncodedDocument:
    """Token ids and loss mask of a document, and the number of bytes of its text."""

    name: str
    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]
    bytes: int


class _EncodedPart(NamedTuple):
    """An encoded part, without its text."""

    tokens: npt.NDArray[np.uint32]
    in_loss: bool
    bytes: int


@dataclass(frozen=True)
class Markers:
    """Control tokens of one vocabulary; None where it has none."""

    end_of_text: int
    repository: tuple[int, ...] | None
    fim: tuple[int, ...] | None

    @classmethod
    def find(cls, tokenizer: "Tokenizer", *, fim: bool) -> "Markers":
        markers = cls(tokenizer.end_of_text, _ids(tokenizer, REPOSITORY_MARKERS), _ids(tokenizer, FIM_MARKERS))
        if fim and markers.fim is None:
            expected = " or ".join(spelling[0] for spelling in FIM_MARKERS)
            raise InputError(f"--fim needs a vocabulary with fill-in-the-middle tokens ({expected}); this one has none")
        return markers


def file_parts(document: Document, markers: Markers, fim: float, seed: int) -> Iterator[DocumentPart]:
    yield from _body(document, markers, fim, seed)
    yield DocumentPart(token=markers.end_of_text)


def repository_parts(
    repository: str, documents: Iterable[Document], markers: Markers, fim: float, seed: int
) -> Iterator[DocumentPart]:
    """Yield the files one after another, each after its path; a vocabulary without markers gets a comment line."""
    if markers.repository is not None:
        yield DocumentPart(token=markers.repository[0])
        yield DocumentPart(text=f"{repository}\n")
    for document in documents:
        if markers.repository is not None:
            yield DocumentPart(token=markers.repository[1])
            yield DocumentPart(text=f"{document.path}\n")
        else:
            yield DocumentPart(text=_comment(document.path))
        yield from _body(document, markers, fim, seed)
        if not document.text.endswith("\n"):
            yield DocumentPart(text="\n")
    yield DocumentPart(token=markers.end_of_text)


def reading_order(paths: Sequence[str]) -> list[int]:
    """Return the positions of the paths in reading order: the README, then by path, a package before its modules."""
    parts = [PurePosixPath(path).parts for path in paths]
    readmes = [len(part) for part in parts if part[-1].lower().startswith("readme")]
    top_depth = min(readmes, default=0)

    def key(position: int) -> tuple[bool, tuple[str, ...], int]:
        *folders, name = parts[position]
        is_readme = len(parts[position]) == top_depth and name.lower().startswith("readme")
        return not is_readme, (*folders, "" if name == "__init__.py" else name), position

    return sorted(range(len(paths)), key=key)


def split_for_fim(document: Document, rate: float, seed: int) -> tuple[str, str, str] | None:
    """Return prefix, middle and suffix, split at two random characters, or None if the document is not rearranged."""
    digest = hashlib.blake2b(f"{seed}\0{document.repository}\0{document.path}".encode(), digest_size=24).digest()
    draw, first, second = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8, 16))
    if draw >= rate * 2**64:
        return None
    positions = len(document.text) + 1
    start, stop = sorted((first % positions, second % positions))
    return document.text[:start], document.text[start:stop], document.text[stop:]


def encode_documents(
    documents: Iterable[tuple[str, Iterable[DocumentPart]]], tokenizer: "Tokenizer", pool: WorkerPool = IN_PROCESS
) -> Iterator[EncodedDocument]:
    """Encode the documents, in order. Memory holds a few batches of text and the ids of the documents in them."""

    def make_worker_function() -> Callable[[list[DocumentPart]], list[_EncodedPart]]:
        tokenizer.save(pool.directory / "tokenizer")
        return partial(_encode_in_worker, str(pool.directory / "tokenizer"))

    ends: deque[str | None] = deque()  # for each part in flight: the name of the document that it completes

    def all_parts() -> Iterator[DocumentPart]:
        for name, parts in documents:
            last = None
            for part in parts:
                if last is not None:
                    ends.append(None)
                    yield last
                last = part
            assert last is not None, name
            ends.append(name)
            yield last

    encode = partial(_encode, tokenizer.encode_batch)
    batches = pool.map(
        encode,
        all_parts(),
        lambda part: len(part.text),
        batch=_BATCH_CHARACTERS,
        make_worker_function=make_worker_function,
    )
    encoded: list[_EncodedPart] = []
    for encoded_part in chain.from_iterable(batches):
        encoded.append(encoded_part)
        if (name := ends.popleft()) is not None:
            yield _assemble(name, encoded)
            encoded = []


def _encode(encode_batch: Callable[..., Sequence[Any]], parts: Sequence[DocumentPart]) -> list[_EncodedPart]:
    ids: dict[int, Any] = {}
    for special in (False, True):
        positions = [at for at, part in enumerate(parts) if part.ids is None and part.special == special]
        encoded = encode_batch([parts[at].text for at in positions], special=special) if positions else []
        ids.update(zip(positions, encoded, strict=True))
    return [
        _EncodedPart(
            np.asarray(ids[at] if part.ids is None else part.ids, dtype=np.uint32),
            part.in_loss,
            len(part.text.encode()),
        )
        for at, part in enumerate(parts)
    ]


def _encode_in_worker(directory: str, parts: Sequence[DocumentPart]) -> list[_EncodedPart]:
    from etude.data.encoder import open_encoder

    return _encode(open_encoder(directory).encode_batch, parts)


def _assemble(name: str, parts: list[_EncodedPart]) -> EncodedDocument:
    tokens = np.concatenate([part.tokens for part in parts])
    loss_mask = np.repeat([part.in_loss for part in parts], [len(part.tokens) for part in parts])
    return EncodedDocument(name, tokens, loss_mask, sum(part.bytes for part in parts))


def _body(document: Document, markers: Markers, fim: float, seed: int) -> Iterator[DocumentPart]:
    split = split_for_fim(document, fim, seed) if fim else None
    if split is None or markers.fim is None:
        yield DocumentPart(text=document.text)
        return
    before, middle, after = split
    for token, text in zip(markers.fim, (before, after, middle), strict=True):  # prefix, suffix, middle
        yield DocumentPart(token=token)
        yield DocumentPart(text=text)


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
