"""Alternative names for identifiers, and whether a name is unambiguous in a code base."""

import ast
import random
import re

from etude.tasks.generators.code import definitions
from etude.tasks.generators.repository import Repository


def _parse_synonyms(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


VERBS = _parse_synonyms(  # as the first word of a function's name
    "get=fetch make=build build=make create=make check=verify find=locate load=read parse=read format=render "
    "render=format add=insert remove=drop delete=drop update=refresh set=assign split=divide join=combine "
    "convert=translate resolve=look_up validate=check wrap=enclose write=put open=enter close=leave init=start "
    "process=handle handle=process"
)
NOUNS = _parse_synonyms(
    "error=failure exception=failure handler=receiver value=entry values=entries name=label names=labels "
    "type=kind types=kinds class=kind func=function attrs=attributes attr=attribute args=arguments arg=argument "
    "opts=options option=setting missing=absent invalid=wrong field=item fields=items key=tag keys=tags "
    "dict=mapping str=text string=text file=document path=place stream=flow context=scope wrapper=envelope "
    "hook=callback prefix=head suffix=tail index=position size=extent length=extent node=vertex param=parameter "
    "ctx=scope msg=message fmt=layout"
)
# attributes of builtin types: the class that defines such a name cannot be inferred from its use
COMMON = {name for kind in (str, bytes, list, dict, set, int, object, type, BaseException) for name in dir(kind)}
HISTORY_FILES = re.compile(r"(^|/)(change|history|news|release|authors|contributors)[^/]*(/|$)", re.IGNORECASE)
TEXT_SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt", ".toml", ".cfg", ".ini")


def alternative_name(name: str, rng: random.Random, repository: Repository) -> str | None:
    """Return an unused synonym of a name, or None."""
    lead = "_" * (len(name) - len(name.lstrip("_")))
    camel = name.lstrip("_")[:1].isupper()
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name) if camel else name.strip("_").split("_")
    verbs = [(0, VERBS[parts[0]])] if parts and not camel and parts[0] in VERBS else []
    nouns = [(number, NOUNS[part.lower()]) for number, part in enumerate(parts) if part.lower() in NOUNS]
    choices = verbs + nouns
    rng.shuffle(choices)
    for number, word in choices:
        changed = "".join(each.title() for each in word.split("_")) if camel else word
        made = [*parts[:number], changed, *parts[number + 1 :]]
        new = lead + ("".join(made) if camel else "_".join(made))
        if not any(new.encode() in data for data in repository.files.values()):
            return new
    return None


def is_unique(repository: Repository, name: str) -> bool:
    """Return whether every use of a name in the code base refers to one function or class."""
    if name in COMMON or len(name) < 5 or name.startswith("__"):
        return False
    defined = 0
    for module in (repository.module(path) for path in sorted(repository.python_paths)):
        if name not in module.names:
            continue
        defined += sum(node.name == name for node, _ in definitions(module.tree))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.arg | ast.keyword) and node.arg == name:
                return False
            if (
                isinstance(node, ast.Name | ast.Attribute)
                and not isinstance(node.ctx, ast.Load)
                and name == _identifier(node)
            ):
                return False
            if isinstance(node, ast.alias) and node.asname == name and node.name != name:
                return False
    return defined == 1


def _identifier(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def rename_in_files(repository: Repository, old: str, new: str) -> dict[str, bytes]:
    """Return the files in which a name occurs, with the new name in its place; changelogs are left alone."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(old)}(?![A-Za-z0-9_])")
    changes = {}
    for path, data in repository.files.items():
        if path.endswith(TEXT_SUFFIXES) and old.encode() in data and not HISTORY_FILES.search(path):
            text = data.decode("utf-8", "surrogateescape")
            after = word.sub(new, text)
            if after != text:
                changes[path] = after.encode("utf-8", "surrogateescape")
    return changes
