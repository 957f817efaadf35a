"""The set-up script of an installation: how it is composed, and what in a script or a test command hides failures."""

import re
import shlex
from collections.abc import Mapping, Sequence

from etude.tasks.installation.result import WORKSPACE

PIP = "python -m pip install"
DIRECTORY = "/srv/install"  # of files that the script itself writes
MOCKS = "/srv/mocks"  # of files that stand for missing services, files and credentials
_MASKS = (
    (re.compile(r"\|\|\s*(true|:|exit\s+0|echo\b|printf\b|/bin/true)"), "|| {0}"),
    (re.compile(r"(^|[;&\s])set\s+\+(e|o\s+errexit)\b"), "set +e"),
    (re.compile(r"[;\n]\s*(true|exit\s+0)\s*$"), "an end that always succeeds"),
    (re.compile(r"\btrap\b.*\bexit\s+0"), "a trap that always succeeds"),
)
_TEST_MASKS = (
    (re.compile(r"\|(?!\|)"), "a pipe, which hides the exit code"),
    (re.compile(r"(^|[;&|(]\s*)(echo|printf|cat|true|:|exit)\b"), "printed text instead of tests"),
    (re.compile(r"--exitfirst-x|--co\b|--collect-only"), "a run that only collects tests"),
)


def compose_script(
    title: str, project: str, env: Mapping[str, str], commands: Sequence[str], pins: Sequence[str] = ()
) -> str:
    """Return a bash script that runs these commands in the workspace, with the versions of packages in `pins`."""
    lines = ["#!/usr/bin/env bash", *(f"# {line}" for line in title.splitlines()), "set -euo pipefail"]
    lines.append(f"cd {shlex.quote(f'{WORKSPACE}/{project}' if project else WORKSPACE)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if pins:
        lines += [f"mkdir -p {DIRECTORY}", f"cat > {DIRECTORY}/constraints.txt <<'PINS'", *pins, "PINS"]
        # Not PIP_CONSTRAINT, which would also hold for what builds the project.
        pinned = f"{PIP} -c {DIRECTORY}/constraints.txt"
        commands = [command.replace(PIP, pinned) for command in commands]
    return "\n".join([*lines, *commands, ""])


def masked_failure(text: str) -> str:
    """Return what in a set-up script hides failures; empty if nothing does."""
    return _first(text, _MASKS)


def masked_test_command(command: str) -> str:
    """Return what in a test command hides failures or replaces tests; empty if nothing does."""
    return _first(command, (*_MASKS, *_TEST_MASKS))


def _first(text: str, masks: Sequence[tuple[re.Pattern[str], str]]) -> str:
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for pattern, name in masks:
        if found := pattern.search(code):
            return name.format(found[1] if found.groups() else "") if "{0}" in name else f"{name} ({found[0].strip()})"
    return ""


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Return the text with the values of secrets replaced by their names."""
    for name, value in sorted(secrets.items(), key=lambda each: -len(each[1])):
        if value:
            text = text.replace(value, f"<{name}>")
    return text
