"""Exercises over lines in old ways of writing, files that are not code, imports, and questions about what is there."""

import json
import re
from random import Random

from etude_nano.code_snippets import Pool, invented, module_name, renamed
from etude_nano.exercises import Desk, Draw, Exercise, line_changed, lines_with, pick
from etude_nano.exercises_code import DEFINED, beside, draw_file, mended

# ------------------------------------------------------------------------------------------- today's ways


def modern(chance: Random, pool: Pool) -> Exercise | None:
    """An old way of writing to today's, in one line of a file."""
    way = chance.choice(("percent", "percent", "format", "format", "none", "type"))
    names = [invented(chance, pool) for _ in range(3)]
    count = chance.choice((1, 1, 2, 2, 3))
    if way in ("percent", "format"):
        parts = [" ".join(chance.choice(pool.words) for _ in range(chance.randint(0, 2))) for _ in range(count + 1)]
        glue = pick(chance, " ", ": ", " = ", ", ", "-", "")
        slots = [pick(chance, "%s", "%s", "%d") if way == "percent" else "{}" for _ in range(count)]
        filled = [f"{{{name}}}" for name in names[:count]]
        old, new = (
            "".join(part + glue + slot for part, slot in zip(parts, each, strict=False)) + parts[-1]
            for each in (slots, filled)
        )
        given = (
            names[0] if count == 1 and chance.random() < 0.8 else f"({', '.join(names[:count])}{',' * (count == 1)})"
        )
        was = f'"{old}" % {given}' if way == "percent" else f'"{old}".format({", ".join(names[:count])})'
        now = f'f"{new}"'
        what, today = pick(chance, "% and format", "old formatting", way), "f-strings"
    elif way == "none":
        sign = chance.choice(("==", "!="))
        was, now = f"{names[0]} {sign} None", f"{names[0]} {'is' if sign == '==' else 'is not'} None"
        what, today = f"{sign} None", "is"
    else:
        kind = pick(chance, "int", "str", "list", "dict", "float")
        was, now = f"type({names[0]}) == {kind}", f"isinstance({names[0]}, {kind})"
        what, today = "type() ==", "isinstance"
    frames = [
        "return @",
        f"{names[2]} = @",
        "print(@)",
        f"{invented(chance, pool)}.append(@)",
        f"return [@ for {names[0]} in {names[2]}s]",
    ]
    if way in ("none", "type"):
        frames += ["if @:", f"while @ and {names[1]}:", f"return {names[1]} if @ else {names[2]}"]
    frame = chance.choice(frames)
    path, text = draw_file(chance, pool, most=1)
    places = lines_with(text, r"^    \w+ = ", lambda line: line.count("(") == line.count(")"))
    if not places:
        return None
    at, _ = chance.choice(places)
    inner = frame.endswith(":")
    lines = [
        line_changed(text, at, "    " + frame.replace("@", part) + ("\n        return None" if inner else ""))
        for part in (was, now)
    ]
    request = pick(
        chance,
        f"{path} has {what} on line {at}. Today we use {today}.",
        f"No {what} any more: {today}, in {path}.",
        f"Write line {at} of {path} with {today}.",
        f"Bring {path} up to date: {today} and not {what}.",
    )
    say = pick(chance, f"{path} uses {today} now.", f"Line {at} has {today} now.", "Done.")
    return mended(chance, pool, f"modern-{way}", path, lines[0], lines[1], request, "", say)


# ------------------------------------------------------------------------------------------- other files


def settings(chance: Random, pool: Pool) -> Exercise | None:
    """A value, a key or a comma in a JSON file."""
    keys = list(dict.fromkeys(invented(chance, pool) for _ in range(chance.randint(2, 6))))
    values = {
        key: chance.choice((chance.randint(0, 99), chance.choice(pool.words), True, False, chance.randint(100, 9999)))
        for key in keys
    }
    right = json.dumps(values, indent=2) + "\n"
    path = f"{module_name(chance, pool)}.json"
    key = chance.choice(keys)
    way = chance.choice(("value", "key", "quotes", "comma", "new"))
    if way == "value":
        other = chance.randint(0, 999)
        wrong = json.dumps({**values, key: other}, indent=2) + "\n"
        shown = json.dumps(values[key])
        request = pick(
            chance,
            f"Set {key} to {shown} in {path}.",
            f"{key} should be {shown} ({path}).",
            f"{path}: {key} must be {shown}.",
        )
    elif way == "key":
        wrong = right.replace(f'"{key}"', f'"{key[:-1]}"')
        request = pick(chance, f"KeyError: '{key}'. The key is in {path}.", f"{key[:-1]} in {path} should be {key}.")
    elif way == "quotes":
        if not isinstance(values[key], int) or isinstance(values[key], bool):
            return None
        wrong = right.replace(f'"{key}": {values[key]}', f'"{key}": "{values[key]}"')
        request = pick(
            chance, f"{key} in {path} is a text. It should be a number.", f"{path} has quotes around the {key}."
        )
    elif way == "comma":
        wrong = right.replace("\n}", ",\n}")
        request = pick(chance, f"{path} has a comma too many at the end.", f"{path} is not JSON: the last comma.")
    else:
        last = keys[-1]
        wrong = json.dumps({name: value for name, value in values.items() if name != last}, indent=2) + "\n"
        request = pick(
            chance,
            f"Add {last} to {path}: {json.dumps(values[last])}.",
            f'{path} needs "{last}": {json.dumps(values[last])} at its end.',
        )
    if wrong == right or len(keys) < 2:
        return None
    return mended(
        chance,
        pool,
        f"settings-{way}",
        path,
        wrong,
        right,
        request,
        "",
        pick(chance, f"{path} is right now.", "Done.", f"Changed {path}."),
    )


def imports(chance: Random, pool: Pool) -> Exercise | None:
    """An import of a module or a name that is called otherwise."""
    piece = renamed(chance.choice(pool.pieces), chance, pool, chance.choice((0.0, 1.0)))
    if not piece.text.startswith("def ") or len(piece.name) < 4:
        return None
    module = module_name(chance, pool)
    user = module_name(chance, pool, [module])
    own = invented(chance, pool)
    right = f"from {module} import {piece.name}\n\n\ndef {own}(*given):\n    return {piece.name}(*given)\n"
    victim = chance.choice((module, piece.name))
    wrong = victim[:-1] if chance.random() < 0.5 else victim[:2] + victim[3:]
    head = right.partition("\n")[0]
    before = right.replace(head, re.sub(rf"\b{victim}\b", wrong, head), 1)
    if wrong in (module, piece.name) or before == right or module == piece.name:
        return None
    if victim == module:
        log = f"ModuleNotFoundError: No module named '{wrong}'"
    else:
        log = f"ImportError: cannot import name '{wrong}' from '{module}' (/work/{module}.py)"
    request = pick(
        chance,
        f"import {user}\n{log}",
        f"{user}.py does not start: {log}",
        f"Mend the import of {user}.py.",
        f'File "/work/{user}.py", line 1\n{log}',
    )
    if log not in request and f"{user}.py" not in request:
        return None
    repo = {f"{module}.py": piece.text, f"{user}.py": before}
    desk = Desk(chance, request, repo)
    way = chance.random()
    if way < 0.4:
        desk.list_files()
        desk.read(f"{user}.py")
    elif way < 0.7:
        desk.grep("import")
    else:
        desk.read(f"{user}.py", word=wrong)
        if victim == piece.name:
            desk.read(f"{module}.py")
        else:
            desk.list_files()
    if victim == piece.name and way < 0.7:
        desk.grep("def")
    elif 0.4 <= way < 0.7:
        desk.list_files()
    desk.change(f"{user}.py", right)
    return desk.done(
        "imports",
        pick(
            chance,
            f"{user}.py imports {victim} now.",
            f"It is called {victim}, not {wrong}.",
            "The import is right now.",
        ),
    )


# ------------------------------------------------------------------------------------------- questions


def question(chance: Random, pool: Pool) -> Exercise | None:
    """What is there? Nothing is to be changed."""
    path, text = draw_file(chance, pool)
    repo = beside(chance, pool, path, text)
    way = chance.choice(("line", "where", "number", "names", "count", "value"))
    defined = [found.group(2) for found in DEFINED.finditer(text)]
    lines = text.rstrip("\n").split("\n")
    if way == "line":
        at = chance.randint(1, len(lines))
        if not lines[at - 1].strip():
            return None
        request, answer = (
            pick(chance, f"What does line {at} of {path} say?", f"Show me line {at} of {path}."),
            lines[at - 1].strip(),
        )
    elif way == "where":
        if not defined or sum(f"def {defined[0]}(" in each for each in repo.values()) > 1:
            return None
        name = defined[0]
        request = pick(chance, f"Which file has {name}?", f"Where do I find {name}?", f"Look up the file of {name}.")
        desk = Desk(chance, request, repo)
        desk.grep(
            pick(chance, f"def {name}", name) if sum(name in each for each in repo.values()) == 1 else f"def {name}"
        )
        return desk.done("where", pick(chance, f"{path}.", f"It is in {path}.", f"{name} stands in {path}."))
    elif way == "number":
        found = [at for at, line in enumerate(lines, 1) if len(line.strip()) > 5 and text.count(line.strip()) == 1]
        if not found:
            return None
        at = chance.choice(found)
        request, answer = (
            pick(
                chance,
                f"On which line of {path} is `{lines[at - 1].strip()}`?",
                f"{path}: where is `{lines[at - 1].strip()}`?",
            ),
            pick(chance, f"Line {at}.", f"On line {at}.", f"{at}"),
        )
    elif way == "names":
        if not defined:
            return None
        request, answer = (
            pick(chance, f"Which functions does {path} define?", f"Name the functions of {path}."),
            ", ".join(defined),
        )
    elif way == "count":
        request, answer = f"How many lines does {path} have?", pick(chance, f"{len(lines)}", f"{len(lines)} lines.")
    else:
        found_values = re.findall(r"^ *(\w+) = ([^\n]{1,30})$", text, re.MULTILINE)
        if not found_values:
            return None
        name, given = chance.choice(found_values)
        if text.count(f"{name} = ") != 1:
            return None
        request, answer = (
            pick(chance, f"What is {name} set to in {path}?", f"What does {path} give to {name}?"),
            f"{given}",
        )
    desk = Desk(chance, request, repo)
    desk.read(path)
    return desk.done(f"question-{way}", answer)


FILES: tuple[tuple[Draw, int], ...] = (
    (modern, 6),
    (settings, 4),
    (imports, 4),
    (question, 5),
)
