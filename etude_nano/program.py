"""Programs of one to three modules out of functions, what they compute, and the cases that show a fault.

Code of our own books is run here, in this process, to learn what it gives: that is how a check, a symptom and the
hidden cases of a task come to be true. Nothing that a model wrote ever is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from etude_nano import word_lists
from etude_nano.templates import Fault, Function, Shape, Split, draw_arguments, draw_function, leaves, users

# In the text of a function `@name(` calls another; how that is spelt depends on where the two stand.
_CALL = re.compile(r"@(\w+)")
LAYOUT = {1: (1, 1), 2: (1, 2), 3: (2, 2), 4: (3, 3)}  # difficulty -> modules and functions of a chain
TRIES = 40  # draws of arguments until enough cases show a fault


@dataclass(frozen=True)
class Program:
    """Modules in the order in which they use each other, the deepest first."""

    homes: tuple[tuple[str, tuple[Function, ...]], ...]
    dotted: bool = False  # `import cart` and `cart.total(...)`, or `from cart import total`

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(function for _, functions in self.homes for function in functions)

    @property
    def top(self) -> Function:
        return self.functions[-1]

    def file_of(self, name: str) -> str:
        """The file that a function is in."""
        return next(f"{module}.py" for module, functions in self.homes for each in functions if each.name == name)

    def files(self, texts: Mapping[str, str] | None = None) -> dict[str, str]:
        """Its files; `texts` are functions that are not as they should be."""
        texts = texts or {}
        homes = {each.name: module for module, functions in self.homes for each in functions}
        files = {}
        for module, functions in self.homes:
            parts = [texts.get(function.name, function.right) for function in functions]
            used = dict.fromkeys(name for part in parts for name in _CALL.findall(part) if homes[name] != module)
            imports = [f"import {homes[name]}" if self.dotted else f"from {homes[name]} import {name}" for name in used]
            head = "\n".join(dict.fromkeys(imports))

            def spelt(call: re.Match[str], module: str = module) -> str:
                home = homes[call.group(1)]
                return f"{home}.{call.group(1)}" if self.dotted and home != module else call.group(1)

            files[f"{module}.py"] = "\n\n".join(
                _CALL.sub(spelt, part) for part in ([head + "\n"] if head else []) + parts
            )
        return files

    def load(self, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Its functions, ready to be called."""
        texts = texts or {}
        namespace: dict[str, Any] = {}
        source = "\n".join(texts.get(each.name, each.right) for each in self.functions).replace("@", "")
        exec(compile(source, "nano", "exec"), namespace)
        return namespace


@dataclass(frozen=True)
class Case:
    """A call, what it should give and, if the program is wrong, what it gives."""

    name: str
    arguments: tuple[Any, ...]
    want: str  # as repr writes it
    got: str

    @property
    def call(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"

    @property
    def reveals(self) -> bool:
        return self.got != self.want

    @property
    def raises(self) -> bool:
        return self.got.startswith("raises ")


def draw_cases(
    function: Function,
    right: Mapping[str, Any],
    wrong: Mapping[str, Any],
    chance: Random,
    *,
    revealing: int = 3,
    plain: int = 3,
) -> list[Case] | None:
    """Cases of a function, those that reveal what is wrong first; None if it does not show."""
    found: dict[str, Case] = {}
    shown = 0
    for attempt in range(TRIES):
        if shown == revealing and (len(found) == revealing + plain or (found and attempt > TRIES // 3)):
            break
        arguments = draw_arguments(function.kinds, chance)
        want = _outcome(right[function.name], arguments)
        if want.startswith("raises "):
            continue
        case = Case(function.name, arguments, want, _outcome(wrong[function.name], arguments))
        if case.call in found or (case.reveals and shown == revealing):
            continue
        if not case.reveals and len(found) - shown == plain:
            continue
        found[case.call] = case
        shown += case.reveals
    return sorted(found.values(), key=lambda case: not case.reveals) if shown == revealing else None


def plain_cases(function: Function, program: Program, chance: Random, count: int) -> list[Case] | None:
    """Cases of a function of a program in which nothing is wrong."""
    right = program.load()
    return draw_cases(function, right, right, chance, revealing=0, plain=count) or None


def _outcome(function: Any, arguments: Sequence[Any]) -> str:
    try:
        return repr(function(*arguments))
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------- drawing programs


def draw_user(inner: Function, split: Split, chance: Random, taken: set[str]) -> Function:
    """A function that uses another, with the same arguments."""
    shape = chance.choice(users(split, inner.result))
    parameters = ", ".join(inner.parameters)
    swapped = ", ".join(reversed(inner.parameters))
    given = {
        "params": parameters,
        "call": f"@{inner.name}({parameters})",
        "swapped": f"@{inner.name}({swapped})",
        "inner": inner.name,
    }
    user = draw_function(shape, split, chance, taken, given)
    required = tuple(kind for kind in inner.kinds if not kind.endswith("?"))
    return Function(user.shape, user.name, user.right, user.faults, user.parameters, required, user.result)


def draw_program(leaf: Shape, split: Split, chance: Random, modules: int, functions: int) -> Program:
    """A leaf and the functions that use it, one upon the other, spread over modules from the bottom up."""
    taken: set[str] = set()
    chain = [draw_function(leaf, split, chance, taken)]
    while len(chain) < functions:
        chain.append(draw_user(chain[-1], split, chance, taken))
    return Program(spread(chain, modules, chance), dotted=chance.random() < 0.3)


def draw_pair(first: Shape, split: Split, chance: Random, modules: int) -> Program:
    """Two functions that have nothing to do with each other, in one module or two; the first is of that shape."""
    taken: set[str] = set()
    both = [
        draw_function(first, split, chance, taken),
        draw_function(chance.choice(leaves(split)), split, chance, taken),
    ]
    return Program(spread(both, modules, chance))


def spread(functions: Sequence[Function], modules: int, chance: Random) -> tuple[tuple[str, tuple[Function, ...]], ...]:
    """Modules for functions, each with at least one; the last, if there are several, is one that is run."""
    names = chance.sample(word_lists.MODULES, modules)
    if modules > 1:
        names[-1] = chance.choice(word_lists.TOP_MODULES)
    extra = len(functions) - modules
    return tuple(
        (name, tuple(functions[: extra + 1] if place == 0 else functions[extra + place : extra + place + 1]))
        for place, name in enumerate(names)
    )


# ------------------------------------------------------------------------------------------- the check in the workspace


@dataclass(frozen=True)
class Check:
    """A small script in the workspace that shows whether the program is right."""

    path: str
    text: str
    log: str  # the last line of what it says of the faulty program

    @property
    def command(self) -> str:
        return f"python3 {self.path}"


def draw_check(program: Program, cases: Sequence[Case], chance: Random) -> Check:
    """A check with these cases, in one of two styles."""
    path = chance.choice(("check.py", "check.py", "test_all.py", "selftest.py"))
    homes: dict[str, list[str]] = {}
    for name in dict.fromkeys(case.name for case in cases):
        homes.setdefault(program.file_of(name).removesuffix(".py"), []).append(name)
    imports = "".join(f"from {module} import {', '.join(names)}\n" for module, names in homes.items())
    first = next((case for case in cases if case.reveals), cases[0])
    error = first.got.removeprefix("raises ") if first.raises else ""
    if chance.random() < 0.6:
        listed = ", ".join(f"({case.call!r}, {case.want})" for case in cases)
        text = (
            f"{imports}\nfor call, want in [{listed}]:\n    got = eval(call)\n    if got != want:\n"
            '        raise SystemExit(f"FAIL {call}: got {got!r}, want {want!r}")\nprint("ok")\n'
        )
        return Check(path, text, error or f"FAIL {first.call}: got {first.got}, want {first.want}")
    asserts = "".join(
        f'got = {case.call}\nassert got == {case.want}, f"got {{got!r}}, want {_inside(case.want)}"\n' for case in cases
    )
    return Check(
        path, f'{imports}\n{asserts}print("ok")\n', error or f"AssertionError: got {first.got}, want {first.want}"
    )


def _inside(text: str) -> str:
    """Text as it stands inside an f-string with double quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("{", "{{").replace("}", "}}")


def pick_fault(function: Function, chance: Random) -> Fault | None:
    return chance.choice(function.faults) if function.faults else None
