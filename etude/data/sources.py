"""What a recipe calls a source, expanded into text files.

A source is a directory, a file, or a word: "stdlib" (the running Python's standard library) or "site-packages" (what
is installed beside it); "site-packages/torch" is a part of it. The same files
give the same list everywhere: sorted by path inside each source, sources in the given order, no file twice.
Below a directory, hidden and generated folders, installed packages and files that are not UTF-8 are left out;
a file named outright must be UTF-8.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from etude.errors import InputError

WORDS = {"stdlib": "stdlib", "site-packages": "purelib"}  # sources that are not paths, by sysconfig's names
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


def source_files(sources: Sequence[str], suffixes: Sequence[str] = (".py",)) -> list[Path]:
    """All text files of the sources; a source that is absent or holds none is an error."""
    files: dict[Path, None] = {}  # a dict, to keep the order and drop what overlapping sources share
    for source in sources:
        files.update(dict.fromkeys(_expand(source, tuple(suffixes))))
    return list(files)


def is_word(source: str) -> bool:
    return source.partition("/")[0] in WORDS


def locate(source: str) -> Path:
    """Where a source is on this machine."""
    word, _, rest = source.partition("/")
    return Path(sysconfig.get_path(WORDS[word])) / rest if word in WORDS else Path(source)


def spread(files: Sequence[Path], most: int | None) -> list[Path]:
    """At most `most` files, evenly over the list: the first of a sorted codebase are not typical of it."""
    if most is None or most >= len(files):
        return list(files)
    if most < 1:
        raise InputError(f"at most {most} files leaves none to read; give 1 or more")
    return [files[index * len(files) // most] for index in range(most)]


def _expand(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    root = locate(source)
    if root.is_file():
        if not _is_utf8(root):
            raise InputError(f"source {source} is not UTF-8 text; convert it or name another file")
        return [root]
    if not root.is_dir():
        raise InputError(f"source {source} does not exist; name a directory, a file, or {' or '.join(WORDS)}")
    matching = sorted(_walk(root, suffixes), key=lambda path: path.relative_to(root).as_posix())
    found = [path for path in matching if _is_utf8(path)]
    if not found:
        raise InputError(f"source {source} holds no UTF-8 file ending in {' or '.join(suffixes)}")
    return found


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(suffixes) and path.is_file():  # is_file: a broken link has a name and no text
                yield path


def _refuse(error: OSError) -> None:
    raise InputError(f"source folder {error.filename} cannot be read: {error.strerror}")


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise InputError(f"source file {path} cannot be read: {error.strerror}") from None
    return True
