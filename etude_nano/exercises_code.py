"""Exercises over snippets of real code: the request says which change to make, or which fault to repair.

Where the request describes a fault, the file has it and the original snippet is the solution.
"""

import re
from random import Random

from etude_nano.code_snippets import SnippetPool, draw_module_name, identifiers_in, invent_name, rename_identifiers
from etude_nano.demonstrator import TextEdit
from etude_nano.exercises import DrawExercise, Exercise, TranscriptBuilder, find_lines, replace_line
from etude_nano.phrases import choose, draw_phrase

_REVERSED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OPPOSITE = {"==": "!=", "!=": "==", " in ": " not in ", " not in ": " in ", " and ": " or ", " or ": " and "}
_NUMBER = r"(?<![\w.\"'])\d{1,4}(?![\w.\"'])"
DEFINITION = re.compile(r"^( *)def (\w+)\(", re.MULTILINE)


# ------------------------------------------------------------------------------------------- files


def draw_file(rng: Random, pool: SnippetPool, max_snippets: int = 2) -> tuple[str, str]:
    """Draw a file of one or more snippets, some with renamed identifiers; return its path and text."""
    share = rng.choice((0.0, 0.3, 0.7, 1.0))
    parts = [
        rename_identifiers(rng.choice(pool.snippets), rng, pool, share).text
        for _ in range(rng.choice((1, max_snippets)))
    ]
    if sum(map(len, parts)) > 1200:
        parts = parts[:1]
    head = f"import {invent_name(rng, pool)}\n\n\n" if rng.random() < 0.15 else ""
    return f"{draw_module_name(rng, pool)}.py", head + "\n\n".join(parts)


def with_unrelated_files(rng: Random, pool: SnippetPool, path: str, text: str) -> dict[str, str]:
    """Return a workspace with this file and some that are not needed."""
    repo = {path: text}
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = f"{draw_module_name(rng, pool)}.{rng.choice(('py', 'py', 'py', 'md', 'json'))}"
        content = {"md": "# notes\n", "json": "{}\n"}.get(other.rpartition(".")[2], rng.choice(pool.snippets).text)
        repo.setdefault(other, content)
    return repo


def function_at(text: str, number: int) -> str:
    """Return the name of the function that a line is in, if that name is unique; else an empty string."""
    above = [(found.group(2), text.count("\n", 0, found.start()) + 1) for found in DEFINITION.finditer(text)]
    inside = [name for name, line in above if line <= number]
    return inside[-1] if inside and len(re.findall(rf"\bdef {inside[-1]}\(", text)) == 1 else ""


def single_file_exercise(
    rng: Random, pool: SnippetPool, kind: str, path: str, before: str, after: str, request: str, word: str, say: str
) -> Exercise | None:
    """Return an exercise that edits one file; a search for `word` leads to it if the request does not name it."""
    if before == after:
        return None
    repo = with_unrelated_files(rng, pool, path, before)
    if path not in request and sum(word in text for text in repo.values()) > 1:
        return None
    transcript = TranscriptBuilder(rng, request, repo)
    transcript.read(path, word=word)
    transcript.edit_file(path, after)
    return transcript.finish(kind, say)


def _describe_place(rng: Random, path: str, text: str, number: int, line: str) -> tuple[str, str]:
    """Describe the place of a line; return also the search word that leads there if the file is not named."""
    inside = function_at(text, number)
    ways = [(f"line {number} of {path}", ""), (f"{path}, line {number}", ""), (f"line {number} in {path}", "")]
    if text.count(line.strip()) == 1:
        ways.append((f"`{line.strip()}` in {path}", ""))
    if inside:
        ways += [(f"{inside} in {path}, line {number}", ""), (f"line {number}, in {inside}", inside)]
    return rng.choice(ways)


def _replace_request(rng: Random, where: str, old: str, new: str) -> str:
    """Draw a request to replace one text by another."""
    return draw_phrase(rng, "code.replace_request", where=where, old=old, new=new)


def _final_message(rng: Random, path: str, number: int, old: str, new: str) -> str:
    return draw_phrase(rng, "code.final_message", path=path, number=number, new=new, old=old)


# ------------------------------------------------------------------------------------------- requested changes


def change_number(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that changes a number."""
    path, text = draw_file(rng, pool)
    found = find_lines(text, _NUMBER)
    if not found:
        return None
    at, line = rng.choice(found)
    old = rng.choice(re.findall(_NUMBER, line))
    new = str(rng.choice((int(old) + 1, int(old) + rng.randint(2, 9), rng.randint(0, 99), rng.randint(100, 999))))
    return _change_word(rng, pool, "number", path, text, at, line, old, new)


def change_name(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that changes one use of a name, to one of the same file or an invented one."""
    path, text = draw_file(rng, pool)
    found = find_lines(text, r"\w+", lambda line: bool(identifiers_in(line)))
    if not found:
        return None
    at, line = rng.choice(found)
    old = rng.choice(identifiers_in(line))
    new = rng.choice(identifiers_in(text)) if rng.random() < 0.6 else invent_name(rng, pool)
    return _change_word(rng, pool, "word", path, text, at, line, old, new)


def _change_word(
    rng: Random, pool: SnippetPool, kind: str, path: str, text: str, at: int, line: str, old: str, new: str
) -> Exercise | None:
    if old == new or len(re.findall(rf"\b{old}\b", line)) != 1:
        return None
    after = re.sub(rf"\b{old}\b", new, line)
    where, lead = _describe_place(rng, path, text, at, line)
    request = _replace_request(rng, where, old, new)
    if len(re.findall(rf"\b{old}\b", text)) == 1 and rng.random() < 0.4:
        request = draw_phrase(rng, "code.change_word_request", path=path, old=old, new=new)
    return single_file_exercise(
        rng,
        pool,
        kind,
        path,
        text,
        replace_line(text, at, after),
        request,
        lead,
        _final_message(rng, path, at, old, new),
    )


def change_string(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that changes a string literal."""
    path, text = draw_file(rng, pool)
    found = find_lines(text, r"\"[^\"\\{}%]+\"|'[^'\\{}%]+'", lambda line: '"""' not in line)
    if not found:
        return None
    at, line = rng.choice(found)
    match = rng.choice(list(re.finditer(r"\"([^\"\\{}%]+)\"|'([^'\\{}%]+)'", line)))
    old = match.group(1) or match.group(2)
    new = " ".join(rng.choice(pool.words) for _ in range(rng.randint(1, 3)))
    after = line[: match.start() + 1] + new + line[match.end() - 1 :]
    where, lead = _describe_place(rng, path, text, at, line)
    request = choose(
        rng, _replace_request(rng, where, f'"{old}"', f'"{new}"'), f'The text "{old}" in {where} should read "{new}".'
    )
    say = _final_message(rng, path, at, old, new)
    return single_file_exercise(rng, pool, "string", path, text, replace_line(text, at, after), request, lead, say)


def change_line(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that replaces, inserts or removes a line as the request says."""
    path, text = draw_file(rng, pool)
    found = find_lines(text, r"\S.{3}", lambda line: len(line) < 70 and '"""' not in line)
    if len(found) < 3:
        return None
    at, line = rng.choice(found)
    other = rng.choice(find_lines(rng.choice(pool.snippets).text, r"\S")[1:] or found)[1].strip()
    indent = line[: len(line) - len(line.lstrip())]
    where, lead = _describe_place(rng, path, text, at, line)
    variant = rng.choice(("instead", "instead", "before", "after", "gone"))
    if variant == "instead":
        after = replace_line(text, at, indent + other)
        request = choose(
            rng, f"Make {where} say `{other}`.", f"Replace {where} with:\n{other}", f"{where} should be `{other}`"
        )
        say = choose(rng, f"Line {at} is `{other}` now.", "Done.", f"Replaced line {at} of {path}.")
    elif variant == "before":
        after = replace_line(text, at, f"{indent}{other}\n{line}")
        request = choose(rng, f"Add `{other}` before {where}.", f"Insert `{other}` above {where}.")
        say = choose(rng, f"Added `{other}` to {path}.", f"`{other}` stands before it now.")
    elif variant == "after":
        if line.rstrip().endswith((":", "(", ",", "[", "{")):
            return None
        after = replace_line(text, at, f"{line}\n{indent}{other}")
        request = choose(rng, f"After {where}, add `{other}`.", f"Put `{other}` below {where}.")
        say = choose(rng, f"Added `{other}` to {path}.", f"{path} has one line more.")
    else:
        lines = text.split("\n")
        after = "\n".join(lines[: at - 1] + lines[at:])
        request = choose(rng, f"Remove {where}.", f"Delete {where}, we do not need it.", f"Take out {where}.")
        say = choose(rng, f"Removed line {at} of {path}.", "It is gone.", f"`{line.strip()}` is gone.")
    return single_file_exercise(rng, pool, f"line-{variant}", path, text, after, request, lead, say)


def write_body(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that writes the body, given in the request, of an empty function."""
    snippet = rename_identifiers(rng.choice(pool.snippets), rng, pool, rng.choice((0.0, 0.5, 1.0)))
    lines = snippet.text.rstrip("\n").split("\n")
    if not re.match(r"def \w+\(.*\):$", lines[0]) or not 2 <= len(lines) - 1 <= 7:
        return None
    stub = choose(rng, "    pass", "    raise NotImplementedError", "    ...", "    return None  # TODO")
    other = rng.choice(pool.snippets).text
    rest = "\n\n" + other if rng.random() < 0.4 and len(other) < 500 else ""
    path = f"{draw_module_name(rng, pool)}.py"
    before, after = f"{lines[0]}\n{stub}\n{rest}", snippet.text + rest
    if before.count(stub) != 1:
        return None
    body = "\n".join(lines[1:])
    request = draw_phrase(rng, "code.write_body_request", snippet=snippet, path=path, body=body)
    return single_file_exercise(
        rng, pool, "block", path, before, after, request, "", choose(rng, f"{snippet.name} is written.", "Done.")
    )


def add_documentation(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that adds a docstring or a comment with given words."""
    path, text = draw_file(rng, pool)
    words = " ".join(rng.choice(pool.words) for _ in range(rng.randint(2, 6))).capitalize() + "."
    if rng.random() < 0.5:
        found = [
            (at, line)
            for at, line in find_lines(text, r"^ *def \w+\(.*\):$")
            if '"""' not in text.split("\n")[at] and function_at(text, at)
        ]
        if not found:
            return None
        at, line = rng.choice(found)
        name, indent = function_at(text, at), line[: len(line) - len(line.lstrip())]
        after = replace_line(text, at, f'{line}\n{indent}    """{words}"""')
        where = choose(rng, f" in {path}", f" ({path})", "")
        request = draw_phrase(rng, "code.add_documentation_request", name=name, where=where, words=words)
        say = choose(rng, f"{name} has a docstring now.", "Done.", f"Added the docstring to {name}.")
        return single_file_exercise(rng, pool, "docstring", path, text, after, request, name, say)
    found = find_lines(text, r"\S", lambda line: not line.lstrip().startswith((")", "]", "}", '"', "el")))
    if not found:
        return None
    at, line = rng.choice(found)
    indent = line[: len(line) - len(line.lstrip())]
    where, lead = _describe_place(rng, path, text, at, line)
    request = choose(rng, f"Put the comment `# {words}` above {where}.", f"Comment {where}: {words}")
    after = replace_line(text, at, f"{indent}# {words}\n{line}")
    return single_file_exercise(
        rng, pool, "comment", path, text, after, request, lead, f"Commented line {at} of {path}."
    )


def add_parameter(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that adds a parameter with a default."""
    path, text = draw_file(rng, pool)
    found = [(at, line) for at, line in find_lines(text, r"^ *def \w+\([^()*]*\):$") if function_at(text, at)]
    if not found:
        return None
    at, line = rng.choice(found)
    name = function_at(text, at)
    parameter = invent_name(rng, pool)
    default = choose(rng, "None", "0", "1", "True", "False", '""', str(rng.randint(2, 99)))
    comma = "" if "()" in line else ", "
    after = replace_line(text, at, line.replace("):", f"{comma}{parameter}={default}):"))
    where = choose(rng, f" in {path}", "")
    request = draw_phrase(
        rng, "code.add_parameter_request", name=name, where=where, parameter=parameter, default=default
    )
    say = choose(rng, f"{name} takes {parameter} now.", f"Added {parameter} to {name} in {path}.")
    return single_file_exercise(rng, pool, "signature", path, text, after, request, name, say)


def rename(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise that renames an identifier everywhere."""
    path, text = draw_file(rng, pool)
    used = [name for name in identifiers_in(text) if 1 <= len(re.findall(rf"\b{name}\b", text)) <= 5]
    if not used:
        return None
    old, new = rng.choice(used), invent_name(rng, pool)
    after = re.sub(rf"\b{old}\b", new, text)
    if new in text:
        return None
    repo = with_unrelated_files(rng, pool, path, text)
    if sum(bool(re.search(rf"\b{old}\b", each)) for each in repo.values()) > 1:
        return None
    where = choose(rng, f" in {path}", "", f" ({path})")
    request = draw_phrase(rng, "code.rename_request", new=new, old=old, where=where)
    transcript = TranscriptBuilder(rng, request, repo)
    if path in transcript.known_paths and rng.random() < 0.6:
        transcript.read(path)
    else:
        transcript.grep(old)
    if text.count(old) == len(re.findall(rf"\b{old}\b", text)) > 1:
        transcript.apply_edit(TextEdit(path, old, new, everywhere=True))
    else:
        transcript.edit_file(path, after)
    if rng.random() < 0.2:
        transcript.grep(new)
    return transcript.finish(
        "rename", choose(rng, f"Renamed {old} to {new} in {path}.", f"{old} is called {new} now.", "Renamed.")
    )


# ------------------------------------------------------------------------------------------- described faults


def reversed_operator(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise with a reversed comparison, sign or condition."""
    path, right = draw_file(rng, pool)
    found = find_lines(right, r" (<=|>=|<|>|==|!=|in|not in|and|or|\+|-) ", lambda line: '"' not in line)
    if not found:
        return None
    at, line = rng.choice(found)
    match = rng.choice(list(re.finditer(r" (<=|>=|<|>|==|!=|not in|in|and|or|\+|-) ", line)))
    sign = match.group(1)
    if sign == "in" and (" for " in line or line.lstrip().startswith("for")):
        return None
    other = {**_REVERSED, "+": "-", "-": "+"}.get(sign) or _OPPOSITE[sign if sign in _OPPOSITE else f" {sign} "].strip()
    wrong = line[: match.start() + 1] + other + line[match.end() - 1 :]
    where, lead = _describe_place(rng, path, right, at, wrong)
    inside = function_at(right, at)
    if sign in _REVERSED:
        why = choose(rng, f"The comparison in {where} is the wrong way round.", f"{where} compares the wrong way.")
    elif sign in "+-":
        done = "add" if sign == "+" else "subtract"
        why = choose(rng, f"{where} should {done}.", f"{where}: we want to {done} here.")
    else:
        why = choose(
            rng, f"The condition in {where} is the opposite of what it should be.", f"{where}: it is the other way."
        )
    before = replace_line(right, at, wrong)
    if len(re.findall(rf" {re.escape(other)} ", wrong)) > 1 and sign not in _REVERSED:
        return None
    say = choose(
        rng, f"Line {at} of {path} has {sign} now.", f"It was {other} and is {sign} now.", f"Fixed {inside or path}."
    )
    return single_file_exercise(rng, pool, "turned", path, before, right, why, lead, say)


def missing_return(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise with a function that does not return its result."""
    path, right = draw_file(rng, pool)
    found = [(at, line) for at, line in find_lines(right, r"^ +return [a-z]\w*[^\n]*$") if function_at(right, at)]
    if not found:
        return None
    at, line = rng.choice(found)
    name = function_at(right, at)
    before = replace_line(right, at, line.replace("return ", "", 1))
    where = choose(rng, f" in {path}", "", f" ({path})")
    request = choose(
        rng,
        f"{name}{where} gives None. Line {at} should return.",
        f"{name}{where} forgets to return on line {at}.",
        f"A return is missing in {name}{where}: `{line.strip()[7:]}`.",
    )
    say = choose(rng, f"{name} returns it now.", f"Added the return to {name} in {path}.")
    return single_file_exercise(rng, pool, "no-return", path, before, right, request, name, say)


def swapped_arguments(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise with two arguments in the wrong order."""
    path, right = draw_file(rng, pool)
    call = r"(\w+)\((\w+), (\w+)\)"
    found = find_lines(right, call, lambda line: not line.lstrip().startswith(("def", "class")))
    if not found:
        return None
    at, line = rng.choice(found)
    match = rng.choice(list(re.finditer(call, line)))
    name, one, two = match.groups()
    if one == two:
        return None
    before = replace_line(right, at, line.replace(match.group(), f"{name}({two}, {one})"))
    where, lead = _describe_place(rng, path, right, at, line)
    if "`" in where:
        return None
    request = draw_phrase(rng, "code.swapped_arguments_request", name=name, where=where, one=one, two=two)
    say = choose(rng, f"{name}({one}, {two}) now.", f"Swapped the arguments of {name}.", "Done.")
    return single_file_exercise(rng, pool, "order", path, before, right, request, lead, say)


def misspelt_name(rng: Random, pool: SnippetPool) -> Exercise | None:
    """Draw an exercise with a misspelt name."""
    path, right = draw_file(rng, pool)
    used = [name for name in identifiers_in(right) if len(name) > 3 and len(re.findall(rf"\b{name}\b", right)) > 1]
    if not used:
        return None
    name = rng.choice(used)
    places = find_lines(right, rf"\b{name}\b", lambda line: not line.lstrip().startswith(("def", "class", "import")))
    if not places:
        return None
    at, line = rng.choice(places)
    middle = rng.randrange(1, len(name) - 1)
    wrong = rng.choice(
        (name[:middle] + name[middle + 1 :], name[:middle] + name[middle + 1] + name[middle] + name[middle + 2 :])
    )
    if wrong in right or wrong == name or len(re.findall(rf"\b{name}\b", line)) != 1:
        return None
    before = replace_line(right, at, re.sub(rf"\b{name}\b", wrong, line))
    request = draw_phrase(rng, "code.misspelt_name_request", wrong=wrong, name=name, path=path, at=at)
    repo = with_unrelated_files(rng, pool, path, before)
    transcript = TranscriptBuilder(rng, request, repo)
    if path in transcript.known_paths and rng.random() < 0.7:
        transcript.read(path)
    else:
        transcript.grep(wrong)
        if rng.random() < 0.6:
            transcript.read(path)
    transcript.edit_file(path, right)
    return transcript.finish(
        "misspelt",
        choose(rng, f"{path} says {name} now.", f"It was misspelt: {name}, not {wrong}.", "Fixed the name."),
    )


CODE_EXERCISES: tuple[tuple[DrawExercise, int], ...] = (
    (change_number, 6),
    (change_name, 8),
    (change_string, 4),
    (change_line, 9),
    (write_body, 5),
    (add_documentation, 4),
    (add_parameter, 3),
    (rename, 6),
    (reversed_operator, 5),
    (missing_return, 4),
    (swapped_arguments, 3),
    (misspelt_name, 6),
)
