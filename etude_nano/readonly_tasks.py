"""Tasks in which nothing may be changed: questions, reviews, and correct code that the request doubts."""

import re
from random import Random

from etude.tasks.checks import VerifierCheck
from etude_nano.phrases import choose, draw_phrase
from etude_nano.program import CHAIN_LAYOUTS, Case, draw_check, draw_fault, draw_pair, draw_program, plain_cases
from etude_nano.repair_tasks import doubtful_requests, faulty_cases, quoted_code
from etude_nano.sides import Split
from etude_nano.task_writer import DemonstrationPlan, NanoTaskDraft, unchanged_check

# Patterns that an answer must and must not match where the code is correct.
CORRECT_PATTERN = r"\b(correct|right|no bug|no change|nothing|as it should|fine|passes|ok|works)\b"
FAULTY_PATTERN = (
    r"\b(fixed|changed|edited|wrong|incorrect|broken|is a bug|not correct|not right|isn't right|isn't correct|"
    r"maybe|perhaps|possibly|might|either|unless|unsure|not sure|unclear|or not|cannot tell|can't tell|don't know|"
    r"could|would|if (it|there|so|not)|(?<!no )(issue|problem|error|defect|fault|mistake)s?|faulty)\b|\?"
)  # or leave it open


def review(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task that asks which function is wrong."""
    if difficulty == 2:
        program = draw_pair(split, rng, 1, faulty=True)
    else:
        program = draw_program(split, rng, difficulty - 1, difficulty - 1, faulty=True)
    faulty = program.functions[0]
    fault = draw_fault(faulty, rng)
    if fault is None or (cases := faulty_cases(program, {faulty.name: fault.text}, [faulty], rng)) is None:
        return None
    files = program.files({faulty.name: fault.text})
    visible = [case for case in cases if not case.reveals][:1] or cases[:1]
    check = draw_check(program, visible, rng)
    repo = {**files, check.path: check.text}
    request = draw_phrase(rng, "readonly_tasks.review_request")
    return _question_draft(
        "review",
        "review",
        "imperative",
        request,
        repo,
        {"one_of": [each.name for each in program.functions], "is": faulty.name, "faulty": True},
        DemonstrationPlan(
            tuple(reversed(list(files))),
            "",
            choose(rng, f"{faulty.name} is wrong.", faulty.name),
            _fault_reason(faulty.doc, fault.wrong),
        ),
        f"review/{faulty.template}/{fault.id}",
    )


def faulty_line(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task that asks for the number of the wrong line."""
    program = draw_program(split, rng, 1, difficulty, faulty=True)
    faulty = program.functions[0]
    fault = draw_fault(faulty, rng)
    if fault is None or (cases := faulty_cases(program, {faulty.name: fault.text}, [program.top], rng)) is None:
        return None
    right, files = program.files(), program.files({faulty.name: fault.text})
    file = next(iter(files))
    pairs = zip(files[file].split("\n"), right[file].split("\n"), strict=True)
    line = next(number for number, (wrong, fixed) in enumerate(pairs, 1) if wrong != fixed)
    case = cases[0]
    got = "fails" if case.raises else f"gives {case.got}, not {case.want}"
    given = {int(number) for number in re.findall(r"-?\d+", f"{case.call} {got}")}
    if line in given:
        return None
    check = draw_check(program, [case for case in cases if not case.reveals][:1] or cases[:1], rng)
    where = f" of {file}" if difficulty == 1 else ""
    request = f"{case.call} {got}. Which line{where} is to blame? Only tell me the number."
    return _question_draft(
        "line",
        "review",
        "symptom",
        request,
        {**files, check.path: check.text},
        {"number": line, "given": sorted(given), "faulty": True},
        DemonstrationPlan(
            (file,),
            "",
            choose(rng, f"Line {line}.", f"It is line {line}."),
            _fault_reason(faulty.doc, fault.wrong),
            difficulty == 1,
        ),
        f"line/{faulty.template}/{fault.id}",
    )


def call_value(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task that asks for the result of a call."""
    program = draw_program(split, rng, max(1, difficulty - 1), min(2, difficulty), result="int")
    if program.top.result != "int":
        return None
    cases = plain_cases(program.top, program, rng, 6)
    if not cases:
        return None
    module, name = program.modules[-1][0], program.top.name
    for case in cases[1:]:
        request = choose(rng, f"What does {case.call} give?", f"What is {case.call}?") + " Change nothing."
        given = {int(number) for number in re.findall(r"-?\d+", request)}
        if int(case.want) not in given:
            break
    else:
        return None
    check = draw_check(program, cases[:1], rng)
    command = f"python3 -c '{f'from {module} import {name}; print({case.call})'}'"
    if "'" in case.call:
        command = f'python3 -c "from {module} import {name}; print({case.call})"'
    return _question_draft(
        "value",
        "question",
        "symptom",
        request,
        {**program.files(), check.path: check.text},
        {"number": int(case.want), "given": sorted(given)},
        DemonstrationPlan(
            (f"{module}.py",), command, choose(rng, f"It gives {case.want}.", f"{case.want}"), "", difficulty == 1
        ),
        f"value/{program.functions[0].template}",
    )


def defining_file(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task that asks which file defines a function."""
    program = draw_program(split, rng, difficulty - 1, difficulty - 1)
    function = rng.choice(program.functions)
    files = program.files()
    cases = plain_cases(program.top, program, rng, 2)
    if not cases:
        return None
    check = draw_check(program, cases[:2], rng)
    file = program.file_of(function.name)
    request = draw_phrase(rng, "readonly_tasks.defining_file_request", function=function)
    repo = {**files, check.path: check.text}
    return _question_draft(
        "where",
        "question",
        "symptom",
        request,
        repo,
        {"one_of": list(repo), "is": file},
        DemonstrationPlan((), f"grep -n 'def {function.name}' *.py", choose(rng, f"In {file}.", f"{file} defines it.")),
        f"where/{program.functions[0].template}",
    )


def already_correct(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task whose request doubts correct code: the answer must say so and change nothing."""
    program = draw_program(split, rng, *CHAIN_LAYOUTS[difficulty])
    cases = plain_cases(program.top, program, rng, 3)
    if not cases:
        return None
    check = draw_check(program, cases[:2], rng)
    case: Case = cases[0]
    top, file = program.top, program.file_of(program.top.name)
    at = f" in {file}" if difficulty == 1 else ""
    request = choose(rng, *doubtful_requests(difficulty, case.call, case.want, top.name, at, check))
    say = draw_phrase(rng, "readonly_tasks.already_correct_say", top=top, check=check)
    return _question_draft(
        "all-well",
        "question",
        "symptom",
        request,
        {**program.files(), check.path: check.text},
        {"says": CORRECT_PATTERN, "not": FAULTY_PATTERN},
        DemonstrationPlan((file,) if difficulty < 4 else (), check.command, say, "", difficulty == 1),
        f"all-well/{program.functions[0].template}",
    )


def _fault_reason(doc: str, wrong: str) -> str:
    return f"It should be: {doc} But it has {quoted_code(wrong)}."


def _question_draft(
    family: str,
    category: str,
    register: str,
    request: str,
    repo: dict[str, str],
    final: dict[str, object],
    plan: DemonstrationPlan,
    site: str,
) -> NanoTaskDraft:
    return NanoTaskDraft(
        family=family,
        category=category,  # type: ignore[arg-type]
        register=register,
        request=request,
        repo=repo,
        solution={},
        checks=(VerifierCheck("answer", {}, final), unchanged_check(repo)),
        plan=plan,
        sites=(site,),
    )
