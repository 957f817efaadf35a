"""Exercises: they follow their scripts, match sessions in pods, and show nothing that is measured."""

import asyncio
import inspect
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from etude.chat.dialects import dialect_for
from etude.chat.messages import ToolCall
from etude.chat.tokenizer import Tokenizer
from etude.data.canonical import definition_digest
from etude.data.shards import Shards
from etude.errors import InputError
from etude.pods import open_fleet
from etude.tasks.harbor import read_task
from etude.tasks.leaks import find_leaks, measured_answers
from etude_nano.base_data import Amounts, drill, make_base_data
from etude_nano.code_snippets import (
    CodeSnippet,
    SnippetPool,
    extract_snippets,
    invent_name,
    make_pool,
    rename_identifiers,
)
from etude_nano.demonstrator import NANO_TOOL_SET
from etude_nano.exercises import TranscriptBuilder, draw_exercise, simulate_exercise
from etude_nano.exercises_programs import draw_slot_values, run_script
from etude_nano.function_templates import draw_caller, draw_leaf
from etude_nano.pod_sessions import run_demonstrations, vocabulary_texts
from etude_nano.sides import UNSEEN_FAULTS, side_of
from etude_nano.simulated_sessions import CannotSimulate, SimulatedToolExecutor
from etude_nano.source import generate_nano
from etude_nano.task_writer import WORKSPACE
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
    assert len(kinds) > 15


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


def test_training_functions_and_their_faults_are_of_the_training_side_and_most_forms_differ() -> None:
    rng, forms = Random(3), set()
    for _ in range(300):
        taken: set[str] = set()
        function = draw_leaf("train", rng, taken)
        caller = draw_caller(function, "train", rng, taken)
        for each in (function, caller):
            assert side_of(each.right) == "train", each.right
            assert all(side_of(fault.text) == "train" for fault in each.faults), each.right
            assert not {fault.kind for fault in each.faults} & UNSEEN_FAULTS
        forms.add(definition_digest(function.right))
    assert len(forms) > 150


def test_an_exercise_tells_what_to_do_and_its_report_is_what_the_script_prints(pool: SnippetPool) -> None:
    found = [each for seed in range(60) if (each := run_script(Random(seed), pool)) is not None]
    assert len(found) > 15
    for exercise in found:
        script = next(path for path in exercise.repo if path in exercise.request and "print(" in exercise.repo[path])
        (command,) = [
            dict(call.arguments or {})["command"]
            for turn in exercise.turns
            for call in turn.message.calls
            if "python3" in str(call.arguments) and not turn.mistake
        ]
        assert command == f"python3 {script}"
        edits = [call for turn in exercise.turns for call in turn.message.calls if call.name == "search_replace"]
        assert bool(edits) == (exercise.kind == "run-told")


def test_an_invented_name_does_not_capture_a_word_that_a_template_writes(pool: SnippetPool) -> None:
    ordinary = replace(pool, words=("apricot", "basalt", "cedar", "dune", "ember", "fjord", "gorge", "heath", "islet"))
    capturing = replace(pool, words=(*ordinary.words, "key", "value", "len", "max", "a", "as"))
    for seed in range(300):
        rng = Random(seed)
        values = draw_slot_values(rng, capturing)
        function = draw_leaf("train", rng, set(), values)
        compile(function.right.replace("@", ""), "nano", "exec")
        assert not {"key", "value", "len", "max", "a", "as"} & set(values.values()), seed
    assert sum(bool(draw_slot_values(Random(seed), ordinary)) for seed in range(100)) > 30


def test_a_snippet_with_renamed_identifiers_has_the_same_structure(pool: SnippetPool) -> None:
    snippet = CodeSnippet("add", "def add(left, right):\n    return left + len(right)\n")
    other = rename_identifiers(snippet, Random(2), pool, 1.0)
    assert other.name != "add"
    assert definition_digest(other.text) == definition_digest(snippet.text)
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
    amounts = Amounts(practice=12, drills=6, code=1.0, programs=5, measured=200, measured_tasks=60)
    (source / "either.py").write_text(
        f'{inspect.getsource(json.dumps)}\n\ndef either(a, b):\n    return f"{{a}} or {{b}}"\n'
    )
    facts = make_base_data(tmp_path / "data", [str(source)], amounts, processes=1)
    tokenizer = Tokenizer.load(tmp_path / "data" / "tokenizer")
    for kind, found in facts.items():
        shards = Shards.open(tmp_path / "data" / kind)
        assert shards.tokenizer_digest == tokenizer.digest
        assert (len(shards), shards.tokens) == (found["documents"], found["tokens"])
    assert facts["practice"]["documents"] >= 10
    generate_nano(tmp_path / "unseen", 60, "unseen")  # tasks that write such an f-string are among them
    answers = measured_answers([tmp_path / "unseen"])
    assert list(find_leaks(answers, [source]))
    assert not list(find_leaks(answers, [tmp_path / "data" / kind for kind in facts]))
    assert json.loads((tmp_path / "data" / "card.json").read_text())["corpora"] == facts
    with pytest.raises(InputError, match="not empty"):
        make_base_data(tmp_path / "data", [str(source)], amounts)
    with pytest.raises(InputError, match="is not a directory"):
        make_base_data(tmp_path / "other", ["/nowhere"], amounts)


def test_a_call_that_is_parsed_without_a_required_argument_cannot_be_simulated(tmp_path: Path) -> None:
    """Code about agents contains the markup of tool calls; a turn that quotes it may be parsed as another call."""
    tools = SimulatedToolExecutor({"a.py": "x = 1\n"}, NANO_TOOL_SET, str(tmp_path))
    with pytest.raises(CannotSimulate, match="search_replace without old_string"):
        asyncio.run(tools.run([ToolCall("search_replace", {"file_path": "a.py"}, "1")]))
