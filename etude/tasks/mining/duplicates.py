"""Near duplicates: changes that do the same, such as a commit and its backport to another branch."""

import hashlib
import re
from dataclasses import dataclass

from etude.tasks.mining.classify import ChangeParts, added_lines

SIMILARITY = 0.6  # Jaccard index of added lines
MIN_LINES = 3  # fewer added lines say nothing


@dataclass(frozen=True)
class ChangeFingerprint:
    """The lines that a change adds to source and tests, as hashes."""

    source: frozenset[str]
    tests: frozenset[str]

    def resembles(self, other: "ChangeFingerprint") -> bool:
        """Return whether two changes add mostly the same lines to the source, or to the tests."""
        return _similar(self.source, other.source) or _similar(self.tests, other.tests)


def _similar(one: frozenset[str], other: frozenset[str]) -> bool:
    smaller = min(len(one), len(other))
    return smaller >= MIN_LINES and len(one & other) >= SIMILARITY * len(one | other)


def fingerprint(parts: ChangeParts) -> ChangeFingerprint:
    return ChangeFingerprint(_hashes(added_lines(parts.source)), _hashes(added_lines(parts.tests)))


def _hashes(lines: list[str]) -> frozenset[str]:
    squeezed = (re.sub(r"\s+", "", line) for line in lines)
    return frozenset(hashlib.sha256(line.encode()).hexdigest()[:16] for line in squeezed if len(line) > 5)
