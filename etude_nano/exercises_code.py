"""Exercises over pieces of real code: the request says what to change, or asks what is there.

Where the request tells a fault, the file has it and the piece as it was is the answer.
"""

import re
from random import Random

from etude_nano.code_snippets import Pool, invented, module_name, names_in, renamed
from etude_nano.demonstrator import Edit
from etude_nano.exercises import Desk, Draw, Exercise, line_changed, lines_with, pick

_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OPPOSITE = {"==": "!=", "!=": "==", " in ": " not in ", " not in ": " in ", " and ": " or ", " or ": " and "}
_NUMBER = r"(?<![\w.\"'])\d{1,4}(?![\w.\"'])"
DEFINED = re.compile(r"^( *)def (\w+)\(", re.MULTILINE)


# ------------------------------------------------------------------------------------------- files


def draw_file(chance: Random, pool: Pool, most: int = 2) -> tuple[str, str]:
    """A file of a piece or two, part of the time under other names."""
    share = chance.choice((0.0, 0.3, 0.7, 1.0))
    parts = [renamed(chance.choice(pool.pieces), chance, pool, share).text for _ in range(chance.choice((1, most)))]
    if sum(map(len, parts)) > 1200:
        parts = parts[:1]
    head = f"import {invented(chance, pool)}\n\n\n" if chance.random() < 0.15 else ""
    return f"{module_name(chance, pool)}.py", head + "\n\n".join(parts)


def beside(chance: Random, pool: Pool, path: str, text: str) -> dict[str, str]:
    """A workspace with a file, and others beside it that nobody needs."""
    repo = {path: text}
    for _ in range(chance.choice((0, 0, 1, 2))):
        other = f"{module_name(chance, pool)}.{chance.choice(('py', 'py', 'py', 'md', 'json'))}"
        content = {"md": "# notes\n", "json": "{}\n"}.get(other.rpartition(".")[2], chance.choice(pool.pieces).text)
        repo.setdefault(other, content)
    return repo


def function_at(text: str, number: int) -> str:
    """The function that a line is in, if it can be told by its name alone."""
    above = [(found.group(2), text.count("\n", 0, found.start()) + 1) for found in DEFINED.finditer(text)]
    inside = [name for name, line in above if line <= number]
    return inside[-1] if inside and len(re.findall(rf"\bdef {inside[-1]}\(", text)) == 1 else ""


def mended(
    chance: Random, pool: Pool, kind: str, path: str, before: str, after: str, request: str, word: str, say: str
) -> Exercise | None:
    """The exercise of changing one file; `word` leads to it where it is not named."""
    if before == after:
        return None
    repo = beside(chance, pool, path, before)
    if path not in request and sum(word in text for text in repo.values()) > 1:
        return None
    desk = Desk(chance, request, repo)
    desk.read(path, word=word)
    desk.change(path, after)
    return desk.done(kind, say)


def _place(chance: Random, path: str, text: str, number: int, line: str) -> tuple[str, str]:
    """Words for where a line is, and the word that leads there if they do not name the file."""
    inside = function_at(text, number)
    ways = [(f"line {number} of {path}", ""), (f"{path}, line {number}", ""), (f"line {number} in {path}", "")]
    if text.count(line.strip()) == 1:
        ways.append((f"`{line.strip()}` in {path}", ""))
    if inside:
        ways += [(f"{inside} in {path}, line {number}", ""), (f"line {number}, in {inside}", inside)]
    return chance.choice(ways)


def _told(chance: Random, where: str, old: str, new: str) -> str:
    """A request for one thing in the place of another."""
    return pick(
        chance,
        f"In {where}: {old} should be {new}.",
        f"Change {old} to {new} in {where}.",
        f"{where} should have {new}, not {old}.",
        f"Put `{new}` in place of `{old}`: {where}.",
        f"Use {new} instead of {old} in {where}.",
        f"{where} has `{old}`. It must be `{new}`.",
        f"Please make it {new} and not {old} ({where}).",
    )


def _said(chance: Random, path: str, number: int, old: str, new: str) -> str:
    return pick(
        chance,
        "Done.",
        f"{path} is changed.",
        f"Line {number} of {path} has `{new}` now.",
        f"Changed {old} to {new} in {path}.",
        f"`{old}` is now `{new}`.",
        f"{path} says {new} now.",
    )


# ------------------------------------------------------------------------------------------- told changes


def number(chance: Random, pool: Pool) -> Exercise | None:
    """Another number."""
    path, text = draw_file(chance, pool)
    found = lines_with(text, _NUMBER)
    if not found:
        return None
    at, line = chance.choice(found)
    old = chance.choice(re.findall(_NUMBER, line))
    new = str(
        chance.choice((int(old) + 1, int(old) + chance.randint(2, 9), chance.randint(0, 99), chance.randint(100, 999)))
    )
    return _one_word(chance, pool, "number", path, text, at, line, old, new)


def word(chance: Random, pool: Pool) -> Exercise | None:
    """Another name, from the same file or from nowhere."""
    path, text = draw_file(chance, pool)
    found = lines_with(text, r"\w+", lambda line: bool(names_in(line)))
    if not found:
        return None
    at, line = chance.choice(found)
    old = chance.choice(names_in(line))
    new = chance.choice(names_in(text)) if chance.random() < 0.6 else invented(chance, pool)
    return _one_word(chance, pool, "word", path, text, at, line, old, new)


def _one_word(
    chance: Random, pool: Pool, kind: str, path: str, text: str, at: int, line: str, old: str, new: str
) -> Exercise | None:
    if old == new or len(re.findall(rf"\b{old}\b", line)) != 1:
        return None
    after = re.sub(rf"\b{old}\b", new, line)
    where, lead = _place(chance, path, text, at, line)
    request = _told(chance, where, old, new)
    if len(re.findall(rf"\b{old}\b", text)) == 1 and chance.random() < 0.4:
        request = pick(
            chance,
            f"{path}: {old} should be {new}.",
            f"{old} in {path} is wrong. It is {new}.",
            f"{old} -> {new} in {path}",
        )
    return mended(
        chance, pool, kind, path, text, line_changed(text, at, after), request, lead, _said(chance, path, at, old, new)
    )


def string(chance: Random, pool: Pool) -> Exercise | None:
    """Another text between quotes."""
    path, text = draw_file(chance, pool)
    found = lines_with(text, r"\"[^\"\\{}%]+\"|'[^'\\{}%]+'", lambda line: '"""' not in line)
    if not found:
        return None
    at, line = chance.choice(found)
    match = chance.choice(list(re.finditer(r"\"([^\"\\{}%]+)\"|'([^'\\{}%]+)'", line)))
    old = match.group(1) or match.group(2)
    new = " ".join(chance.choice(pool.words) for _ in range(chance.randint(1, 3)))
    after = line[: match.start() + 1] + new + line[match.end() - 1 :]
    where, lead = _place(chance, path, text, at, line)
    request = pick(
        chance, _told(chance, where, f'"{old}"', f'"{new}"'), f'The text "{old}" in {where} should read "{new}".'
    )
    say = _said(chance, path, at, old, new)
    return mended(chance, pool, "string", path, text, line_changed(text, at, after), request, lead, say)


def whole_line(chance: Random, pool: Pool) -> Exercise | None:
    """A line that the request spells out: instead of another, before it, after it; or a line less."""
    path, text = draw_file(chance, pool)
    found = lines_with(text, r"\S.{3}", lambda line: len(line) < 70 and '"""' not in line)
    if len(found) < 3:
        return None
    at, line = chance.choice(found)
    other = chance.choice(lines_with(chance.choice(pool.pieces).text, r"\S")[1:] or found)[1].strip()
    indent = line[: len(line) - len(line.lstrip())]
    where, lead = _place(chance, path, text, at, line)
    way = chance.choice(("instead", "instead", "before", "after", "gone"))
    if way == "instead":
        after = line_changed(text, at, indent + other)
        request = pick(
            chance, f"Make {where} say `{other}`.", f"Replace {where} with:\n{other}", f"{where} should be `{other}`"
        )
        say = pick(chance, f"Line {at} is `{other}` now.", "Done.", f"Replaced line {at} of {path}.")
    elif way == "before":
        after = line_changed(text, at, f"{indent}{other}\n{line}")
        request = pick(chance, f"Add `{other}` before {where}.", f"Insert `{other}` above {where}.")
        say = pick(chance, f"Added `{other}` to {path}.", f"`{other}` stands before it now.")
    elif way == "after":
        if line.rstrip().endswith((":", "(", ",", "[", "{")):
            return None
        after = line_changed(text, at, f"{line}\n{indent}{other}")
        request = pick(chance, f"After {where}, add `{other}`.", f"Put `{other}` below {where}.")
        say = pick(chance, f"Added `{other}` to {path}.", f"{path} has one line more.")
    else:
        lines = text.split("\n")
        after = "\n".join(lines[: at - 1] + lines[at:])
        request = pick(chance, f"Remove {where}.", f"Delete {where}, we do not need it.", f"Take out {where}.")
        say = pick(chance, f"Removed line {at} of {path}.", "It is gone.", f"`{line.strip()}` is gone.")
    return mended(chance, pool, f"line-{way}", path, text, after, request, lead, say)


def block(chance: Random, pool: Pool) -> Exercise | None:
    """Several lines that the request spells out, for a function that is not written yet."""
    piece = renamed(chance.choice(pool.pieces), chance, pool, chance.choice((0.0, 0.5, 1.0)))
    lines = piece.text.rstrip("\n").split("\n")
    if not re.match(r"def \w+\(.*\):$", lines[0]) or not 2 <= len(lines) - 1 <= 7:
        return None
    stub = pick(chance, "    pass", "    raise NotImplementedError", "    ...", "    return None  # TODO")
    other = chance.choice(pool.pieces).text
    rest = "\n\n" + other if chance.random() < 0.4 and len(other) < 500 else ""
    path = f"{module_name(chance, pool)}.py"
    before, after = f"{lines[0]}\n{stub}\n{rest}", piece.text + rest
    if before.count(stub) != 1:
        return None
    body = "\n".join(lines[1:])
    request = pick(
        chance,
        f"Write {piece.name} in {path}:\n{body}",
        f"The body of {piece.name} ({path}) should be\n{body}",
        f"{path}: {piece.name} is empty. Put this in:\n{body}",
    )
    return mended(
        chance, pool, "block", path, before, after, request, "", pick(chance, f"{piece.name} is written.", "Done.")
    )


def documented(chance: Random, pool: Pool) -> Exercise | None:
    """A docstring or a comment with given words."""
    path, text = draw_file(chance, pool)
    words = " ".join(chance.choice(pool.words) for _ in range(chance.randint(2, 6))).capitalize() + "."
    if chance.random() < 0.5:
        found = [
            (at, line)
            for at, line in lines_with(text, r"^ *def \w+\(.*\):$")
            if '"""' not in text.split("\n")[at] and function_at(text, at)
        ]
        if not found:
            return None
        at, line = chance.choice(found)
        name, indent = function_at(text, at), line[: len(line) - len(line.lstrip())]
        after = line_changed(text, at, f'{line}\n{indent}    """{words}"""')
        where = pick(chance, f" in {path}", f" ({path})", "")
        request = pick(
            chance,
            f"Give {name}{where} the docstring: {words}",
            f'Add a docstring to {name}{where} that says "{words}"',
            f"{name}{where} has no docstring. It should be: {words}",
        )
        say = pick(chance, f"{name} has a docstring now.", "Done.", f"Added the docstring to {name}.")
        return mended(chance, pool, "docstring", path, text, after, request, name, say)
    found = lines_with(text, r"\S", lambda line: not line.lstrip().startswith((")", "]", "}", '"', "el")))
    if not found:
        return None
    at, line = chance.choice(found)
    indent = line[: len(line) - len(line.lstrip())]
    where, lead = _place(chance, path, text, at, line)
    request = pick(chance, f"Put the comment `# {words}` above {where}.", f"Comment {where}: {words}")
    after = line_changed(text, at, f"{indent}# {words}\n{line}")
    return mended(chance, pool, "comment", path, text, after, request, lead, f"Commented line {at} of {path}.")


def signature(chance: Random, pool: Pool) -> Exercise | None:
    """One parameter more or under another name."""
    path, text = draw_file(chance, pool)
    found = [(at, line) for at, line in lines_with(text, r"^ *def \w+\([^()*]*\):$") if function_at(text, at)]
    if not found:
        return None
    at, line = chance.choice(found)
    name = function_at(text, at)
    parameter = invented(chance, pool)
    default = pick(chance, "None", "0", "1", "True", "False", '""', str(chance.randint(2, 99)))
    comma = "" if "()" in line else ", "
    after = line_changed(text, at, line.replace("):", f"{comma}{parameter}={default}):"))
    where = pick(chance, f" in {path}", "")
    request = pick(
        chance,
        f"Give {name}{where} one more parameter, {parameter}={default}.",
        f"{name}{where} should take {parameter}, {default} by default.",
        f"Add the parameter {parameter} to {name}{where}; its default is {default}.",
    )
    say = pick(chance, f"{name} takes {parameter} now.", f"Added {parameter} to {name} in {path}.")
    return mended(chance, pool, "signature", path, text, after, request, name, say)


def rename(chance: Random, pool: Pool) -> Exercise | None:
    """Another name for something, in all its places."""
    path, text = draw_file(chance, pool)
    used = [name for name in names_in(text) if 1 <= len(re.findall(rf"\b{name}\b", text)) <= 5]
    if not used:
        return None
    old, new = chance.choice(used), invented(chance, pool)
    after = re.sub(rf"\b{old}\b", new, text)
    if new in text:
        return None
    repo = beside(chance, pool, path, text)
    if sum(bool(re.search(rf"\b{old}\b", each)) for each in repo.values()) > 1:
        return None
    where = pick(chance, f" in {path}", "", f" ({path})")
    request = pick(
        chance,
        f"Call it {new} and not {old}{where}.",
        f"{old} should be called {new}{where}.",
        f"Rename {old}{where}: {new}.",
    )
    desk = Desk(chance, request, repo)
    if path in desk.known and chance.random() < 0.6:
        desk.read(path)
    else:
        desk.grep(old)
    if text.count(old) == len(re.findall(rf"\b{old}\b", text)) > 1:
        desk.replace(Edit(path, old, new, everywhere=True))
    else:
        desk.change(path, after)
    if chance.random() < 0.2:
        desk.grep(new)
    return desk.done(
        "rename", pick(chance, f"Renamed {old} to {new} in {path}.", f"{old} is called {new} now.", "Renamed.")
    )


# ------------------------------------------------------------------------------------------- told faults


def turned(chance: Random, pool: Pool) -> Exercise | None:
    """A comparison, a sign or a condition the wrong way round."""
    path, right = draw_file(chance, pool)
    found = lines_with(right, r" (<=|>=|<|>|==|!=|in|not in|and|or|\+|-) ", lambda line: '"' not in line)
    if not found:
        return None
    at, line = chance.choice(found)
    match = chance.choice(list(re.finditer(r" (<=|>=|<|>|==|!=|not in|in|and|or|\+|-) ", line)))
    sign = match.group(1)
    if sign == "in" and (" for " in line or line.lstrip().startswith("for")):
        return None
    other = {**_TURNED, "+": "-", "-": "+"}.get(sign) or _OPPOSITE[sign if sign in _OPPOSITE else f" {sign} "].strip()
    wrong = line[: match.start() + 1] + other + line[match.end() - 1 :]
    where, lead = _place(chance, path, right, at, wrong)
    inside = function_at(right, at)
    if sign in _TURNED:
        why = pick(chance, f"The comparison in {where} is the wrong way round.", f"{where} compares the wrong way.")
    elif sign in "+-":
        done = "add" if sign == "+" else "subtract"
        why = pick(chance, f"{where} should {done}.", f"{where}: we want to {done} here.")
    else:
        why = pick(
            chance, f"The condition in {where} is the opposite of what it should be.", f"{where}: it is the other way."
        )
    before = line_changed(right, at, wrong)
    if len(re.findall(rf" {re.escape(other)} ", wrong)) > 1 and sign not in _TURNED:
        return None
    say = pick(
        chance, f"Line {at} of {path} has {sign} now.", f"It was {other} and is {sign} now.", f"Fixed {inside or path}."
    )
    return mended(chance, pool, "turned", path, before, right, why, lead, say)


def no_return(chance: Random, pool: Pool) -> Exercise | None:
    """A function that does not give what it works out."""
    path, right = draw_file(chance, pool)
    found = [(at, line) for at, line in lines_with(right, r"^ +return [a-z]\w*[^\n]*$") if function_at(right, at)]
    if not found:
        return None
    at, line = chance.choice(found)
    name = function_at(right, at)
    before = line_changed(right, at, line.replace("return ", "", 1))
    where = pick(chance, f" in {path}", "", f" ({path})")
    request = pick(
        chance,
        f"{name}{where} gives None. Line {at} should return.",
        f"{name}{where} forgets to return on line {at}.",
        f"A return is missing in {name}{where}: `{line.strip()[7:]}`.",
    )
    say = pick(chance, f"{name} returns it now.", f"Added the return to {name} in {path}.")
    return mended(chance, pool, "no-return", path, before, right, request, name, say)


def order(chance: Random, pool: Pool) -> Exercise | None:
    """Two arguments in the wrong order."""
    path, right = draw_file(chance, pool)
    call = r"(\w+)\((\w+), (\w+)\)"
    found = lines_with(right, call, lambda line: not line.lstrip().startswith(("def", "class")))
    if not found:
        return None
    at, line = chance.choice(found)
    match = chance.choice(list(re.finditer(call, line)))
    name, one, two = match.groups()
    if one == two:
        return None
    before = line_changed(right, at, line.replace(match.group(), f"{name}({two}, {one})"))
    where, lead = _place(chance, path, right, at, line)
    if "`" in where:
        return None
    request = pick(
        chance,
        f"The arguments of {name} are in the wrong order: {where}.",
        f"Swap the arguments of {name} in {where}.",
        f"{where}: {one} comes before {two}.",
    )
    say = pick(chance, f"{name}({one}, {two}) now.", f"Swapped the arguments of {name}.", "Done.")
    return mended(chance, pool, "order", path, before, right, request, lead, say)


def misspelt(chance: Random, pool: Pool) -> Exercise | None:
    """A name that is not there, for one that is nearly the same."""
    path, right = draw_file(chance, pool)
    used = [name for name in names_in(right) if len(name) > 3 and len(re.findall(rf"\b{name}\b", right)) > 1]
    if not used:
        return None
    name = chance.choice(used)
    places = lines_with(right, rf"\b{name}\b", lambda line: not line.lstrip().startswith(("def", "class", "import")))
    if not places:
        return None
    at, line = chance.choice(places)
    middle = chance.randrange(1, len(name) - 1)
    wrong = chance.choice(
        (name[:middle] + name[middle + 1 :], name[:middle] + name[middle + 1] + name[middle] + name[middle + 2 :])
    )
    if wrong in right or wrong == name or len(re.findall(rf"\b{name}\b", line)) != 1:
        return None
    before = line_changed(right, at, re.sub(rf"\b{name}\b", wrong, line))
    request = pick(
        chance,
        f"NameError: name '{wrong}' is not defined. Did you mean: '{name}'?",
        f"{path}: NameError: name '{wrong}' is not defined",
        f"  File \"/work/{path}\", line {at}\nNameError: name '{wrong}' is not defined",
        f"{wrong} in {path} is misspelt.",
        f"There is no {wrong}, it is {name}.",
    )
    repo = beside(chance, pool, path, before)
    desk = Desk(chance, request, repo)
    if path in desk.known and chance.random() < 0.7:
        desk.read(path)
    else:
        desk.grep(wrong)
        if chance.random() < 0.6:
            desk.read(path)
    desk.change(path, right)
    return desk.done(
        "misspelt",
        pick(chance, f"{path} says {name} now.", f"It was misspelt: {name}, not {wrong}.", "Fixed the name."),
    )


CODE: tuple[tuple[Draw, int], ...] = (
    (number, 6),
    (word, 8),
    (string, 4),
    (whole_line, 9),
    (block, 5),
    (documented, 4),
    (signature, 3),
    (rename, 6),
    (turned, 5),
    (no_return, 4),
    (order, 3),
    (misspelt, 6),
)
