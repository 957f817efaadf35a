"""Programs of one to three modules built from template functions, their results, and the cases that show a fault.

Code from our own templates runs here, in this process, to compute its results, from which the check, the symptom and
the hidden cases of a task are made. Code written by a model never runs here.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from etude_nano import word_lists
from etude_nano.function_templates import draw_caller, draw_leaf
from etude_nano.sides import Split
from etude_nano.templates import Fault, NanoFunction, draw_arguments, draw_large_arguments

# In the text of a function `@name(` calls another; the spelling of the call depends on the modules of the two.
_CALL = re.compile(r"@(\w+)")
CHAIN_LAYOUTS = {1: (1, 1), 2: (1, 2), 3: (2, 2), 4: (3, 3)}  # difficulty -> modules and functions of a call chain
MAX_LARGE_RESULT = 2000  # characters of the repr
MAX_ARGUMENT_DRAWS = 40  # draws of arguments until enough cases show a fault


@dataclass(frozen=True)
class Program:
    """Modules with their functions, callees before callers."""

    modules: tuple[tuple[str, tuple[NanoFunction, ...]], ...]
    qualified: bool = False  # `import cart` and `cart.total(...)` instead of `from cart import total`

    @property
    def functions(self) -> tuple[NanoFunction, ...]:
        return tuple(function for _, functions in self.modules for function in functions)

    @property
    def top(self) -> NanoFunction:
        """The function at the end of the call chain."""
        return self.functions[-1]

    def file_of(self, name: str) -> str:
        """Return the file that defines a function."""
        return next(f"{module}.py" for module, functions in self.modules for each in functions if each.name == name)

    def files(self, texts: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the files of the program; `texts` replaces functions by name."""
        texts = texts or {}
        module_of = {each.name: module for module, functions in self.modules for each in functions}
        files = {}
        for module, functions in self.modules:
            parts = [texts.get(function.name, function.right) for function in functions]
            used = dict.fromkeys(name for part in parts for name in _CALL.findall(part) if module_of[name] != module)
            imports = [
                f"import {module_of[name]}" if self.qualified else f"from {module_of[name]} import {name}"
                for name in used
            ]
            head = "\n".join(dict.fromkeys(imports))

            def spelt(call: re.Match[str], module: str = module) -> str:
                home = module_of[call.group(1)]
                return f"{home}.{call.group(1)}" if self.qualified and home != module else call.group(1)

            files[f"{module}.py"] = "\n\n".join(
                _CALL.sub(spelt, part) for part in ([head + "\n"] if head else []) + parts
            )
        return files

    def load(self, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Execute the program and return its namespace; `texts` replaces functions by name."""
        texts = texts or {}
        namespace: dict[str, Any] = {}
        source = "\n".join(texts.get(each.name, each.right) for each in self.functions).replace("@", "")
        exec(compile(source, "nano", "exec"), namespace)
        return namespace


@dataclass(frozen=True)
class Case:
    """A call, its expected result, and the result of the faulty program."""

    name: str
    arguments: tuple[Any, ...]
    want: str  # repr of the expected result
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
    function: NanoFunction,
    right: Mapping[str, Any],
    wrong: Mapping[str, Any],
    rng: Random,
    *,
    revealing: int = 3,
    plain: int = 3,
) -> list[Case] | None:
    """Draw cases of a function, those that reveal the fault first; None if too few draws reveal it."""
    found: dict[str, Case] = {}
    revealed = 0
    for attempt in range(MAX_ARGUMENT_DRAWS):
        if revealed == revealing and (len(found) == revealing + plain or (found and attempt > MAX_ARGUMENT_DRAWS // 3)):
            break
        arguments = draw_arguments(function.argument_kinds, rng)
        want = _outcome(right[function.name], arguments)
        if want.startswith("raises "):
            continue
        case = Case(function.name, arguments, want, _outcome(wrong[function.name], arguments))
        if case.call in found or (case.reveals and revealed == revealing):
            continue
        if not case.reveals and len(found) - revealed == plain:
            continue
        found[case.call] = case
        revealed += case.reveals
    return sorted(found.values(), key=lambda case: not case.reveals) if revealed == revealing else None


def plain_cases(function: NanoFunction, program: Program, rng: Random, count: int) -> list[Case] | None:
    """Draw up to `count` cases of a function of a correct program; None if there are none."""
    right = program.load()
    return draw_cases(function, right, right, rng, revealing=0, plain=count) or None


def large_cases(function: NanoFunction, program: Program, rng: Random, count: int) -> list[Case]:
    """Draw up to `count` cases of a function of a correct program with large arguments; fewer where it fails on them,
    or where the result is too long for a task."""
    right = program.load()[function.name]
    found: dict[str, Case] = {}
    for _ in range(2 * count):
        arguments = draw_large_arguments(function.argument_kinds, rng)
        want = _outcome(right, arguments)
        if len(found) < count and not want.startswith("raises ") and len(want) <= MAX_LARGE_RESULT:
            case = Case(function.name, arguments, want, want)
            found[case.call] = case
    return list(found.values())


def kept_parameters(name: str, program: Program, before: Mapping[str, str]) -> list[str]:
    """Return the parameters of a function if it has the same ones with the texts of `before`; else none."""
    right, old = (list(inspect.signature(each[name]).parameters) for each in (program.load(), program.load(before)))
    return right if right == old else []


def _outcome(function: Any, arguments: Sequence[Any]) -> str:
    try:
        return repr(function(*arguments))
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------- drawing programs


def draw_program(
    split: Split, rng: Random, modules: int, functions: int, *, faulty: bool = False, result: str = ""
) -> Program:
    """Draw a chain of functions from a leaf up, each calling the one before it, distributed over modules.

    `faulty` and `result` are about the leaf."""
    taken: set[str] = set()
    chain = [draw_leaf(split, rng, taken, faulty=faulty, result=result)]
    while len(chain) < functions:
        chain.append(draw_caller(chain[-1], split, rng, taken))
    return Program(distribute_functions(chain, modules, rng), qualified=rng.random() < 0.3)


def draw_pair(split: Split, rng: Random, modules: int, *, faulty: bool = False) -> Program:
    """Draw two independent functions in one module or two; `faulty` is about the first."""
    taken: set[str] = set()
    both = [draw_leaf(split, rng, taken, faulty=faulty), draw_leaf(split, rng, taken)]
    return Program(distribute_functions(both, modules, rng))


def distribute_functions(
    functions: Sequence[NanoFunction], modules: int, rng: Random
) -> tuple[tuple[str, tuple[NanoFunction, ...]], ...]:
    """Assign functions to modules, at least one to each; the last of several gets the name of an entry point."""
    names = rng.sample(word_lists.MODULES, modules)
    if modules > 1:
        names[-1] = rng.choice(word_lists.TOP_MODULES)
    extra = len(functions) - modules
    return tuple(
        (name, tuple(functions[: extra + 1] if index == 0 else functions[extra + index : extra + index + 1]))
        for index, name in enumerate(names)
    )


# ------------------------------------------------------------------------------------------- the check in the workspace


@dataclass(frozen=True)
class CheckScript:
    """A small script in the workspace that shows whether the program is right."""

    path: str
    text: str
    log: str  # the last line that it prints for the faulty program

    @property
    def command(self) -> str:
        return f"python3 {self.path}"


def draw_check(program: Program, cases: Sequence[Case], rng: Random) -> CheckScript:
    """Draw a check script with these cases, in one of two styles."""
    path = rng.choice(("check.py", "check.py", "test_all.py", "selftest.py"))
    names_by_module: dict[str, list[str]] = {}
    for name in dict.fromkeys(case.name for case in cases):
        names_by_module.setdefault(program.file_of(name).removesuffix(".py"), []).append(name)
    imports = "".join(f"from {module} import {', '.join(names)}\n" for module, names in names_by_module.items())
    first = next((case for case in cases if case.reveals), cases[0])
    error = first.got.removeprefix("raises ") if first.raises else ""
    if rng.random() < 0.6:
        listed = ", ".join(f"({case.call!r}, {case.want})" for case in cases)
        text = (
            f"{imports}\nfor call, want in [{listed}]:\n    got = eval(call)\n    if got != want:\n"
            '        raise SystemExit(f"FAIL {call}: got {got!r}, want {want!r}")\nprint("ok")\n'
        )
        return CheckScript(path, text, error or f"FAIL {first.call}: got {first.got}, want {first.want}")
    asserts = "".join(
        f'got = {case.call}\nassert got == {case.want}, f"got {{got!r}}, want {_in_f_string(case.want)}"\n'
        for case in cases
    )
    return CheckScript(
        path, f'{imports}\n{asserts}print("ok")\n', error or f"AssertionError: got {first.got}, want {first.want}"
    )


def _in_f_string(text: str) -> str:
    """Escape text for an f-string in double quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("{", "{{").replace("}", "}}")


def draw_fault(function: NanoFunction, rng: Random) -> Fault | None:
    return rng.choice(function.faults) if function.faults else None
