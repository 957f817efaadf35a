"""Tasks in which something does not work: wrong code, missing code, a wrong import, a broken configuration.

The request names the file only at difficulty 1. From 2 on it is a symptom or a log; from 4 on the check must be run.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from etude_nano import word_lists
from etude_nano.function_templates import draw_leaf
from etude_nano.phrases import choose, draw_phrase
from etude_nano.program import (
    CHAIN_LAYOUTS,
    Case,
    CheckScript,
    Program,
    distribute_functions,
    draw_cases,
    draw_check,
    draw_fault,
    draw_pair,
    draw_program,
    kept_parameters,
    large_cases,
    plain_cases,
)
from etude_nano.sides import Split
from etude_nano.task_writer import DemonstrationPlan, NanoTaskDraft, calls_check, data_check
from etude_nano.templates import Fault, NanoFunction

LOADER = '''\
import json


def read_values():
    """The values of {file}."""
    with open("{file}") as source:
        return json.load(source)
'''
LOADER_USER = '''\
from {loader} import read_values


def {function}({noun}):
    """The {noun} {operator} {key}."""
    return {noun} {operator} read_values()["{key}"]
'''
LARGE_CALLS = 2  # of each function, with large numbers and long texts, lists and tables
HIDDEN_CALLS = 6  # of each function, beside those that the task is about
# Module, function, positional or keyword arguments, and the repr of the result.
Calls = tuple[tuple[str, str, tuple[Any, ...] | dict[str, Any], str], ...]


def debugging(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task with one fault; with two at difficulty 5."""
    if difficulty == 5:
        return _two_faults(rng, split)
    independent = difficulty == 2 and rng.random() < 0.5
    if independent:
        program = draw_pair(split, rng, 1, faulty=True)
    else:
        program = draw_program(split, rng, *CHAIN_LAYOUTS[difficulty], faulty=True)
    faulty = program.functions[0]
    if difficulty > 2 and program.functions[1].faults and rng.random() < 0.25:
        faulty = program.functions[1]
    fault = draw_fault(faulty, rng)
    asked = faulty if independent else program.top
    if fault is None or (cases := faulty_cases(program, {faulty.name: fault.text}, [asked, faulty], rng)) is None:
        return None
    visible = [*[case for case in cases if case.name == asked.name and not case.reveals][:1], cases[0]]
    if independent and (other := plain_cases(program.top, program, rng, 1)):
        visible.append(other[0])
    check = draw_check(program, visible, rng)
    request, register = _fix_request(difficulty, cases[0], program.file_of(faulty.name), faulty.name, check, rng)
    return _repair_draft(
        "debugging",
        program,
        {faulty.name: fault.text},
        check,
        cases,
        asked=(request, register),
        say=_says_fixed([(faulty, fault)], program, check, rng),
        think=_thought(faulty, fault),
        difficulty=difficulty,
        sites=[f"{faulty.template}/{fault.id}"],
    )


def _two_faults(rng: Random, split: Split) -> NanoTaskDraft | None:
    """Draw a task with two faulty functions, in one module or two."""
    taken: set[str] = set()
    both = [draw_leaf(split, rng, taken, faulty=True) for _ in range(2)]
    program = Program(distribute_functions(both, rng.choice((1, 2)), rng))
    faults = [draw_fault(each, rng) for each in both]
    if None in faults:
        return None
    wrong = {each.name: fault.text for each, fault in zip(both, faults, strict=True) if fault}
    found = [faulty_cases(program, wrong, [each], rng) for each in both]
    if found[0] is None or found[1] is None:
        return None
    cases = [*found[0], *found[1]]
    check = draw_check(program, [found[0][0], found[1][0]], rng)
    request = draw_phrase(rng, "repair_tasks.two_faults_request", check=check)
    pairs = [(each, fault) for each, fault in zip(both, faults, strict=True) if fault]
    return _repair_draft(
        "debugging",
        program,
        wrong,
        check,
        cases,
        asked=(request, "log" if check.log in request else "imperative"),
        say=_says_fixed(pairs, program, check, rng),
        think="",
        difficulty=5,
        sites=[f"{each.template}/{fault.id}" for each, fault in pairs],
    )


def implement(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task with a function that is only a docstring with an example; two functions at difficulty 5."""
    if difficulty in (2, 5):
        program = draw_pair(split, rng, 1 if difficulty == 2 else 2)
    else:
        program = draw_program(split, rng, *CHAIN_LAYOUTS[difficulty])
    missing = program.functions[:2] if difficulty == 5 else program.functions[:1]
    right = program.load()
    stubs, finished, cases = {}, {}, []
    for function in missing:
        found = draw_cases(function, right, {function.name: _raise_not_implemented}, rng, revealing=4, plain=0)
        if found is None:
            return None
        stubs[function.name], finished[function.name] = stub(function, found[0])
        cases += found
    asked = program.top if difficulty in (3, 4) else missing[0]
    if asked not in missing:
        found = draw_cases(asked, right, {asked.name: _raise_not_implemented}, rng, revealing=3, plain=0)
        if found is None:
            return None
        cases = [*found, *cases]
    named = [each.name for each in (missing if len(missing) > 1 else [asked])]
    check = draw_check(program, [next(case for case in cases if case.name == name) for name in named], rng)
    request, register = _implement_request(
        difficulty, missing[0].name, program.file_of(missing[0].name), cases[0], check, rng
    )
    names = " and ".join(each.name for each in missing)
    say = choose(rng, f"Implemented {names}.", f"{names} {'is' if len(missing) == 1 else 'are'} written.")
    return _repair_draft(
        "implement",
        program,
        stubs,
        check,
        cases,
        asked=(request, register),
        say=f"{say} {_says_passed(check, rng)}",
        think=f"{missing[0].name} has to give: {missing[0].doc}",
        difficulty=difficulty,
        sites=[f"implement/{each.template}" for each in missing],
        finished=finished,
    )


def _implement_request(
    difficulty: int, name: str, file: str, case: Case, check: CheckScript, rng: Random
) -> tuple[str, str]:
    """Draw a request for missing code; return it and its register."""
    if difficulty == 1:
        return choose(rng, f"Implement {name} in {file}.", f"{file}: {name} is not written. Write it."), "imperative"
    if difficulty < 4:
        log, symptom = f"{check.command}\nNotImplementedError", f"{case.call} should give {case.want}."
        return (log, "log") if rng.random() < 0.5 else (symptom, "symptom")
    request = draw_phrase(rng, "repair_tasks.implement_request", check=check)
    return request, "imperative"


def _raise_not_implemented(*arguments: Any) -> None:
    raise NotImplementedError


def stub(function: NanoFunction, example: Case) -> tuple[str, str]:
    """Return the function with an example in its docstring: without its body, and with it."""
    head, end, body = function.right.partition('"""\n')
    head += f" {example.call} is {example.want}.{end}"
    return f"{head}    raise NotImplementedError\n", head + body


def broken_import(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task with an import that misspells a module or a name in it."""
    modules = 3 if difficulty == 4 else 2
    program = draw_program(split, rng, modules, modules)
    program = replace(program, qualified=False)
    right = program.files()
    path = rng.choice([f"{module}.py" for module, _ in program.modules[1:]])
    line = right[path].partition("\n")[0]
    _, module, _, name = line.split()
    if rng.random() < 0.5:
        wrong = misspell(module, rng)
        broken, error = right[path].replace(line, f"from {wrong} import {name}"), f"No module named '{wrong}'"
        error = f"ModuleNotFoundError: {error}"
    else:
        wrong = misspell(name, rng)
        broken = right[path].replace(line, f"from {module} import {wrong}")
        error = f"ImportError: cannot import name '{wrong}' from '{module}' (/work/{module}.py)"
    cases = plain_cases(program.top, program, rng, 4)
    if not cases or wrong in (module, name):
        return None
    check = replace(draw_check(program, cases[:2], rng), log=error)
    request, register = _start_request(difficulty, path, check, rng)
    say = choose(rng, f"The import in {path} said {wrong}.", f"{path} imported {wrong}, which is not there.")
    return NanoTaskDraft(
        family="import",
        category="devops",
        register=register,
        request=request,
        repo={**right, path: broken, check.path: check.text},
        solution={path: right[path]},
        checks=(calls_check((*verifier_calls(cases, program), *hidden_calls(program))),),
        plan=DemonstrationPlan(
            (path,), check.command, f"{say} {_says_passed(check, rng)}", named=difficulty == 1, find=wrong
        ),
        sites=(f"import/{'module' if error.startswith('Module') else 'name'}/{program.functions[0].template}",),
        protected=(check.path,),
    )


def broken_config(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task with a broken JSON file: a misspelt key, a number in quotes, or an extra comma."""
    names = rng.sample(word_lists.LABELS, 3)
    values = {name: rng.randint(2, 40) for name in names}
    loader, user = rng.choice(word_lists.MODULES), rng.choice(word_lists.TOP_MODULES)
    key, noun = rng.choice(names), rng.choice(word_lists.NOUNS)[1]
    operator = rng.choice("+*-")
    function = f"{noun}_{rng.choice(('cost', 'sum', 'rate', 'now'))}"
    file = rng.choice(("config.json", "settings.json", "values.json"))
    code = {
        f"{loader}.py": LOADER.format(file=file),
        f"{user}.py": LOADER_USER.format(loader=loader, function=function, noun=noun, operator=operator, key=key),
    }
    right = json.dumps(values, indent=2) + "\n"
    fault = rng.choice(("key", "comma", "quotes") if operator != "*" else ("key", "comma"))
    if fault == "key":
        wrong, error = right.replace(f'"{key}"', f'"{misspell(key, rng)}"'), f"KeyError: '{key}'"
    elif fault == "comma":
        wrong = right.replace("\n}", ",\n}")
        error = "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 5 column 1"
    else:
        wrong = right.replace(f'"{key}": {values[key]}', f'"{key}": "{values[key]}"')
        error = f"TypeError: unsupported operand type(s) for {operator}: 'int' and 'str'"
    cases = [Case(function, (x,), repr(eval(f"{x} {operator} {values[key]}")), "") for x in rng.sample(range(2, 60), 3)]
    if wrong == right:
        return None
    program = Program(((user, (NanoFunction("config", function, "", (), (noun,), ()),)),))
    check = replace(draw_check(program, cases[:1], rng), log=error)
    request, register = _start_request(difficulty, file, check, rng)
    say = {"key": f"{key} was misspelt in {file}.", "comma": f"{file} had a comma too many."}
    say["quotes"] = f"{key} was a text in {file}; it is a number now."
    return NanoTaskDraft(
        family="config",
        category="devops",
        register=register,
        request=request,
        repo={**code, file: wrong, check.path: check.text},
        solution={file: right},
        checks=(
            calls_check((*verifier_calls(cases, program), (loader, "read_values", (), repr(values)))),
            data_check(file, values),
        ),
        plan=DemonstrationPlan(
            (f"{user}.py", file), check.command, f"{say[fault]} {_says_passed(check, rng)}", "", difficulty == 1
        ),
        sites=(f"config/{fault}/{operator}",),
        protected=(check.path,),
    )


def _start_request(difficulty: int, path: str, check: CheckScript, rng: Random) -> tuple[str, str]:
    if difficulty == 1:
        return choose(rng, f"{check.command}: {check.log}\nIt is in {path}.", f"Fix {path}: {check.log}"), "symptom"
    if difficulty < 4:
        return choose(rng, f"$ {check.command}\n{check.log}", f"I get {check.log}", check.log), "log"
    return choose(rng, f"{check.command} does not even start.", f"Get {check.command} to run."), "imperative"


def misspell(word: str, rng: Random) -> str:
    """Return the word with one letter removed, doubled, or swapped with the next."""
    at = rng.randrange(1, len(word) - 1)
    return rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        )
    )


# ------------------------------------------------------------------------------------------- shared


def faulty_cases(
    program: Program, wrong: Mapping[str, str], functions: Sequence[NanoFunction], rng: Random
) -> list[Case] | None:
    """Draw cases of each function, in order; None if the fault does not show in every function."""
    correct, broken = program.load(), program.load(wrong)
    cases: list[Case] = []
    for function in dict.fromkeys(functions):
        found = draw_cases(function, correct, broken, rng)
        if found is None:
            return None
        cases += found
    return cases


def verifier_calls(cases: Sequence[Case], program: Program) -> Calls:
    return tuple(
        (program.file_of(case.name).removesuffix(".py"), case.name, case.arguments, case.want) for case in cases
    )


def hidden_calls(program: Program, before: Mapping[str, str] | None = None) -> Calls:
    """Return further calls of every function, also of those that the task is not about, on arguments of their own.

    `before` has the texts of functions that the workspace has otherwise. Parameters that the solution leaves as they
    are must keep their names: one call of each such function is by keywords."""
    rng = Random("\n".join(program.files().values()))
    found: list[Case] = []
    for function in program.functions:
        found += plain_cases(function, program, rng, HIDDEN_CALLS) or ()
    for function in program.functions:
        found += large_cases(function, program, rng, LARGE_CALLS)
    calls = verifier_calls(found, program)
    keywords = [
        (module, name, dict(zip(parameters, arguments, strict=True)), want)
        for module, name, arguments, want in {call[1]: call for call in reversed(calls)}.values()
        if len(parameters := kept_parameters(name, program, before or {})) == len(arguments)
    ]
    return (*calls, *keywords)


def _fix_request(difficulty: int, case: Case, file: str, name: str, check: CheckScript, rng: Random) -> tuple[str, str]:
    """Draw a request about wrong code; return it and its register."""
    call, want = case.call, case.want
    got = f"raises {case.got.removeprefix('raises ').partition(':')[0]}" if case.raises else f"gives {case.got}"
    if difficulty == 1:
        texts = {
            "symptom": (f"{call} in {file} {got}, not {want}.", f"{file}: {call} {got}. It should be {want}."),
            "imperative": (f"Fix {name} in {file}: {call} must be {want}.", f"Fix the bug in {file}. {call} {got}."),
            "log": (f"{check.log}\nThe bug is in {file}.",),
        }
    elif difficulty < 4:
        texts = {
            "symptom": (f"{call} {got}, it should give {want}.", f"I want {want} from {call}, but it {got}."),
            "imperative": (f"{call} must be {want}. Fix it.", f"Fix this: {call} {got}, not {want}."),
            "log": (f"$ {check.command}\n{check.log}", check.log),
        }
    else:
        texts = {
            "log": (f"$ {check.command}\n{check.log}", f"{check.command} says\n{check.log}"),
            "imperative": (f"Make {check.command} pass.", f"{check.command} fails. Find out why and fix it."),
        }
    if not case.raises:
        # The same wording as for correct code: only reading the code shows whether it is wrong.
        texts["doubt"] = doubtful_requests(
            difficulty, call, case.got, case.name, f" in {file}" if difficulty == 1 else "", check
        )
    register = rng.choice(list(texts))
    return rng.choice(texts[register]), register


def doubtful_requests(difficulty: int, call: str, got: str, name: str, at: str, check: CheckScript) -> tuple[str, ...]:
    """Return requests that leave open whether anything is wrong."""
    if difficulty >= 4:
        return f"I think {check.command} fails. Fix it if so.", f"Does {check.command} pass? Fix it if not."
    return (
        f"{call}{at} gives {got}. Is that right? Fix it if not.",
        f"Is there a bug in {name}{at}? Fix it if so, else leave it.",
        f"Someone says {name}{at} is wrong. Fix it if that is true.",
    )


def _says_passed(check: CheckScript, rng: Random) -> str:
    return choose(rng, f"{check.path} passes.", f"{check.path} is ok now.", f"{check.command} says ok.")


def _says_fixed(pairs: Sequence[tuple[NanoFunction, Fault]], program: Program, check: CheckScript, rng: Random) -> str:
    said = []
    for function, fault in pairs:
        file = program.file_of(function.name)
        wrong, right = quoted_code(fault.wrong), quoted_code(fault.right)
        said.append(draw_phrase(rng, "repair_tasks.says_fixed", function=function, file=file, wrong=wrong, right=right))
    return " ".join([*said, _says_passed(check, rng)])


def quoted_code(part: str) -> str:
    """Quote a code fragment for use in a sentence."""
    return f"`{part.replace('@', '').strip()}`" if part.strip() else "nothing"


def _thought(function: NanoFunction, fault: Fault) -> str:
    wrong, right = quoted_code(fault.wrong), quoted_code(fault.right)
    return f"{function.name} should be: {function.doc} It has {wrong}, so {right} is right."


def _repair_draft(
    family: str,
    program: Program,
    wrong: Mapping[str, str],
    check: CheckScript,
    cases: Sequence[Case],
    *,
    asked: tuple[str, str],
    say: str,
    think: str,
    difficulty: int,
    sites: Iterable[str],
    finished: Mapping[str, str] | None = None,
) -> NanoTaskDraft:
    """Return a task whose solution is the correct program; `finished` replaces functions that were only stubs."""
    right, broken = program.files(finished), program.files(wrong)
    top_down = [f"{module}.py" for module, _ in reversed(program.modules)]
    changed = [path for path in top_down if broken[path] != right[path]]
    # Read from the top down to the deepest fault; files below it are not needed.
    read = top_down[: top_down.index(changed[-1]) + 1] if difficulty > 1 else changed
    return NanoTaskDraft(
        family=family,
        category="feature" if finished else "debugging",
        register=asked[1],
        request=asked[0],
        repo={**broken, check.path: check.text},
        solution={path: right[path] for path in changed},
        checks=(calls_check((*verifier_calls(cases, program), *hidden_calls(program, wrong))),),
        plan=DemonstrationPlan(tuple(read), check.command, say, think, difficulty == 1),
        sites=tuple(sites),
        protected=(check.path,),
    )
