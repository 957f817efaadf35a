"""Practice sessions: that they go as meant, are what a pod would give, and show nothing that is held out."""

import asyncio
import inspect
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.data.shards import Shards
from etude.errors import InputError
from etude.pods import open_fleet
from etude.tasks.harbor import read_task
from etude_nano.base_data import Amounts, drill, make_base_data
from etude_nano.code_snippets import Piece, Pool, invented, make_pool, renamed, take_pieces
from etude_nano.exercises import Desk, draw_exercise, practise
from etude_nano.exercises_programs import draw_wrong
from etude_nano.function_templates import draw_caller, draw_sketch, form, is_held_out_fault
from etude_nano.pod_sessions import render_experts, vocabulary_texts
from etude_nano.source import generate_nano
from etude_nano.task_writer import WORKSPACE
from etude_nano.templates import Slots, draw_function, faulty_leaves, shapes_of
from etude_nano.tokenizer import FRAMES, opening_lines, train_nano_tokenizer


@pytest.fixture(scope="module")
def pool() -> Pool:
    modules = (inspect, json, asyncio.base_events, asyncio.tasks)
    return make_pool(take_pieces(inspect.getsource(module) for module in modules))


@pytest.fixture(scope="module")
def tokenizer(pool: Pool) -> Tokenizer:
    return train_nano_tokenizer([*vocabulary_texts(40), *(piece.text for piece in pool.pieces)], 1200)


def test_exercises_of_all_kinds_go_as_meant(pool: Pool, tokenizer: Tokenizer) -> None:
    chance, dialect = Random(7), dialect_for(tokenizer)
    kinds, lost = set(), 0

    async def play() -> None:
        nonlocal lost
        for _ in range(250):
            exercise = draw_exercise(chance, pool)
            shown = await practise(exercise, dialect)
            if shown is None:
                lost += 1
                continue
            kinds.add(exercise.kind)
            text = tokenizer.decode(shown.tokens.tolist())
            assert exercise.request in text
            assert text.endswith(f"{exercise.turns[-1].message.content}<|im_end|>")
            assert shown.learned.all() == (not any(turn.mistake for turn in exercise.turns)), exercise.kind

    asyncio.run(play())
    assert lost <= 5
    assert len(kinds) > 25


def test_nobody_at_a_desk_reads_a_file_that_it_has_not_come_upon(pool: Pool) -> None:
    for seed in range(300):
        exercise = draw_exercise(Random(seed), pool)
        seen = exercise.request
        for turn in exercise.turns:
            for call in turn.message.calls:
                given = dict(call.arguments or {})
                path = str(given.get("target_file") or given.get("file_path") or "")
                if path in exercise.repo:
                    stem = path.removesuffix(".py")
                    assert path in seen or f"from {stem} " in seen or f"import {stem}" in seen, (seed, path, seen)
                    seen += exercise.repo[path]
                if given.get("command") == "ls":
                    seen += " ".join(exercise.repo)
                elif "grep" in str(given.get("command")):
                    seen += " ".join(path for path in exercise.repo if path.endswith(".py"))


def test_a_desk_finds_by_a_word_only_what_was_said(pool: Pool) -> None:
    desk = Desk(Random(1), "Something is wrong.", {"a.py": "def unsaid():\n    pass\n"})
    desk.read("a.py", word="unsaid")
    assert dict(desk.turns[0].message.calls[0].arguments or {}) == {"command": "ls"}


def test_no_sketch_has_a_held_out_form_and_few_have_the_form_of_another() -> None:
    chance = Random(3)
    held_out = set()
    for shape in faulty_leaves("held-out"):
        for _ in range(3):
            function = draw_function(shape, "held-out", chance, set())
            if shape.held_out:
                held_out.add(form(function.right))
            for fault in function.faults:
                held_out.add(form(function.right, fault.text))
        if not shape.held_out:
            assert all(is_held_out_fault(shape.text(), shape.text(place)) for place in shape.faults("held-out"))
    forms = set()
    for _ in range(400):
        taken: set[str] = set()
        function = draw_sketch(chance, taken, {})
        caller = draw_caller(function, chance, taken, {})
        assert form(function.right) not in held_out, function.right
        assert not {form(function.right, fault.text) for fault in function.faults} & held_out, function.right
        assert {form(caller.right.replace("@", ""))}.isdisjoint(held_out)
        forms.add(form(function.right))
    assert len(forms) > 150


def test_the_form_of_a_function_is_what_is_left_without_names_and_numbers() -> None:
    one = 'def f(prices):\n    """Sum."""\n    return sum(prices) + 7\n'
    assert form(one) == form("def total(xs):\n    return sum(xs) + 30\n")
    assert form(one) != form("def total(xs):\n    return sum(xs) - 30\n")
    (shape,) = shapes_of("\n# a | f | number | int\ndef $f($x):\n    return $x + $k\n")
    assert form(Slots(Random(0), {"f": "f"}).fill(shape.text())) == form("def g(a):\n    return a + 2\n")


def test_a_wrong_program_shows_it_in_its_first_case(pool: Pool) -> None:
    found = [wrong for seed in range(40) if (wrong := draw_wrong(Random(seed), pool)) is not None]
    assert len(found) > 20
    for wrong in found:
        assert wrong.cases[0].reveals
        assert wrong.repo[wrong.file] != wrong.right[wrong.file]


def test_a_renamed_piece_is_the_same_code_under_other_names(pool: Pool) -> None:
    piece = Piece("add", "def add(left, right):\n    return left + len(right)\n")
    other = renamed(piece, Random(2), pool, 1.0)
    assert other.name != "add"
    assert form(other.text) == form(piece.text)
    assert len({invented(Random(seed), pool) for seed in range(100)}) > 80


def test_copied_code_is_the_same_tokens_in_a_file_a_listing_and_a_call(tokenizer: Tokenizer) -> None:
    line = '    return ["- %s" % team for team in teams]  # """quoted"""'
    listed = tokenizer.encode(f"12|{line}\n")
    call = tokenizer.encode(FRAMES[1] + 'a.py", "old_string": ' + json.dumps(line) + ', "new_string": "x"}}\n')
    alike = {tokenizer.encode(r"\""[0] + '"')[0]: tokenizer.encode('"')[0]}
    alike[tokenizer.encode(r"\"\"\"")[0]] = tokenizer.encode('"""')[0]
    inside = [alike.get(token, token) for token in call]
    copied = listed[3:-1]
    assert any(inside[at : at + len(copied)] == copied for at in range(len(inside)))


def test_the_opening_is_a_few_tokens_and_text_is_what_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert len(opening_lines()) >= 7
    for frame in (*opening_lines(), *FRAMES):
        assert len(tokenizer.encode(frame)) == 1
    tokenizer.save(tmp_path / "t")
    again = Tokenizer.load(tmp_path / "t")
    for text in ("".join(FRAMES), 'x = \'é\'\t\n\\d \\\\ """ 12.5e3\n', '\n\n  "a":  1'):
        assert again.decode(again.encode(text)) == text
        assert again.encode(text) == tokenizer.encode(text)


@pytest.mark.slow
def test_with_its_tokenizer_rehearsed_sessions_are_those_of_pods(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from etude_nano.demonstrator import read_files
    from etude_nano.simulated_sessions import rehearse

    generate_nano(tmp_path / "tasks", 12, "train", 4000)
    tasks = [read_task(path) for path in sorted((tmp_path / "tasks").iterdir()) if path.is_dir()]

    async def both() -> None:
        async with open_fleet(state=tmp_path / "pods") as fleet:
            async for shown in render_experts(tasks, dialect_for(tokenizer), fleet):
                task = next(task for task in tasks if task.name == shown.task)
                again = await rehearse(read_files(task.directory), dialect_for(tokenizer))
                assert again is None or np.array_equal(again.tokens, shown.tokens), WORKSPACE

    asyncio.run(both())


def test_a_drill_copies_its_lines_as_json(pool: Pool) -> None:
    copied = 0
    for seed in range(50):
        text = drill(Random(seed), pool)
        for line in text.splitlines():
            if line.startswith('{"file_path"'):
                old = json.loads(line)["old_string"]
                copied += f"|{old}\n" in text
    assert copied > 50


def test_base_data_is_a_tokenizer_and_corpora_that_fit_it(tmp_path: Path) -> None:
    source = tmp_path / "code"
    source.mkdir()
    for module in (inspect, json.decoder, asyncio.base_events):
        (source / f"{module.__name__}.py").write_text(inspect.getsource(module))
    amounts = Amounts(practice=12, sessions=4, drills=6, code=1.0, programs=5)
    facts = make_base_data(tmp_path / "data", [str(source)], amounts, processes=1)
    tokenizer = Tokenizer.load(tmp_path / "data" / "tokenizer")
    for kind, found in facts.items():
        shards = Shards.open(tmp_path / "data" / kind)
        assert shards.tokenizer_digest == tokenizer.digest
        assert (len(shards), shards.tokens) == (found["documents"], found["tokens"])
    assert facts["practice"]["documents"] >= 10
    assert facts["sessions"]["documents"] >= 2
    with pytest.raises(InputError, match="not empty"):
        make_base_data(tmp_path / "data", [str(source)], amounts)
    with pytest.raises(InputError, match="is not a directory"):
        make_base_data(tmp_path / "other", ["/nowhere"], amounts)
