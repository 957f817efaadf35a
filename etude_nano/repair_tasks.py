"""Tasks in which something does not work: wrong code, missing code, a wrong import, a broken configuration.

The request names the file at difficulty 1 only. From 2 on it is a symptom or a log; from 4 on one has to run the check.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from etude_nano import word_lists
from etude_nano.program import (
    LAYOUT,
    Case,
    Check,
    Program,
    draw_cases,
    draw_check,
    draw_pair,
    draw_program,
    pick_fault,
    plain_cases,
    spread,
)
from etude_nano.task_writer import Draft, Plan
from etude_nano.templates import Fault, Function, Split, draw_function, faulty_leaves, leaves

LOADER = '''\
import json


def read_values():
    """The values of {file}."""
    with open("{file}") as source:
        return json.load(source)
'''
LOADED = '''\
from {loader} import read_values


def {function}({noun}):
    """The {noun} {operator} {key}."""
    return {noun} {operator} read_values()["{key}"]
'''
Calls = tuple[tuple[str, str, tuple[Any, ...]], ...]


def debugging(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """One wrong place; two at difficulty 5."""
    if difficulty == 5:
        return _two_bugs(chance, split)
    leaf = chance.choice(faulty_leaves(split))
    apart = difficulty == 2 and chance.random() < 0.5
    program = draw_pair(leaf, split, chance, 1) if apart else draw_program(leaf, split, chance, *LAYOUT[difficulty])
    guilty = program.functions[0]
    if split == "train" and difficulty > 2 and chance.random() < 0.25:
        guilty = program.functions[1]
    fault = pick_fault(guilty, chance)
    asked = guilty if apart else program.top
    if fault is None or (cases := faulty_cases(program, {guilty.name: fault.text}, [asked, guilty], chance)) is None:
        return None
    visible = [*[case for case in cases if case.name == asked.name and not case.reveals][:1], cases[0]]
    if apart and (other := plain_cases(program.top, program, chance, 1)):
        visible.append(other[0])
    check = draw_check(program, visible, chance)
    request, register = ask_to_fix(difficulty, cases[0], program.file_of(guilty.name), guilty.name, check, chance)
    return fixed_draft(
        "debugging",
        program,
        {guilty.name: fault.text},
        check,
        cases,
        asked=(request, register),
        say=say_fixed([(guilty, fault)], program, check, chance),
        think=think_of(guilty, fault),
        difficulty=difficulty,
        sites=[f"{guilty.shape}/{fault.id}"],
    )


def _two_bugs(chance: Random, split: Split) -> Draft | None:
    """Two functions, both wrong, in one module or two."""
    first, second = chance.sample(faulty_leaves(split), 2)
    taken: set[str] = set()
    both = [draw_function(shape, split, chance, taken) for shape in (first, second)]
    program = Program(spread(both, chance.choice((1, 2)), chance))
    faults = [pick_fault(each, chance) for each in both]
    if None in faults:
        return None
    wrong = {each.name: fault.text for each, fault in zip(both, faults, strict=True) if fault}
    found = [faulty_cases(program, wrong, [each], chance) for each in both]
    if found[0] is None or found[1] is None:
        return None
    cases = [*found[0], *found[1]]
    check = draw_check(program, [found[0][0], found[1][0]], chance)
    request = pick(
        chance,
        f"{check.command} fails, and not for one reason only.",
        f"Fix all that is wrong until {check.command} passes.",
        f"{check.log}\nThere is a second bug too.",
        f"$ {check.command}\n{check.log}\nand more behind it.",
        f"Make {check.command} pass. There are two bugs.",
    )
    pairs = [(each, fault) for each, fault in zip(both, faults, strict=True) if fault]
    return fixed_draft(
        "debugging",
        program,
        wrong,
        check,
        cases,
        asked=(request, "log" if check.log in request else "imperative"),
        say=say_fixed(pairs, program, check, chance),
        think="",
        difficulty=5,
        sites=[f"{each.shape}/{fault.id}" for each, fault in pairs],
    )


def implement(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """A function that is only a docstring with an example; two at difficulty 5."""
    shape = chance.choice(leaves(split))
    if difficulty in (2, 5):
        program = draw_pair(shape, split, chance, 1 if difficulty == 2 else 2)
    else:
        program = draw_program(shape, split, chance, *LAYOUT[difficulty])
    missing = program.functions[:2] if difficulty == 5 else program.functions[:1]
    right = program.load()
    stubs, finished, cases = {}, {}, []
    for function in missing:
        found = draw_cases(function, right, {function.name: _not_done}, chance, revealing=4, plain=0)
        if found is None:
            return None
        stubs[function.name], finished[function.name] = stub(function, found[0])
        cases += found
    asked = program.top if difficulty in (3, 4) else missing[0]
    if asked not in missing:
        found = draw_cases(asked, right, {asked.name: _not_done}, chance, revealing=3, plain=0)
        if found is None:
            return None
        cases = [*found, *cases]
    named = [each.name for each in (missing if len(missing) > 1 else [asked])]
    check = draw_check(program, [next(case for case in cases if case.name == name) for name in named], chance)
    request, register = _ask_to_write(
        difficulty, missing[0].name, program.file_of(missing[0].name), cases[0], check, chance
    )
    names = " and ".join(each.name for each in missing)
    say = pick(chance, f"Implemented {names}.", f"{names} {'is' if len(missing) == 1 else 'are'} written.")
    return fixed_draft(
        "implement",
        program,
        stubs,
        check,
        cases,
        asked=(request, register),
        say=f"{say} {passes(check, chance)}",
        think=f"{missing[0].name} has to give: {missing[0].doc}",
        difficulty=difficulty,
        sites=[f"implement/{each.shape}" for each in missing],
        finished=finished,
    )


def _ask_to_write(difficulty: int, name: str, file: str, case: Case, check: Check, chance: Random) -> tuple[str, str]:
    """A request for code that is not there, and its register."""
    if difficulty == 1:
        return pick(chance, f"Implement {name} in {file}.", f"{file}: {name} is not written. Write it."), "imperative"
    if difficulty < 4:
        log, symptom = f"{check.command}\nNotImplementedError", f"{case.call} should give {case.want}."
        return (log, "log") if chance.random() < 0.5 else (symptom, "symptom")
    request = pick(
        chance,
        f"Finish what is not implemented. {check.command} must pass.",
        f"Make {check.command} pass.",
        f"Write what is still missing, until {check.command} says ok.",
        f"{check.command} ends with NotImplementedError. Write what it needs.",
    )
    return request, "imperative"


def _not_done(*arguments: Any) -> None:
    raise NotImplementedError


def stub(function: Function, example: Case) -> tuple[str, str]:
    """The function with an example in its docstring: without its body, and with it."""
    head, end, body = function.right.partition('"""\n')
    head += f" {example.call} is {example.want}.{end}"
    return f"{head}    raise NotImplementedError\n", head + body


def broken_import(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """A module, or a name in it, that is imported under another name than it has."""
    modules = 3 if difficulty == 4 else 2
    program = draw_program(chance.choice(leaves(split)), split, chance, modules, modules)
    program = replace(program, dotted=False)
    right = program.files()
    path = chance.choice([f"{module}.py" for module, _ in program.homes[1:]])
    line = right[path].partition("\n")[0]
    _, module, _, name = line.split()
    if chance.random() < 0.5:
        wrong = misspelt(module, chance)
        broken, error = right[path].replace(line, f"from {wrong} import {name}"), f"No module named '{wrong}'"
        error = f"ModuleNotFoundError: {error}"
    else:
        wrong = misspelt(name, chance)
        broken = right[path].replace(line, f"from {module} import {wrong}")
        error = f"ImportError: cannot import name '{wrong}' from '{module}' (/work/{module}.py)"
    cases = plain_cases(program.top, program, chance, 4)
    if not cases or wrong in (module, name):
        return None
    check = replace(draw_check(program, cases[:2], chance), log=error)
    request, register = _ask_to_run(difficulty, path, check, chance)
    say = pick(chance, f"The import in {path} said {wrong}.", f"{path} imported {wrong}, which is not there.")
    return Draft(
        family="import",
        category="devops",
        register=register,
        request=request,
        repo={**right, path: broken, check.path: check.text},
        solved={path: right[path]},
        calls=calls_of(cases, program),
        wants={"calls": [case.want for case in cases]},
        plan=Plan((path,), check.command, f"{say} {passes(check, chance)}", named=difficulty == 1, find=wrong),
        sites=(f"import/{'module' if error.startswith('Module') else 'name'}/{program.functions[0].shape}",),
        protected=(check.path,),
    )


def broken_config(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """A JSON file that is not what the code reads: a key misspelt, a number in quotes, a comma too many."""
    names = chance.sample(word_lists.LABELS, 3)
    values = {name: chance.randint(2, 40) for name in names}
    loader, user = chance.choice(word_lists.MODULES), chance.choice(word_lists.TOP_MODULES)
    key, noun = chance.choice(names), chance.choice(word_lists.NOUNS)[1]
    operator = chance.choice("+*" if split == "train" else "-")
    function = f"{noun}_{chance.choice(('cost', 'sum', 'rate', 'now'))}"
    file = chance.choice(("config.json", "settings.json", "values.json"))
    code = {
        f"{loader}.py": LOADER.format(file=file),
        f"{user}.py": LOADED.format(loader=loader, function=function, noun=noun, operator=operator, key=key),
    }
    right = json.dumps(values, indent=2) + "\n"
    fault = chance.choice(("key", "comma", "quotes") if operator != "*" else ("key", "comma"))
    if fault == "key":
        wrong, error = right.replace(f'"{key}"', f'"{misspelt(key, chance)}"'), f"KeyError: '{key}'"
    elif fault == "comma":
        wrong = right.replace("\n}", ",\n}")
        error = "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 5 column 1"
    else:
        wrong = right.replace(f'"{key}": {values[key]}', f'"{key}": "{values[key]}"')
        error = f"TypeError: unsupported operand type(s) for {operator}: 'int' and 'str'"
    cases = [
        Case(function, (x,), repr(eval(f"{x} {operator} {values[key]}")), "") for x in chance.sample(range(2, 60), 3)
    ]
    if wrong == right:
        return None
    program = Program(((user, (Function("config", function, "", (), (noun,), ()),)),))
    check = replace(draw_check(program, cases[:1], chance), log=error)
    request, register = _ask_to_run(difficulty, file, check, chance)
    say = {"key": f"{key} was misspelt in {file}.", "comma": f"{file} had a comma too many."}
    say["quotes"] = f"{key} was a text in {file}; it is a number now."
    return Draft(
        family="config",
        category="devops",
        register=register,
        request=request,
        repo={**code, file: wrong, check.path: check.text},
        solved={file: right},
        calls=calls_of(cases, program),
        wants={"calls": [case.want for case in cases]},
        plan=Plan((f"{user}.py", file), check.command, f"{say[fault]} {passes(check, chance)}", "", difficulty == 1),
        sites=(f"config/{fault}/{operator}",),
        protected=(check.path,),
    )


def _ask_to_run(difficulty: int, path: str, check: Check, chance: Random) -> tuple[str, str]:
    if difficulty == 1:
        return pick(chance, f"{check.command}: {check.log}\nIt is in {path}.", f"Fix {path}: {check.log}"), "symptom"
    if difficulty < 4:
        return pick(chance, f"$ {check.command}\n{check.log}", f"I get {check.log}", check.log), "log"
    return pick(chance, f"{check.command} does not even start.", f"Get {check.command} to run."), "imperative"


def misspelt(word: str, chance: Random) -> str:
    """The word with one letter gone, doubled, or changed with the next."""
    at = chance.randrange(1, len(word) - 1)
    return chance.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        )
    )


# ------------------------------------------------------------------------------------------- shared


def pick(chance: Random, *texts: str) -> str:
    return chance.choice(texts)


def faulty_cases(
    program: Program, wrong: Mapping[str, str], functions: Sequence[Function], chance: Random
) -> list[Case] | None:
    """Cases of the functions, those of the first before the others; None if the fault does not show in each."""
    right, faulty = program.load(), program.load(wrong)
    cases: list[Case] = []
    for function in dict.fromkeys(functions):
        found = draw_cases(function, right, faulty, chance)
        if found is None:
            return None
        cases += found
    return cases


def calls_of(cases: Sequence[Case], program: Program) -> Calls:
    return tuple((program.file_of(case.name).removesuffix(".py"), case.name, case.arguments) for case in cases)


def ask_to_fix(difficulty: int, case: Case, file: str, name: str, check: Check, chance: Random) -> tuple[str, str]:
    """A request about wrong code, and its register."""
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
        # As of code that is right: only who looks can tell.
        texts["doubt"] = doubts(difficulty, call, case.got, case.name, f" in {file}" if difficulty == 1 else "", check)
    register = chance.choice(list(texts))
    return chance.choice(texts[register]), register


def doubts(difficulty: int, call: str, got: str, name: str, at: str, check: Check) -> tuple[str, ...]:
    """Requests that leave open whether anything is wrong."""
    if difficulty >= 4:
        return f"I think {check.command} fails. Fix it if so.", f"Does {check.command} pass? Fix it if not."
    return (
        f"{call}{at} gives {got}. Is that right? Fix it if not.",
        f"Is there a bug in {name}{at}? Fix it if so, else leave it.",
        f"Someone says {name}{at} is wrong. Fix it if that is true.",
    )


def passes(check: Check, chance: Random) -> str:
    return pick(chance, f"{check.path} passes.", f"{check.path} is ok now.", f"{check.command} says ok.")


def say_fixed(pairs: Sequence[tuple[Function, Fault]], program: Program, check: Check, chance: Random) -> str:
    said = []
    for function, fault in pairs:
        file = program.file_of(function.name)
        wrong, right = shown(fault.wrong), shown(fault.right)
        said.append(
            pick(
                chance,
                f"{function.name} in {file} had {wrong} where {right} belongs.",
                f"Fixed {function.name} in {file}: {wrong} is now {right}.",
            )
        )
    return " ".join([*said, passes(check, chance)])


def shown(part: str) -> str:
    """A piece of code in a sentence."""
    return f"`{part.replace('@', '').strip()}`" if part.strip() else "nothing"


def think_of(function: Function, fault: Fault) -> str:
    return f"{function.name} should be: {function.doc} It has {shown(fault.wrong)}, so {shown(fault.right)} is right."


def fixed_draft(
    family: str,
    program: Program,
    wrong: Mapping[str, str],
    check: Check,
    cases: Sequence[Case],
    *,
    asked: tuple[str, str],
    say: str,
    think: str,
    difficulty: int,
    sites: Iterable[str],
    finished: Mapping[str, str] | None = None,
) -> Draft:
    """A task whose solution is the program as it should be; `finished` are functions that were not there before."""
    right, broken = program.files(finished), program.files(wrong)
    path_down = [f"{module}.py" for module, _ in reversed(program.homes)]
    guilty = [path for path in path_down if broken[path] != right[path]]
    # From the top down to where it is wrong; what lies below that nobody has to read.
    read = path_down[: path_down.index(guilty[-1]) + 1] if difficulty > 1 else guilty
    return Draft(
        family=family,
        category="feature" if finished else "debugging",
        register=asked[1],
        request=asked[0],
        repo={**broken, check.path: check.text},
        solved={path: right[path] for path in guilty},
        calls=calls_of(cases, program),
        wants={"calls": [case.want for case in cases]},
        plan=Plan(tuple(read), check.command, say, think, difficulty == 1),
        sites=tuple(sites),
        protected=(check.path,),
    )
