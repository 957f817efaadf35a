"""Parse a Dockerfile into instructions with their line numbers, and substitute variables. Pure functions.

Supported: FROM, ARG, ENV, WORKDIR, USER, COPY, ADD, RUN, SHELL, LABEL, CMD, ENTRYPOINT, EXPOSE, VOLUME, STOPSIGNAL,
HEALTHCHECK, MAINTAINER; line continuations, comments, the escape directive, heredocs, JSON (exec) form. Anything
else is an InputError with file and line. Written by hand because the library dockerfile-parse (2.0.1, measured) reads
the lines of a heredoc as instructions.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from etude.errors import InputError

INSTRUCTIONS = (
    *("FROM", "ARG", "ENV", "WORKDIR", "USER", "COPY", "ADD", "RUN", "SHELL", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE"),
    *("VOLUME", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"),
)
_HEREDOC = re.compile(r"<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(\S.*?)\s*$")
_FLAG = re.compile(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """`<<NAME` in an instruction, and the lines up to NAME."""

    name: str
    body: str
    expand: bool  # False: the name was quoted, so variables are not substituted


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `COPY --chown=0 a b` has the flag chown and the text `a b`."""

    name: str
    text: str
    where: str  # file:line, for messages
    flags: tuple[tuple[str, str], ...] = ()
    heredocs: tuple[Heredoc, ...] = ()
    escape: str = "\\"

    def flag(self, name: str) -> str | None:
        return dict(self.flags).get(name)

    @property
    def json(self) -> tuple[str, ...] | None:
        """Return the words of the JSON form `["a", "b"]`; None if the text is not one."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None  # text that is not JSON is a shell command, as in Docker
        return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None

    def error(self, why: str) -> InputError:
        return InputError(f"{self.where}: {self.name}: {why}")


@dataclass(frozen=True, slots=True)
class BuildStage:
    """The instructions from one FROM to the next."""

    base: Instruction
    name: str  # of `AS name`, in lower case, or the stage's number
    steps: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """ARGs before the first FROM, and the stages."""

    arguments: tuple[Instruction, ...]
    stages: tuple[BuildStage, ...]


# -- parsing


def parse(text: str, file: str = "Dockerfile") -> Dockerfile:
    """Parse a Dockerfile; `file` names it in messages."""
    instructions = list(_instructions(text.replace("\r\n", "\n").split("\n"), file))
    at = next((i for i, each in enumerate(instructions) if each.name == "FROM"), len(instructions))
    for each in instructions[:at]:
        if each.name != "ARG":
            raise each.error("only ARG may come before the first FROM")
    if at == len(instructions):
        raise InputError(f"{file}: there is no FROM; a Dockerfile starts with the image it builds on")
    stages: list[BuildStage] = []
    for each in instructions[at:]:
        if each.name == "FROM":
            stages.append(BuildStage(each, _stage_name(each, len(stages), stages), ()))
        else:
            last = stages[-1]
            stages[-1] = BuildStage(last.base, last.name, (*last.steps, each))
    return Dockerfile(tuple(instructions[:at]), tuple(stages))


def _stage_name(base: Instruction, number: int, known: Sequence[BuildStage]) -> str:
    words = base.text.split()
    if len(words) == 1:
        return str(number)
    if len(words) != 3 or words[1].upper() != "AS":
        raise base.error(f"expected `FROM image` or `FROM image AS name`, found {base.text!r}")
    name = words[2].lower()
    if not re.fullmatch(r"[a-z][a-z0-9._-]*", name) or name in {stage.name for stage in known}:
        raise base.error(f"the stage name {name!r} is not a name, or is taken")
    return name


def _instructions(lines: Sequence[str], file: str) -> Iterator[Instruction]:
    escape = _escape(lines, file)
    continued = re.compile(re.escape(escape) + r"[ \t]*$")
    at = 0
    while at < len(lines):
        start = at
        line = lines[at].strip()
        at += 1
        if not line or line.startswith("#"):
            continue
        parts = [line]
        while continued.search(parts[-1]):
            parts[-1] = continued.sub("", parts[-1])
            # comments and empty lines inside a continued line are skipped
            while at < len(lines) and (not lines[at].strip() or lines[at].lstrip().startswith("#")):
                at += 1
            if at == len(lines):
                break
            parts.append(lines[at].rstrip())
            at += 1
        where = f"{file}:{start + 1}"
        name, flags, text = _split("".join(parts), where)
        heredocs: list[Heredoc] = []
        if name in ("RUN", "COPY", "ADD"):
            for mark in _HEREDOC.finditer(text):
                heredoc, at = _heredoc(mark, lines, at, where)
                heredocs.append(heredoc)
        yield Instruction(name, text, where, flags, tuple(heredocs), escape)


def _escape(lines: Sequence[str], file: str) -> str:
    """Return the character of the `# escape=` directive, which must precede everything else."""
    for number, line in enumerate(lines, 1):
        found = _DIRECTIVE.fullmatch(line.strip())
        if found is None:
            break
        if found[1].lower() == "escape":
            if found[2] not in ("\\", "`"):
                raise InputError(f"{file}:{number}: escape={found[2]}: expected \\ or `")
            return found[2]
    return "\\"


def _split(line: str, where: str) -> tuple[str, tuple[tuple[str, str], ...], str]:
    name, rest = [*line.split(None, 1), ""][:2]
    name, rest = name.upper(), rest.strip()
    if name not in INSTRUCTIONS:
        raise InputError(f"{where}: {name} is not an instruction; expected one of {', '.join(sorted(INSTRUCTIONS))}")
    flags: list[tuple[str, str]] = []
    if name in ("FROM", "COPY", "ADD", "RUN", "HEALTHCHECK"):
        while found := _FLAG.match(rest):
            flags.append((found[1], found[2] or ""))
            rest = rest[found.end() :]
    if not rest:
        raise InputError(f"{where}: {name} has no arguments")
    return name, tuple(flags), rest


def _heredoc(mark: re.Match[str], lines: Sequence[str], at: int, where: str) -> tuple[Heredoc, int]:
    body: list[str] = []
    for end in range(at, len(lines)):
        line = lines[end].lstrip("\t") if mark[1] else lines[end]
        if line == mark[3]:
            return Heredoc(mark[3], "".join(f"{line}\n" for line in body), not mark[2]), end + 1
        body.append(line)
    raise InputError(f"{where}: the heredoc <<{mark[3]} is not terminated; expected a line {mark[3]!r}")


# -- words and variables


def substitute(text: str, variables: Mapping[str, str], escape: str = "\\", where: str = "") -> str:
    """Replace `$X`, `${X}`, `${X:-d}`, `${X-d}`, `${X:+d}`, `${X+d}` and `${X:?why}`; quotes have no effect."""
    out: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == escape and text[at + 1 : at + 2] == "$":
            value, at = "$", at + 2
        elif text[at] == escape and text[at + 1 : at + 2] == escape:
            value, at = escape * 2, at + 2  # an escaped escape does not escape what follows
        elif text[at] == "$":
            value, at = _variable(text, at, variables, escape, where)
        else:
            value, at = text[at], at + 1
        out.append(value)
    return "".join(out)


def _variable(text: str, at: int, variables: Mapping[str, str], escape: str, where: str) -> tuple[str, int]:
    """Return the value of the variable at `at`, and the position after it."""
    if not text.startswith("${", at):
        found = _NAME.match(text, at + 1)
        return (variables.get(found[0], ""), found.end()) if found else ("$", at + 1)
    end, depth = at + 2, 1
    while end < len(text) and depth:
        depth += (text.startswith("${", end)) - (text[end] == "}")
        end += 1
    inside = text[at + 2 : end - 1]
    found = _NAME.match(inside)
    if depth or not found:
        raise InputError(f"{where}: {text[at:end]!r} is not a variable; expected ${{NAME}} or ${{NAME:-default}}")
    name, rest = found[0], inside[found.end() :]
    value = variables.get(name)
    if not rest:
        return value or "", end
    operator = re.match(r":?[-+?]", rest)
    if operator is None:
        raise InputError(f"{where}: {text[at:end]!r}: expected :-, :+ or :? after the name")
    is_set = value is not None and (value != "" or not operator[0].startswith(":"))
    other = substitute(rest[operator.end() :], variables, escape, where)
    if operator[0].endswith("+"):
        return other if is_set else "", end
    if not is_set and operator[0].endswith("?"):
        raise InputError(f"{where}: {name} is not set{': ' + other if other else ''}")
    return (value or "") if is_set else other, end


def words(
    text: str, variables: Mapping[str, str], escape: str = "\\", where: str = "", split: bool = True
) -> list[str]:
    """Split text as a shell would: quotes and escapes removed, variables substituted, their values not split."""
    found: list[str] = []
    word: str | None = None
    quote, at = "", 0
    while at < len(text):
        char, after = text[at], text[at + 1 : at + 2]
        if quote and char == quote:
            quote, at = "", at + 1
        elif not quote and char in "'\"":
            quote, word, at = char, word or "", at + 1
        elif char == escape and after and (not quote or (quote == '"' and after in ('"', "$", escape))):
            word, at = (word or "") + after, at + 2
        elif char == "$" and quote != "'":
            value, at = _variable(text, at, variables, escape, where)
            word = (word or "") + value
        elif char.isspace() and not quote and split:
            found += [] if word is None else [word]
            word, at = None, at + 1
        else:
            word, at = (word or "") + char, at + 1
    if quote:
        raise InputError(f"{where}: the quote {quote} is not closed in {text!r}")
    return found if word is None else [*found, word]


def expand(text: str, variables: Mapping[str, str], escape: str = "\\", where: str = "") -> str:
    """Expand text as one word, spaces included."""
    return "".join(words(text, variables, escape, where, split=False))


def pairs(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Parse `a=b c="d e"`, or the old form `a the rest`, of ENV and LABEL; all see the variables from before."""
    text, escape, where = instruction.text, instruction.escape, instruction.where
    name, *rest = text.split(None, 1)
    if "=" not in name:
        if not rest:
            raise instruction.error(f"expected {name}=value")
        return {name: expand(rest[0], variables, escape, where)}
    found: dict[str, str] = {}
    for word in words(text, variables, escape, where):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise instruction.error(f"{word!r}: expected name=value")
        found[name] = value
    return found
