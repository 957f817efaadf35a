"""Exercises: they follow their scripts, match sessions in pods, and show nothing that is held out."""

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
from etude_nano.code_snippets import (
    CodeSnippet,
    SnippetPool,
    extract_snippets,
    invent_name,
    make_pool,
    rename_identifiers,
)
from etude_nano.exercises import TranscriptBuilder, draw_exercise, simulate_exercise
from etude_nano.exercises_programs import draw_faulty_program
from etude_nano.function_templates import (
    draw_generated_caller,
    draw_generated_function,
    is_held_out_fault,
    structural_form,
)
from etude_nano.pod_sessions import run_demonstrations, vocabulary_texts
from etude_nano.source import generate_nano
from etude_nano.task_writer import WORKSPACE
from etude_nano.templates import TemplateSlots, draw_function, faulty_leaf_templates, parse_templates
from etude_nano.tokenizer import FRAMES, opening_lines, train_nano_tokenizer


@pytest.fixture(scope="module")
def pool() -> SnippetPool:
    modules = (inspect, json, asyncio.base_events, asyncio.tasks)
    return make_pool(extract_snippets(inspect.getsource(module) for module in modules))


@pytest.fixture(scope="module")
def tokenizer(pool: SnippetPool) -> Tokenizer:
    return train_nano_tokenizer([*vocabulary_texts(40), *(snippet.text for snippet in pool.snippets)], 1200)


def test_exercises_of_all_kinds_follow_their_scripts(pool: SnippetPool, tokenizer: Tokenizer) -> None:
    rng, dialect = Random(7), dialect_for(tokenizer)
    kinds, lost = set(), 0

    async def simulate() -> None:
        nonlocal lost
        for _ in range(250):
            exercise = draw_exercise(rng, pool)
            session = await simulate_exercise(exercise, dialect)
            if session is None:
                lost += 1
                continue
            kinds.add(exercise.kind)
            text = tokenizer.decode(session.tokens.tolist())
            assert exercise.request in text
            assert text.endswith(f"{exercise.turns[-1].message.content}<|im_end|>")
            assert session.loss_mask.all() == (not any(turn.mistake for turn in exercise.turns)), exercise.kind

    asyncio.run(simulate())
    assert lost <= 5
    assert len(kinds) > 25


def test_exercises_read_only_files_whose_paths_were_shown(pool: SnippetPool) -> None:
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


def test_a_file_is_searched_only_by_a_word_that_was_mentioned(pool: SnippetPool) -> None:
    transcript = TranscriptBuilder(Random(1), "Something is wrong.", {"a.py": "def unsaid():\n    pass\n"})
    transcript.read("a.py", word="unsaid")
    assert dict(transcript.turns[0].message.calls[0].arguments or {}) == {"command": "ls"}


def test_no_generated_template_has_a_held_out_structure_and_most_structures_differ() -> None:
    rng = Random(3)
    held_out = set()
    for template in faulty_leaf_templates("held-out"):
        for _ in range(3):
            function = draw_function(template, "held-out", rng, set())
            if template.held_out:
                held_out.add(structural_form(function.right))
            for fault in function.faults:
                held_out.add(structural_form(function.right, fault.text))
        if not template.held_out:
            places = template.fault_places("held-out")
            assert all(is_held_out_fault(template.text(), template.text(place)) for place in places)
    forms = set()
    for _ in range(400):
        taken: set[str] = set()
        function = draw_generated_function(rng, taken, {})
        caller = draw_generated_caller(function, rng, taken, {})
        assert structural_form(function.right) not in held_out, function.right
        assert not {structural_form(function.right, fault.text) for fault in function.faults} & held_out, function.right
        assert {structural_form(caller.right.replace("@", ""))}.isdisjoint(held_out)
        forms.add(structural_form(function.right))
    assert len(forms) > 150


def test_the_structure_of_a_function_ignores_names_and_numbers() -> None:
    one = 'def f(prices):\n    """Sum."""\n    return sum(prices) + 7\n'
    assert structural_form(one) == structural_form("def total(xs):\n    return sum(xs) + 30\n")
    assert structural_form(one) != structural_form("def total(xs):\n    return sum(xs) - 30\n")
    (template,) = parse_templates("\n# a | f | number | int\ndef $f($x):\n    return $x + $k\n")
    assert structural_form(TemplateSlots(Random(0), {"f": "f"}).fill(template.text())) == structural_form(
        "def g(a):\n    return a + 2\n"
    )


def test_a_faulty_program_reveals_its_fault_in_the_first_case(pool: SnippetPool) -> None:
    found = [each for seed in range(40) if (each := draw_faulty_program(Random(seed), pool)) is not None]
    assert len(found) > 20
    for faulty in found:
        assert faulty.cases[0].reveals
        assert faulty.repo[faulty.file] != faulty.right[faulty.file]


def test_a_snippet_with_renamed_identifiers_has_the_same_structure(pool: SnippetPool) -> None:
    snippet = CodeSnippet("add", "def add(left, right):\n    return left + len(right)\n")
    other = rename_identifiers(snippet, Random(2), pool, 1.0)
    assert other.name != "add"
    assert structural_form(other.text) == structural_form(snippet.text)
    assert len({invent_name(Random(seed), pool) for seed in range(100)}) > 80


def test_copied_code_has_the_same_tokens_in_a_listing_and_in_a_call(tokenizer: Tokenizer) -> None:
    line = '    return ["- %s" % team for team in teams]  # """quoted"""'
    listed = tokenizer.encode(f"12|{line}\n")
    call = tokenizer.encode(FRAMES[1] + 'a.py", "old_string": ' + json.dumps(line) + ', "new_string": "x"}}\n')
    alike = {tokenizer.encode(r"\""[0] + '"')[0]: tokenizer.encode('"')[0]}
    alike[tokenizer.encode(r"\"\"\"")[0]] = tokenizer.encode('"""')[0]
    inside = [alike.get(token, token) for token in call]
    copied = listed[3:-1]
    assert any(inside[at : at + len(copied)] == copied for at in range(len(inside)))


def test_the_opening_is_a_few_tokens_and_texts_round_trip(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert len(opening_lines()) >= 7
    for frame in (*opening_lines(), *FRAMES):
        assert len(tokenizer.encode(frame)) == 1
    tokenizer.save(tmp_path / "t")
    again = Tokenizer.load(tmp_path / "t")
    for text in ("".join(FRAMES), 'x = \'é\'\t\n\\d \\\\ """ 12.5e3\n', '\n\n  "a":  1'):
        assert again.decode(again.encode(text)) == text
        assert again.encode(text) == tokenizer.encode(text)


@pytest.mark.slow
def test_with_the_nano_tokenizer_simulated_sessions_match_those_in_pods(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from etude_nano.demonstrator import read_files
    from etude_nano.simulated_sessions import simulate_demonstration

    generate_nano(tmp_path / "tasks", 12, "train", 4000)
    tasks = [read_task(path) for path in sorted((tmp_path / "tasks").iterdir()) if path.is_dir()]

    async def both() -> None:
        async with open_fleet(state=tmp_path / "pods") as fleet:
            async for shown in run_demonstrations(tasks, dialect_for(tokenizer), fleet):
                task = next(task for task in tasks if task.name == shown.task)
                again = await simulate_demonstration(read_files(task.directory), dialect_for(tokenizer))
                assert again is None or np.array_equal(again.tokens, shown.tokens), WORKSPACE

    asyncio.run(both())


def test_a_drill_copies_its_lines_as_json(pool: SnippetPool) -> None:
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
