"""Exercises over generated programs, which can be run: docstrings against code, and the output of checks.

The programs come from `function_templates.py`, the requests from here; nano tasks have other requests.
"""

import re
from dataclasses import dataclass
from random import Random

from etude_nano.code_snippets import SnippetPool, draw_module_name, invent_name
from etude_nano.demonstrator import TextEdit, edits_between
from etude_nano.exercises import DrawExercise, Exercise, TranscriptBuilder
from etude_nano.function_templates import draw_generated_caller, draw_generated_function
from etude_nano.phrases import choose, draw_phrase
from etude_nano.program import Case, CheckScript, Program, draw_cases, draw_check, plain_cases
from etude_nano.templates import Fault, NanoFunction

_SIGN = re.compile(r"[<>=!]=|(?<=\s)[<>+*-](?=\s)|//")


@dataclass(frozen=True)
class FaultyProgram:
    """A program with one faulty function, and the cases that show the fault."""

    program: Program
    faulty: NanoFunction
    fault: Fault
    cases: list[Case]
    check: CheckScript
    reported: NanoFunction  # the function that the request names

    @property
    def file(self) -> str:
        return self.program.file_of(self.faulty.name)

    @property
    def right(self) -> dict[str, str]:
        return self.program.files()

    @property
    def repo(self) -> dict[str, str]:
        return {**self.program.files({self.faulty.name: self.fault.text}), self.check.path: self.check.text}


def draw_slot_values(rng: Random, pool: SnippetPool) -> dict[str, str]:
    """Draw invented names for the slots of a template; sometimes none, then its slots use the word lists."""
    if rng.random() < 0.35:
        return {}
    names = list(dict.fromkeys(invent_name(rng, pool) for _ in range(9)))
    if len(names) < 9:
        return {}
    pairs = {
        "x": names[0],
        "xs": f"{names[0]}s",
        "y": names[1],
        "ys": f"{names[1]}s",
        "w": names[2],
        "ws": f"{names[2]}s",
    }
    return {**pairs, "n": names[3], "m": names[4], "t": names[5], "d": names[6], "s": names[7], "c": names[8]}


def draw_generated_program(rng: Random, pool: SnippetPool, layout: str = "") -> Program:
    """Draw a program of one function, of two independent ones, or of a function and its caller."""
    layout = layout or rng.choice(("one", "one", "pair", "pair", "chain", "chain", "chain2"))
    taken: set[str] = set()
    first = draw_generated_function(rng, taken, draw_slot_values(rng, pool))
    if layout == "one":
        return Program(((draw_module_name(rng, pool, taken), (first,)),))
    if layout == "pair":
        both = [first, draw_generated_function(rng, taken, draw_slot_values(rng, pool))]
        rng.shuffle(both)
        return Program(((draw_module_name(rng, pool, taken), tuple(both)),))
    caller = draw_generated_caller(first, rng, taken, {})
    one = draw_module_name(rng, pool, taken)
    if layout == "chain":
        return Program(((one, (first, caller)),))
    return Program(
        ((one, (first,)), (draw_module_name(rng, pool, {*taken, one}), (caller,))), qualified=rng.random() < 0.3
    )


def draw_faulty_program(rng: Random, pool: SnippetPool, layout: str = "") -> FaultyProgram | None:
    """Draw a faulty program; None if the drawn function has no fault or no case shows it."""
    program = draw_generated_program(rng, pool, layout)
    faulty = rng.choice(program.functions)
    if not faulty.faults:
        return None
    fault = rng.choice(faulty.faults)
    callers = [each for each in program.functions if f"@{faulty.name}(" in each.right]
    reported = callers[0] if callers and rng.random() < 0.5 else faulty
    right, wrong = program.load(), program.load({faulty.name: fault.text})
    cases = draw_cases(reported, right, wrong, rng, revealing=2, plain=1)
    if cases is None or any(len(case.call) > 70 for case in cases):
        return None
    visible = [*[case for case in cases if not case.reveals][:1], cases[0]]
    return FaultyProgram(program, faulty, fault, cases, draw_check(program, visible, rng), reported)


def _read_to_fault(transcript: TranscriptBuilder, wrong: FaultyProgram) -> None:
    """Read from the function that the request names down to the faulty one."""
    top = wrong.program.file_of(wrong.reported.name)
    if (
        wrong.reported.name not in transcript.seen_text
        and wrong.check.path in transcript.known_paths
        and wrong.file not in transcript.known_paths
    ):
        transcript.read(wrong.check.path)  # it imports the reported function
        transcript.known_paths |= {top}
    if wrong.file in transcript.known_paths and transcript.rng.random() < 0.7:
        transcript.read(wrong.file)
        return
    transcript.discover(top, wrong.reported.name)
    if top == wrong.file:
        transcript.read(top)
    elif top in transcript.known_paths and wrong.file in transcript.known_paths:
        transcript.read(top, wrong.file)
    else:
        transcript.read(top)
        transcript.known_paths |= {wrong.file}  # imported by the file just read
        transcript.read(wrong.file)


# ------------------------------------------------------------------------------------------- repairs and edits


def repair(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise with a fault that the request states, or shows by a call, a docstring, a check or a log."""
    wrong = draw_faulty_program(rng, pool)
    if wrong is None:
        return None
    case, file, name = wrong.cases[0], wrong.file, wrong.faulty.name
    got = f"raises {case.got[7:].partition(':')[0]}" if case.raises else f"is {case.got}"
    variant = rng.choice(("told", "call", "call", "call", "doc", "check", "log"))
    if variant == "told" and (not wrong.fault.wrong.strip() or "\n" in wrong.fault.wrong):
        variant = "call"
    if variant == "told":
        was, now = (part.replace("@", "").strip() for part in (wrong.fault.wrong, wrong.fault.right))
        request = choose(
            rng,
            f"{name} in {file} has `{was}` where `{now or 'nothing'}` should be.",
            f"`{was}` is wrong in {name}. Put `{now}` there.",
            f"{file}: not {was} but {now} in {name}.",
        )
    elif variant == "call":
        where = choose(rng, f" ({file})", f" {file}", "", "")
        request = draw_phrase(rng, "programs.repair_call", case=case, got=got, where=where, wrong=wrong)
    elif variant == "doc":
        request = draw_phrase(rng, "programs.repair_docstring", name=name, file=file)
    elif variant == "check":
        request = choose(
            rng, f"{wrong.check.command} does not pass. Mend the code.", f"Get {wrong.check.path} to pass."
        )
    else:
        request = choose(rng, f"{wrong.check.path} says: {wrong.check.log}", f"{wrong.check.log} ({wrong.check.path})")
    transcript = TranscriptBuilder(rng, request, wrong.repo)
    if wrong.check.path in transcript.known_paths and (variant == "check" or rng.random() < 0.3):
        transcript.run(wrong.check.command, exit_code=1)
    _read_to_fault(transcript, wrong)
    after = wrong.right[file]
    mistaken = transcript.mistake_due and _mistaken_edit(transcript, wrong, after)
    if not mistaken:
        transcript.edit_file(file, after)
    if mistaken or rng.random() < 0.8:
        transcript.run(wrong.check.command)
    return transcript.finish(f"mend-{variant}", _final_message(rng, wrong))


def _mistaken_edit(transcript: TranscriptBuilder, wrong: FaultyProgram, after: str) -> bool:
    """Try an edit that does not help, as the check shows, then make the right one; return whether it was done."""
    (edit, *more) = edits_between(wrong.file, transcript.repo[wrong.file], after)
    signs = list(_SIGN.finditer(edit.new))
    if more or not signs or transcript.rng.random() < 0.4:
        return False
    sign = transcript.rng.choice(signs)
    others = [each for each in ("<", ">", "<=", ">=", "==", "+", "-", "*") if each != sign.group()]
    bad = edit.new[: sign.start()] + transcript.rng.choice(others) + edit.new[sign.end() :]
    if bad in (edit.old, edit.new) or wrong.program.files() == {}:
        return False
    transcript.mistake_due = False
    transcript.apply_edit(TextEdit(edit.path, edit.old, bad), mistake=True)
    transcript.run(wrong.check.command, exit_code=1)
    transcript.apply_edit(TextEdit(edit.path, bad, edit.new))
    transcript.repo[wrong.file] = after
    return True


def _final_message(rng: Random, wrong: FaultyProgram) -> str:
    was, now = (part.replace("@", "").strip() for part in (wrong.fault.wrong, wrong.fault.right))
    name, file = wrong.faulty.name, wrong.file
    return choose(
        rng,
        f"{name} has `{now or 'nothing'}` in place of `{was or 'nothing'}` now.",
        f"It was {name} in {file}: `{was or 'nothing'}` should have been `{now or 'nothing'}`.",
        f"Mended {name}.",
        f"{file} is right now; {wrong.check.path} passes." if rng.random() < 0.5 else f"Mended {file}.",
    )


def implement(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that writes a function from its docstring."""
    program = draw_generated_program(rng, pool)
    function = rng.choice(program.functions)
    right = program.load()
    cases = draw_cases(function, right, right, rng, revealing=0, plain=3)
    if not cases or any(len(case.call) > 70 for case in cases):
        return None
    head, end, _ = function.right.partition('"""\n')
    stub = head + end + choose(rng, "    raise NotImplementedError\n", "    pass\n", "    ...\n")
    file = program.file_of(function.name)
    check = draw_check(program, cases[:2], rng)
    repo = {**program.files({function.name: stub}), check.path: check.text}
    where = choose(rng, f" in {file}", f" ({file})", "")
    request = draw_phrase(rng, "programs.implement_request", function=function, where=where, cases=cases, check=check)
    transcript = TranscriptBuilder(rng, request, repo)
    transcript.read(file, word=function.name)
    transcript.edit_file(file, program.files()[file])
    if rng.random() < 0.8:
        transcript.run(check.command)
    return transcript.finish(
        "write", choose(rng, f"{function.name} has its code.", f"Wrote {function.name} in {file}.", "Written.")
    )


def extract_parameter(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that turns a number in the code into a parameter with that default."""
    program = draw_generated_program(rng, pool, "one")
    (function,) = program.functions
    head, doc, body = re.split(r'^(    """.*?"""\n)', function.right.replace("@", ""), maxsplit=1, flags=re.MULTILINE)
    numbers = re.findall(r"(?<![\w\"-])\d+(?![\w\"])", body)
    single = [each for each in numbers if numbers.count(each) == 1]
    if not single or "=" in head:
        return None
    value, name = rng.choice(single), invent_name(rng, pool)
    if name in function.right:
        return None
    grown = head.replace("):", f", {name}={value}):") + doc + re.sub(rf"(?<![\w\"-]){value}(?![\w\"])", name, body)
    file = next(iter(program.files()))
    cases = plain_cases(function, program, rng, 2)
    if not cases:
        return None
    check = draw_check(program, cases, rng)
    where = choose(rng, f" in {file}", "")
    request = draw_phrase(
        rng, "programs.extract_parameter_request", value=value, function=function, where=where, name=name
    )
    transcript = TranscriptBuilder(rng, request, {file: program.files()[file], check.path: check.text})
    transcript.read(file, word=function.name)
    transcript.edit_file(file, grown)
    if rng.random() < 0.6:
        transcript.run(check.command)
    return transcript.finish(
        "parameter", choose(rng, f"{function.name} takes {name} now.", f"{name} is a parameter, {value} by default.")
    )


def stale_documentation(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise with a number in a docstring, or a name in a README, that differs from the code."""
    readme = rng.random() < 0.5
    program = draw_generated_program(rng, pool, "one" if readme else "")
    function = rng.choice(program.functions)
    file = program.file_of(function.name)
    right = program.files()
    cases = plain_cases(program.top, program, rng, 2)
    if not cases:
        return None
    check = draw_check(program, cases, rng)
    if not readme:
        code = function.right.replace(function.doc, "")
        shared = [each for each in re.findall(r"\b\d+\b", function.doc) if re.search(rf"\b{each}\b", code)]
        if not shared or file not in right or right[file].count(function.doc) != 1:
            return None
        true = rng.choice(shared)
        false = str(int(true) + rng.choice((1, 2, 3, 7)))
        old = right[file].replace(function.doc, re.sub(rf"\b{true}\b", false, function.doc, count=1))
        where = choose(rng, f" in {file}", "")
        request = draw_phrase(rng, "programs.stale_docstring", function=function, where=where, false=false)
        transcript = TranscriptBuilder(rng, request, {**right, file: old, check.path: check.text})
        transcript.read(file, word=function.name)
        transcript.edit_file(file, right[file])
        return transcript.finish("stale-doc", choose(rng, f"The docstring has {true} now.", f"{true}, as in the code."))
    wrong = f"{draw_module_name(rng, pool)}.py" if rng.random() < 0.5 else invent_name(rng, pool)
    true = file if wrong.endswith(".py") else function.name
    title = rng.choice(pool.words)
    text = draw_phrase(rng, "programs.readme_text", title=title, function=function, file=file)
    if wrong in text or text.count(true) != 1:
        return None
    request = draw_phrase(rng, "programs.stale_readme", wrong=wrong)
    transcript = TranscriptBuilder(
        rng, request, {**right, "README.md": text.replace(true, wrong), check.path: check.text}
    )
    transcript.read("README.md")
    if wrong.endswith(".py") and rng.random() < 0.5:
        transcript.list_files()
    else:
        transcript.grep("def")
    transcript.edit_file("README.md", text)
    return transcript.finish("stale-readme", choose(rng, f"README.md has {true} now.", f"It is {true}."))


def add_assertion(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that adds a case to a check."""
    program = draw_generated_program(rng, pool)
    cases = plain_cases(program.top, program, rng, 3)
    if not cases or len(cases) < 2:
        return None
    file = program.file_of(program.top.name)
    path = choose(rng, "check.py", "test_all.py", "selftest.py", f"test_{invent_name(rng, pool)}.py")
    name = program.top.name
    before = f"from {file.removesuffix('.py')} import {name}\n\nassert {cases[0].call} == {cases[0].want}\n"
    after = f"{before}assert {cases[1].call} == {cases[1].want}\n"
    request = draw_phrase(rng, "programs.add_assertion_request", path=path, cases=cases)
    transcript = TranscriptBuilder(rng, request, {**program.files(), path: before})
    transcript.read(path)
    transcript.edit_file(path, after)
    transcript.run(f"python3 {path}")
    return transcript.finish(
        "assertion", choose(rng, f"{path} has one assert more.", f"Added it to {path}; it passes.")
    )


# ------------------------------------------------------------------------------------------- questions


def call_result(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that asks for the result of a call."""
    program = draw_generated_program(rng, pool)
    cases = plain_cases(program.top, program, rng, 2)
    if not cases:
        return None
    case, file = cases[0], program.file_of(program.top.name)
    where = choose(rng, f" in {file}", "", "")
    request = choose(rng, f"Tell me what {case.call} returns{where}.", f"Run {case.call}{where}. What comes out?")
    check = draw_check(program, cases, rng)
    transcript = TranscriptBuilder(rng, request, {**program.files(), check.path: check.text})
    transcript.discover(file, program.top.name)
    quote = '"' if "'" in case.call else "'"
    inside = f"from {file.removesuffix('.py')} import {program.top.name}; print({case.call})"
    if quote in inside:
        return None
    transcript.run(f"python3 -c {quote}{inside}{quote}")
    shown = case.want.strip("'") if program.top.result == "str" else case.want
    return transcript.finish("result", choose(rng, f"{shown}", f"It returns {shown}.", f"{case.call} is {shown}."))


def already_correct(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise whose request doubts correct code."""
    program = draw_generated_program(rng, pool)
    cases = plain_cases(program.top, program, rng, 3)
    if not cases:
        return None
    check = draw_check(program, cases[:2], rng)
    name, file, case = program.top.name, program.file_of(program.top.name), cases[0]
    where = choose(rng, f" ({file})", "")
    request = draw_phrase(rng, "programs.already_correct_request", name=name, where=where, case=case, check=check)
    transcript = TranscriptBuilder(rng, request, {**program.files(), check.path: check.text})
    if check.path not in transcript.known_paths or rng.random() < 0.3:
        transcript.read(file, word=name)
    transcript.run(check.command)
    return transcript.finish(
        "fine", choose(rng, f"{name} is fine.", f"All is right with {name}; {check.path} passes.", "Nothing to mend.")
    )


def locate_fault(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that asks which line or function is wrong, without a repair."""
    wrong = draw_faulty_program(rng, pool, rng.choice(("one", "pair", "chain")))
    if wrong is None:
        return None
    before, after = wrong.repo[wrong.file].split("\n"), wrong.right[wrong.file].split("\n")
    if len(before) != len(after):
        return None
    at = next(number for number, (old, new) in enumerate(zip(before, after, strict=True), 1) if old != new)
    case, name = wrong.cases[0], wrong.faulty.name
    got = "raises" if case.raises else f"is {case.got}"
    if len(wrong.program.functions) > 1 and rng.random() < 0.5:
        request = draw_phrase(rng, "programs.locate_function", wrong=wrong)
        say = choose(rng, name, f"It is {name}.", f"{name} has a mistake.")
    else:
        request = draw_phrase(rng, "programs.locate_line", wrong=wrong, case=case, got=got)
        say = choose(rng, f"{at}", f"Line {at}.", f"Line {at} is wrong.")
    transcript = TranscriptBuilder(rng, request, wrong.repo)
    transcript.read(wrong.file)
    return transcript.finish("blame", say)


PROGRAM_EXERCISES: tuple[tuple[DrawExercise, int], ...] = (
    (repair, 30),
    (implement, 9),
    (extract_parameter, 4),
    (stale_documentation, 6),
    (add_assertion, 3),
    (call_result, 4),
    (already_correct, 5),
    (locate_fault, 5),
)
