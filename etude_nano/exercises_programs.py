"""Exercises over sketched programs, which can be run: what a docstring says, what code does, and what a check shows.

The programs come from `sketches.py`, the words of the requests from here; the tasks of the nano source have others.
"""

import re
from dataclasses import dataclass
from random import Random

from etude_nano.code_snippets import Pool, invented, module_name
from etude_nano.demonstrator import Edit, edits_between
from etude_nano.exercises import Desk, Draw, Exercise, pick
from etude_nano.function_templates import draw_caller, draw_sketch
from etude_nano.program import Case, Check, Program, draw_cases, draw_check, plain_cases
from etude_nano.templates import Fault, Function

_SIGN = re.compile(r"[<>=!]=|(?<=\s)[<>+*-](?=\s)|//")


@dataclass(frozen=True)
class Wrong:
    """A program in which one function is wrong, and the cases that show it."""

    program: Program
    guilty: Function
    fault: Fault
    cases: list[Case]
    check: Check
    asked: Function  # the one that the request speaks of

    @property
    def file(self) -> str:
        return self.program.file_of(self.guilty.name)

    @property
    def right(self) -> dict[str, str]:
        return self.program.files()

    @property
    def repo(self) -> dict[str, str]:
        return {**self.program.files({self.guilty.name: self.fault.text}), self.check.path: self.check.text}


def draw_words(chance: Random, pool: Pool) -> dict[str, str]:
    """Names for the slots of a sketch; none part of the time, then they are those of the books."""
    if chance.random() < 0.35:
        return {}
    names = list(dict.fromkeys(invented(chance, pool) for _ in range(9)))
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


def draw_sketched(chance: Random, pool: Pool, layout: str = "") -> Program:
    """A program of one function, of two that know nothing of each other, or of one that uses another."""
    layout = layout or chance.choice(("one", "one", "pair", "pair", "chain", "chain", "chain2"))
    taken: set[str] = set()
    first = draw_sketch(chance, taken, draw_words(chance, pool))
    if layout == "one":
        return Program(((module_name(chance, pool, taken), (first,)),))
    if layout == "pair":
        both = [first, draw_sketch(chance, taken, draw_words(chance, pool))]
        chance.shuffle(both)
        return Program(((module_name(chance, pool, taken), tuple(both)),))
    user = draw_caller(first, chance, taken, {})
    one = module_name(chance, pool, taken)
    if layout == "chain":
        return Program(((one, (first, user)),))
    return Program(((one, (first,)), (module_name(chance, pool, {*taken, one}), (user,))), dotted=chance.random() < 0.3)


def draw_wrong(chance: Random, pool: Pool, layout: str = "") -> Wrong | None:
    program = draw_sketched(chance, pool, layout)
    guilty = chance.choice(program.functions)
    if not guilty.faults:
        return None
    fault = chance.choice(guilty.faults)
    uses = [each for each in program.functions if f"@{guilty.name}(" in each.right]
    asked = uses[0] if uses and chance.random() < 0.5 else guilty
    right, wrong = program.load(), program.load({guilty.name: fault.text})
    cases = draw_cases(asked, right, wrong, chance, revealing=2, plain=1)
    if cases is None or any(len(case.call) > 70 for case in cases):
        return None
    visible = [*[case for case in cases if not case.reveals][:1], cases[0]]
    return Wrong(program, guilty, fault, cases, draw_check(program, visible, chance), asked)


def _read_down(desk: Desk, wrong: Wrong) -> None:
    """Come from what the request speaks of down to what is wrong."""
    top = wrong.program.file_of(wrong.asked.name)
    if wrong.asked.name not in desk.seen and wrong.check.path in desk.known and wrong.file not in desk.known:
        desk.read(wrong.check.path)  # it says what is called, and where that is
        desk.known |= {top}
    if wrong.file in desk.known and desk.chance.random() < 0.7:
        desk.read(wrong.file)
        return
    desk.find(top, wrong.asked.name)
    if top == wrong.file:
        desk.read(top)
    elif top in desk.known and wrong.file in desk.known:
        desk.read(top, wrong.file)
    else:
        desk.read(top)
        desk.known |= {wrong.file}  # its import says so
        desk.read(wrong.file)


# ------------------------------------------------------------------------------------------- fixing


def mend(chance: Random, pool: Pool) -> Exercise | None:
    """Something is wrong: told outright, by what it does, by its docstring, or by a check."""
    wrong = draw_wrong(chance, pool)
    if wrong is None:
        return None
    case, file, name = wrong.cases[0], wrong.file, wrong.guilty.name
    got = f"raises {case.got[7:].partition(':')[0]}" if case.raises else f"is {case.got}"
    way = chance.choice(("told", "call", "call", "call", "doc", "check", "log"))
    if way == "told" and (not wrong.fault.wrong.strip() or "\n" in wrong.fault.wrong):
        way = "call"
    if way == "told":
        was, now = (part.replace("@", "").strip() for part in (wrong.fault.wrong, wrong.fault.right))
        request = pick(
            chance,
            f"{name} in {file} has `{was}` where `{now or 'nothing'}` should be.",
            f"`{was}` is wrong in {name}. Put `{now}` there.",
            f"{file}: not {was} but {now} in {name}.",
        )
    elif way == "call":
        where = pick(chance, f" ({file})", f" {file}", "", "")
        request = pick(
            chance,
            f"Why is {case.call} not {case.want}? It {got}.{where}",
            f"Expected {case.want} from {case.call}, found {case.got}.{where}",
            f"{case.call} -> {case.got}, should be {case.want}{where}",
            f"We need {case.call} == {case.want}. Now it {got}.{where}",
            f"Mend {wrong.asked.name}{where}: {case.call} {got} instead of {case.want}",
        )
    elif way == "doc":
        request = pick(
            chance,
            f"{name} in {file} does not do what its docstring says. Mend it.",
            f"The code of {name} is not what its docstring promises.",
            f"Make {name} ({file}) do what it says.",
        )
    elif way == "check":
        request = pick(
            chance, f"{wrong.check.command} does not pass. Mend the code.", f"Get {wrong.check.path} to pass."
        )
    else:
        request = pick(chance, f"{wrong.check.path} says: {wrong.check.log}", f"{wrong.check.log} ({wrong.check.path})")
    desk = Desk(chance, request, wrong.repo)
    if wrong.check.path in desk.known and (way == "check" or chance.random() < 0.3):
        desk.run(wrong.check.command, exits=1)
    _read_down(desk, wrong)
    after = wrong.right[file]
    slipped = desk.slip and _slip(desk, wrong, after)
    if not slipped:
        desk.change(file, after)
    if slipped or chance.random() < 0.8:
        desk.run(wrong.check.command)
    return desk.done(f"mend-{way}", _said(chance, wrong))


def _slip(desk: Desk, wrong: Wrong, after: str) -> bool:
    """A change that does not help, which the check shows; then the right one."""
    (edit, *more) = edits_between(wrong.file, desk.repo[wrong.file], after)
    signs = list(_SIGN.finditer(edit.new))
    if more or not signs or desk.chance.random() < 0.4:
        return False
    sign = desk.chance.choice(signs)
    others = [each for each in ("<", ">", "<=", ">=", "==", "+", "-", "*") if each != sign.group()]
    bad = edit.new[: sign.start()] + desk.chance.choice(others) + edit.new[sign.end() :]
    if bad in (edit.old, edit.new) or wrong.program.files() == {}:
        return False
    desk.slip = False
    desk.replace(Edit(edit.path, edit.old, bad), mistake=True)
    desk.run(wrong.check.command, exits=1)
    desk.replace(Edit(edit.path, bad, edit.new))
    desk.repo[wrong.file] = after
    return True


def _said(chance: Random, wrong: Wrong) -> str:
    was, now = (part.replace("@", "").strip() for part in (wrong.fault.wrong, wrong.fault.right))
    name, file = wrong.guilty.name, wrong.file
    return pick(
        chance,
        f"{name} has `{now or 'nothing'}` in place of `{was or 'nothing'}` now.",
        f"It was {name} in {file}: `{was or 'nothing'}` should have been `{now or 'nothing'}`.",
        f"Mended {name}.",
        f"{file} is right now; {wrong.check.path} passes." if chance.random() < 0.5 else f"Mended {file}.",
    )


def write(chance: Random, pool: Pool) -> Exercise | None:
    """A function of which only the docstring is there."""
    program = draw_sketched(chance, pool)
    function = chance.choice(program.functions)
    right = program.load()
    cases = draw_cases(function, right, right, chance, revealing=0, plain=3)
    if not cases or any(len(case.call) > 70 for case in cases):
        return None
    head, end, _ = function.right.partition('"""\n')
    stub = head + end + pick(chance, "    raise NotImplementedError\n", "    pass\n", "    ...\n")
    file = program.file_of(function.name)
    check = draw_check(program, cases[:2], chance)
    repo = {**program.files({function.name: stub}), check.path: check.text}
    where = pick(chance, f" in {file}", f" ({file})", "")
    request = pick(
        chance,
        f"{function.name}{where} has no code yet. For example {cases[0].call} is {cases[0].want}.",
        f"Write the code of {function.name}{where}.",
        f"Fill in {function.name}{where}; {cases[0].call} should be {cases[0].want}.",
        f"{check.path} needs {function.name}{where}, which is not done.",
    )
    desk = Desk(chance, request, repo)
    desk.read(file, word=function.name)
    desk.change(file, program.files()[file])
    if chance.random() < 0.8:
        desk.run(check.command)
    return desk.done(
        "write", pick(chance, f"{function.name} has its code.", f"Wrote {function.name} in {file}.", "Written.")
    )


def parameter(chance: Random, pool: Pool) -> Exercise | None:
    """A number in the code becomes a parameter with that default."""
    program = draw_sketched(chance, pool, "one")
    (function,) = program.functions
    head, doc, body = re.split(r'^(    """.*?"""\n)', function.right.replace("@", ""), maxsplit=1, flags=re.MULTILINE)
    numbers = re.findall(r"(?<![\w\"-])\d+(?![\w\"])", body)
    single = [each for each in numbers if numbers.count(each) == 1]
    if not single or "=" in head:
        return None
    value, name = chance.choice(single), invented(chance, pool)
    if name in function.right:
        return None
    grown = head.replace("):", f", {name}={value}):") + doc + re.sub(rf"(?<![\w\"-]){value}(?![\w\"])", name, body)
    file = next(iter(program.files()))
    cases = plain_cases(function, program, chance, 2)
    if not cases:
        return None
    check = draw_check(program, cases, chance)
    where = pick(chance, f" in {file}", "")
    request = pick(
        chance,
        f"Turn the {value} of {function.name}{where} into a parameter {name}, with {value} as default.",
        f"{function.name}{where} has {value} built in. Let callers pass it as {name}={value}.",
        f"Let {name} be a parameter of {function.name}{where} in place of {value}; it stays {value} unless given.",
    )
    desk = Desk(chance, request, {file: program.files()[file], check.path: check.text})
    desk.read(file, word=function.name)
    desk.change(file, grown)
    if chance.random() < 0.6:
        desk.run(check.command)
    return desk.done(
        "parameter", pick(chance, f"{function.name} takes {name} now.", f"{name} is a parameter, {value} by default.")
    )


def stale(chance: Random, pool: Pool) -> Exercise | None:
    """A docstring with a number, or a README with a name, that is not what the code has."""
    readme = chance.random() < 0.5
    program = draw_sketched(chance, pool, "one" if readme else "")
    function = chance.choice(program.functions)
    file = program.file_of(function.name)
    right = program.files()
    cases = plain_cases(program.top, program, chance, 2)
    if not cases:
        return None
    check = draw_check(program, cases, chance)
    if not readme:
        code = function.right.replace(function.doc, "")
        shared = [each for each in re.findall(r"\b\d+\b", function.doc) if re.search(rf"\b{each}\b", code)]
        if not shared or file not in right or right[file].count(function.doc) != 1:
            return None
        true = chance.choice(shared)
        false = str(int(true) + chance.choice((1, 2, 3, 7)))
        old = right[file].replace(function.doc, re.sub(rf"\b{true}\b", false, function.doc, count=1))
        where = pick(chance, f" in {file}", "")
        request = pick(
            chance,
            f"The words under {function.name}{where} say {false}, the code has another number. Trust the code.",
            f"{function.name}{where}: its docstring has an old number.",
            f"Compare docstring and code of {function.name}{where}; the docstring is old.",
        )
        desk = Desk(chance, request, {**right, file: old, check.path: check.text})
        desk.read(file, word=function.name)
        desk.change(file, right[file])
        return desk.done("stale-doc", pick(chance, f"The docstring has {true} now.", f"{true}, as in the code."))
    wrong = f"{module_name(chance, pool)}.py" if chance.random() < 0.5 else invented(chance, pool)
    true = file if wrong.endswith(".py") else function.name
    title = chance.choice(pool.words)
    text = pick(
        chance,
        f"# {title}\n\nUse {function.name} of {file}.\n",
        f"# {title}\n\n- {file}: has {function.name}\n",
        f"{title}\n\nSee {file} for {function.name}, which does the work.\n",
    )
    if wrong in text or text.count(true) != 1:
        return None
    request = pick(
        chance,
        f"README.md names {wrong}. What is it called really? Put that in.",
        f"README.md: {wrong} is not its name any more.",
    )
    desk = Desk(chance, request, {**right, "README.md": text.replace(true, wrong), check.path: check.text})
    desk.read("README.md")
    if wrong.endswith(".py") and chance.random() < 0.5:
        desk.list_files()
    else:
        desk.grep("def")
    desk.change("README.md", text)
    return desk.done("stale-readme", pick(chance, f"README.md has {true} now.", f"It is {true}."))


def assertion(chance: Random, pool: Pool) -> Exercise | None:
    """One more case for a check."""
    program = draw_sketched(chance, pool)
    cases = plain_cases(program.top, program, chance, 3)
    if not cases or len(cases) < 2:
        return None
    file = program.file_of(program.top.name)
    path = pick(chance, "check.py", "test_all.py", "selftest.py", f"test_{invented(chance, pool)}.py")
    name = program.top.name
    before = f"from {file.removesuffix('.py')} import {name}\n\nassert {cases[0].call} == {cases[0].want}\n"
    after = f"{before}assert {cases[1].call} == {cases[1].want}\n"
    request = pick(
        chance,
        f"{path} should also see to it that {cases[1].call} is {cases[1].want}.",
        f"Add {cases[1].call} == {cases[1].want} to {path}.",
        f"Assert in {path} that {cases[1].call} gives {cases[1].want}.",
    )
    desk = Desk(chance, request, {**program.files(), path: before})
    desk.read(path)
    desk.change(path, after)
    desk.run(f"python3 {path}")
    return desk.done("assertion", pick(chance, f"{path} has one assert more.", f"Added it to {path}; it passes."))


# ------------------------------------------------------------------------------------------- looking only


def result(chance: Random, pool: Pool) -> Exercise | None:
    """What a call gives: run it and say."""
    program = draw_sketched(chance, pool)
    cases = plain_cases(program.top, program, chance, 2)
    if not cases:
        return None
    case, file = cases[0], program.file_of(program.top.name)
    where = pick(chance, f" in {file}", "", "")
    request = pick(chance, f"Tell me what {case.call} returns{where}.", f"Run {case.call}{where}. What comes out?")
    check = draw_check(program, cases, chance)
    desk = Desk(chance, request, {**program.files(), check.path: check.text})
    desk.find(file, program.top.name)
    quote = '"' if "'" in case.call else "'"
    inside = f"from {file.removesuffix('.py')} import {program.top.name}; print({case.call})"
    if quote in inside:
        return None
    desk.run(f"python3 -c {quote}{inside}{quote}")
    shown = case.want.strip("'") if program.top.result == "str" else case.want
    return desk.done("result", pick(chance, f"{shown}", f"It returns {shown}.", f"{case.call} is {shown}."))


def fine(chance: Random, pool: Pool) -> Exercise | None:
    """Nothing is wrong, whatever somebody thinks."""
    program = draw_sketched(chance, pool)
    cases = plain_cases(program.top, program, chance, 3)
    if not cases:
        return None
    check = draw_check(program, cases[:2], chance)
    name, file, case = program.top.name, program.file_of(program.top.name), cases[0]
    where = pick(chance, f" ({file})", "")
    request = pick(
        chance,
        f"I am not sure of {name}{where}. Look at it, and mend it only if you must.",
        f"{case.call} is {case.want}. Should it be?{where}",
        f"Does {check.path} pass? If not, mend the code.",
        f"Check {name}{where} against its docstring. Mend what is wrong, if anything.",
    )
    desk = Desk(chance, request, {**program.files(), check.path: check.text})
    if check.path not in desk.known or chance.random() < 0.3:
        desk.read(file, word=name)
    desk.run(check.command)
    return desk.done(
        "fine", pick(chance, f"{name} is fine.", f"All is right with {name}; {check.path} passes.", "Nothing to mend.")
    )


def blame(chance: Random, pool: Pool) -> Exercise | None:
    """Which line, or which function, is wrong? It is to stay."""
    wrong = draw_wrong(chance, pool, chance.choice(("one", "pair", "chain")))
    if wrong is None:
        return None
    before, after = wrong.repo[wrong.file].split("\n"), wrong.right[wrong.file].split("\n")
    if len(before) != len(after):
        return None
    at = next(number for number, (old, new) in enumerate(zip(before, after, strict=True), 1) if old != new)
    case, name = wrong.cases[0], wrong.guilty.name
    got = "raises" if case.raises else f"is {case.got}"
    if len(wrong.program.functions) > 1 and chance.random() < 0.5:
        request = pick(
            chance,
            f"Something in {wrong.file} is not what its docstring says. Only name the function.",
            f"{wrong.file} has a function with a mistake. What is its name? Leave it.",
        )
        say = pick(chance, name, f"It is {name}.", f"{name} has a mistake.")
    else:
        request = pick(
            chance,
            f"Find the line in {wrong.file} that makes {case.call} wrong: it {got}, should be {case.want}. Leave it.",
            f"{wrong.file}: one line is not right. Its number? Do not change it.",
        )
        say = pick(chance, f"{at}", f"Line {at}.", f"Line {at} is wrong.")
    desk = Desk(chance, request, wrong.repo)
    desk.read(wrong.file)
    return desk.done("blame", say)


PROGRAMS: tuple[tuple[Draw, int], ...] = (
    (mend, 30),
    (write, 9),
    (parameter, 4),
    (stale, 6),
    (assertion, 3),
    (result, 4),
    (fine, 5),
    (blame, 5),
)
