"""Settings of the corpus and tokenizer stages."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from etude.config import AbsolutePath, Settings, StageSettings, made_by, resolve_path
from etude.data.sources import is_named_source

DEMONSTRATIONS = "demonstrations:"  # prefix of a source: the demonstrations of a task set of this run
SESSIONS = "sessions:"  # prefix of a source: the directory of sessions that `etude data sessions` collected
SESSIONS_FILE = "sessions.jsonl"  # in that directory


def _resolve_source(value: object, info: ValidationInfo) -> object:
    return value if isinstance(value, str) and is_named_source(value) else resolve_path(value, info)


def _resolve_corpus_source(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str) and value.startswith(SESSIONS):
        return f"{SESSIONS}{resolve_path(value.removeprefix(SESSIONS), info)}"
    return value if isinstance(value, str) and value.startswith(DEMONSTRATIONS) else _resolve_source(value, info)


TextSource = Annotated[str, BeforeValidator(_resolve_source)]
# strict=False here only lets a TOML array become a tuple; the items stay strict.
TextSources = Annotated[tuple[TextSource, ...], Field(strict=False, min_length=1)]
CorpusSource = Annotated[str, BeforeValidator(_resolve_corpus_source)]


def sessions_file(source: str) -> str:
    """Return the file of a source: that of `sessions:DIR`, or the source itself."""
    return f"{source.removeprefix(SESSIONS)}/{SESSIONS_FILE}" if source.startswith(SESSIONS) else source


class TokenizerSettings(StageSettings):
    """Train a byte-level BPE tokenizer."""

    sources: TextSources = Field(description='text to train on: directories, files, "stdlib" or "site-packages"')
    vocab_size: int = Field(
        default=1024, ge=300, description="vocabulary size, including single bytes and special tokens"
    )


class CorpusSettings(Settings):
    """One corpus of this run."""

    name: str = Field(
        min_length=1, description="name of the corpus, as used in mix and held_out", pattern=r"^[A-Za-z0-9_-]+$"
    )
    sources: tuple[CorpusSource, ...] = Field(
        strict=False,
        min_length=1,
        description="directories, repositories, archives, .jsonl, .parquet, "
        '"stdlib", "site-packages", "demonstrations:SET", "sessions:DIR"',
    )
    chat: bool = Field(
        default=False, description="sources are rows of conversations; the loss is on assistant turns only"
    )
    layout: Literal["file", "repository"] = Field(default="file", description="one document per file or per repository")
    suffixes: tuple[str, ...] | None = Field(
        default=None, strict=False, description="file suffixes to read; default: code and prose"
    )
    fim: float = Field(default=0.0, ge=0, le=1, description="share of files rearranged for fill-in-the-middle")
    validation: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of repositories in the validation split, chosen by a hash of their names",
    )
    held_out: tuple[str, ...] = Field(
        default=(), strict=False, description="names or globs of repositories that are never trained on"
    )
    against: tuple[TextSource, ...] = Field(
        default=(),
        strict=False,
        description="protected text: documents that share passages with these sources are removed",
    )

    @model_validator(mode="after")
    def _demonstrations_need_chat(self) -> Self:
        for prefix in (DEMONSTRATIONS, SESSIONS):
            if not self.chat and any(source.startswith(prefix) for source in self.sources):
                raise ValueError(f"sources names {prefix}..., which are conversations: set chat = true")
        return self


class CorporaSettings(StageSettings):
    """Build corpora: filter, deduplicate, decontaminate, split, tokenize."""

    build: tuple[CorpusSettings, ...] = Field(strict=False, min_length=1, description="one table per corpus")
    tokenizer: AbsolutePath | None = made_by("tokenizer", "base", doc="tokenizer directory, when no stage makes one")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [corpus.name for corpus in self.build]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"build names {sorted(twice)[0]} twice")
        return self
