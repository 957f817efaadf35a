"""The result of an installation: what replays it and what can be run in it, and its files on disk."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from etude.errors import EtudeError, InputError
from etude.files import write_atomically

RESULT, SCRIPT = "result.json", "setup.sh"
WORKSPACE = "/work"
FLAKY = "flaky"  # status of a test whose status differs between the runs

# Reasons why an installation fails, by code.
REASONS: Mapping[str, str] = {
    "unsupported-language": "no detector knows how to install the repository",
    "several-projects": "a monorepo: the project is not at the top and was not named",
    "python-version": "no interpreter of this host has a version that the project accepts",
    "no-toolchain": "the programs of its language are not on this host",
    "no-tests": "there are no tests",
    "system-package": "a Debian package that it needs cannot be installed",
    "dependency": "a dependency cannot be installed",
    "build": "the project itself cannot be built or installed",
    "missing-module": "tests import a module that no known package provides",
    "collection": "the tests cannot be collected",
    "tests-fail": "too few of the tests pass",
    "network": "tests need a network",
    "timeout": "it takes longer than its time limit",
    "script-fails": "the set-up script fails when it is replayed in a fresh pod",
    "edited-files": "the set-up changes or deletes files of the repository",
    "masked-failure": "the set-up or the test command hides failures",
    "stubbed-runner": "the test runner was replaced: probes that must fail pass, or there is no report",
    "no-report": "the test command reports no test",
    "wrong-output": "a target command does not do what its description says",
    "secret": "a secret is in the files of the image",
    "no-proposals": "the exploring session proposed no commands that can be targets",
    "attempts": "no session set it up within the allowed attempts",
    "pod": "the pods failed",
}


@dataclass(frozen=True)
class Installation:
    """An installed repository: what replays the installation, and what can be run in it."""

    repository: str  # name, e.g. "humanize"
    commit: str  # full commit id; empty for a plain directory
    script: str  # text of the set-up script (bash), which replays the installation from the base image
    base: str  # base image of the script: "python:3.11", "host", ...
    image: str  # name of the resulting image in the pod store: dependencies and tools, workspace at /work
    workspace: str = WORKSPACE
    env: Mapping[str, str] = field(default_factory=dict)  # of commands in the image; the image has it, too
    test_command: str = ""  # runs the whole test suite in the workspace
    framework: str = ""  # "pytest", "unittest", "node", "go", "cargo", ...
    # test id -> status at this commit, from the verification in fresh pods without network; "flaky" if it differs
    tests: Mapping[str, str] = field(default_factory=dict, repr=False)
    dependency_digest: str = ""  # of the dependency files: commits with the same digest can share the image
    project: str = ""  # directory of the project in the repository; empty: its top
    facts: Mapping[str, object] = field(default_factory=dict, repr=False)  # seconds, egress bytes, attempts, as_of

    @property
    def directory(self) -> str:
        """The directory in the pod in which the test command runs."""
        return f"{self.workspace}/{self.project}" if self.project else self.workspace

    @property
    def passing(self) -> list[str]:
        """The tests that pass in every run."""
        return [test for test, status in self.tests.items() if status == "passed"]


class InstallationFailed(EtudeError):
    """A repository could not be installed; `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str, log: str = "") -> None:
        assert reason in REASONS, reason
        super().__init__(f"{message} [{reason}]")
        self.reason, self.log = reason, log


_INSTALLATION = TypeAdapter(Installation)


def save_installation(installation: Installation, directory: Path) -> None:
    """Write result.json and setup.sh into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / SCRIPT, installation.script)
    os.chmod(directory / SCRIPT, 0o755)
    write_atomically(directory / RESULT, json.dumps(asdict(installation), indent=1) + "\n")


def load_installation(directory: Path) -> Installation:
    """Return the installation that `save_installation` wrote."""
    file = directory / RESULT
    try:
        return _INSTALLATION.validate_json(file.read_bytes())
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}; expected the directory of an installation (`etude tasks install --out`)"
        ) from None
    except ValidationError as error:
        detail = error.errors()[0]
        raise InputError(f"{file}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}; install it again") from None
