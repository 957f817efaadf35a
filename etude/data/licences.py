"""Recognise licence files by name, and guess the licence by well-known phrases.

Licences are recorded per repository and not trained on. A guess is an SPDX identifier or "unknown"; it is for reports
only and not legal advice.
"""

import re
from pathlib import PurePosixPath

UNKNOWN = "unknown"
_NAME = re.compile(r"(?:un)?licen[cs]e|copying|copyright|notice", re.IGNORECASE)
_PROSE = frozenset({"", ".txt", ".md", ".rst", ".html"})

_TITLE = 1000  # characters in which a licence names itself; later text mentions others, for compatibility or history

# All phrases of an entry must occur, in lower case with single spaces. The first match wins, so a licence that extends
# another stands before it.
_TITLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Apache-2.0", ("apache license", "version 2.0")),
    ("AGPL-3.0-only", ("gnu affero general public license", "version 3")),
    ("LGPL-3.0-only", ("gnu lesser general public license", "version 3")),
    ("LGPL-2.1-only", ("gnu lesser general public license", "version 2.1")),
    ("GPL-3.0-only", ("gnu general public license", "version 3")),
    ("GPL-2.0-only", ("gnu general public license", "version 2")),
    ("MPL-2.0", ("mozilla public license", "2.0")),
    ("EPL-2.0", ("eclipse public license", "2.0")),
    ("CC0-1.0", ("cc0 1.0 universal",)),
    ("BSL-1.0", ("boost software license", "version 1.0")),
)
_PHRASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("PSF-2.0", ("python software foundation license version 2",)),
    ("Unlicense", ("this is free and unencumbered software released into the public domain",)),
    ("Zlib", ("this software is provided 'as-is'", "altered source versions must be plainly marked")),
    ("BSD-3-Clause", ("redistribution and use in source and binary forms", "neither the name")),
    ("BSD-2-Clause", ("redistribution and use in source and binary forms",)),
    ("ISC", ("permission to use, copy, modify, and/or distribute this software for any purpose",)),
    ("ISC", ("permission to use, copy, modify, and distribute this software for any purpose",)),
    ("MIT", ("permission is hereby granted, free of charge, to any person obtaining a copy",)),
)


def is_licence(path: str) -> bool:
    """Return True for LICENSE, COPYING.LESSER, LICENSE-MIT, licences/foo.txt; not for licence.py, which is code."""
    name = PurePosixPath(path)
    folders = {part.lower() for part in name.parts[:-1]}
    if name.suffix.lower() in _PROSE and folders & {"licenses", "licences"}:
        return True
    found = _NAME.match(name.name)
    if found is None:
        return False
    rest = name.name[found.end() :]
    return rest == "" or rest.lower() in _PROSE or re.fullmatch(r"[-.][A-Z0-9.-]+(\.(txt|md|rst))?", rest) is not None


def guess_licence(text: str) -> str:
    """Return an SPDX identifier or UNKNOWN."""
    if declared := re.search(r"SPDX-License-Identifier:\s*([A-Za-z0-9.+-]+)", text):
        return declared[1]
    flat = " ".join(text.lower().split())
    for table, part in ((_TITLES, flat[:_TITLE]), (_PHRASES, flat)):
        for identifier, phrases in table:
            if all(phrase in part for phrase in phrases):
                return identifier
    return UNKNOWN
