"""Exercises that ask about a file and change nothing."""

import re
from random import Random

from etude_nano.code_snippets import SnippetPool
from etude_nano.exercises import DrawExercise, Exercise, TranscriptBuilder
from etude_nano.exercises_code import DEFINITION, draw_file, with_unrelated_files
from etude_nano.phrases import choose


def question(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that asks about a file and changes nothing."""
    path, text = draw_file(rng, pool)
    repo = with_unrelated_files(rng, pool, path, text)
    variant = rng.choice(("line", "number", "names", "count", "value"))
    defined = [found.group(2) for found in DEFINITION.finditer(text)]
    lines = text.rstrip("\n").split("\n")
    if variant == "line":
        at = rng.randint(1, len(lines))
        if not lines[at - 1].strip():
            return None
        request, answer = (
            choose(rng, f"What does line {at} of {path} say?", f"Show me line {at} of {path}."),
            lines[at - 1].strip(),
        )
    elif variant == "number":
        found = [at for at, line in enumerate(lines, 1) if len(line.strip()) > 5 and text.count(line.strip()) == 1]
        if not found:
            return None
        at = rng.choice(found)
        request, answer = (
            choose(
                rng,
                f"On which line of {path} is `{lines[at - 1].strip()}`?",
                f"{path}: where is `{lines[at - 1].strip()}`?",
            ),
            choose(rng, f"Line {at}.", f"On line {at}.", f"{at}"),
        )
    elif variant == "names":
        if not defined:
            return None
        request, answer = (
            choose(rng, f"Which functions does {path} define?", f"Name the functions of {path}."),
            ", ".join(defined),
        )
    elif variant == "count":
        request, answer = f"How many lines does {path} have?", choose(rng, f"{len(lines)}", f"{len(lines)} lines.")
    else:
        found_values = re.findall(r"^ *(\w+) = ([^\n]{1,30})$", text, re.MULTILINE)
        if not found_values:
            return None
        name, given = rng.choice(found_values)
        if text.count(f"{name} = ") != 1:
            return None
        request, answer = (
            choose(rng, f"What is {name} set to in {path}?", f"What does {path} give to {name}?"),
            f"{given}",
        )
    transcript = TranscriptBuilder(rng, request, repo)
    transcript.read(path)
    return transcript.finish(f"question-{variant}", answer)


FILE_EXERCISES: tuple[tuple[DrawExercise, int], ...] = ((question, 6),)
