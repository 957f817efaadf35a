"""The data of the nano base model, made on all cores: a tokenizer and three token corpora.

    OUT/tokenizer     see `tokenizer.py`
    OUT/code          code of installed packages, and programs of the training side, some with results of calls
    OUT/drills        listings with lines copied and changed, many to a document: the shortest way to learn copying
    OUT/practice      sessions of exercises (`exercises.py`): the tools and their format
    OUT/card.json     documents and tokens of each corpus, and how they were made

The base has seen code and the tool format, and no session of a kind that tasks have. No document contains a function
of a measured side (`sides.py`). `recipes/nano-base.toml` trains on them. The same arguments and packages give the same
bytes.
"""

import asyncio
import json
import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.data.canonical import definition_digest, definition_digests
from etude.data.corpus import TOKENIZER
from etude.data.shards import FORMAT, MANIFEST, SPLITS, ShardWriter
from etude.data.sources import locate_source
from etude.errors import InputError
from etude.system.cores import usable_cores
from etude.system.progress import ProgressCallback
from etude.tasks.leaks import Answers, task_answer
from etude.tasks.settings import SEED_STRIDE
from etude_nano.code_snippets import SnippetPool, extract_snippets, invent_name, make_pool, rename_identifiers
from etude_nano.exercises import draw_exercise, simulate_exercise
from etude_nano.exercises_programs import draw_exercise_program
from etude_nano.function_templates import compose_template
from etude_nano.pod_sessions import vocabulary_texts
from etude_nano.program import plain_cases
from etude_nano.sides import Split, side_of
from etude_nano.source import nano_tasks
from etude_nano.templates import draw_function, leaf_templates
from etude_nano.tokenizer import train_nano_tokenizer

MEASURED_SEEDS: dict[Split, int] = {"validation": 700_000, "new": 600_000, "unseen": 0}  # where sets of recipes begin
RECIPE_SEEDS = 3  # seeds of a run for which that is done
MAX_PARTS = 64  # more than cores, so that none waits long for the last; each has at least a megabyte of code
MAX_CODE_TOKENS = 1024  # tokens of a code document, so that it fits into one row
CARD = "card.json"

Documents = list[tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]]


@dataclass(frozen=True)
class Amounts:
    """How much of each kind of data to make."""

    practice: int = 160_000  # sessions of exercises
    drills: int = 40_000  # documents
    code: float = 60.0  # megabytes
    programs: int = 120_000  # programs of the training side
    measured: int = 20_000  # functions to draw, to find those of the measured sides that real code contains too
    measured_tasks: int = 400  # tasks to draw, for each measured split and each of a recipe's first seeds, for the same
    seed: int = 0


def make_base_data(
    out: Path,
    sources: Sequence[str],
    amounts: Amounts = Amounts(),  # noqa: B008  frozen
    progress: ProgressCallback = lambda done, total, note="": None,
    processes: int | None = None,
) -> dict[str, dict[str, int]]:
    """Write the tokenizer and corpora below `out`; return the number of documents and tokens of each corpus."""
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; name a directory that does not exist yet")
    started = time.monotonic()
    texts = list(code_texts(sources, int(amounts.code * 1e6), amounts.seed))
    measured = MeasuredCode(measured_forms(amounts.measured), drawn_answers(amounts.measured_tasks))
    texts = [text for text in texts if not measured.is_in(text)]
    parts = max(1, min(MAX_PARTS, int(amounts.code)))
    progress(0, parts, f"{len(texts)} files of code")
    sample = Random(amounts.seed).sample(texts, min(250, len(texts)))
    tokenizer = train_nano_tokenizer([*vocabulary_texts(1000), *(text[:10_000] for text in sample)])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out / TOKENIZER)
    progress(0, parts, f"tokenizer of {len(tokenizer)}, after {time.monotonic() - started:.0f} s")
    jobs = [(part, parts, texts[part::parts]) for part in range(parts)]
    made: dict[str, Documents] = {"code": [], "drills": [], "practice": []}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise each forked worker prints a warning
    # fork: the workers inherit the loaded modules, and no thread is running that they need
    with multiprocessing.get_context("fork").Pool(processes or usable_cores()) as workers:
        work = partial(_make_part, out / TOKENIZER, amounts, measured)
        for done, part in enumerate(workers.imap(work, jobs), 1):
            for kind, documents in part.items():
                made[kind] += documents
            progress(done, parts, f"{len(made['practice']):,} sessions, {time.monotonic() - started:.0f} s")
    facts = {}
    for kind, documents in made.items():
        if documents:
            write_corpus(out / kind, documents, tokenizer, {"kind": kind, **asdict(amounts), "sources": list(sources)})
            facts[kind] = {"documents": len(documents), "tokens": sum(len(ids) for ids, _ in documents)}
    card = {
        "amounts": asdict(amounts),
        "sources": source_versions(sources),
        "corpora": facts,
        "tokenizer": tokenizer.digest,
    }
    (out / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return facts


def source_versions(sources: Sequence[str]) -> dict[str, list[str]]:
    """Return each source with what determines its contents: Python's version, or the installed distributions."""
    installed = sorted({f"{each.name}=={each.version}" for each in distributions()}, key=str.lower)
    known = {"stdlib": [f"Python {platform.python_version()}"], "site-packages": installed}
    return {source: known.get(source, []) for source in sources}


def code_texts(sources: Sequence[str], limit: int, seed: int) -> Iterator[str]:
    """Yield Python files of the sources in shuffled order, until `limit` characters."""
    files: dict[Path, None] = {}
    for source in sources:
        root = locate_source(source)
        if not root.is_dir():
            raise InputError(
                f"source {source} is not a directory; name one with Python code, or stdlib, or site-packages"
            )
        files |= dict.fromkeys(sorted(root.rglob("*.py")))
    order = list(files)
    Random(seed).shuffle(order)
    size = 0
    for path in order:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 200 < len(text) < 200_000 and "<|im_" not in text:
            yield text
            size += len(text)
            if size >= limit:
                return


# ------------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class MeasuredCode:
    """What no training text may contain: functions of the measured sides, and the answers of measured tasks."""

    forms: frozenset[str]
    answers: Answers

    def is_in(self, text: str) -> bool:
        return bool(self.answers.leaks_in(text, "")) or not self.forms.isdisjoint(definition_digests(text))


def measured_forms(draws: int) -> frozenset[str]:
    """Return the canonical digests of functions that measured tasks may have, as far as this many draws show them."""
    rng = Random("measured forms")
    found = set()
    for _ in range(draws):
        template = rng.choice(leaf_templates()) if rng.random() < 0.2 else compose_template(rng)
        function = draw_function(template, "new", rng, set()).right
        if side_of(function) != "train":
            found.add(definition_digest(function.replace("@", "")))
    return frozenset(found)


def drawn_answers(count: int) -> Answers:
    """Return the answers of the first `count` tasks that each measured set of the recipes has with its first seeds."""
    drawn = (
        nano_tasks(count, split, first + seed * SEED_STRIDE)
        for split, first in MEASURED_SEEDS.items()
        for seed in range(RECIPE_SEEDS)
    )
    return Answers(task_answer(name, files) for tasks in drawn for name, files in tasks)


# ------------------------------------------------------------------------------------------- one part of the data


def _make_part(
    tokenizer_path: Path, amounts: Amounts, measured: MeasuredCode, job: tuple[int, int, list[str]]
) -> dict[str, Documents]:
    """Return the documents of one part, made from its own files with its own random generator."""
    part, parts, texts = job
    tokenizer = Tokenizer.load(tokenizer_path)
    dialect = dialect_for(tokenizer)
    rng = Random(f"nano-base/{amounts.seed}/{part}")
    pool = make_pool(extract_snippets(texts))
    if not pool.snippets:
        raise InputError("there is too little code to extract snippets from; name larger sources or more megabytes")

    def share(count: int) -> int:
        return count // parts + (part < count % parts)

    def encoded(documents: Iterable[str]) -> Documents:
        kept = (text for text in documents if not measured.is_in(text))
        found = [np.array([*tokenizer.encode(text), tokenizer.end_of_text], np.uint16) for text in kept]
        return [(ids, np.ones(len(ids), np.bool_)) for ids in found]

    programs = (program_text(rng, pool) for _ in range(share(amounts.programs)))
    code = [cut for ids, _ in encoded([*texts, *programs]) for cut in _split_document(ids)]

    async def exercises() -> Documents:
        practice: Documents = []
        for number in range(share(amounts.practice)):
            shown = await simulate_exercise(draw_exercise(rng, pool), dialect, f"practice-{part}-{number}")
            if shown is not None and not measured.is_in(tokenizer.decode(shown.tokens.tolist())):
                practice.append((shown.tokens.astype(np.uint16), shown.loss_mask))
        return practice

    practice = asyncio.run(exercises())
    drills = encoded(drill(rng, pool) for _ in range(share(amounts.drills)))
    return {"code": code, "drills": drills, "practice": practice}


def _split_document(ids: npt.NDArray[np.uint16]) -> Documents:
    cuts = [ids[at : at + MAX_CODE_TOKENS] for at in range(0, len(ids), MAX_CODE_TOKENS)]
    return [(cut, np.ones(len(cut), np.bool_)) for cut in cuts if len(cut) > 16]


def program_text(rng: Random, pool: SnippetPool) -> str:
    """Return a correct program of the training side as one document, often followed by calls and their results."""
    program = draw_exercise_program(rng, pool)
    text = "\n\n".join(f"# {path}\n{code}" for path, code in program.files().items())
    calls = rng.choice((0, 2, 4))
    cases = [case for each in program.functions for case in plain_cases(each, program, rng, calls) or ()]
    return text + "".join(f"\n>>> {case.call}\n{case.want}" for case in cases) + "\n"


# ------------------------------------------------------------------------------------------- drills


def drill(rng: Random, pool: SnippetPool) -> str:
    """Return a listing followed by lines of it copied, found and changed, as text and as JSON."""
    if rng.random() < 0.08:
        return _echo(rng, pool)
    snippet = rename_identifiers(rng.choice(pool.snippets), rng, pool, rng.choice((0.0, 0.5, 1.0, 1.0)))
    lines = snippet.text.rstrip("\n").split("\n")[:18]
    path = f"{invent_name(rng, pool)}.py"
    items = [f"{path}\n" + "\n".join(f"{number}|{line}" for number, line in enumerate(lines, 1))]
    usable = [number for number, line in enumerate(lines, 1) if line.strip()]
    for _ in range(rng.randint(3, 6)):
        number = rng.choice(usable)
        items.append(rng.choice(_DRILL_ITEMS)(rng, pool, path, lines, number))
    return "\n\n".join(items) + "\n"


def _echo(rng: Random, pool: SnippetPool) -> str:
    """Return meaningless words twice, and once as JSON."""
    row = " ".join(invent_name(rng, pool) for _ in range(rng.randint(10, 40)))
    return f"{row}\n{row}\n{json.dumps(row)}\n"


def _copy(rng: Random, pool: SnippetPool, path: str, lines: list[str], number: int) -> str:
    many = rng.choice((1, 1, 2, 3))
    part = "\n".join(lines[number - 1 : number - 1 + many])
    asked = f"line {number}" if many == 1 else f"lines {number} to {number + part.count(chr(10))}"
    return f"{asked}:\n{json.dumps(part) if rng.random() < 0.7 else part}"


def _find(rng: Random, pool: SnippetPool, path: str, lines: list[str], number: int) -> str:
    return f"`{lines[number - 1].strip()}` is line {lines.index(lines[number - 1]) + 1}"


def _change(rng: Random, pool: SnippetPool, path: str, lines: list[str], number: int) -> str:
    line = lines[number - 1]
    words = re.findall(r"\w+", line)
    if not words:
        return _copy(rng, pool, path, lines, number)
    old, new = (
        rng.choice(words),
        rng.choice((invent_name(rng, pool), str(rng.randint(0, 99)), rng.choice(words))),
    )
    changed = re.sub(rf"\b{re.escape(old)}\b", new, line, count=1)
    call = {"file_path": path, "old_string": line, "new_string": changed}
    ask = rng.choice((f"{new} for {old} in line {number}", f"line {number}: {old} -> {new}", f"{old} should be {new}"))
    return f"{ask}\n{json.dumps(call)}"


def _add(rng: Random, pool: SnippetPool, path: str, lines: list[str], number: int) -> str:
    line = lines[number - 1]
    indent = line[: len(line) - len(line.lstrip())]
    new = rng.choice(rng.choice(pool.snippets).text.rstrip("\n").split("\n")).strip() or "pass"
    call = {"file_path": path, "old_string": line, "new_string": f"{line}\n{indent}{new}"}
    return f"after line {number}: {new}\n{json.dumps(call)}"


_DRILL_ITEMS: tuple[Callable[[Random, SnippetPool, str, list[str], int], str], ...] = (
    _copy,
    _copy,
    _find,
    _change,
    _change,
    _change,
    _add,
)


# ------------------------------------------------------------------------------------------- writing


def write_corpus(out: Path, documents: Documents, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    """Write a corpus of tokenized documents in the format that mixtures read by path."""
    shards: list[dict[str, Any]] = []
    kind = str(options["kind"])
    with ShardWriter(
        out / "train", len(tokenizer), mask=True, limit=256 << 20, first=0, finished=shards.append
    ) as writer:
        for number, (ids, loss_mask) in enumerate(documents):
            writer.add(f"{kind}/{number}", ids, loss_mask, 2 * len(ids))
    totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    empty = {"documents": 0, "tokens": 0, "bytes": 0, "shards": []}
    manifest = {
        "format": FORMAT,
        "sources": options["sources"],
        "options": options,
        "tokenizer": tokenizer.digest,
        "vocab_size": len(tokenizer),
        "mask": True,
        "splits": {split: {**totals, "shards": shards} if split == "train" else empty for split in SPLITS},
        "repositories": {},
    }
    tokenizer.save(out / TOKENIZER)
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
