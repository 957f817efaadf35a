"""Run git on a repository that may be hostile: nothing that the repository configures is executed.

A repository's own configuration names programs: filters, the fsmonitor, hooks, pagers, signature checkers, the upload
program of a promisor remote. Git asks for no permission to run them. Every git command on a repository goes through
here; git's own network and lazy fetching are off, so a partial clone has the objects that it has.
"""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from etude.errors import InputError

TIMEOUT_S = 600  # git's ignore patterns can take exponential time

# Variables of the caller that select its own configuration; GIT_DIR and the others, which hooks set, override -C.
KEPT_VARIABLES = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_CONFIG_COUNT")
KEPT_PREFIXES = ("GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_")
ENVIRONMENT = {
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # protocol.allow is not enough: a repository can allow a single protocol
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "false",
    "GIT_SSH_COMMAND": "false",
    "GIT_EDITOR": "false",
    "GIT_PAGER": "cat",
    "LC_ALL": "C",  # error messages are parsed
}
SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.alternateRefsCommand": "false",
    "log.showSignature": "false",
    "gpg.program": "false",
    "gpg.x509.program": "false",
    "gpg.ssh.program": "false",
}
# Settings of drivers, whose names the repository chooses, that name a program, and the values without one.
DRIVER_SETTINGS = {
    "filter": {"clean": "", "smudge": "", "process": "", "required": "false"},
    "diff": {"command": "false", "textconv": "false"},
    "merge": {"driver": "false"},
    "tar": {"command": "false"},
}
# Commands that compare files would run diff drivers; "false" in their place makes them fail.
DIFF_COMMANDS = ("diff", "log", "show")


def run_git(repository: Path, *arguments: str, timeout: float = TIMEOUT_S, stdin: bytes = b"") -> bytes:
    """Return the output of a git command in a repository; InputError with git's words if it fails."""
    try:
        environment = git_environment(repository)
        command = git_command(repository, *arguments)
        done = subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=timeout)
    except FileNotFoundError:
        raise InputError(f"{repository} is a git repository, but git is not installed; install it") from None
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{repository}: git {arguments[0]} took more than {timeout:g} s; look for costly patterns in .gitignore"
        ) from None
    if done.returncode:
        reason = os.fsdecode(done.stderr).strip() or "no reason given"
        raise InputError(f"{repository}: git {arguments[0]} failed: {reason}")
    return done.stdout


def git_command(repository: Path, *arguments: str) -> list[str]:
    """Return the command line of a git command in a repository, to be run with `git_environment`."""
    options = ["--no-ext-diff", "--no-textconv"] if arguments[0] in DIFF_COMMANDS else []
    return ["git", "-C", str(repository), arguments[0], *options, *arguments[1:]]


def git_environment(repository: Path) -> dict[str, str]:
    """Return an environment in which git runs no program that the repository or a configuration file names."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key in KEPT_VARIABLES or key.startswith(KEPT_PREFIXES)
    } | ENVIRONMENT
    settings = SETTINGS | _driver_settings(repository, environment)
    first = int(environment.get("GIT_CONFIG_COUNT") or 0)
    for number, (key, value) in enumerate(settings.items(), first):  # not as -c options: a name may contain "="
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return environment | {"GIT_CONFIG_COUNT": str(first + len(settings))}


def _driver_settings(repository: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return settings without a program for every driver that is configured; listing them runs nothing."""
    command = ["git", "-C", str(repository), "config", "--list", "--name-only", "-z"]
    listed = subprocess.run(command, capture_output=True, env=environment, timeout=TIMEOUT_S).stdout
    drivers = {key.rpartition(".")[0] for key in os.fsdecode(listed).split("\0") if key.count(".") > 1}
    return {
        f"{driver}.{name}": value
        for driver in sorted(drivers)
        for name, value in DRIVER_SETTINGS.get(driver.partition(".")[0], {}).items()
    }


@contextlib.contextmanager
def object_reader(repository: Path) -> Iterator[Callable[[bytes], bytes]]:
    """Yield a function that returns the contents of a blob: no checkout, no filter programs, no attributes."""
    command, environment = git_command(repository, "cat-file", "--batch"), git_environment(repository)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as objects:

        def read(digest: bytes) -> bytes:
            assert objects.stdin is not None
            assert objects.stdout is not None
            objects.stdin.write(digest + b"\n")
            objects.stdin.flush()
            size = int(objects.stdout.readline().split()[2])
            return objects.stdout.read(size + 1)[:-1]  # a newline follows

        try:
            yield read
        finally:
            with contextlib.suppress(OSError):
                objects.kill()
