"""Exercises over programs that can be run: run a script and report its output, alone or after a change as told.

The programs are of the training side (`sides.py`). No request leaves open what to change or what the result should be:
that is what tasks are about.
"""

import re
from random import Random

from etude_nano.code_snippets import SnippetPool, draw_module_name, invent_name
from etude_nano.exercises import DrawExercise, Exercise, TranscriptBuilder
from etude_nano.function_templates import draw_caller, draw_leaf
from etude_nano.phrases import choose, draw_phrase
from etude_nano.program import Case, Program, plain_cases
from etude_nano.simulated_sessions import run_python
from etude_nano.templates import template_words


def draw_slot_values(rng: Random, pool: SnippetPool) -> dict[str, str]:
    """Draw invented names for the slots of a template; sometimes none, then its slots use the word lists."""
    if rng.random() < 0.35:
        return {}
    x, y, w, *others = (invent_name(rng, pool) for _ in range(9))
    values = {
        "x": x,
        "xs": f"{x}s",
        "y": y,
        "ys": f"{y}s",
        "w": w,
        "ws": f"{w}s",
        **dict(zip("nmtdsc", others, strict=True)),
    }
    names = set(values.values())
    return values if len(names) == len(values) and not names & template_words() else {}


def draw_exercise_program(rng: Random, pool: SnippetPool) -> Program:
    """Draw a program of one function, of two independent ones, or of a function and its caller, in one file or two."""
    taken: set[str] = set()
    first = draw_leaf("train", rng, taken, draw_slot_values(rng, pool), faulty=True)
    layout = rng.choice(("one", "pair", "chain", "two files"))
    one = draw_module_name(rng, pool, taken)
    if layout == "one":
        return Program(((one, (first,)),))
    if layout == "pair":
        return Program(((one, (first, draw_leaf("train", rng, taken, draw_slot_values(rng, pool)))),))
    caller = draw_caller(first, "train", rng, taken)
    if layout == "chain":
        return Program(((one, (first, caller)),))
    return Program(((one, (first,)), (draw_module_name(rng, pool, {*taken, one}), (caller,))), rng.random() < 0.3)


def _show_script(program: Program, cases: list[Case]) -> str:
    """Return a script that prints the results of calls of the program's last function."""
    module = program.file_of(program.top.name).removesuffix(".py")
    return f"from {module} import {program.top.name}\n\n" + "".join(f"print({case.call})\n" for case in cases)


def run_script(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that runs a script and reports its output, often after a change that the request tells."""
    program = draw_exercise_program(rng, pool)
    cases = plain_cases(program.top, program, rng, rng.choice((1, 1, 2)))
    if not cases or any(len(case.call) > 70 for case in cases):
        return None
    script = choose(rng, "show.py", "demo.py", "try_it.py", f"{draw_module_name(rng, pool)}.py")
    changed, told = program.functions[0], rng.random() < 0.6
    fault = rng.choice(changed.faults)
    before = {**program.files(), script: _show_script(program, cases)}
    after = {**before, **program.files({changed.name: fault.text})} if told else before
    output, code = run_python(after, after[script], f"/work/{script}")
    if code or not output.strip() or len(output) > 200 or len(before) < len(program.files()) + 1:
        return None
    request = draw_phrase(rng, "programs.run_request", command=f"python3 {script}", script=script)
    file = program.file_of(changed.name)
    if told:
        lines = [
            (number, old.strip(), new.strip())
            for number, (old, new) in enumerate(zip(before[file].split("\n"), after[file].split("\n"), strict=False), 1)
            if old != new
        ]
        if len(lines) != 1 or not lines[0][2]:
            return None
        (number, old, new), name = lines[0], changed.name
        change = draw_phrase(rng, "programs.told_change", file=file, number=number, old=old, new=new, name=name)
        request = f"{change} {choose(rng, 'Then: ', 'After that: ', '')}{request}"
    transcript = TranscriptBuilder(rng, request, before)
    if told:
        transcript.read(file, word=changed.name)
        transcript.edit_file(file, after[file])
    elif rng.random() < 0.2:
        transcript.read(script)
    transcript.run(f"python3 {script}")
    shown = re.sub(r"\n+", ", ", output.strip())
    return transcript.finish("run-told" if told else "run", choose(rng, shown, f"It prints {shown}.", f"{shown}"))


PROGRAM_EXERCISES: tuple[tuple[DrawExercise, int], ...] = ((run_script, 10),)
