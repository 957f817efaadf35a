"""Exercises over outdated syntax, JSON files and imports, and questions about files."""

import json
import re
from random import Random

from etude_nano.code_snippets import SnippetPool, draw_module_name, invent_name, rename_identifiers
from etude_nano.exercises import DrawExercise, Exercise, TranscriptBuilder, find_lines, replace_line
from etude_nano.exercises_code import DEFINITION, draw_file, single_file_exercise, with_unrelated_files
from etude_nano.phrases import choose, draw_phrase

# ------------------------------------------------------------------------------------------- syntax migrations


def modernize(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that migrates old syntax in one line of a file."""
    variant = rng.choice(("percent", "percent", "format", "format", "none", "type"))
    names = [invent_name(rng, pool) for _ in range(3)]
    count = rng.choice((1, 1, 2, 2, 3))
    if variant in ("percent", "format"):
        parts = [" ".join(rng.choice(pool.words) for _ in range(rng.randint(0, 2))) for _ in range(count + 1)]
        glue = choose(rng, " ", ": ", " = ", ", ", "-", "")
        slots = [choose(rng, "%s", "%s", "%d") if variant == "percent" else "{}" for _ in range(count)]
        filled = [f"{{{name}}}" for name in names[:count]]
        old, new = (
            "".join(part + glue + slot for part, slot in zip(parts, each, strict=False)) + parts[-1]
            for each in (slots, filled)
        )
        given = names[0] if count == 1 and rng.random() < 0.8 else f"({', '.join(names[:count])}{',' * (count == 1)})"
        was = f'"{old}" % {given}' if variant == "percent" else f'"{old}".format({", ".join(names[:count])})'
        now = f'f"{new}"'
        old_syntax, modern = choose(rng, "% and format", "old formatting", variant), "f-strings"
    elif variant == "none":
        sign = rng.choice(("==", "!="))
        was, now = f"{names[0]} {sign} None", f"{names[0]} {'is' if sign == '==' else 'is not'} None"
        old_syntax, modern = f"{sign} None", "is"
    else:
        kind = choose(rng, "int", "str", "list", "dict", "float")
        was, now = f"type({names[0]}) == {kind}", f"isinstance({names[0]}, {kind})"
        old_syntax, modern = "type() ==", "isinstance"
    frames = [
        "return @",
        f"{names[2]} = @",
        "print(@)",
        f"{invent_name(rng, pool)}.append(@)",
        f"return [@ for {names[0]} in {names[2]}s]",
    ]
    if variant in ("none", "type"):
        frames += ["if @:", f"while @ and {names[1]}:", f"return {names[1]} if @ else {names[2]}"]
    frame = rng.choice(frames)
    path, text = draw_file(rng, pool, max_snippets=1)
    places = find_lines(text, r"^    \w+ = ", lambda line: line.count("(") == line.count(")"))
    if not places:
        return None
    at, _ = rng.choice(places)
    inner = frame.endswith(":")
    lines = [
        replace_line(text, at, "    " + frame.replace("@", part) + ("\n        return None" if inner else ""))
        for part in (was, now)
    ]
    request = draw_phrase(rng, "files.modernize_request", path=path, old_syntax=old_syntax, at=at, modern=modern)
    say = choose(rng, f"{path} uses {modern} now.", f"Line {at} has {modern} now.", "Done.")
    return single_file_exercise(rng, pool, f"modern-{variant}", path, lines[0], lines[1], request, "", say)


# ------------------------------------------------------------------------------------------- other files


def repair_json(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that corrects a value, a key or a comma of a JSON file."""
    keys = list(dict.fromkeys(invent_name(rng, pool) for _ in range(rng.randint(2, 6))))
    values = {
        key: rng.choice((rng.randint(0, 99), rng.choice(pool.words), True, False, rng.randint(100, 9999)))
        for key in keys
    }
    right = json.dumps(values, indent=2) + "\n"
    path = f"{draw_module_name(rng, pool)}.json"
    key = rng.choice(keys)
    variant = rng.choice(("value", "key", "quotes", "comma", "new"))
    if variant == "value":
        other = rng.randint(0, 999)
        wrong = json.dumps({**values, key: other}, indent=2) + "\n"
        shown = json.dumps(values[key])
        request = draw_phrase(rng, "files.repair_json_request", key=key, shown=shown, path=path)
    elif variant == "key":
        wrong = right.replace(f'"{key}"', f'"{key[:-1]}"')
        request = choose(rng, f"KeyError: '{key}'. The key is in {path}.", f"{key[:-1]} in {path} should be {key}.")
    elif variant == "quotes":
        if not isinstance(values[key], int) or isinstance(values[key], bool):
            return None
        wrong = right.replace(f'"{key}": {values[key]}', f'"{key}": "{values[key]}"')
        request = choose(
            rng, f"{key} in {path} is a text. It should be a number.", f"{path} has quotes around the {key}."
        )
    elif variant == "comma":
        wrong = right.replace("\n}", ",\n}")
        request = choose(rng, f"{path} has a comma too many at the end.", f"{path} is not JSON: the last comma.")
    else:
        last = keys[-1]
        wrong = json.dumps({name: value for name, value in values.items() if name != last}, indent=2) + "\n"
        request = choose(
            rng,
            f"Add {last} to {path}: {json.dumps(values[last])}.",
            f'{path} needs "{last}": {json.dumps(values[last])} at its end.',
        )
    if wrong == right or len(keys) < 2:
        return None
    return single_file_exercise(
        rng,
        pool,
        f"settings-{variant}",
        path,
        wrong,
        right,
        request,
        "",
        choose(rng, f"{path} is right now.", "Done.", f"Changed {path}."),
    )


def repair_import(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise with a misspelt module or name in an import."""
    snippet = rename_identifiers(rng.choice(pool.snippets), rng, pool, rng.choice((0.0, 1.0)))
    if not snippet.text.startswith("def ") or len(snippet.name) < 4:
        return None
    module = draw_module_name(rng, pool)
    user = draw_module_name(rng, pool, [module])
    own = invent_name(rng, pool)
    right = f"from {module} import {snippet.name}\n\n\ndef {own}(*given):\n    return {snippet.name}(*given)\n"
    misspelt = rng.choice((module, snippet.name))
    wrong = misspelt[:-1] if rng.random() < 0.5 else misspelt[:2] + misspelt[3:]
    head = right.partition("\n")[0]
    before = right.replace(head, re.sub(rf"\b{misspelt}\b", wrong, head), 1)
    if wrong in (module, snippet.name) or before == right or module == snippet.name:
        return None
    if misspelt == module:
        log = f"ModuleNotFoundError: No module named '{wrong}'"
    else:
        log = f"ImportError: cannot import name '{wrong}' from '{module}' (/work/{module}.py)"
    request = draw_phrase(rng, "files.repair_import_request", user=user, log=log)
    if log not in request and f"{user}.py" not in request:
        return None
    repo = {f"{module}.py": snippet.text, f"{user}.py": before}
    transcript = TranscriptBuilder(rng, request, repo)
    variant = rng.random()
    if variant < 0.4:
        transcript.list_files()
        transcript.read(f"{user}.py")
    elif variant < 0.7:
        transcript.grep("import")
    else:
        transcript.read(f"{user}.py", word=wrong)
        if misspelt == snippet.name:
            transcript.read(f"{module}.py")
        else:
            transcript.list_files()
    if misspelt == snippet.name and variant < 0.7:
        transcript.grep("def")
    elif 0.4 <= variant < 0.7:
        transcript.list_files()
    transcript.edit_file(f"{user}.py", right)
    return transcript.finish(
        "imports",
        draw_phrase(rng, "files.repair_import", user=user, misspelt=misspelt, wrong=wrong),
    )


# ------------------------------------------------------------------------------------------- questions


def question(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that asks about a file and changes nothing."""
    path, text = draw_file(rng, pool)
    repo = with_unrelated_files(rng, pool, path, text)
    variant = rng.choice(("line", "where", "number", "names", "count", "value"))
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
    elif variant == "where":
        if not defined or sum(f"def {defined[0]}(" in each for each in repo.values()) > 1:
            return None
        name = defined[0]
        request = choose(rng, f"Which file has {name}?", f"Where do I find {name}?", f"Look up the file of {name}.")
        transcript = TranscriptBuilder(rng, request, repo)
        transcript.grep(
            choose(rng, f"def {name}", name) if sum(name in each for each in repo.values()) == 1 else f"def {name}"
        )
        return transcript.finish("where", choose(rng, f"{path}.", f"It is in {path}.", f"{name} stands in {path}."))
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


FILE_EXERCISES: tuple[tuple[DrawExercise, int], ...] = (
    (modernize, 6),
    (repair_json, 4),
    (repair_import, 4),
    (question, 5),
)
