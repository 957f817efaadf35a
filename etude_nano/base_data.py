"""All that a nano base model is made from, in one go on all cores: a tokenizer and three corpora of tokens.

    OUT/tokenizer     see `vocabulary.py`
    OUT/code          code of installed packages, and training programs as plain files
    OUT/drills        listings with lines copied and changed, many to a document: the shortest way to learn copying
    OUT/practice      practice sessions (`practice.py`)
    OUT/sessions      expert sessions of training tasks, if any are wanted; by default the base has seen none

`recipes/nano-base.toml` trains on them. The same arguments and packages give the same bytes.
"""

import asyncio
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.data.corpus import TOKENIZER
from etude.data.shards import FORMAT, MANIFEST, SPLITS, ShardWriter
from etude.data.sources import locate
from etude.errors import InputError
from etude.system.cores import usable_cores
from etude.system.progress import Report
from etude_nano.code_snippets import Pool, invented, make_pool, renamed, take_pieces
from etude_nano.exercises import draw_exercise, practise
from etude_nano.pod_sessions import vocabulary_texts
from etude_nano.program import draw_program
from etude_nano.simulated_sessions import rehearsals
from etude_nano.templates import leaves
from etude_nano.tokenizer import train_nano_tokenizer

PARTS = 64  # of the work at most: more than cores, so that none waits long for the last; each has a megabyte of code
LONGEST = 1024  # tokens of a document of code: a row takes it whole

Documents = list[tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]]


@dataclass(frozen=True)
class Amounts:
    """How much to make."""

    practice: int = 160_000  # sessions
    sessions: int = 0  # of experts in training tasks
    drills: int = 40_000  # documents
    code: float = 60.0  # megabytes
    programs: int = 4_000  # training programs as plain files
    seed: int = 0


def make_base_data(
    out: Path,
    sources: Sequence[str],
    amounts: Amounts = Amounts(),  # noqa: B008  frozen
    progress: Report = lambda done, total, note="": None,
    processes: int | None = None,
) -> dict[str, dict[str, int]]:
    """Make everything below `out`; how many documents and tokens there are of each."""
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; name a directory that is not there yet")
    started = time.monotonic()
    texts = list(code_texts(sources, int(amounts.code * 1e6), amounts.seed))
    parts = max(1, min(PARTS, int(amounts.code)))
    progress(0, parts, f"{len(texts)} files of code")
    sample = Random(amounts.seed).sample(texts, min(250, len(texts)))
    tokenizer = train_nano_tokenizer([*vocabulary_texts(1000), *(text[:10_000] for text in sample)])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out / TOKENIZER)
    progress(0, parts, f"tokenizer of {len(tokenizer)}, after {time.monotonic() - started:.0f} s")
    jobs = [(part, parts, texts[part::parts]) for part in range(parts)]
    made: dict[str, Documents] = {"code": [], "drills": [], "practice": [], "sessions": []}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or each worker would complain of the fork
    # fork: the workers have the modules already, and nothing here has started a thread that matters to them
    with multiprocessing.get_context("fork").Pool(processes or usable_cores()) as pool:
        work = partial(_make_part, out / TOKENIZER, amounts)
        for done, part in enumerate(pool.imap(work, jobs), 1):
            for kind, documents in part.items():
                made[kind] += documents
            progress(done, parts, f"{len(made['practice']):,} sessions, {time.monotonic() - started:.0f} s")
    facts = {}
    for kind, documents in made.items():
        if documents:
            write_corpus(out / kind, documents, tokenizer, {"kind": kind, **asdict(amounts), "sources": list(sources)})
            facts[kind] = {"documents": len(documents), "tokens": sum(len(ids) for ids, _ in documents)}
    return facts


def code_texts(sources: Sequence[str], limit: int, seed: int) -> Iterator[str]:
    """Python files of the sources, in a shuffled order, until there are so many characters."""
    files: dict[Path, None] = {}
    for source in sources:
        root = locate(source)
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


# ------------------------------------------------------------------------------------------- one part of the work


def _make_part(place: Path, amounts: Amounts, job: tuple[int, int, list[str]]) -> dict[str, Documents]:
    """The documents of one part of several: from its own files, by its own luck."""
    part, parts, texts = job
    tokenizer = Tokenizer.load(place)
    dialect = dialect_for(tokenizer)
    chance = Random(f"nano-base/{amounts.seed}/{part}")
    pool = make_pool(take_pieces(texts))
    if not pool.pieces:
        raise InputError("there is too little code to take pieces from; name larger sources or more megabytes")

    def share(count: int) -> int:
        return count // parts + (part < count % parts)

    def encoded(documents: Iterable[str]) -> Documents:
        found = [np.array([*tokenizer.encode(text), tokenizer.end_of_text], np.uint16) for text in documents]
        return [(ids, np.ones(len(ids), np.bool_)) for ids in found]

    programs = (program_text(chance) for _ in range(share(amounts.programs)))
    code = [cut for ids, _ in encoded([*texts, *programs]) for cut in _cuts(ids)]

    async def sessions() -> tuple[Documents, Documents]:
        practice: Documents = []
        for number in range(share(amounts.practice)):
            shown = await practise(draw_exercise(chance, pool), dialect, f"practice-{part}-{number}")
            if shown is not None:
                practice.append((shown.tokens.astype(np.uint16), shown.learned))
        experts: Documents = []
        if count := share(amounts.sessions):
            async for each in rehearsals(count, dialect, seed=10_000_000 + part * 100_000):
                experts.append((each.tokens.astype(np.uint16), np.ones(len(each.tokens), np.bool_)))
        return practice, experts

    practice, experts = asyncio.run(sessions())
    drills = encoded(drill(chance, pool) for _ in range(share(amounts.drills)))
    return {"code": code, "drills": drills, "practice": practice, "sessions": experts}


def _cuts(ids: npt.NDArray[np.uint16]) -> Documents:
    cuts = [ids[at : at + LONGEST] for at in range(0, len(ids), LONGEST)]
    return [(cut, np.ones(len(cut), np.bool_)) for cut in cuts if len(cut) > 16]


def program_text(chance: Random) -> str:
    """A training program as a file, right in every place."""
    program = draw_program(chance.choice(leaves("train")), "train", chance, 1, chance.choice((1, 2)))
    (text,) = program.files().values()
    return text


# ------------------------------------------------------------------------------------------- drills


def drill(chance: Random, pool: Pool) -> str:
    """A listing and what is done with its lines: copied, found, changed, as text and as JSON."""
    if chance.random() < 0.08:
        return _echo(chance, pool)
    piece = renamed(chance.choice(pool.pieces), chance, pool, chance.choice((0.0, 0.5, 1.0, 1.0)))
    lines = piece.text.rstrip("\n").split("\n")[:18]
    path = f"{invented(chance, pool)}.py"
    told = [f"{path}\n" + "\n".join(f"{number}|{line}" for number, line in enumerate(lines, 1))]
    usable = [number for number, line in enumerate(lines, 1) if line.strip()]
    for _ in range(chance.randint(3, 6)):
        number = chance.choice(usable)
        told.append(chance.choice(_ITEMS)(chance, pool, path, lines, number))
    return "\n\n".join(told) + "\n"


def _echo(chance: Random, pool: Pool) -> str:
    """Words that mean nothing, twice."""
    row = " ".join(invented(chance, pool) for _ in range(chance.randint(10, 40)))
    return f"{row}\n{row}\n{json.dumps(row)}\n"


def _copy(chance: Random, pool: Pool, path: str, lines: list[str], number: int) -> str:
    many = chance.choice((1, 1, 2, 3))
    part = "\n".join(lines[number - 1 : number - 1 + many])
    asked = f"line {number}" if many == 1 else f"lines {number} to {number + part.count(chr(10))}"
    return f"{asked}:\n{json.dumps(part) if chance.random() < 0.7 else part}"


def _find(chance: Random, pool: Pool, path: str, lines: list[str], number: int) -> str:
    return f"`{lines[number - 1].strip()}` is line {lines.index(lines[number - 1]) + 1}"


def _change(chance: Random, pool: Pool, path: str, lines: list[str], number: int) -> str:
    line = lines[number - 1]
    words = re.findall(r"\w+", line)
    if not words:
        return _copy(chance, pool, path, lines, number)
    old, new = (
        chance.choice(words),
        chance.choice((invented(chance, pool), str(chance.randint(0, 99)), chance.choice(words))),
    )
    changed = re.sub(rf"\b{re.escape(old)}\b", new, line, count=1)
    call = {"file_path": path, "old_string": line, "new_string": changed}
    ask = chance.choice(
        (f"{new} for {old} in line {number}", f"line {number}: {old} -> {new}", f"{old} should be {new}")
    )
    return f"{ask}\n{json.dumps(call)}"


def _add(chance: Random, pool: Pool, path: str, lines: list[str], number: int) -> str:
    line = lines[number - 1]
    indent = line[: len(line) - len(line.lstrip())]
    new = chance.choice(chance.choice(pool.pieces).text.rstrip("\n").split("\n")).strip() or "pass"
    call = {"file_path": path, "old_string": line, "new_string": f"{line}\n{indent}{new}"}
    return f"after line {number}: {new}\n{json.dumps(call)}"


_ITEMS: tuple[Callable[[Random, Pool, str, list[str], int], str], ...] = (
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
    """A corpus of documents that are tokens already, as mixtures read it by its path."""
    shards: list[dict[str, Any]] = []
    names = str(options["kind"])
    with ShardWriter(
        out / "train", len(tokenizer), mask=True, limit=256 << 20, first=0, finished=shards.append
    ) as writer:
        for number, (ids, learned) in enumerate(documents):
            writer.add(f"{names}/{number}", ids, learned, 2 * len(ids))
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
