"""Find commands in files that contain some: CI workflows, Dockerfiles, tox.ini, noxfile.py, Makefile. Pure functions.

Nothing is parsed as its own language: a command is recognised by its first words wherever it stands.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

_PREFIX = re.compile(
    r"^(?:[-\s@]*)(?:(?:run|script|commands?|before_script|postCreateCommand|RUN|CMD)\b\s*[:=]?\s*)?[|>'\"-]*\s*"
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=\S*$")
_RUNNERS = ("uv", "poetry", "pdm", "hatch", "rye", "pipenv")
PIP_VALUES = (
    *("-r", "--requirement", "-c", "--constraint", "-e", "--editable", "-i", "--index-url", "--extra-index-url"),
    *("-f", "--find-links", "-t", "--target", "--prefix", "--root", "--group"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._ -]*\])?\s*([<>=!~].*)?$")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]+$")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in a text, without `sudo`, variables and `python -m`."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        line = _PREFIX.sub("", line.strip()).rstrip("'\"")
        for part in re.split(r"&&|;|\|\|", re.sub(r"\$\{\{.*?\}\}", "X", line)):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue
            while words and (
                words[0] in ("sudo", "-E", "env", "exec", "time", "then", "do") or _ASSIGNMENT.match(words[0])
            ):
                words = words[1:]
            if len(words) > 2 and words[0] in _RUNNERS and words[1] == "run":
                words = words[2:]
            if words and re.fullmatch(r"(.*/)?(python[\d.]*|\{envpython\}|py)", words[0]) and "-m" in words[1:3]:
                words = words[words.index("-m") + 1 :]
            if len(words) > 1 and words[0] == "uv" and words[1] == "pip":
                words = words[1:]
            if words:
                yield words


def pip_installs(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return the requirements, requirement files and extras of the project in the `pip install` commands of a text."""
    requirements: list[str] = []
    files: list[str] = []
    extras: list[str] = []
    for words in commands(text):
        if len(words) < 3 or not re.fullmatch(r"pip[\d.]*", words[0]) or words[1] != "install":
            continue
        rest = iter(words[2:])
        for word in rest:
            if word in ("-r", "--requirement"):
                files.append(next(rest, ""))
            elif word.startswith("--requirement="):
                files.append(word.partition("=")[2])
            elif word in ("-e", "--editable"):
                extras += _extras(next(rest, ""))
            elif word in PIP_VALUES:
                next(rest, "")
            elif word.startswith("."):
                extras += _extras(word)
            elif not word.startswith("-") and _NAME.match(word) and not word.endswith((".whl", ".gz", ".txt")):
                requirements.append(word)
    return requirements, files, extras


def _extras(word: str) -> list[str]:
    found = re.fullmatch(r"\.?/?\[([A-Za-z0-9,._ -]+)\]", word)
    return [name.strip() for name in found[1].split(",")] if found else []


def apt_packages(text: str) -> list[str]:
    """Return the packages that the `apt-get install` commands of a text name."""
    found = []
    for words in commands(text):
        if words[0] in ("apt-get", "apt") and "install" in words:
            names = words[words.index("install") + 1 :]
            found += [word for word in names if not word.startswith("-") and _PACKAGE.match(word)]
    return found


def find_test_commands(text: str) -> list[str]:
    """Return the commands of a text that run pytest, unittest or setup.py test, without options that only report."""
    found = []
    for words in commands(text):
        if words[0] in ("pytest", "py.test"):
            kept = _kept_arguments(words[1:])
            found.append(shlex.join(["python", "-m", "pytest", "-q", *kept]))
        elif words[0] == "unittest":
            kept = [word for word in words[1:] if not word.startswith("{") and word not in ("-v", "--verbose")]
            found.append(shlex.join(["python", "-m", "unittest", "-v", *kept]))
    return list(dict.fromkeys(each for each in found if not re.search(r"[{}$]|\bX\b", each)))


def _kept_arguments(words: Sequence[str]) -> list[str]:
    """Return paths and the options that select tests; reports, verbosity and parallelism do not matter."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("-k", "-m", "--ignore", "-W", "-p"):
            kept += [word, next(rest, "")]
        elif word in (
            "-n",
            "-o",
            "-c",
            "--maxfail",
            "--durations",
            "--cov-report",
            "--junitxml",
            "--timeout",
            "--dist",
        ):
            next(rest, "")
        elif word.startswith(("--ignore=", "--doctest-", "--import-mode", "--pyargs")) or not word.startswith("-"):
            kept.append(word)
    return kept
