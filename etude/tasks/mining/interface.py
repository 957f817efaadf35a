"""Find what hidden tests take for granted: names and texts that the solution defines and that neither the workspace nor
the request has. They go into a note of the instruction, so that a correct solution is not refused for its spelling.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from etude.syntax import parse_tree
from etude.tasks.mining.classify import ChangeParts, added_lines
from etude.tasks.mining.history import FileDifference

WORD = re.compile(r"[A-Za-z_$][\w$]*")
MAX_NOTES = 16  # a change with a larger interface is no request that a person would write
MIN_TEXT = 3  # characters of a text that tests compare
MAX_TEXT = 300
DECLARATION = (
    r"(?:function\*?|class|interface|type|const|let|var|get|set|async|static|readonly|public|func|fn|struct|enum|def)"
)


class HiddenName(Exception):
    """Tests use a name that cannot be described."""


@dataclass(frozen=True)
class InterfaceNotes:
    """Lines that describe names, and texts that must be used word for word."""

    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        parts = []
        if self.names:
            parts.append("Use these names:\n\n" + "\n".join(f"- `{line}`" for line in self.names))
        if self.texts:
            parts.append("Texts, word for word:\n\n" + "\n".join(f"- `{text}`" for text in self.texts))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class DefinedName:
    """A name that a file defines: its description, and where it is bound (module or class), if not in a call."""

    name: str
    line: str
    kind: str  # definition, parameter, attribute, import


def words_of(files: Mapping[str, bytes]) -> set[str]:
    """Return all words of the text files of a workspace."""
    found: set[str] = set()
    for data in files.values():
        if b"\0" not in data[:1024]:
            found.update(WORD.findall(data.decode("utf-8", "replace")))
    return found


def find_interface(parts: ChangeParts, workspace: Mapping[str, bytes], request: str) -> InterfaceNotes:
    """Return the notes that the tests of a change need; raise HiddenName if a name cannot be described."""
    known, asked = words_of(workspace), set(WORD.findall(request))
    code = [line for line in added_lines(parts.tests) if not line.startswith(("#", "//", "*"))]
    used = set(WORD.findall("\n".join(code)))
    missing = used - known - asked
    notes: dict[str, None] = {}
    for file in parts.source:
        for defined in new_definitions(file):
            if defined.name in missing or (
                defined.name in asked and defined.name in used - known and _has_more(defined)
            ):
                notes[defined.line] = None
    notes.update(dict.fromkeys(_new_exports(parts, asked)))
    modules = {_module_word(file.path): file.path for file in parts.source if file.before is None}
    notes.update({path: None for word, path in modules.items() if word in missing})
    described = {word for line in notes for word in WORD.findall(line)}
    _check_described(parts, missing - described)
    if len(notes) > MAX_NOTES:
        raise HiddenName(f"the tests use {len(notes)} new names")
    texts = _new_texts(parts, "\n".join(code), workspace, request)
    texts = [text for text in texts if not set(WORD.findall(text)) <= described | asked or not WORD.fullmatch(text)]
    return InterfaceNotes(tuple(notes), tuple(texts[:MAX_NOTES]))


def _has_more(defined: DefinedName) -> bool:
    """Return whether a description says more than the name."""
    return "(" in defined.line and not defined.line.endswith("()")


def _module_word(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0]


# ------------------------------------------------------------------------------------------------- definitions


def new_definitions(file: FileDifference) -> list[DefinedName]:
    """Return the names that a file defines after a change and not before."""
    if file.after is None:
        return []
    if not file.path.endswith((".py", ".pyi")):
        return list(_declared(file))
    try:
        after = list(definitions_of(file.after.decode()))
        before = set(definitions_of((file.before or b"").decode()))
    except (SyntaxError, ValueError):
        return []
    kinds = {"definition": 0, "import": 1, "attribute": 2, "parameter": 3}
    return sorted((each for each in after if each not in before), key=lambda each: kinds[each.kind])


def definitions_of(code: str) -> Iterator[DefinedName]:
    """Yield what Python code defines: functions, classes, parameters, attributes, variables and imported names."""
    yield from _in_body(parse_tree(code).body, "")


def _in_body(body: Sequence[ast.stmt], owner: str) -> Iterator[DefinedName]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = f"{owner}{node.name}({ast.unparse(node.args)})"
            yield DefinedName(node.name, line, "definition")
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            yield from (DefinedName(each.arg, line, "parameter") for each in given if each is not None)
            yield from _attributes(node, owner)
            yield from (each for each in _in_body(node.body, f"{owner}{node.name}.") if each.kind == "parameter")
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            yield DefinedName(
                node.name, f"{owner}{node.name}({bases})" if bases else f"{owner}{node.name}", "definition"
            )
            yield from _in_body(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            yield from (DefinedName(name, f"{owner}{name}", "attribute") for name in bound)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
            yield from (DefinedName(name, f"{owner}{name}", "import") for name in names)
        else:
            for part in ("body", "orelse", "finalbody", "handlers"):
                inner = [each for each in getattr(node, part, []) if isinstance(each, ast.stmt)]
                yield from _in_body(inner, owner)


def _attributes(function: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> Iterator[DefinedName]:
    """Yield the attributes that a function sets on any object."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            place = owner if of_self else f"{ast.unparse(node.value)}."
            yield DefinedName(node.attr, f"{place}{node.attr}", "attribute")
        elif isinstance(node, ast.FunctionDef) and node is not function:
            yield DefinedName(node.name, f"{node.name}({ast.unparse(node.args)})", "definition")


def _declared(file: FileDifference) -> Iterator[DefinedName]:
    """Yield names that other languages declare in added lines."""
    for line in added_lines([file]):
        for found in re.finditer(rf"(?:^|[\s.(]){DECLARATION}\s+([\w$]+)|^(?:this\.)?([\w$#]+)\??(?=\s*[(:=])", line):
            name = found[1] or found[2]
            if name not in ("if", "for", "while", "switch", "return", "catch", "case", "default"):
                yield DefinedName(name, line.rstrip(" {=>,;"), "definition")


def _new_exports(parts: ChangeParts, asked: set[str]) -> Iterator[str]:
    """Yield the names that tests import from modules which did not have them."""
    modules = {_dotted(file.path): file for file in parts.source if file.path.endswith(".py")}
    for test in parts.tests:
        try:
            tree = parse_tree((test.after or b"").decode())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules and not node.level:
                new = {each.name for each in new_definitions(modules[node.module]) if each.kind == "import"}
                yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name in new)


def _dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _check_described(parts: ChangeParts, names: set[str]) -> None:
    """Raise HiddenName if a name is one that the solution makes up, and no definition of it was found."""
    for file in parts.source:
        if file.path.endswith((".py", ".pyi")):
            continue  # there, every binding is a definition; a name that is only used comes from elsewhere
        written = set(WORD.findall(re.sub(r"//.*|'[^']*'|\"[^\"]*\"", "", "\n".join(added_lines([file])))))
        declared = {each.name for each in new_definitions(file)}
        if hidden := sorted(names & written - declared):
            raise HiddenName(f"the tests use {hidden[0]}, which the solution introduces without a declaration")


# ------------------------------------------------------------------------------------------------- texts


def _new_texts(parts: ChangeParts, tests: str, workspace: Mapping[str, bytes], request: str) -> list[str]:
    """Return texts of the solution that the tests compare with and that neither workspace nor request has."""
    found: dict[str, None] = {}
    added = "\n".join(added_lines(parts.source))
    everything = b"\n".join(workspace.values())
    for text in _strings(parts):
        shown = text.strip()
        candidates = [shown, *re.split(r"\{[^}]*\}|%\w", shown)]
        for each in (candidate.strip() for candidate in candidates):
            plain = MIN_TEXT <= len(each) <= MAX_TEXT and re.search(r"[A-Za-z]{2}", each) is not None
            if plain and each in tests and each in added and each not in request and each.encode() not in everything:
                found[shown if each in shown and len(shown) <= MAX_TEXT else each] = None
                break
    return [text.replace("\n", "\\n") for text in found]


def _strings(parts: ChangeParts) -> Iterator[str]:
    """Yield the string constants of the changed source files, without docstrings; f-strings with their braces."""
    for file in parts.source:
        if file.after is None:
            continue
        if not file.path.endswith(".py"):
            for found in re.finditer(
                r"'([^'\n]{2,})'|\"([^\"\n]{2,})\"|`([^`\n]{2,})`", "\n".join(added_lines([file]))
            ):
                yield next(group for group in found.groups() if group)
            continue
        try:
            tree = parse_tree(file.after.decode())
        except (SyntaxError, ValueError):
            continue
        inner: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                inner.add(id(node.value))
            elif isinstance(node, ast.JoinedStr):
                inner |= {id(each) for each in ast.walk(node) if each is not node}
                if id(node) not in inner:
                    yield ast.unparse(node)[2:-1]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                yield node.value
