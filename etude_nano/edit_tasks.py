"""Tasks that change working code: a new parameter, a rename, a syntax migration, corrected docs, more tests.

The verifier also checks that other behaviour is unchanged: the hidden calls hold before and after, and where only the
documentation is wrong the code may not change at all.
"""

import re
from dataclasses import replace
from random import Random

from etude.tasks.checks import lines_check
from etude_nano import word_lists as words
from etude_nano.function_templates import draw_caller, draw_leaf
from etude_nano.phrases import choose, draw_phrase
from etude_nano.program import (
    Program,
    distribute_functions,
    draw_cases,
    draw_check,
    draw_program,
    plain_cases,
)
from etude_nano.repair_tasks import hidden_calls, verifier_calls
from etude_nano.sides import SIDES, Split, side_of
from etude_nano.task_writer import (
    DemonstrationPlan,
    NanoTaskDraft,
    calls_check,
    code_check,
    mutants_check,
    names_check,
    patterns_check,
    text_check,
)
from etude_nano.templates import NanoFunction, change_templates, draw_function

MIGRATIONS = ("fstring", "none", "type")
LEGACY_PATTERNS = {"fstring": "text-formatting", "none": "none-comparisons", "type": "type-comparisons"}
NUMBER_END = r"(?![%\w]|[.,/^*-]\d)"  # 7.25 does not say 7
MODERN_SYNTAX = {"fstring": "f-strings", "none": "is", "type": "isinstance"}


def parameter(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task that asks to make a number of the code a parameter whose default keeps the old behaviour."""
    taken: set[str] = set()
    old = draw_leaf(split, rng, taken)
    found = _extracted_parameter(old, rng)
    if found is None or side_of(found[0].right) != SIDES[split]:
        return None
    extended, name, value = found
    functions = [extended] if difficulty == 1 else [draw_leaf(split, rng, taken), extended]
    program = Program(distribute_functions(functions, 2 if difficulty == 3 else 1, rng))
    before = {extended.name: old.right}
    cases = draw_cases(extended, program.load(), program.load(before), rng, revealing=3, plain=2)
    plain = [case for case in cases or () if not case.reveals]
    if not cases or not plain:
        return None
    check = draw_check(program, [plain[0], cases[0]], rng)
    file = program.file_of(extended.name)
    request = draw_phrase(rng, "edit_tasks.parameter_request", function=extended.name, name=name, value=value)
    files, broken = program.files(), program.files(before)
    say = choose(rng, f"{extended.name} has the parameter now.", f"Added the parameter to {extended.name} in {file}.")
    return NanoTaskDraft(
        family="parameter",
        category="feature",
        register="imperative",
        request=request if difficulty > 1 else f"{file}: {request}",
        repo={**broken, check.path: check.text},
        solution={file: files[file]},
        checks=(calls_check((*verifier_calls(cases, program), *hidden_calls(program, before))),),
        plan=DemonstrationPlan((file,), check.command, f"{say} {check.path} passes.", "", difficulty == 1),
        sites=(f"parameter/{extended.template}",),
        protected=(check.path,),
    )


def _extracted_parameter(function: NanoFunction, rng: Random) -> tuple[NanoFunction, str, str] | None:
    """Return a function with a number of its body as a new last parameter, and the parameter's name and default."""
    head, doc, body = re.split(r'^(    """.*?"""\n)', function.right, maxsplit=1, flags=re.MULTILINE)
    numbers = re.findall(r"(?<![\w\"-])\d+(?![\w\"])", body)
    single = [each for each in numbers if numbers.count(each) == 1 and int(each) > 1]
    names = [name for name in words.AMOUNTS + words.LIMITS if name not in function.right]
    if not single or "=" in head:
        return None
    value, name = rng.choice(single), rng.choice(names)
    body = re.sub(rf"(?<![\w\"-]){value}(?![\w\"])", name, body)
    right = head.replace("):", f", {name}={value}):") + doc + body
    return replace(function, right=right, faults=(), argument_kinds=(*function.argument_kinds, "few?")), name, value


def rename(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task that asks to rename a function everywhere; two functions at difficulty 5."""
    count = {1: 2, 2: 2, 3: 2, 4: 3, 5: 3}[difficulty]
    modules = {1: 1, 2: 1, 3: 2, 4: 3, 5: 2}[difficulty]
    program = draw_program(split, rng, modules, count)
    if difficulty == 4:  # the deepest function has two callers
        deepest, middle, _ = program.functions
        taken = {each.name for each in program.functions}
        program = Program(
            distribute_functions([deepest, middle, draw_caller(deepest, split, rng, taken)], 3, rng), program.qualified
        )
    targets = program.functions[: 2 if difficulty == 5 else 1]
    cases = plain_cases(program.top, program, rng, 4)
    if not cases:
        return None
    renames = {each.name: _draw_new_name(each.name, rng) for each in targets}
    if len({*renames.values(), *(each.name for each in program.functions)}) < len(renames) + len(program.functions):
        return None
    repo = program.files()
    renamed = {path: _apply_renames(text, renames) for path, text in repo.items()}
    check = draw_check(program, cases[:2], rng)
    mapping = " and ".join(f"{old} to {new}" for old, new in renames.items())
    where = f" in {program.file_of(targets[0].name)}" if difficulty == 1 else ""
    request = choose(rng, f"Rename {mapping}{where}.", f"Please rename {mapping}{where}, everywhere.")
    inner = [
        (program.file_of(each.name).removesuffix(".py"), renames[each.name], case)
        for each in targets
        for case in plain_cases(each, program, rng, 2) or ()
    ]
    more = [
        (module, renames.get(name, name), arguments, want) for module, name, arguments, want in hidden_calls(program)
    ]
    changed = {path: text for path, text in renamed.items() if text != repo[path]}
    return NanoTaskDraft(
        family="rename",
        category="refactor",
        register="imperative",
        request=request,
        repo={**repo, check.path: check.text},
        solution=changed,
        checks=(
            calls_check(
                (
                    *verifier_calls(cases, program),
                    *((module, name, case.arguments, case.want) for module, name, case in inner),
                    *more,
                ),
                absent=[(module, old) for module, _ in program.modules for old in renames],
            ),
            text_check("*.py", lacks=rf"\b({'|'.join(renames)})\b"),
            names_check(list(renames), {**renamed, check.path: check.text}),
        ),
        plan=DemonstrationPlan(
            tuple(changed),
            check.command,
            f"Renamed {mapping} in {' and '.join(changed)}. {check.path} passes.",
            "",
            difficulty == 1,
            tuple(renames.items()),
        ),
        sites=(f"rename/{program.functions[0].template}",),
        protected=(check.path,),
    )


def _draw_new_name(name: str, rng: Random) -> str:
    verb = rng.choice(("get", "find", "make", "compute", "take", "build", "work_out", "derive"))
    return f"{verb}_{rng.choice((name.split('_')[-1], name.split('_')[0], rng.choice(words.LABELS)))}"


def _apply_renames(text: str, renames: dict[str, str]) -> str:
    for old, new in renames.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def migrate(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task that asks to migrate old syntax; in two places at difficulty 5."""
    kind = rng.choice(MIGRATIONS if difficulty < 5 else ("fstring",))
    taken: set[str] = set()
    old = [draw_function(rng.choice(change_templates(kind)), split, rng, taken) for _ in range(1 + (difficulty == 5))]
    others = {1: 0, 2: 1, 3: 1, 4: 2, 5: 0}[difficulty]
    functions = old + [draw_leaf(split, rng, taken) for _ in range(others)]
    rng.shuffle(functions)
    program = Program(distribute_functions(functions, {1: 1, 2: 1, 3: 2, 4: 3, 5: 2}[difficulty], rng))
    before = {each.name: each.before for each in old}
    repo, right = program.files(before), program.files()
    cases = [case for each in old for case in plain_cases(each, program, rng, 4) or ()]
    if len(cases) < 2 * len(old):
        return None
    check = draw_check(program, [cases[0], cases[-1]], rng)
    changed = {path: text for path, text in right.items() if text != repo[path]}
    file, old_syntax, modern = next(iter(changed)), old[0].request, MODERN_SYNTAX[kind]
    if difficulty == 1:
        request = choose(
            rng, f"{file} still has {old_syntax}. Use {modern}.", f"Use {modern} in {file}, not {old_syntax}."
        )
    else:
        request = draw_phrase(rng, "edit_tasks.migrate_request", modern=modern, old_syntax=old_syntax)
    names = " and ".join(each.name for each in old)
    return NanoTaskDraft(
        family=f"migrate-{kind}",
        category="migration",
        register="imperative",
        request=request,
        repo={**repo, check.path: check.text},
        solution=changed,
        checks=(
            calls_check((*verifier_calls(cases, program), *hidden_calls(program, before))),
            patterns_check(LEGACY_PATTERNS[kind], {**right, check.path: check.text}),
        ),
        plan=DemonstrationPlan(
            tuple(changed) if difficulty == 1 else tuple(repo),
            check.command,
            f"{names} {'uses' if len(old) == 1 else 'use'} {modern} now. {check.path} passes.",
            "",
            difficulty == 1,
        ),
        sites=tuple(each.template for each in old),
        protected=(check.path,),
    )


def docstring(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task in which a number in a docstring differs from the one in the code; the code is right."""
    program = draw_program(split, rng, max(1, difficulty - 1), 2)
    candidates = [each for each in program.functions if _shared_numbers(each) and side_of(each.right) == SIDES[split]]
    if not candidates:
        return None
    function = rng.choice(candidates)
    true = rng.choice(_shared_numbers(function))
    false = str(int(true) + rng.choice((-1, 1, 2, 5, 10)))
    if false in function.right or int(false) < 0:
        return None
    doc = function.doc
    stale = re.sub(rf"\b{true}\b", false, doc, count=1)
    cases = plain_cases(program.top, program, rng, 2)
    if not cases:
        return None
    repo, right = program.files({function.name: function.right.replace(doc, stale)}), program.files()
    file = program.file_of(function.name)
    check = draw_check(program, cases[:2], rng)
    request = draw_phrase(rng, f"edit_tasks.docstring_request_{difficulty}", function=function, file=file, false=false)
    return NanoTaskDraft(
        family="docstring",
        category="docs",
        register="symptom" if false in request else "imperative",
        request=request,
        repo={**repo, check.path: check.text},
        solution={file: right[file]},
        checks=(
            code_check(right),
            text_check(f"/{file}", _doc_pattern(doc, true) + NUMBER_END, _doc_pattern(stale, false)),
            lines_check(file, repo[file], right[file], prose=True),
        ),
        plan=DemonstrationPlan(
            (file,) if difficulty == 1 else tuple(reversed(list(right))),
            "",
            f"The docstring of {function.name} says {true} now, as the code does.",
            f"The code of {function.name} has {true}, the docstring {false}.",
            difficulty == 1,
            find=false,
        ),
        sites=(f"docstring/{function.template}",),
        protected=(check.path,),
    )


def _shared_numbers(function: NanoFunction) -> list[str]:
    """Return the numbers that occur both in the docstring and in the code."""
    code = function.right.replace(function.doc, "")
    return [number for number in re.findall(r"(?<![\w-])\d+(?!\w)", function.doc) if re.search(rf"\b{number}\b", code)]


def _doc_pattern(doc: str, number: str) -> str:
    """Return a pattern for the number after the word that precedes it, which may not change."""
    at = re.search(rf"\b{number}\b", doc)
    assert at is not None
    before = doc[: at.start()].split()[-1:] or [""]
    return rf'{re.escape(before[0])}\s*"?{number}\b' if before[0] else rf'"""{number}\b'


def readme(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task in which the README names a function or a file by a name that it no longer has."""
    program = draw_program(split, rng, max(1, difficulty - 1), max(1, difficulty - 1))
    top, file = program.top, program.file_of(program.top.name)
    cases = plain_cases(top, program, rng, 2)
    if not cases:
        return None
    stale_file = rng.random() < 0.5
    true = file if stale_file else top.name
    others = [name for name in words.MODULES if f"{name}.py" not in program.files()]
    false = f"{rng.choice(others)}.py" if stale_file else _draw_new_name(top.name, rng)
    title, case = rng.choice(words.LABELS), cases[0]
    text = draw_phrase(rng, "edit_tasks.readme_text", title=title, top=top, file=file, case=case)
    stale = re.sub(rf"\b{re.escape(true)}", false, text)
    check = draw_check(program, cases[:2], rng)
    repo = {**program.files(), "README.md": stale, check.path: check.text}
    if difficulty == 1:
        request = f"README.md speaks of {false}, which is not there. Correct it."
    else:
        request = choose(rng, "The README is out of date. Correct it.", f"There is no {false}. Correct the docs.")
    unchanged_code = {path: text for path, text in repo.items() if path.endswith(".py")}
    return NanoTaskDraft(
        family="readme",
        category="docs",
        register="symptom" if false in request else "imperative",
        request=request,
        repo=repo,
        solution={"README.md": text},
        checks=(
            code_check(unchanged_code),
            text_check("/README.md", rf"\b{re.escape(true)}", rf"\b{re.escape(false)}"),
            lines_check("README.md", stale, text, prose=True),
        ),
        plan=DemonstrationPlan(
            ("README.md",),
            "grep -n def *.py",
            f"README.md says {true} now.",
            f"It is called {true}.",
            True,
            ((false, true),),
        ),
        sites=(f"readme/{program.functions[0].template}",),
        protected=(check.path,),
    )


def testing(rng: Random, split: Split, difficulty: int) -> NanoTaskDraft | None:
    """Draw a task with a check that misses a fault: the solution adds the assert that finds it."""
    program = draw_program(split, rng, max(1, difficulty - 1), difficulty - 1, faulty=True)
    faulty = program.functions[0]
    if not faulty.faults:
        return None
    fault = rng.choice(faulty.faults)
    right, wrong = program.load(), program.load({faulty.name: fault.text})
    cases = draw_cases(faulty, right, wrong, rng, revealing=2, plain=2)
    plain = [case for case in cases or () if not case.reveals]
    if not cases or not plain:
        return None
    file, module = program.file_of(faulty.name), program.file_of(faulty.name).removesuffix(".py")
    start = f"from {module} import {faulty.name}\n\nassert {plain[0].call} == {plain[0].want}\n"
    text, full = start, f"{start}assert {cases[0].call} == {cases[0].want}\n"
    files = program.files()
    mutant = program.files({faulty.name: fault.text})
    line = next(
        new.strip() for new, old in zip(mutant[file].split("\n"), files[file].split("\n"), strict=True) if new != old
    )
    wording = "testing_request" if difficulty == 2 else "testing_without_file"
    request = draw_phrase(rng, f"edit_tasks.{wording}", line=line, file=file)
    return NanoTaskDraft(
        family="testing",
        category="testing",
        register="imperative",
        request=request,
        repo={**files, "check.py": text},
        solution={"check.py": full},
        checks=(code_check(files), mutants_check("check.py", file, files[file], mutant[file])),
        plan=DemonstrationPlan(
            ("check.py", file),
            "python3 check.py",
            f"check.py has an assert for {cases[0].call} now, and passes.",
            f"With that line {cases[0].call} would give {cases[0].got}, not {cases[0].want}.",
            True,
        ),
        sites=(f"testing/{faulty.template}/{fault.id}",),
        protected=tuple(files),
    )
