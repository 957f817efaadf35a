"""Tasks in which nothing may be changed: questions, a review, and code that is right although somebody doubts it."""

import re
from random import Random

from etude_nano.program import LAYOUT, Case, draw_check, draw_pair, draw_program, pick_fault, plain_cases
from etude_nano.repair_tasks import doubts, faulty_cases, pick, shown
from etude_nano.task_writer import Draft, Plan, unchanged
from etude_nano.templates import Split, faulty_leaves, leaves

# What an answer must and must not say where all is well.
ALL_WELL = r"\b(correct|right|no bug|no change|nothing|as it should|fine|passes|ok|works)\b"
NOT_WELL = r"\b(fixed|changed|edited|wrong|incorrect|broken|is a bug|not correct|not right)\b"


def review(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """Which function is wrong?"""
    leaf = chance.choice(faulty_leaves(split))
    if difficulty == 2:
        program = draw_pair(leaf, split, chance, 1)
    else:
        program = draw_program(leaf, split, chance, difficulty - 1, difficulty - 1)
    guilty = program.functions[0]
    fault = pick_fault(guilty, chance)
    if fault is None or (cases := faulty_cases(program, {guilty.name: fault.text}, [guilty], chance)) is None:
        return None
    files = program.files({guilty.name: fault.text})
    visible = [case for case in cases if not case.reveals][:1] or cases[:1]
    check = draw_check(program, visible, chance)
    repo = {**files, check.path: check.text}
    request = pick(
        chance,
        "Which function does not do what its docstring says? Name it, change nothing.",
        "Review the code: one function is wrong. Which? Do not edit.",
        "One function has a bug. Tell me its name only.",
    )
    return _question(
        "review",
        "review",
        "imperative",
        request,
        repo,
        {"one_of": [each.name for each in program.functions], "is": guilty.name},
        Plan(
            tuple(reversed(list(files))),
            "",
            pick(chance, f"{guilty.name} is wrong.", guilty.name),
            _reason(guilty.doc, fault.wrong),
        ),
        f"review/{guilty.shape}/{fault.id}",
    )


def which_line(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """Which line is wrong?"""
    program = draw_program(chance.choice(faulty_leaves(split)), split, chance, 1, difficulty)
    guilty = program.functions[0]
    fault = pick_fault(guilty, chance)
    if fault is None or (cases := faulty_cases(program, {guilty.name: fault.text}, [program.top], chance)) is None:
        return None
    right, files = program.files(), program.files({guilty.name: fault.text})
    file = next(iter(files))
    pairs = zip(files[file].split("\n"), right[file].split("\n"), strict=True)
    line = next(number for number, (wrong, fixed) in enumerate(pairs, 1) if wrong != fixed)
    case = cases[0]
    got = "fails" if case.raises else f"gives {case.got}, not {case.want}"
    given = {int(number) for number in re.findall(r"-?\d+", f"{case.call} {got}")}
    if line in given:
        return None
    check = draw_check(program, [case for case in cases if not case.reveals][:1] or cases[:1], chance)
    where = f" of {file}" if difficulty == 1 else ""
    request = f"{case.call} {got}. Which line{where} is to blame? Only tell me the number."
    return _question(
        "line",
        "review",
        "symptom",
        request,
        {**files, check.path: check.text},
        {"number": line, "given": sorted(given)},
        Plan(
            (file,),
            "",
            pick(chance, f"Line {line}.", f"It is line {line}."),
            _reason(guilty.doc, fault.wrong),
            difficulty == 1,
        ),
        f"line/{guilty.shape}/{fault.id}",
    )


def value(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """What does a call give?"""
    shape = chance.choice([shape for shape in leaves(split) if shape.result == "int"])
    program = draw_program(shape, split, chance, max(1, difficulty - 1), min(2, difficulty))
    if program.top.result != "int":
        return None
    cases = plain_cases(program.top, program, chance, 6)
    if not cases:
        return None
    module, name = program.homes[-1][0], program.top.name
    for case in cases[1:]:
        request = pick(chance, f"What does {case.call} give?", f"What is {case.call}?") + " Change nothing."
        given = {int(number) for number in re.findall(r"-?\d+", request)}
        if int(case.want) not in given:
            break
    else:
        return None
    check = draw_check(program, cases[:1], chance)
    command = f"python3 -c '{f'from {module} import {name}; print({case.call})'}'"
    if "'" in case.call:
        command = f'python3 -c "from {module} import {name}; print({case.call})"'
    return _question(
        "value",
        "question",
        "symptom",
        request,
        {**program.files(), check.path: check.text},
        {"number": int(case.want), "given": sorted(given)},
        Plan((f"{module}.py",), command, pick(chance, f"It gives {case.want}.", f"{case.want}"), "", difficulty == 1),
        f"value/{program.functions[0].shape}",
    )


def where(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """Which file is a function in?"""
    program = draw_program(chance.choice(leaves(split)), split, chance, difficulty - 1, difficulty - 1)
    function = chance.choice(program.functions)
    files = program.files()
    cases = plain_cases(program.top, program, chance, 2)
    if not cases:
        return None
    check = draw_check(program, cases[:2], chance)
    file = program.file_of(function.name)
    request = pick(
        chance,
        f"Which file defines {function.name}?",
        f"Where is {function.name} defined?",
        f"In which file is {function.name}?",
    )
    repo = {**files, check.path: check.text}
    return _question(
        "where",
        "question",
        "symptom",
        request,
        repo,
        {"one_of": list(repo), "is": file},
        Plan((), f"grep -n 'def {function.name}' *.py", pick(chance, f"In {file}.", f"{file} defines it.")),
        f"where/{program.functions[0].shape}",
    )


def all_well(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """Code that is right although the request doubts it: say so and change nothing."""
    program = draw_program(chance.choice(leaves(split)), split, chance, *LAYOUT[difficulty])
    cases = plain_cases(program.top, program, chance, 3)
    if not cases:
        return None
    check = draw_check(program, cases[:2], chance)
    case: Case = cases[0]
    top, file = program.top, program.file_of(program.top.name)
    at = f" in {file}" if difficulty == 1 else ""
    request = pick(chance, *doubts(difficulty, case.call, case.want, top.name, at, check))
    say = pick(
        chance,
        f"{top.name} is correct. Nothing to change.",
        f"No bug: {top.name} is right as it is.",
        f"{check.path} passes; nothing to fix.",
    )
    return _question(
        "all-well",
        "question",
        "symptom",
        request,
        {**program.files(), check.path: check.text},
        {"says": ALL_WELL, "not": NOT_WELL},
        Plan((file,) if difficulty < 4 else (), check.command, say, "", difficulty == 1),
        f"all-well/{program.functions[0].shape}",
    )


def _reason(doc: str, wrong: str) -> str:
    return f"It should be: {doc} But it has {shown(wrong)}."


def _question(
    family: str,
    category: str,
    register: str,
    request: str,
    repo: dict[str, str],
    final: dict[str, object],
    plan: Plan,
    site: str,
) -> Draft:
    return Draft(
        family=family,
        category=category,  # type: ignore[arg-type]
        register=register,
        request=request,
        repo=repo,
        solved={},
        calls=(),
        wants={"unchanged": unchanged(repo), "final": final},
        plan=plan,
        sites=(site,),
    )
