"""Build a corpus of token shards from sources. The same inputs give the same bytes.

    ingest     read and filter every file; texts that pass are staged on disk, so memory holds only names
    decide     assign each repository to a split; find duplicates and documents that leak protected text
    encode     encode the remaining documents into shards; a killed build resumes after the last finished shard

A repository is in exactly one split. Held-out documents take precedence: duplicates of them are removed from training,
and the held-out split is itself protected text. Every removed document has an entry in report.json.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.canonical import definition_digests
from etude.data.conversations import chat_parts, load_chat
from etude.data.decontaminate import ProtectedNgrams, find_contaminated
from etude.data.dedup import find_exact_duplicates, find_near_duplicates
from etude.data.document_format import (
    LAYOUTS,
    DocumentPart,
    Markers,
    encode_documents,
    file_parts,
    reading_order,
    repository_parts,
)
from etude.data.documents import Document, document_name, source_digest
from etude.data.filters import Filters
from etude.data.ingest import IngestResult, ingest, read_files, read_protected, read_rendered_chats
from etude.data.shards import FORMAT, MANIFEST, SPLITS, ShardWriter
from etude.data.staging import StagedDocument, StagingArea, open_staging_area, write_atomic
from etude.data.worker_pool import WorkerPool
from etude.errors import InputError
from etude.globs import Globs
from etude.system.progress import ProgressCallback

if TYPE_CHECKING:
    from etude.chat.tokenizer import Tokenizer

REPORT = "report.json"
TOKENIZER = "tokenizer"  # a copy of the tokenizer, so that a corpus can be read on its own
# Names of the stage results in the staging directory.
INGESTED, DECIDED = "collected", "decided"


@dataclass(frozen=True)
class CorpusOptions:
    """Options of `build_corpus`; the defaults suit a few repositories of code. The names are stored in corpus.json."""

    layout: str = "file"  # "file": one document per file; "repository": one per repository
    chat: bool = False  # sources are rows of messages; documents get a loss mask
    fim: float = 0.0  # share of the files that are rearranged for fill-in-the-middle
    suffixes: tuple[str, ...] = ()  # of the files to read; () means filters.DEFAULT_SUFFIXES
    max_bytes: int = 1 << 20  # size limit of a file; larger ones are data
    validation: float = 0.0  # share of the repositories, chosen by a hash of their names
    held_out: tuple[str, ...] = ()  # names or globs of repositories that are never trained on
    against: tuple[str, ...] = ()  # sources of protected text: benchmarks, repositories kept for evaluation
    answers: tuple[tuple[str, ...], ...] = ()  # digests of definitions; a document with all of one entry is removed
    near: float = 0.8  # Jaccard similarity from which a document is a near duplicate; 1.0 removes exact ones only
    shingle: int = 5  # words of a shingle
    ngram: int = 13  # words of an n-gram; a common n-gram is a leak
    leak: float = 0.0  # tolerated share of protected n-grams in a document
    boilerplate: int = 10  # n-grams in more repositories than this are ignored
    seed: int = 0  # of the validation split and fill-in-the-middle
    shard_bytes: int = 256 << 20  # bytes of tokens in one shard; a larger document gets a shard of its own

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InputError(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        for name in ("fim", "validation", "near", "leak"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} = {getattr(self, name)} is not between 0 and 1")
        if bare := [suffix for suffix in self.suffixes if not suffix.startswith(".")]:
            raise InputError(f"suffix {bare[0]} has no dot; write .{bare[0]}")
        if self.chat and (self.fim or self.suffixes or self.layout != "file"):
            raise InputError("chat: layout, fim and suffixes do not apply to chats; remove them")
        for name in ("shingle", "ngram", "max_bytes", "shard_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)} is less than 1")
        if max(self.shingle, self.ngram) > 256 or self.near == 0:
            raise InputError("shingle and ngram are at most 256, near is more than 0")

    @property
    def filters(self) -> Filters:
        if not self.suffixes:
            return Filters(max_bytes=self.max_bytes)
        suffixes = frozenset(suffix.lower() for suffix in self.suffixes)
        return Filters(suffixes=suffixes, names=frozenset(), max_bytes=self.max_bytes)


@dataclass(frozen=True)
class CorpusSize:
    """Numbers of documents, bytes and tokens."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "CorpusSize") -> "CorpusSize":
        return CorpusSize(self.documents + other.documents, self.bytes + other.bytes, self.tokens + other.tokens)


@dataclass(frozen=True)
class CorpusReport:
    """Documents read, removed and written; `details` is the content of report.json."""

    path: Path
    read: CorpusSize
    removed: dict[str, CorpusSize]
    splits: dict[str, CorpusSize]
    details: dict[str, Any] = field(repr=False)


def build_corpus(
    sources: Sequence[str],
    tokenizer: "Tokenizer",
    out: Path,
    options: CorpusOptions = CorpusOptions(),  # noqa: B008  frozen
    progress: ProgressCallback | None = None,
    *,
    restart: bool = False,
) -> CorpusReport:
    """Build the corpus at `out`, or resume an interrupted build with the same arguments."""
    markers = Markers.find(tokenizer, fim=options.fim > 0)
    plan = _plan(sources, tokenizer, options)
    with open_staging_area(out, plan, restart=restart) as staging, WorkerPool(staging.path / "workers") as pool:
        report = progress or _ignore_progress
        if staging.stage_result(INGESTED) is None:

            def read(source: str) -> Iterator[IngestResult]:
                if options.chat:
                    return read_rendered_chats(source, tokenizer, pool)
                return read_files(source, options.filters, pool)

            found = ingest(staging, sources, read, lambda count: report(count, 3 * count, "ingest"))
            staging.finish_stage(INGESTED, found)
        builder = _CorpusBuilder(staging, options, tokenizer, markers, report, pool)
        if staging.stage_result(DECIDED) is None:
            staging.finish_stage(DECIDED, builder.decide())
        builder.encode(staging.stage_result(DECIDED))
        details = builder.write_manifest(list(sources))
        staging.publish(out)
    return _as_report(out, details)


def read_report(corpus: Path) -> CorpusReport:
    """Return the report of a finished corpus."""
    try:
        return _as_report(corpus, json.loads((corpus / REPORT).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{corpus}: it has no {REPORT}; name a directory made by `etude data build`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{corpus / REPORT} is not the report of a corpus ({error})") from None


def choose_split(repository: str, options: CorpusOptions) -> str:
    """Return the split of a repository. It depends on seed and name only, so it is the same in every corpus."""
    if Globs(options.held_out).matches(repository):
        return "held_out"
    digest = hashlib.blake2b(f"{options.seed}\0{repository}".encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "little") < options.validation * 2**64 else "train"


def _plan(sources: Sequence[str], tokenizer: "Tokenizer", options: CorpusOptions) -> dict[str, Any]:
    """Return everything that determines the bytes of a corpus; a build resumes only with an equal plan."""
    if not sources:
        raise InputError("no source was given; name a directory, a repository, an archive or a file of rows")
    template = hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest() if options.chat else None
    return {
        "format": FORMAT,
        "sources": list(sources),
        **asdict(options),
        "tokenizer": tokenizer.digest,
        "chat_template": template,
        **{f"content of {source}": source_digest(source) for source in dict.fromkeys((*sources, *options.against))},
    }


# ------------------------------------------------------------------------------------------ decide and encode


class _CorpusBuilder:
    """Decides about the staged documents and encodes them. A document is its position in `documents`."""

    def __init__(
        self,
        staging: StagingArea,
        options: CorpusOptions,
        tokenizer: "Tokenizer",
        markers: Markers,
        report: ProgressCallback,
        pool: WorkerPool,
    ) -> None:
        self.staging, self.options, self.tokenizer, self.markers = staging, options, tokenizer, markers
        self.report, self.pool = report, pool
        self.ingested = staging.stage_result(INGESTED)
        self.documents = [StagedDocument(*fields) for fields in self.ingested["entries"]]
        repositories = dict.fromkeys(document.repository for document in self.documents)
        self.split_of = {repository: choose_split(repository, options) for repository in repositories}
        for pattern in options.held_out:
            if not any(map(Globs([pattern]).matches, repositories)):
                some = ", ".join(sorted(repositories)[:5])
                raise InputError(f"held_out {pattern} matches no repository; there are {some} ...")

    def decide(self) -> list[dict[str, Any]]:
        """Return the documents to remove, in order, each with its reason and the text it repeats."""
        by_precedence = sorted(range(len(self.documents)), key=lambda at: -SPLITS.index(self._split(at)))
        exact = find_exact_duplicates([self.documents[at].digest for at in by_precedence])
        removed = {
            by_precedence[one.document]: {"reason": one.kind, "of": self._name(by_precedence[one.kept])}
            for one in exact
        }
        left = [at for at in by_precedence if at not in removed]
        near: list[Any] = []
        if self.options.near < 1:
            near = find_near_duplicates(
                left,
                self._plain_text,
                threshold=self.options.near,
                shingle=self.options.shingle,
                progress=self._decide_progress(),
                pool=self.pool,
            )
        for one in near:
            similarity = round(one.similarity, 4)
            removed[one.document] = {"reason": one.kind, "of": self._name(one.kept), "similarity": similarity}
        removed |= self._find_contaminated([at for at in left if at not in removed])
        removed |= self._find_answers([at for at in left if at not in removed])
        return [
            {"at": at, "document": self._name(at), "bytes": self.documents[at].size, **removed[at]}
            for at in sorted(removed)
        ]

    def _find_contaminated(self, left: Sequence[int]) -> dict[int, dict[str, Any]]:
        options = self.options
        held_out = [at for at in left if self._split(at) == "held_out"]

        def texts() -> Iterator[tuple[str, str]]:
            yield from read_protected(options.against, options.filters)
            yield from ((f"held_out: {self._name(at)}", self._plain_text(at)) for at in held_out)

        protected = ProtectedNgrams(texts(), options.ngram, self.pool)
        if options.against and not len(protected):
            named = ", ".join(options.against)
            raise InputError(
                f"against {named}: no text has {options.ngram} words or more, so nothing would be protected"
            )
        if not len(protected):
            return {}
        checked = [(at, self.documents[at].repository) for at in left if self._split(at) != "held_out"]
        found = find_contaminated(
            protected,
            checked,
            self._plain_text,
            max_share=options.leak,
            boilerplate=options.boilerplate,
            progress=self._decide_progress(len(self.documents) // 2),
            pool=self.pool,
        )
        return {
            one.document: {
                "reason": "contaminated",
                "source": one.source,
                "ngram": one.ngram,
                "matches": one.matches,
                "share": one.share,
            }
            for one in found
        }

    def _find_answers(self, left: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the documents that contain the answer of a measured task, whatever its names and numbers are."""
        wanted = [frozenset(answer) for answer in self.options.answers]
        known = frozenset(digest for answer in wanted for digest in answer)
        removed = {}
        for at in (at for at in left if known and self._split(at) != "held_out"):
            found = definition_digests(self._plain_text(at)).keys() & known
            if found and any(answer <= found for answer in wanted):
                removed[at] = {"reason": "answer", "of": "a measured task"}
        return removed

    def encode(self, removed: list[dict[str, Any]]) -> None:
        """Write the shards that are not finished yet, split by split."""
        removed_positions = {one["at"] for one in removed}
        finished = self.staging.finished_shards()
        done = 0
        for split in SPLITS:
            units = self._units(
                [at for at in range(len(self.documents)) if at not in removed_positions and self._split(at) == split]
            )
            done_shards = [shard for shard in finished if shard["split"] == split]
            skipped = sum(shard["documents"] for shard in done_shards)
            writer = ShardWriter(
                self.staging.corpus / split,
                len(self.tokenizer),
                mask=self.options.chat,
                limit=self.options.shard_bytes,
                first=len(done_shards),
                finished=partial(self._record_shard, split),
            )
            done += sum(map(len, units[:skipped]))
            planned = ((self._unit_name(unit), self._parts(unit)) for unit in units[skipped:])
            with writer:
                documents = encode_documents(planned, self.tokenizer, self.pool)
                for unit, encoded in zip(units[skipped:], documents, strict=True):
                    writer.add(encoded.name, encoded.tokens, encoded.loss_mask, encoded.bytes)
                    done += len(unit)
                    self.report(2 * len(self.documents) + done, 3 * len(self.documents), "encode")

    def _record_shard(self, split: str, shard: dict[str, Any]) -> None:
        self.staging.add_shard({"split": split, **shard})

    def write_manifest(self, sources: list[str]) -> dict[str, Any]:
        """Write corpus.json and report.json, which do not depend on time or machine; return the report."""
        shards = self.staging.finished_shards()
        splits: dict[str, Any] = {}
        for split in SPLITS:
            own = [{key: shard[key] for key in shard if key != "split"} for shard in shards if shard["split"] == split]
            totals = {key: sum(shard[key] for shard in own) for key in ("documents", "tokens", "bytes")}
            splits[split] = {**totals, "shards": own}
        manifest = {
            "format": FORMAT,
            "sources": sources,
            "options": asdict(self.options),
            "tokenizer": self.tokenizer.digest,
            "vocab_size": len(self.tokenizer),
            "mask": self.options.chat,
            "splits": splits,
            "repositories": {
                name: {"split": split, "licences": self.ingested["licences"].get(name, {})}
                for name, split in self.split_of.items()
            },
        }
        details = self._details(splits)
        self.tokenizer.save(self.staging.corpus / TOKENIZER)
        write_atomic(self.staging.corpus / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        write_atomic(self.staging.corpus / REPORT, json.dumps(details, indent=1) + "\n")
        return details

    def _details(self, splits: dict[str, Any]) -> dict[str, Any]:
        decided = [{key: one[key] for key in one if key != "at"} for one in self.staging.stage_result(DECIDED)]
        removed = [*self.ingested["removed"], *decided]
        sizes: dict[str, CorpusSize] = {}
        for one in removed:
            sizes[one["reason"]] = sizes.get(one["reason"], CorpusSize()) + CorpusSize(1, one["bytes"])
        everything = sum(sizes.values(), CorpusSize()) + sum(
            (CorpusSize(1, document.size) for document in self.documents), CorpusSize()
        )
        counted_twice = sum((CorpusSize(1, one["bytes"]) for one in decided), CorpusSize())  # as read and as removed
        read = CorpusSize(everything.documents - counted_twice.documents, everything.bytes - counted_twice.bytes)
        return {
            "format": FORMAT,
            "read": _plain_size(read),
            "removed": {reason: _plain_size(sizes[reason]) for reason in sorted(sizes)},
            "splits": {
                split: {key: splits[split][key] for key in ("documents", "bytes", "tokens")} for split in SPLITS
            },
            "licences": self._licences(),
            "removed_documents": removed,
        }

    def _licences(self) -> dict[str, int]:
        """Return the number of repositories of each licence."""
        counts: Counter[str] = Counter()
        for name in self.split_of:
            found = sorted(set(self.ingested["licences"].get(name, {}).values()))
            counts[" + ".join(found) or "none found"] += 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def _units(self, documents: Sequence[int]) -> list[list[int]]:
        """Group documents into training documents: one file each, or the files of a repository in reading order."""
        if self.options.layout == "file":
            return [[at] for at in documents]
        groups: dict[str, list[int]] = {}
        for at in documents:
            groups.setdefault(self.documents[at].repository, []).append(at)
        return [
            [group[i] for i in reading_order([self.documents[at].path for at in group])] for group in groups.values()
        ]

    def _unit_name(self, unit: Sequence[int]) -> str:
        return self._name(unit[0]) if self.options.layout == "file" else self.documents[unit[0]].repository

    def _parts(self, unit: Sequence[int]) -> Iterator[DocumentPart]:
        options = self.options
        if options.chat:
            _, segments = load_chat(self.staging.text(self.documents[unit[0]]))
            return chat_parts(segments, self.markers.end_of_text)
        if options.layout == "file":
            return file_parts(self._document(unit[0]), self.markers, options.fim, options.seed)
        repository = self.documents[unit[0]].repository
        return repository_parts(repository, map(self._document, unit), self.markers, options.fim, options.seed)

    def _document(self, at: int) -> Document:
        document = self.documents[at]
        return Document(document.repository, document.path, self.staging.text(document))

    def _plain_text(self, at: int) -> str:
        text = self.staging.text(self.documents[at])
        return load_chat(text)[0] if self.options.chat else text

    def _name(self, at: int) -> str:
        return document_name(self.documents[at].repository, self.documents[at].path)

    def _split(self, at: int) -> str:
        return self.split_of[self.documents[at].repository]

    def _decide_progress(self, start: int = 0) -> Callable[[int], None]:
        """Return a progress callback for one of the two passes of `decide`."""
        count = len(self.documents)
        return lambda done: self.report(count + start + done // 2, 3 * count, "decide")


def _ignore_progress(done: int, total: int, note: str = "") -> None:
    """Default progress callback: does nothing."""


def _plain_size(size: CorpusSize) -> dict[str, int]:
    return {"documents": size.documents, "bytes": size.bytes}


def _as_report(path: Path, details: dict[str, Any]) -> CorpusReport:
    return CorpusReport(
        path=path,
        read=CorpusSize(**details["read"]),
        removed={reason: CorpusSize(**size) for reason, size in details["removed"].items()},
        splits={split: CorpusSize(**size) for split, size in details["splits"].items()},
        details=details,
    )
