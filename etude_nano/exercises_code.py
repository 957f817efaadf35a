"""Exercises over snippets of real code: the request says which change to make, word for word."""

import re
from random import Random

from etude_nano.code_snippets import SnippetPool, draw_module_name, identifiers_in, invent_name, rename_identifiers
from etude_nano.exercises import DrawExercise, Exercise, TranscriptBuilder, find_lines, replace_line
from etude_nano.phrases import choose, draw_phrase

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


CODE_EXERCISES: tuple[tuple[DrawExercise, int], ...] = (
    (change_number, 6),
    (change_name, 8),
    (change_string, 4),
    (change_line, 9),
    (write_body, 5),
    (add_documentation, 4),
)
