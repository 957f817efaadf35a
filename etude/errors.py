"""The errors Etude raises on purpose, and the exit codes they become.

A message names the thing, what was expected and what to do; one line per problem, no traceback needed.

    0 ok    1 failed    2 bad input, configuration or usage    3 busy: in use by another process    130 interrupted
"""

import difflib
from collections.abc import Sequence
from typing import ClassVar


class EtudeError(Exception):
    """A failure that the message explains to the user; any other exception is a bug."""

    exit_code: ClassVar[int] = 1


class InputError(EtudeError):
    """Input from the user (a file, a key, a flag, a path) cannot be used as it is."""

    exit_code: ClassVar[int] = 2


class BusyError(EtudeError):
    """Another process uses the resource; waiting or choosing another name helps."""

    exit_code: ClassVar[int] = 3


class Interrupted(EtudeError):
    """The user stopped the work; the message says how to continue."""

    exit_code: ClassVar[int] = 130


def suggest(name: str, known: Sequence[str]) -> str:
    """Return advice for a name that is not known: the closest one, or all of them."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
