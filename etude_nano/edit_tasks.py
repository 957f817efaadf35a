"""Tasks in which working code is to be changed: one more parameter, another name, today's way, true words, more tests.

What must stay as it is, stays: the hidden calls hold before and after, and where only words are wrong the code may not
change at all.
"""

import re
from random import Random

from etude_nano import word_lists as words
from etude_nano.program import Program, draw_cases, draw_check, draw_program, draw_user, plain_cases, spread
from etude_nano.repair_tasks import calls_of, pick
from etude_nano.task_writer import Draft, Plan
from etude_nano.templates import Function, Split, changes, draw_function, faulty_leaves, leaves

OLD_WAYS = ("fstring", "none", "type")
TODAY = {"fstring": "f-strings", "none": "is", "type": "isinstance"}


def parameter(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """One more parameter, with a default under which nothing changes."""
    taken: set[str] = set()
    functions = [draw_function(chance.choice(changes(split, "add")), split, chance, taken)]
    grown = functions[0]
    if difficulty > 1:
        functions.insert(0, draw_function(chance.choice(leaves(split)), split, chance, taken))
    program = Program(spread(functions, 2 if difficulty == 3 else 1, chance))
    before = {grown.name: grown.before}
    right, old = program.load(), program.load(before)
    cases = draw_cases(grown, right, old, chance, revealing=3, plain=2)
    plain = [case for case in cases or () if not case.reveals]
    if not cases or not plain:
        return None
    check = draw_check(program, [plain[0], cases[0]], chance)
    file = program.file_of(grown.name)
    request = grown.wish if difficulty > 1 else f"{file}: {grown.wish}"
    files, broken = program.files(), program.files(before)
    say = pick(chance, f"{grown.name} has the parameter now.", f"Added the parameter to {grown.name} in {file}.")
    return Draft(
        family="parameter",
        category="feature",
        register="imperative",
        request=request,
        repo={**broken, check.path: check.text},
        solved={file: files[file]},
        calls=calls_of(cases, program),
        wants={"calls": [case.want for case in cases]},
        plan=Plan((file,), check.command, f"{say} {check.path} passes.", "", difficulty == 1),
        sites=(grown.shape,),
        protected=(check.path,),
    )


def rename(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """A function, or at difficulty 5 two, under another name everywhere."""
    count = {1: 2, 2: 2, 3: 2, 4: 3, 5: 3}[difficulty]
    modules = {1: 1, 2: 1, 3: 2, 4: 3, 5: 2}[difficulty]
    program = draw_program(chance.choice(leaves(split)), split, chance, modules, count)
    if difficulty == 4:  # the deepest is used twice
        deepest, middle, _ = program.functions
        taken = {each.name for each in program.functions}
        program = Program(
            spread([deepest, middle, draw_user(deepest, split, chance, taken)], 3, chance), program.dotted
        )
    victims = program.functions[: 2 if difficulty == 5 else 1]
    cases = plain_cases(program.top, program, chance, 4)
    if not cases:
        return None
    renames = {each.name: _other_name(each.name, chance) for each in victims}
    if len({*renames.values(), *(each.name for each in program.functions)}) < len(renames) + len(program.functions):
        return None
    repo = program.files()
    solved = {path: _renamed(text, renames) for path, text in repo.items()}
    check = draw_check(program, cases[:2], chance)
    wishes = " and ".join(f"{old} to {new}" for old, new in renames.items())
    where = f" in {program.file_of(victims[0].name)}" if difficulty == 1 else ""
    request = pick(chance, f"Rename {wishes}{where}.", f"Please rename {wishes}{where}, everywhere.")
    inner = [
        (program.file_of(each.name).removesuffix(".py"), renames[each.name], case)
        for each in victims
        for case in plain_cases(each, program, chance, 2) or ()
    ]
    changed = {path: text for path, text in solved.items() if text != repo[path]}
    return Draft(
        family="rename",
        category="refactor",
        register="imperative",
        request=request,
        repo={**repo, check.path: check.text},
        solved=changed,
        calls=(*calls_of(cases, program), *((module, name, case.arguments) for module, name, case in inner)),
        wants={"calls": [case.want for case in [*cases, *(case for _, _, case in inner)]], "gone": list(renames)},
        plan=Plan(
            tuple(changed),
            check.command,
            f"Renamed {wishes} in {' and '.join(changed)}. {check.path} passes.",
            "",
            difficulty == 1,
            tuple(renames.items()),
        ),
        sites=(f"rename/{program.functions[0].shape}",),
        protected=(check.path,),
    )


def _other_name(name: str, chance: Random) -> str:
    verb = chance.choice(("get", "find", "make", "compute", "take", "build", "work_out", "derive"))
    return f"{verb}_{chance.choice((name.split('_')[-1], name.split('_')[0], chance.choice(words.LABELS)))}"


def _renamed(text: str, renames: dict[str, str]) -> str:
    for old, new in renames.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def migrate(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """An old way of writing to today's; in two places at difficulty 5."""
    way = chance.choice(OLD_WAYS if difficulty < 5 else ("fstring",))
    taken: set[str] = set()
    old = [
        draw_function(chance.choice(changes(split, way)), split, chance, taken) for _ in range(1 + (difficulty == 5))
    ]
    others = {1: 0, 2: 1, 3: 1, 4: 2, 5: 0}[difficulty]
    functions = old + [draw_function(chance.choice(leaves(split)), split, chance, taken) for _ in range(others)]
    chance.shuffle(functions)
    program = Program(spread(functions, {1: 1, 2: 1, 3: 2, 4: 3, 5: 2}[difficulty], chance))
    repo, right = program.files({each.name: each.before for each in old}), program.files()
    cases = [case for each in old for case in plain_cases(each, program, chance, 4) or ()]
    if len(cases) < 2 * len(old):
        return None
    check = draw_check(program, [cases[0], cases[-1]], chance)
    changed = {path: text for path, text in right.items() if text != repo[path]}
    file, what, today = next(iter(changed)), old[0].wish, TODAY[way]
    if difficulty == 1:
        request = pick(chance, f"{file} still has {what}. Use {today}.", f"Use {today} in {file}, not {what}.")
    else:
        request = pick(
            chance, f"Use {today} in place of {what}.", f"We write {today} now, not {what}. Change what is left."
        )
    names = " and ".join(each.name for each in old)
    return Draft(
        family=f"migrate-{way}",
        category="migration",
        register="imperative",
        request=request,
        repo={**repo, check.path: check.text},
        solved=changed,
        calls=calls_of(cases, program),
        wants={"calls": [case.want for case in cases], "old_ways": way},
        plan=Plan(
            tuple(changed) if difficulty == 1 else tuple(repo),
            check.command,
            f"{names} {'uses' if len(old) == 1 else 'use'} {today} now. {check.path} passes.",
            "",
            difficulty == 1,
        ),
        sites=tuple(each.shape for each in old),
        protected=(check.path,),
    )


def docstring(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """A number in a docstring is not the one in the code; the code is right."""
    program = draw_program(chance.choice(leaves(split)), split, chance, max(1, difficulty - 1), 2)
    known = program.functions if split == "train" else program.functions[:1]
    telling = [each for each in known if _numbers(each)]
    if not telling:
        return None
    function = chance.choice(telling)
    true = chance.choice(_numbers(function))
    false = str(int(true) + chance.choice((-1, 1, 2, 5, 10)))
    if false in function.right or int(false) < 0:
        return None
    doc = function.doc
    stale = re.sub(rf"\b{true}\b", false, doc, count=1)
    cases = plain_cases(program.top, program, chance, 2)
    if not cases:
        return None
    repo, right = program.files({function.name: function.right.replace(doc, stale)}), program.files()
    file = program.file_of(function.name)
    check = draw_check(program, cases[:2], chance)
    if difficulty == 1:
        request = pick(
            chance,
            f"The docstring of {function.name} in {file} is out of date. Correct it, not the code.",
            f"{file}: the docstring of {function.name} says {false}. The code is right, the words are not.",
        )
    elif difficulty == 2:
        request = pick(
            chance,
            "A docstring names a wrong number. The code is right.",
            f"Where is {false} from? Not the code. Correct the docstring.",
        )
    else:
        request = pick(
            chance,
            "One docstring is not true any more. Correct it, leave the code.",
            "Bring the docstrings up to date. Do not touch code.",
        )
    return Draft(
        family="docstring",
        category="docs",
        register="symptom" if false in request else "imperative",
        request=request,
        repo={**repo, check.path: check.text},
        solved={file: right[file]},
        calls=(),
        wants={"code": right, "texts": [[file, [_doc_pattern(doc, true)], [_doc_pattern(stale, false)]]]},
        plan=Plan(
            (file,) if difficulty == 1 else tuple(reversed(list(right))),
            "",
            f"The docstring of {function.name} says {true} now, as the code does.",
            f"The code of {function.name} has {true}, the docstring {false}.",
            difficulty == 1,
            find=false,
        ),
        sites=(f"docstring/{function.shape}",),
        protected=(check.path,),
    )


def _numbers(function: Function) -> list[str]:
    """Numbers that stand in the docstring and in the code."""
    code = function.right.replace(function.doc, "")
    return [number for number in re.findall(r"(?<![\w-])\d+(?!\w)", function.doc) if re.search(rf"\b{number}\b", code)]


def _doc_pattern(doc: str, number: str) -> str:
    """The number in its place: the words beside it may not change."""
    at = re.search(rf"\b{number}\b", doc)
    assert at is not None
    before = doc[: at.start()].split()[-1:] or [""]
    return rf'{re.escape(before[0])}\s*"?{number}\b' if before[0] else rf'"""{number}\b'


def readme(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """A README that speaks of a function, or a file, that has another name by now."""
    program = draw_program(chance.choice(leaves(split)), split, chance, max(1, difficulty - 1), max(1, difficulty - 1))
    top, file = program.top, program.file_of(program.top.name)
    cases = plain_cases(top, program, chance, 2)
    if not cases:
        return None
    stale_file = chance.random() < 0.5
    true = file if stale_file else top.name
    others = [name for name in words.MODULES if f"{name}.py" not in program.files()]
    false = f"{chance.choice(others)}.py" if stale_file else _other_name(top.name, chance)
    title, case = chance.choice(words.LABELS), cases[0]
    text = pick(
        chance,
        f"# {title}\n\nCall {top.name} from {file}:\n\n    {case.call}\n",
        f"# {title}\n\n{file} has {top.name}. Example:\n\n    {case.call} == {case.want}\n",
    )
    stale = re.sub(rf"\b{re.escape(true)}", false, text)
    check = draw_check(program, cases[:2], chance)
    repo = {**program.files(), "README.md": stale, check.path: check.text}
    if difficulty == 1:
        request = f"README.md speaks of {false}, which is not there. Correct it."
    else:
        request = pick(chance, "The README is out of date. Correct it.", f"There is no {false}. Correct the docs.")
    others_same = {path: text for path, text in repo.items() if path.endswith(".py")}
    return Draft(
        family="readme",
        category="docs",
        register="symptom" if false in request else "imperative",
        request=request,
        repo=repo,
        solved={"README.md": text},
        calls=(),
        wants={"code": others_same, "texts": [["README.md", [rf"\b{re.escape(true)}"], [rf"\b{re.escape(false)}"]]]},
        plan=Plan(
            ("README.md",),
            "grep -n def *.py",
            f"README.md says {true} now.",
            f"It is called {true}.",
            True,
            ((false, true),),
        ),
        sites=(f"readme/{program.functions[0].shape}",),
        protected=(check.path,),
    )


def testing(chance: Random, split: Split, difficulty: int) -> Draft | None:
    """A check that misses a fault: add the assert that finds it."""
    program = draw_program(chance.choice(faulty_leaves(split)), split, chance, max(1, difficulty - 1), difficulty - 1)
    guilty = program.functions[0]
    if not guilty.faults:
        return None
    fault = chance.choice(guilty.faults)
    right, wrong = program.load(), program.load({guilty.name: fault.text})
    cases = draw_cases(guilty, right, wrong, chance, revealing=2, plain=2)
    plain = [case for case in cases or () if not case.reveals]
    if not cases or not plain:
        return None
    file, module = program.file_of(guilty.name), program.file_of(guilty.name).removesuffix(".py")
    start = f"from {module} import {guilty.name}\n\nassert {plain[0].call} == {plain[0].want}\n"
    text, full = start, f"{start}assert {cases[0].call} == {cases[0].want}\n"
    files = program.files()
    mutant = program.files({guilty.name: fault.text})
    line = next(
        new.strip() for new, old in zip(mutant[file].split("\n"), files[file].split("\n"), strict=True) if new != old
    )
    if difficulty == 2:
        request = pick(
            chance,
            f"check.py passes even with `{line}` in {file}. Add an assert that finds this.",
            f"Add an assert to check.py that fails when {file} has `{line}`.",
        )
    else:
        request = pick(
            chance,
            f"With `{line}` check.py would still pass. It should not.",
            f"check.py would not see `{line}`. Test that too.",
        )
    same = {file: files[file] + "# the same\n"}
    return Draft(
        family="testing",
        category="testing",
        register="imperative",
        request=request,
        repo={**files, "check.py": text},
        solved={"check.py": full},
        calls=(),
        wants={
            "code": files,
            "variants": {"script": "check.py", "programs": [[{}, True], [same, True], [{file: mutant[file]}, False]]},
        },
        plan=Plan(
            ("check.py", file),
            "python3 check.py",
            f"check.py has an assert for {cases[0].call} now, and passes.",
            f"With that line {cases[0].call} would give {cases[0].got}, not {cases[0].want}.",
            True,
        ),
        sites=(f"testing/{guilty.shape}/{fault.id}",),
        protected=tuple(files),
    )
