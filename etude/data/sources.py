"""Expand the sources of a recipe into text files.

A source is a directory, a file, or a named source: "stdlib" (the running Python's standard library) or "site-packages"
(the installed packages); "site-packages/torch" is a part of it. The same files give the same list everywhere: sources
in the given order, sorted by path inside each source, no file twice. Hidden and generated folders, installed packages
and files that are not UTF-8 are skipped; a file given by its own path must be UTF-8.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from etude.errors import InputError

NAMED_SOURCES = {
    "stdlib": "stdlib",
    "site-packages": "purelib",
}  # sources that are not paths, and sysconfig's names for them
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


def source_files(sources: Sequence[str], suffixes: Sequence[str] = (".py",)) -> list[Path]:
    """Return all text files of the sources; a source that does not exist or has none is an error."""
    files: dict[Path, None] = {}  # a dict keeps the order and drops files that sources share
    for source in sources:
        files.update(dict.fromkeys(_expand(source, tuple(suffixes))))
    return list(files)


def is_named_source(source: str) -> bool:
    return source.partition("/")[0] in NAMED_SOURCES


def locate_source(source: str) -> Path:
    """Return the path of a source on this machine."""
    name, _, rest = source.partition("/")
    return Path(sysconfig.get_path(NAMED_SOURCES[name])) / rest if name in NAMED_SOURCES else Path(source)


def sample_evenly(files: Sequence[Path], max_files: int | None) -> list[Path]:
    """Return at most `max_files` files, spread evenly: the first files of a sorted codebase are not typical of it."""
    if max_files is None or max_files >= len(files):
        return list(files)
    if max_files < 1:
        raise InputError(f"at most {max_files} files leaves none to read; give 1 or more")
    return [files[index * len(files) // max_files] for index in range(max_files)]


def _expand(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    root = locate_source(source)
    if root.is_file():
        if not _is_utf8(root):
            raise InputError(f"source {source} is not UTF-8 text; convert it or name another file")
        return [root]
    if not root.is_dir():
        raise InputError(f"source {source} does not exist; name a directory, a file, or {' or '.join(NAMED_SOURCES)}")
    matching = sorted(_walk(root, suffixes), key=lambda path: path.relative_to(root).as_posix())
    found = [path for path in matching if _is_utf8(path)]
    if not found:
        raise InputError(f"source {source} holds no UTF-8 file ending in {' or '.join(suffixes)}")
    return found


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=_raise_input_error):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(suffixes) and path.is_file():  # is_file is false for a broken link
                yield path


def _raise_input_error(error: OSError) -> None:
    raise InputError(f"source folder {error.filename} cannot be read: {error.strerror}")


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise InputError(f"source file {path} cannot be read: {error.strerror}") from None
    return True
