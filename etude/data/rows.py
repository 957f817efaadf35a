"""Read rows of JSON lines (plain, .gz, .zst) and Parquet, one document or one chat per row, as a stream.

A text row has `text` or `content`, and may name its `repository` (or `repo_name`) and `path`; a chat row has `messages`
and may have `tools` and `exact` tokens. Any other row is an error that names its number: a file of the wrong kind must
not become an empty corpus.
"""

import gzip
import importlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from etude.data.documents import ROWS, File, ReadLimits, clean_name
from etude.errors import InputError

TEXT_KEYS = ("text", "content")
REPOSITORY_KEYS = ("repository", "repo_name")
KNOWN_KEYS = (*TEXT_KEYS, *REPOSITORY_KEYS, "path", "messages", "tools", "exact")


def read_text_rows(path: Path, limits: ReadLimits) -> Iterator[File]:
    for number, row, size in read_rows(path, limits):
        text = _first(row, TEXT_KEYS)
        if row is not None and not isinstance(text, str):
            hint = "; this looks like chat: add --chat" if "messages" in row else ""
            raise InputError(f"{path}: row {number} has no string under text or content{hint}")
        repository, inside, unnamed = locate_row(path, number, row)
        data = (text or "").encode(errors="surrogatepass") if isinstance(text, str) else b""
        yield File(repository, inside, size if row is None else len(data), partial(bytes, data), explicit=unnamed)


def read_protected_rows(path: Path, limits: ReadLimits) -> Iterator[File]:
    """Yield the rows of a benchmark as files of all their strings, whatever the keys (prompt, solution, tests)."""
    for number, row, _ in read_rows(path, limits, columns=None):
        data = "\n".join(iter_strings(row)).encode(errors="surrogatepass")
        repository, inside, _ = locate_row(path, number, row)
        yield File(repository, inside, len(data), partial(bytes, data), explicit=True)


def locate_row(path: Path, number: int, row: Mapping[str, Any] | None) -> tuple[str, str, bool]:
    """Return repository and path of a row, and whether the row has no path of its own and got a generated one."""
    repository, inside = _first(row, REPOSITORY_KEYS), _first(row, ("path",))
    suffix = max((suffix for suffix in ROWS if path.name.endswith(suffix)), key=len)
    named = isinstance(inside, str) and bool(inside)
    return (
        clean_name(repository if isinstance(repository, str) and repository else path.name.removesuffix(suffix)),
        clean_name(inside) if isinstance(inside, str) and named else f"row-{number:08d}",
        not named,
    )


def iter_strings(value: object) -> Iterator[str]:
    """Yield every string inside a JSON value, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_strings(item)


def read_rows(
    path: Path, limits: ReadLimits, columns: tuple[str, ...] | None = KNOWN_KEYS
) -> Iterator[tuple[int, dict[str, Any] | None, int]]:
    """Yield number (from 1), row and size in bytes; the row is None when it exceeds the limit."""
    if path.name.endswith(".parquet"):
        yield from _read_parquet(path, columns)
        return
    with _open(path) as lines:
        number = 0
        while line := lines.readline(limits.max_item_bytes):
            number, size = number + 1, len(line)
            while len(line) == limits.max_item_bytes and not line.endswith(b"\n"):
                line = lines.readline(limits.max_item_bytes)
                size += len(line)
            if size >= limits.max_item_bytes:
                yield number, None, size
            elif line.strip():
                yield number, _parse(path, number, line), size


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: row {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}: row {number} is not a JSON object")
    return row


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    import zstandard

    try:
        if path.name.endswith(".zst"):
            with zstandard.open(path, "rb") as opened:
                yield io.BufferedReader(
                    cast(io.RawIOBase, opened), 1 << 20
                )  # zstandard's own readline reads one byte at a time
        else:
            with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as plain:
                yield cast(IO[bytes], plain)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise InputError(f"{path} cannot be read: {error}; copy or download it again") from None


def _read_parquet(path: Path, known: tuple[str, ...] | None) -> Iterator[tuple[int, dict[str, Any], int]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise InputError(f"{path}: reading Parquet needs pyarrow; pip install etude[parquet]") from None
    try:
        opened = parquet.ParquetFile(path)
        columns = [name for name in opened.schema_arrow.names if known is None or name in known]
        number = 0
        for batch in opened.iter_batches(batch_size=64, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row, 0
    except (OSError, ValueError) as error:  # pyarrow's exceptions derive from one of these
        raise InputError(f"{path}: not a complete Parquet file ({error}); copy or download it again") from None


def _first(row: Mapping[str, Any] | None, keys: tuple[str, ...]) -> object:
    return next((row[key] for key in keys if row.get(key) is not None), None) if row else None
