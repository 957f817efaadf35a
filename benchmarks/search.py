"""Compare semantic, lexical and combined code search: recall on known answers, and the cost of an index.

    python benchmarks/search.py               # four sets of questions; embeds about 5,000 chunks the first time
    python benchmarks/search.py --misses      # also list the questions whose answer was not among the first five
    python benchmarks/search.py --cold        # with an empty cache, in a temporary directory
    python benchmarks/search.py --code        # embed the code itself instead of its description

A question counts as answered when one of the first five chunks is in a function or class that does what it asks for.
The questions are about Etude's own code, click and jinja2, worded differently from the code; one set uses identifiers.
They are few, and the embedded text and the ranking weights were tuned on them: differences under 0.1 mean nothing.
"""

import argparse
import ast
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.local_files import LocalFiles
from etude.harness.search import bm25, index
from etude.harness.search.cache import default_directory
from etude.harness.search.chunks import chunk_text
from etude.harness.search.index import CodeIndex, RankedChunk
from etude.harness.search.searcher import CodebaseSearcher, open_searcher
from etude.harness.search.source import FileEntry

Questions = Sequence[tuple[str, str]]  # question, and the symbols that answer it: `path:Class.method path:function`

ROOT = Path(__file__).resolve().parent.parent
TOP = 5

ETUDE: Questions = [
    (
        "how do we stop training when the loss blows up and keep the batch that caused it",
        "train/guard.py:LossSpikeGuard",
    ),
    (
        "where is a document rejected because it copies text of an evaluation set",
        "data/decontaminate.py:find_contaminated data/decontaminate.py:ProtectedNgrams "
        "data/decontaminate.py:Contamination",
    ),
    (
        "decide whether a new sandbox may start right now or has to wait for its turn",
        "pods/scheduling/admission.py:Admission pods/scheduling/admission.py:AdmissionQueue "
        "pods/scheduling/admission.py:AdmissionDecision",
    ),
    ("convert human readable memory amounts such as 512M into bytes", "pods/cli/units.py:parse_size"),
    (
        "restrict which internet addresses a sandbox can talk to",
        "pods/network/policy.py:EgressPolicy pods/network/policy.py:EgressRule pods/pod.py:Egress "
        "pods/network/policy.py:parse_rule pods/network/policy.py:forbidden_address",
    ),
    (
        "find out which server name a client asks for in its TLS handshake",
        "pods/network/policy.py:ClientHelloReader pods/network/policy.py:ClientHello",
    ),
    ("how does the learning rate change over time", "train/optim.py:LRSchedule"),
    ("detect almost identical source files", "data/dedup.py:find_near_duplicates"),
    ("guess which open source license a repository has", "data/licences.py:guess_licence"),
    (
        "read quantized llama.cpp weights and turn them into safetensors",
        "model/gguf.py:import_gguf model/gguf.py:GgufFile",
    ),
    (
        "replace the parameters of a running server in place",
        "inference/weight_update.py:copy_weights inference/weight_update.py:read_weights",
    ),
    (
        "pick the machine on which the next container is launched",
        "pods/scheduling/router.py:PodRouter pods/scheduling/router.py:Placement",
    ),
    (
        "compute the training loss without holding the logits of all tokens in memory",
        "kernels/loss.py:linear_cross_entropy kernels/loss.py:token_chunks",
    ),
    (
        "only replace a file once its new content has been written completely",
        "files.py:write_atomically data/staging.py:write_atomic model/checkpoint.py:new_directory",
    ),
    ("prevent two programs from using the same directory at the same time", "files.py:take_lock"),
    (
        "share cached keys and values between requests whose prompts begin alike",
        "inference/pages.py:PagePool inference/pages.py:Prefix",
    ),
    ("drop experts recorded by the sampler that the current router would hardly choose", "model/moe.py:filter_replay"),
    ("cut a file at random positions so that the model learns infilling", "data/document_format.py:split_for_fim"),
    (
        "estimate how much memory training needs on each GPU",
        "model/trainer_memory.py:trainer_memory model/trainer_memory.py:TrainerMemory",
    ),
    (
        "forbid dangerous kernel calls inside the sandbox",
        "pods/runtime/seccomp.py:build_filter pods/runtime/seccomp.py:calls "
        "pods/runtime/seccomp.py:build_shared_filter",
    ),
    (
        "do not print a half received unicode character while streaming an answer",
        "chat/incremental_text.py:IncrementalDetokenizer model/generate.py:stream_text",
    ),
    (
        "wait and try again when the remote sampling server does not respond",
        "inference/clients/transport.py:Transport inference/clients/transport.py:RetryPolicy",
    ),
    (
        "test if a model can remember the state of a document after many modifications",
        "evaluation/state_tracking.py:track_state evaluation/state_tracking.py:StateTask "
        "evaluation/state_tracking.py:tasks_from_files",
    ),
    (
        "skip source code that was written by a tool instead of a person",
        "data/filters.py:generated data/filters.py:generated_name",
    ),
    (
        "substitute environment variables in Dockerfile instructions",
        "pods/images/instructions.py:substitute pods/images/instructions.py:expand",
    ),
    (
        "draw the same random numbers again for a given seed when choosing the next token",
        "kernels/draw.py:uniform kernels/draw.py:draw_untruncated inference/sampling.py:draw",
    ),
    (
        "write a conversation as training text with a mask of what the assistant said",
        "data/conversations.py:chat_parts data/conversations.py:ChatFormat data/conversations.py:ConversationSegment",
    ),
    (
        "verify guessed tokens so that decoding gets faster",
        "inference/speculation.py:Speculator inference/speculation.py:VerifiedDrafts",
    ),
]

NAMED: Questions = [
    ("where is ETUDE_PODS read", "pods/fleet.py:default_state"),
    ("splitmix64", "kernels/draw.py:uniform data/text_hash.py:_mix data/text_hash.py:_numbers"),
    ("take_lock", "files.py:take_lock"),
    ("PagePool take pages back", "inference/pages.py:PagePool"),
    ("filter_replay plausibility", "model/moe.py:filter_replay"),
    (
        "PSI avg10 stall",
        "pods/scheduling/pressure.py:Pressure pods/scheduling/pressure.py:read_pressure "
        "pods/scheduling/admission.py:Thresholds",
    ),
    ("make_whiteout overlay", "pods/images/trees.py:make_whiteout pods/images/trees.py:is_whiteout"),
    ("QueueFull retry_after", "inference/service.py:QueueFull"),
    ("parse_chunk_size", "pods/network/policy.py:parse_chunk_size"),
    ("ClientHello", "pods/network/policy.py:ClientHelloReader pods/network/policy.py:ClientHello"),
    ("no_new_privileges prctl", "pods/runtime/capabilities.py:no_new_privileges"),
    (
        "rope yarn mscale",
        "model/attention.py:inverse_frequencies model/attention.py:Rope model/config.py:RopeConfig",
    ),
    ("RMSNorm", "model/layers.py:RMSNorm kernels/fused.py:rms_norm"),
]

CLICK: Questions = [
    (
        "suggest similar option names when the user made a typo",
        "exceptions.py:NoSuchOption exceptions.py:_format_possibilities",
    ),
    ("ask the user yes or no on the terminal", "termui.py:confirm"),
    ("do not show what is typed when a password is entered", "termui.py:prompt termui.py:hidden_prompt_func"),
    ("open the user's text editor to write a message", "termui.py:edit _termui_impl.py:Editor"),
    (
        "show a long text one screen at a time",
        "termui.py:echo_via_pager _termui_impl.py:get_pager_file termui.py:get_pager_file",
    ),
    ("turn a command line argument into a date", "types.py:DateTime"),
    ("display how far a long loop has come", "termui.py:progressbar _termui_impl.py:ProgressBar"),
    ("call a command from a unit test and capture what it prints", "testing.py:CliRunner testing.py:Result"),
    ("generate the script for tab completion in bash", "shell_completion.py:BashComplete"),
    (
        "take the value of an option from the process environment",
        "core.py:Parameter.resolve_envvar_value core.py:Option.resolve_envvar_value "
        "core.py:Parameter.value_from_envvar core.py:Option.value_from_envvar",
    ),
    ("wrap paragraphs of help to the width of the terminal", "formatting.py:wrap_text _textwrap.py:TextWrapper"),
    ("remove colour codes from a string", "_compat.py:strip_ansi termui.py:unstyle"),
]

JINJA: Questions = [
    (
        "keep templates from reaching private attributes of objects",
        "sandbox.py:SandboxedEnvironment sandbox.py:is_internal_attribute",
    ),
    ("decide by file name whether HTML is escaped automatically", "utils.py:select_autoescape"),
    ("find template text inside an installed python package", "loaders.py:PackageLoader"),
    ("split the template source into tokens", "lexer.py:Lexer lexer.py:TokenStream"),
    (
        "store translated templates on disk so that they need not be compiled again",
        "bccache.py:FileSystemBytecodeCache bccache.py:BytecodeCache bccache.py:Bucket",
    ),
    ("a dictionary that forgets the entries used longest ago", "utils.py:LRUCache"),
    ("arrange items of a list into rows of equal length", "filters.py:do_batch filters.py:do_slice"),
    ("shorten a long text and put dots at the end", "filters.py:do_truncate"),
    (
        "make an error's stack trace point at the line of the template",
        "debug.py:rewrite_traceback_stack debug.py:fake_traceback",
    ),
    (
        "collect the messages of a template that must be translated",
        "ext.py:extract_from_ast ext.py:babel_extract ext.py:InternationalizationExtension",
    ),
    ("turn web addresses in a text into links", "utils.py:urlize filters.py:do_urlize"),
    ("evaluate constant expressions before the template is compiled", "optimizer.py:Optimizer optimizer.py:optimize"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--misses", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--code", action="store_true")
    arguments = parser.parse_args()
    if arguments.code:
        vars(index)["embedded_text"] = lambda chunk, lines, _: f"{chunk.path} {chunk.name}\n{chunk_text(chunk, lines)}"
    with tempfile.TemporaryDirectory() as empty:
        asyncio.run(compare(Path(empty) if arguments.cold else default_directory(), arguments.misses))


async def compare(cache: Path, misses: bool) -> None:
    searcher = open_searcher(cache=cache)
    if searcher.embedder is None:
        raise SystemExit(f"benchmarks/search.py: {searcher.lexical_only}")
    await searcher.embedder.prepare()
    console = Console(width=120)
    recalls = Table(title=f"answered within the first {TOP} (mean reciprocal rank)")
    for column in ("questions", "number", "by meaning", "by words", "both"):
        recalls.add_column(column, justify="left" if column == "questions" else "right")
    missed: list[str] = []
    for name, root, questions in (
        ("Etude, paraphrased", ROOT / "etude", ETUDE),
        ("Etude, by name", ROOT / "etude", NAMED),
        ("click, paraphrased", installed("click"), CLICK),
        ("jinja2, paraphrased", installed("jinja2"), JINJA),
    ):
        cells, rows = await recall(searcher, root, questions)
        recalls.add_row(name, str(len(questions)), *cells)
        missed += [f"{name}: {row}" for row in rows]
    console.print(recalls)
    console.print(await cost(searcher, ROOT / "etude", cache))
    if misses:
        console.print("\n".join(missed))


def installed(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"benchmarks/search.py: {package} is not installed")
    return Path(spec.submodule_search_locations[0])


# ------------------------------------------------------------------------------------------------- recall


async def recall(searcher: CodebaseSearcher, root: Path, questions: Questions) -> tuple[list[str], list[str]]:
    """Return share answered and mean reciprocal rank of each method, and the questions that the combination missed."""
    assert searcher.embedder is not None
    code_index = await searcher.prepare(LocalFiles(root))
    ranks: dict[str, list[int]] = {"semantic": [], "lexical": [], "fused": []}
    missed = []
    for question, answers in questions:
        spans = [symbol_span(root, answer) for answer in answers.split()]
        words = bm25.question_words(question)
        vector = await searcher.embedder.embed_question(question)
        ranks["semantic"].append(rank_of(code_index.rank([], vector, limit=50), spans))
        ranks["lexical"].append(rank_of(code_index.rank(words, None, limit=50), spans))
        ranks["fused"].append(rank_of(code_index.rank(words, vector, limit=50), spans))
        if not 0 < ranks["fused"][-1] <= TOP:
            missed.append(f"{question} {[found[-1] for found in ranks.values()]}")
    cells = []
    for found in ranks.values():
        share = sum(0 < rank <= TOP for rank in found) / len(found)
        cells.append(f"{share:.2f} ({sum(1 / rank for rank in found if rank) / len(found):.2f})")
    return cells, missed


def symbol_span(root: Path, answer: str) -> tuple[str, int, int]:
    """Return path and lines of `path:Class.method`; an answer that no longer exists is an error, not a miss."""
    path, _, name = answer.partition(":")
    body: Sequence[ast.stmt] = ast.parse((root / path).read_text(encoding="utf-8")).body
    lines: list[int] = []
    for part in name.split("."):
        nodes = [node for node in body if getattr(node, "name", None) == part]
        if not nodes:
            raise SystemExit(
                f"benchmarks/search.py: there is no {name} in {root / path}; the question needs a new answer"
            )
        lines = [number for node in nodes for number in (node.lineno, node.end_lineno or node.lineno)]
        body = getattr(nodes[-1], "body", [])
    return path, min(lines), max(lines)


def rank_of(found: Sequence[RankedChunk], spans: Sequence[tuple[str, int, int]]) -> int:
    """Return the rank of the first chunk that overlaps one of the spans; 0 if none does."""
    for rank, item in enumerate(found, start=1):
        chunk = item.chunk
        if any(chunk.path == path and chunk.first <= last and chunk.last >= first for path, first, last in spans):
            return rank
    return 0


# ------------------------------------------------------------------------------------------------- cost


class EditedFiles(LocalFiles):
    """A directory in which one file gains a function each time it is listed."""

    def __init__(self, root: Path, path: str) -> None:
        super().__init__(root)
        self.path = path
        self.edits = 0

    async def listing(self) -> Sequence[FileEntry]:
        self.edits += 1
        return [
            FileEntry(entry.path, entry.size, str(self.edits)) if entry.path == self.path else entry
            for entry in await super().listing()
        ]

    async def contents(self, paths: Sequence[str]) -> dict[str, bytes]:
        found = dict(await super().contents(paths))
        if self.path in found:
            found[self.path] += f"\n\ndef edit_{self.edits}_{os.getpid()}():\n    return {self.edits}\n".encode()
        return found


async def cost(warm: CodebaseSearcher, root: Path, cache: Path) -> Table:
    """Return a table of the time of every step, with a new searcher where the old one has the result cached."""
    assert warm.embedder is not None
    table = Table(title="cost")
    for column in ("step", "time", ""):
        table.add_column(column, justify="right" if column == "time" else "left")

    fresh = open_searcher(cache=cache)
    started = time.perf_counter()
    code_index = await CodebaseSearcher(None).prepare(LocalFiles(root))
    lines = sum(len(file.lines) for file in code_index.files)
    seconds = time.perf_counter() - started
    table.add_row(
        "list, read, split and index words",
        f"{seconds:.2f} s",
        f"{len(code_index.files)} files, {lines:,} lines, {code_index.size:,} chunks",
    )

    rate, chunks = await embedding_rate(warm, code_index)
    table.add_row("embed", f"{rate:.0f}/s", f"chunks, {chunks} timed; all of them once: {code_index.size / rate:.0f} s")

    assert fresh.embedder is not None
    await fresh.embedder.prepare()
    started = time.perf_counter()
    await fresh.prepare(LocalFiles(root))
    seconds = time.perf_counter() - started
    table.add_row(
        "index in a new process",
        f"{seconds:.2f} s",
        f"embeddings from the cache, except {fresh.embedder.embedded}",
    )

    edited = EditedFiles(root, "pods/host.py")
    await fresh.prepare(edited)
    started = time.perf_counter()
    before = fresh.embedder.embedded
    await fresh.prepare(edited)
    seconds = time.perf_counter() - started
    table.add_row(
        "update after an edit", f"{seconds * 1000:.0f} ms", f"{fresh.embedder.embedded - before} chunks embedded"
    )

    times = []
    files = LocalFiles(root)
    for question, _ in ETUDE[:10]:
        started = time.perf_counter()
        await fresh.search(files, question)
        times.append(time.perf_counter() - started)
    table.add_row("search", f"{sorted(times)[5] * 1000:.0f} ms", "median of 10; listing, encoding and ranking")
    return table


async def embedding_rate(searcher: CodebaseSearcher, code_index: CodeIndex) -> tuple[float, int]:
    """Return chunks per second of the embedding model alone on an even sample, and the size of the sample."""
    assert searcher.embedder is not None
    texts = [text for file in code_index.files for text in file.texts()]
    sample = texts[:: max(1, len(texts) // 256)]
    encoder = searcher.embedder.encoder()
    started = time.perf_counter()
    await asyncio.to_thread(encoder.encode, sample)
    return len(sample) / (time.perf_counter() - started), len(sample)


if __name__ == "__main__":
    main()
