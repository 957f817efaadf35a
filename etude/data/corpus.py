"""From sources to a corpus of token shards: collect, split, decide, encode; the same inputs give the same bytes.

    collect    read and filter every file; texts that pass go to disk, so memory holds names and never the texts
    decide     which split each repository is in, which documents repeat or leak others
    encode     the documents that are left, into shards; a killed build goes on after the last whole one

A repository is in one split. Held-out documents take precedence: what repeats one is removed from training, and the
held-out split is itself protected text. Nothing is removed without a line in report.json.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.conversations import chat_pieces, load_chat
from etude.data.decontaminate import Protected, find_contaminated
from etude.data.dedup import find_exact, find_near
from etude.data.document_format import (
    LAYOUTS,
    Markers,
    Piece,
    encode_documents,
    file_pieces,
    reading_order,
    repository_pieces,
)
from etude.data.documents import Document, document_name, source_digest
from etude.data.filters import Filters
from etude.data.ingest import Found, collect, read_files, read_protected, read_rendered_chats
from etude.data.shards import FORMAT, MANIFEST, SPLITS, ShardWriter
from etude.data.staging import Entry, Workspace, open_workspace, write_whole
from etude.data.worker_pool import Crew
from etude.errors import InputError
from etude.system.progress import Report

if TYPE_CHECKING:  # the model room loads torch
    from etude.chat.tokenizer import Tokenizer

REPORT = "report.json"
TOKENIZER = "tokenizer"  # a copy: a corpus can be read without asking what it was made with


@dataclass(frozen=True)
class CorpusOptions:
    """What `build_corpus` does beside reading; a default is right for a few repositories of code."""

    layout: str = "file"  # "file": each file a document; "repository": each repository one
    chat: bool = False  # sources are rows of messages; documents get a loss mask
    fim: float = 0.0  # share of the files that are rearranged for fill-in-the-middle
    suffixes: tuple[str, ...] = ()  # of the files to read; () is filters.DEFAULT_SUFFIXES
    max_bytes: int = 1 << 20  # of one file; larger ones are data
    validation: float = 0.0  # share of the repositories, chosen by a hash of their names
    held_out: tuple[str, ...] = ()  # names of repositories, or globs, that training must not see
    against: tuple[str, ...] = ()  # sources of protected text: benchmarks, repositories kept for evaluation
    near: float = 0.8  # Jaccard similarity from which a document is a near duplicate; 1.0 keeps all but exact ones
    shingle: int = 5  # words of a shingle
    ngram: int = 13  # words in common that make a leak
    leak: float = 0.0  # share of a document's n-grams that may be protected
    boilerplate: int = 10  # an n-gram in more repositories than this is common property
    seed: int = 0  # of the validation split and fill-in-the-middle
    shard_bytes: int = 256 << 20  # of tokens in one shard; a larger document gets a shard of its own

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InputError(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        for name in ("fim", "validation", "near", "leak"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} = {getattr(self, name)} is not between 0 and 1")
        if bare := [suffix for suffix in self.suffixes if not suffix.startswith(".")]:
            raise InputError(f"suffix {bare[0]} has no dot; say .{bare[0]}")
        if self.chat and (self.fim or self.suffixes or self.layout != "file"):
            raise InputError("chat: a chat is a document as it is; layout, fim and suffix do not apply")
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
class Size:
    """How much there is of something."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.documents + other.documents, self.bytes + other.bytes, self.tokens + other.tokens)


@dataclass(frozen=True)
class CorpusReport:
    """What was read, removed and made; `details` is the content of report.json."""

    path: Path
    read: Size
    removed: dict[str, Size]
    splits: dict[str, Size]
    details: dict[str, Any] = field(repr=False)


def build_corpus(
    sources: Sequence[str],
    tokenizer: "Tokenizer",
    out: Path,
    options: CorpusOptions = CorpusOptions(),  # noqa: B008  frozen
    progress: Report | None = None,
    *,
    restart: bool = False,
) -> CorpusReport:
    """Build the corpus at `out`, or go on with the one that was being built there with the same arguments."""
    markers = Markers.find(tokenizer, fim=options.fim > 0)
    plan = _plan(sources, tokenizer, options)
    with open_workspace(out, plan, restart=restart) as work, Crew(work.path / "crew") as crew:
        report = progress or _silent
        if work.stage("collected") is None:

            def read(source: str) -> Iterator[Found]:
                if options.chat:
                    return read_rendered_chats(source, tokenizer, crew)
                return read_files(source, options.filters, crew)

            found = collect(work, sources, read, lambda count: report(count, 3 * count, "collect"))
            work.finish_stage("collected", found)
        build = _Build(work, options, tokenizer, markers, report, crew)
        if work.stage("decided") is None:
            work.finish_stage("decided", build.decide())
        build.encode(work.stage("decided"))
        details = build.describe(list(sources))
        work.publish(out)
    return _as_report(out, details)


def read_report(corpus: Path) -> CorpusReport:
    """The report of a finished corpus."""
    try:
        return _as_report(corpus, json.loads((corpus / REPORT).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{corpus}: it has no {REPORT}; name a directory made by `etude data build`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{corpus / REPORT} is not the report of a corpus ({error})") from None


def choose_split(repository: str, options: CorpusOptions) -> str:
    """By its name alone, so that a repository is in the same split in every corpus of the same seed."""
    if any(fnmatchcase(repository, pattern) for pattern in options.held_out):
        return "held_out"
    digest = hashlib.blake2b(f"{options.seed}\0{repository}".encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "little") < options.validation * 2**64 else "train"


def _plan(sources: Sequence[str], tokenizer: "Tokenizer", options: CorpusOptions) -> dict[str, Any]:
    """All that decides the bytes of a corpus; two builds with equal plans are the same build."""
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


class _Build:
    """The collected documents on their way into shards. A document is its position in `entries`."""

    def __init__(
        self,
        work: Workspace,
        options: CorpusOptions,
        tokenizer: "Tokenizer",
        markers: Markers,
        report: Report,
        crew: Crew,
    ) -> None:
        self.work, self.options, self.tokenizer, self.markers = work, options, tokenizer, markers
        self.report, self.crew = report, crew
        self.collected = work.stage("collected")
        self.entries = [Entry(*entry) for entry in self.collected["entries"]]
        repositories = dict.fromkeys(entry.repository for entry in self.entries)
        self.split_of = {repository: choose_split(repository, options) for repository in repositories}
        for pattern in options.held_out:
            if not any(fnmatchcase(repository, pattern) for repository in repositories):
                some = ", ".join(sorted(repositories)[:5])
                raise InputError(f"held out {pattern} is the name of no repository here; there are {some} ...")

    def decide(self) -> list[dict[str, Any]]:
        """The documents to remove, in order, each with its reason and the text it repeats."""
        by_precedence = sorted(range(len(self.entries)), key=lambda at: -SPLITS.index(self._split(at)))
        exact = find_exact([self.entries[at].digest for at in by_precedence])
        removed = {
            by_precedence[one.document]: {"reason": one.kind, "of": self._name(by_precedence[one.kept])}
            for one in exact
        }
        left = [at for at in by_precedence if at not in removed]
        near: list[Any] = []
        if self.options.near < 1:
            near = find_near(
                left,
                self._plain,
                threshold=self.options.near,
                shingle=self.options.shingle,
                progress=self._second(2),
                crew=self.crew,
            )
        for one in near:
            similarity = round(one.similarity, 4)
            removed[one.document] = {"reason": one.kind, "of": self._name(one.kept), "similarity": similarity}
        removed |= self._contaminated([at for at in left if at not in removed])
        return [
            {"at": at, "document": self._name(at), "bytes": self.entries[at].size, **removed[at]}
            for at in sorted(removed)
        ]

    def _contaminated(self, left: Sequence[int]) -> dict[int, dict[str, Any]]:
        options = self.options
        held_out = [at for at in left if self._split(at) == "held_out"]

        def texts() -> Iterator[tuple[str, str]]:
            yield from read_protected(options.against, options.filters)
            yield from ((f"held_out: {self._name(at)}", self._plain(at)) for at in held_out)

        protected = Protected(texts(), options.ngram, self.crew)
        if options.against and not len(protected):
            named = ", ".join(options.against)
            raise InputError(f"against {named}: no text of {options.ngram} words or more; nothing would be protected")
        if not len(protected):
            return {}
        checked = [(at, self.entries[at].repository) for at in left if self._split(at) != "held_out"]
        found = find_contaminated(
            protected,
            checked,
            self._plain,
            share=options.leak,
            boilerplate=options.boilerplate,
            progress=self._second(2, len(self.entries) // 2),
            crew=self.crew,
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

    def encode(self, removed: list[dict[str, Any]]) -> None:
        """Write the shards that are not yet written, split by split."""
        gone = {one["at"] for one in removed}
        finished = self.work.finished_shards()
        done = 0
        for split in SPLITS:
            units = self._units([at for at in range(len(self.entries)) if at not in gone and self._split(at) == split])
            whole = [shard for shard in finished if shard["split"] == split]
            skipped = sum(shard["documents"] for shard in whole)
            writer = ShardWriter(
                self.work.corpus / split,
                len(self.tokenizer),
                mask=self.options.chat,
                limit=self.options.shard_bytes,
                first=len(whole),
                finished=partial(self._keep_shard, split),
            )
            done += sum(map(len, units[:skipped]))
            planned = ((self._unit_name(unit), self._pieces(unit)) for unit in units[skipped:])
            with writer:
                made = encode_documents(planned, self.tokenizer, self.crew)
                for unit, encoded in zip(units[skipped:], made, strict=True):
                    writer.add(encoded.name, encoded.tokens, encoded.written, encoded.bytes)
                    done += len(unit)
                    self.report(2 * len(self.entries) + done, 3 * len(self.entries), "encode")

    def _keep_shard(self, split: str, entry: dict[str, Any]) -> None:
        self.work.add_shard({"split": split, **entry})

    def describe(self, sources: list[str]) -> dict[str, Any]:
        """Write corpus.json and report.json; nothing in them depends on when or where they were made."""
        shards = self.work.finished_shards()
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
                name: {"split": split, "licences": self.collected["licences"].get(name, {})}
                for name, split in self.split_of.items()
            },
        }
        details = self._details(splits)
        self.tokenizer.save(self.work.corpus / TOKENIZER)
        write_whole(self.work.corpus / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        write_whole(self.work.corpus / REPORT, json.dumps(details, indent=1) + "\n")
        return details

    def _details(self, splits: dict[str, Any]) -> dict[str, Any]:
        decided = [{key: one[key] for key in one if key != "at"} for one in self.work.stage("decided")]
        removed = [*self.collected["removed"], *decided]
        sizes: dict[str, Size] = {}
        for one in removed:
            sizes[one["reason"]] = sizes.get(one["reason"], Size()) + Size(1, one["bytes"])
        everything = sum(sizes.values(), Size()) + sum((Size(1, entry.size) for entry in self.entries), Size())
        again = sum((Size(1, one["bytes"]) for one in decided), Size())  # counted as read and as removed
        read = Size(everything.documents - again.documents, everything.bytes - again.bytes)
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
        """How many repositories there are of each licence."""
        counts: Counter[str] = Counter()
        for name in self.split_of:
            found = sorted(set(self.collected["licences"].get(name, {}).values()))
            counts[" + ".join(found) or "none found"] += 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def _units(self, documents: Sequence[int]) -> list[list[int]]:
        """What becomes one document each: a file, or the files of a repository in reading order."""
        if self.options.layout == "file":
            return [[at] for at in documents]
        groups: dict[str, list[int]] = {}
        for at in documents:
            groups.setdefault(self.entries[at].repository, []).append(at)
        return [[group[i] for i in reading_order([self.entries[at].path for at in group])] for group in groups.values()]

    def _unit_name(self, unit: Sequence[int]) -> str:
        return self._name(unit[0]) if self.options.layout == "file" else self.entries[unit[0]].repository

    def _pieces(self, unit: Sequence[int]) -> Iterator[Piece]:
        options = self.options
        if options.chat:
            _, segments = load_chat(self.work.text(self.entries[unit[0]]))
            return chat_pieces(segments, self.markers.end_of_text)
        if options.layout == "file":
            return file_pieces(self._document(unit[0]), self.markers, options.fim, options.seed)
        repository = self.entries[unit[0]].repository
        return repository_pieces(repository, map(self._document, unit), self.markers, options.fim, options.seed)

    def _document(self, at: int) -> Document:
        entry = self.entries[at]
        return Document(entry.repository, entry.path, self.work.text(entry))

    def _plain(self, at: int) -> str:
        text = self.work.text(self.entries[at])
        return load_chat(text)[0] if self.options.chat else text

    def _name(self, at: int) -> str:
        return document_name(self.entries[at].repository, self.entries[at].path)

    def _split(self, at: int) -> str:
        return self.split_of[self.entries[at].repository]

    def _second(self, parts: int, start: int = 0) -> Callable[[int], None]:
        """Progress of one of the `parts` of deciding, as part of the whole build."""
        count = len(self.entries)
        return lambda done: self.report(count + start + done // parts, 3 * count, "decide")


def _silent(done: int, total: int, note: str = "") -> None:
    """No one is watching."""


def _plain_size(size: Size) -> dict[str, int]:
    return {"documents": size.documents, "bytes": size.bytes}


def _as_report(path: Path, details: dict[str, Any]) -> CorpusReport:
    return CorpusReport(
        path=path,
        read=Size(**details["read"]),
        removed={reason: Size(**size) for reason, size in details["removed"].items()},
        splits={split: Size(**size) for split, size in details["splits"].items()},
        details=details,
    )
