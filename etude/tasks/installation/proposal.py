"""What the detectors propose for a repository: how it is set up and how its tests are run, best first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Ecosystem = Literal["python", "node", "go", "rust"]
ECOSYSTEMS: tuple[Ecosystem, ...] = get_args(Ecosystem)


@dataclass(frozen=True)
class SetupStep:
    """One step of the set-up: its alternatives are tried in order, and the first that succeeds is kept."""

    name: str
    alternatives: tuple[str, ...]
    required: bool = False  # if all alternatives fail: True ends the installation, False leaves the step out
    reason: str = "dependency"  # of the failure, a key of REASONS


@dataclass(frozen=True)
class TestProposal:
    """A command that may run the tests, and the runner whose report is read."""

    __test__ = False  # no test class

    command: str
    framework: str


@dataclass(frozen=True)
class Proposal:
    """The set-up and test commands that the files of a repository suggest."""

    ecosystem: Ecosystem
    project: str = ""  # directory in the repository; empty: its top
    base: str = "host"
    apt: tuple[str, ...] = ()  # Debian packages that its own set-up installs
    steps: tuple[SetupStep, ...] = ()
    tests: tuple[TestProposal, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # of the set-up
    sources: tuple[str, ...] = ()  # the files that this was read from


def unique(items: Sequence[str]) -> tuple[str, ...]:
    """Return the items without repetitions and empty ones, in order."""
    return tuple(dict.fromkeys(item for item in items if item))
