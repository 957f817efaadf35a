"""The one typed configuration tree, read from TOML. Every default of the system lives here.

A knob acts or errors: an unknown key, a key of the wrong type, a section whose stage does not run and a key
that the chosen stages would ignore are all errors, reported together. Nothing is coerced.

To add a stage: write one `Stage` subclass and give `Recipe` one line for it; the order of those lines is the
order of the pipeline. Relative paths mean "from the recipe file"; a loaded recipe holds absolute ones only.
"""

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from etude.data.sources import is_word
from etude.errors import InputError
from etude.model.config import ModelConfig, unread_keys


class Typed(str):
    """A string typed on the command line: a relative path in it is meant from the working directory."""


def _absolute(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        return value  # a Path is taken as it is, anything else is for the type check to refuse
    if not value:
        raise ValueError("must be a path, not an empty string")
    directory = Path.cwd() if isinstance(value, Typed) else (info.context or {}).get("directory", Path.cwd())
    return os.path.abspath(os.path.join(directory, os.path.expanduser(value)))


def _absolute_source(value: object, info: ValidationInfo) -> object:
    return value if isinstance(value, str) and is_word(value) else _absolute(value, info)


def _toml_can_hold(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    def check(value: JsonValue, key: str) -> None:
        if value is None:
            raise ValueError(f"{key} is null, which TOML cannot hold: leave the key out")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}, which JSON cannot hold")
        if isinstance(value, dict | list):
            for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                check(item, f"{key}.{name}")

    for name, item in config.items():
        check(item, name)
    return config


AbsolutePath = Annotated[Path, Field(strict=False), BeforeValidator(_absolute)]
Source = Annotated[str, BeforeValidator(_absolute_source)]
# strict=False here only lets a TOML array become a tuple; the items stay strict.
Sources = Annotated[tuple[Source, ...], Field(strict=False, min_length=1)]
HfConfig = Annotated[dict[str, JsonValue], AfterValidator(_toml_can_hold)]


def made_by(*stages: str, doc: str) -> Any:
    """A field for what an earlier stage may make: refused when such a stage runs, needed when none does."""
    return Field(default=None, description=doc, json_schema_extra={"made_by": list(stages)})


class Section(BaseModel):
    """A table of the recipe: frozen, strict, closed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Stage(Section):
    """A section that configures the stage of the same name, and is given only when that stage runs."""


class TokenizerStage(Stage):
    """Train a byte-level BPE tokenizer."""

    sources: Sources = Field(description='text to learn from: directories, files, "stdlib" or "site-packages"')
    vocab_size: int = Field(default=1024, ge=300, description="entries, single bytes and special tokens included")


class BaseStage(Stage):
    """Start from an open model: turn a GGUF file into a checkpoint."""

    source: str = Field(description="a .gguf file, or an installed package that carries one", min_length=1)
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of the weights")


class InitStage(Stage):
    """Make a model with random weights."""

    config: HfConfig = Field(description="a Hugging Face config.json as a table, without vocab_size")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of the weights")
    tokenizer: AbsolutePath | None = made_by("tokenizer", doc="directory of a tokenizer, when no stage trains one")

    @model_validator(mode="after")
    def _config_is_one_we_can_build(self) -> Self:
        if "vocab_size" in self.config:
            raise ValueError("config.vocab_size would not be used: the tokenizer decides it; remove it")
        stand_in = {**self.config, "vocab_size": 1024}
        try:
            ModelConfig.from_hugging_face(stand_in, "config")
        except InputError as problem:
            raise ValueError(str(problem)) from None
        if unread := unread_keys(stand_in):
            raise ValueError(
                f"config.{unread[0]} would not be used: a {self.config['model_type']} model has no such key"
            )
        return self


class NllStage(Stage):
    """Measure the model's negative log-likelihood on a codebase."""

    sources: Sources = Field(description='code to score: directories, files, "stdlib" or "site-packages"')
    window: int = Field(default=512, ge=2, description="tokens the model sees at once")
    stride: int = Field(default=256, ge=1, description="tokens scored per window, at most window")
    max_files: int | None = Field(default=None, ge=1, description="score at most so many files, spread evenly")
    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", "sft", doc="directory of a model, when no stage makes one"
    )

    @model_validator(mode="after")
    def _windows_leave_no_gap(self) -> Self:
        if self.stride > self.window:
            raise ValueError(f"stride must be at most window = {self.window}, not {self.stride}")
        return self


def _name_or_path(value: object, info: ValidationInfo) -> object:
    return _absolute(value, info) if isinstance(value, str) and os.sep in value else value


CorpusRef = Annotated[str, Field(min_length=1), BeforeValidator(_name_or_path)]


class CorpusBuild(Section):
    """One corpus of this run."""

    name: str = Field(min_length=1, description="what mixtures call it", pattern=r"^[A-Za-z0-9_-]+$")
    sources: Sources = Field(
        description='directories, repositories, archives, .jsonl, .parquet, "stdlib", "site-packages"'
    )
    chat: bool = Field(default=False, description="rows are conversations; learn only what the assistant wrote")
    layout: Literal["file", "repository"] = Field(default="file", description="what one document is")
    suffixes: tuple[str, ...] | None = Field(default=None, strict=False, description="file endings to read")
    fim: float = Field(default=0.0, ge=0, le=1, description="share of documents in fill-in-the-middle form")
    validation: float = Field(default=0.0, ge=0, lt=1, description="share of repositories set aside by hash")
    held_out: tuple[str, ...] = Field(default=(), strict=False, description="repositories set aside, names or globs")
    against: tuple[Source, ...] = Field(default=(), strict=False, description="sources to decontaminate against")


class CorpusStage(Stage):
    """Build corpora: filter, deduplicate, decontaminate, split, tokenize."""

    build: tuple[CorpusBuild, ...] = Field(strict=False, min_length=1, description="one table per corpus")
    tokenizer: AbsolutePath | None = made_by(
        "tokenizer", "base", doc="directory of a tokenizer, when no stage makes one"
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [corpus.name for corpus in self.build]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"build names {sorted(twice)[0]} twice")
        return self


class MixPart(Section):
    """One source of a mixture."""

    corpus: CorpusRef = Field(description="a corpus of this run by name, or a built one by path")
    weight: float = Field(default=1.0, gt=0, description="share of the rows, relative to the others")


class HeldOut(Section):
    """What is measured while training and never trained on."""

    corpus: CorpusRef = Field(description="a corpus of this run by name, or a built one by path")
    split: Literal["held_out", "validation"] = Field(default="held_out", description="which part of it")
    max_tokens: int | None = Field(default=None, ge=1, description="read no further than this")
    window: int = Field(default=1024, ge=2, description="tokens the model sees at once")
    long_rows: int = Field(
        default=8, ge=1, description="stretches of `length` tokens for the loss by position (extend)"
    )


class TrainingStage(Stage):
    """What pretrain, mtp, extend and sft have in common."""

    model: AbsolutePath | None = None
    mix: tuple[MixPart, ...] = Field(strict=False, min_length=1, description="sources and their weights")
    length: int = Field(ge=2, description="tokens of a row")
    tokens: int = Field(ge=1, description="tokens to train on, rounded up to whole steps")
    rows: int = Field(default=8, ge=1, description="rows of one forward")
    micro_batches: int = Field(default=1, ge=1, description="forwards of one step: gradient accumulation")
    learning_rate: float = Field(default=3e-4, gt=0, description="at its peak")
    warmup: float = Field(default=0.02, ge=0, le=1, description="share of the steps on the way up")
    decay: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="how it comes down")
    final: float = Field(default=0.1, ge=0, le=1, description="learning rate of the last step, as a share of the peak")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False, description="of Adam")
    weight_decay: float = Field(default=0.1, ge=0, description="on matrices only")
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 for no clipping")
    device: str = Field(default="auto", description="cpu, cuda ...; auto takes a GPU if there is one")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of weights and products; masters and moments are float32 always"
    )
    compile: bool = Field(default=False, description="compile the blocks; pays on a GPU")
    recompute: bool = Field(default=False, description="activation checkpointing: less memory, a third more work")
    held_out: HeldOut | None = Field(default=None, description="what to measure on")
    evaluate_every: int = Field(default=0, ge=0, description="steps between measurements; 0 for before and after only")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 for the last only")
    keep: int = Field(default=2, ge=1, description="newest checkpoints to keep, beside the one at half the way")
    spike: float = Field(default=3.0, ge=0, description="stop when the loss is so many nats above usual; 0 never")

    @model_validator(mode="after")
    def _measurements_have_something_to_measure(self) -> Self:
        if self.evaluate_every and self.held_out is None:
            raise ValueError("evaluate_every would not be used: there is no held_out to measure on")
        return self


class PretrainStage(TrainingStage):
    """Continue pretraining at the base length."""

    model: AbsolutePath | None = made_by("base", "init", doc="directory of a model, when no stage makes one")


class MtpStage(TrainingStage):
    """Train multi-token-prediction layers on a mid-run checkpoint."""

    model: AbsolutePath | None = made_by("pretrain", doc="directory of a model, when no stage makes one")
    layers: int = Field(default=1, ge=1, description="how many tokens further to look")
    distance: Literal["kl", "tv"] = Field(default="kl", description="to the main head: KL, or total variation")


class ExtendStage(TrainingStage):
    """Extend the context."""

    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", doc="directory of a model, when no stage makes one"
    )
    rope_theta: float | None = Field(default=None, gt=0, description="another RoPE base")
    rope_scaling: HfConfig | None = Field(default=None, description='such as {rope_type = "yarn", factor = 4.0, ...}')
    min_document: int = Field(default=1, ge=1, description="leave out documents of fewer tokens")


class SftStage(TrainingStage):
    """Fine-tune on conversations."""

    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", doc="directory of a model, when no stage makes one"
    )


def _stages_in_order(stages: tuple[str, ...]) -> tuple[str, ...]:
    order = list(stage_sections())
    for stage in stages:
        if stage not in order:
            raise ValueError(f'names "{stage}", which is not a stage; {_suggest(stage, order)}')
        if stages.count(stage) > 1:
            raise ValueError(f'names "{stage}" twice; a stage runs once')
    ordered = sorted(stages, key=order.index)
    if list(stages) != ordered:
        raise ValueError(f"must be in pipeline order: {json.dumps(ordered)}")
    return stages


StageNames = Annotated[tuple[str, ...], Field(strict=False, min_length=1), AfterValidator(_stages_in_order)]


class Recipe(Section):
    """What one run does. Sections stand in pipeline order."""

    name: str = Field(min_length=1, description="what to call the run")
    seed: int = Field(default=0, ge=0, lt=2**63, description="the only source of randomness")
    stages: StageNames = Field(description="the stages to run, in pipeline order")
    track: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        default=(), strict=False, description="tools that get a copy of the metrics, if installed"
    )

    tokenizer: TokenizerStage | None = None
    base: BaseStage | None = None
    init: InitStage | None = None
    corpus: CorpusStage | None = None
    pretrain: PretrainStage | None = None
    mtp: MtpStage | None = None
    extend: ExtendStage | None = None
    sft: SftStage | None = None
    nll: NllStage | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_sections(cls, data: Any) -> Any:
        """A stage without a section runs on its defaults; a default it lacks is then reported by its key."""
        if not isinstance(data, dict) or not isinstance(stages := data.get("stages"), list | tuple):
            return data
        known = stage_sections()
        return {**{stage: {} for stage in stages if isinstance(stage, str) and stage in known}, **data}

    @model_validator(mode="after")
    def _mixtures_name_corpora_that_are_built(self) -> Self:
        built = [corpus.name for corpus in self.corpus.build] if self.corpus else []
        for stage, section in self:
            if not isinstance(section, TrainingStage):
                continue
            parts = [("mix", part.corpus) for part in section.mix]
            parts += [("held_out", section.held_out.corpus)] if section.held_out else []
            for key, corpus in parts:
                if corpus not in built and not os.path.isabs(corpus):
                    advice = _suggest(corpus, built) if built else "build it in [[corpus.build]] or give a path"
                    raise ValueError(
                        f'{stage}.{key} names the corpus "{corpus}", which this recipe does not build; {advice}'
                    )
        return self

    @model_validator(mode="after")
    def _every_key_is_used(self) -> Self:
        sections = {name: dict(section) for name, section in self if isinstance(section, Stage)}
        if problems := list(_misfits(self.stages, sections)):
            raise ValueError("\n".join(problems))
        return self


def stage_sections() -> dict[str, type[Stage]]:
    """Every stage by name, in pipeline order."""
    sections = {name: _section_of(field) for name, field in Recipe.model_fields.items()}
    return {name: section for name, section in sections.items() if section and issubclass(section, Stage)}


def _section_of(field: FieldInfo) -> type[Section] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _misfits(stages: Sequence[str], sections: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """What the chosen stages would ignore, and what they would miss."""
    for name, section in stage_sections().items():
        given = {key for key, value in sections.get(name, {}).items() if value is not None}
        if name not in stages:
            if name in sections:
                yield (
                    f'[{name}] would not be used: "{name}" is not in stages = {json.dumps(list(stages))}; '
                    "add it or remove the section"
                )
            continue
        for key, field in section.model_fields.items():
            extra = field.json_schema_extra
            makers = extra.get("made_by") if isinstance(extra, dict) else None
            if not isinstance(makers, list):
                continue
            running = [maker for maker in makers if maker in stages]
            if running and key in given:
                yield f'{name}.{key} would not be used: the stage "{running[0]}" makes it; remove one of them'
            elif not running and key not in given:
                yield f'{name}.{key} is needed, as no stage makes it: set it or add the stage "{makers[0]}"'


# ---------------------------------------------------------------------------------------------- reading


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply overrides such as `nll.window=256`. All problems come as one InputError."""
    path = Path(path)
    data = _read_toml(path)
    overridden, problems = _apply(overrides, data)
    directory = Path(os.path.abspath(path)).parent
    try:
        recipe = Recipe.model_validate(data, context={"directory": directory})
    except ValidationError as error:
        for detail in error.errors():
            lines = list(_describe(detail))
            problems += [_blame(line, detail["loc"], overridden) for line in lines]
        if not any(detail["loc"][:1] in ((), ("stages",)) for detail in error.errors()):
            # Field errors kept the whole-recipe check from running, so it runs here on what was written.
            tables = {name: value for name, value in data.items() if isinstance(value, dict)}
            problems += _misfits(data["stages"], tables)
    if problems:
        raise InputError("\n".join(f"recipe {path}: {problem}" for problem in problems))
    return recipe


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except FileNotFoundError:
        raise InputError(f"recipe {path} does not exist; name a TOML file") from None
    except OSError as error:
        raise InputError(f"recipe {path} cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"recipe {path}: its values are nested too deeply to read") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        found = re.search(r"at line (\d+)", reason)
        line = int(found[1]) if found else text.count("\n") + 1
        raise InputError(f"recipe {path}:{line}: not valid TOML: {reason}") from None


def _apply(overrides: Sequence[str], data: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Write the overrides into `data`; return the override behind each dotted key, and what was wrong."""
    overridden: dict[str, str] = {}
    problems: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        *tables, name = (part.strip() for part in key.split("."))
        if not equals or not all([*tables, name]):
            problems.append(f"--set {override}: expected KEY=VALUE, such as tokenizer.vocab_size=2048")
            continue
        table = data
        for depth, part in enumerate(tables, start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                problems.append(f"--set {override}: {'.'.join(tables[:depth])} is not a table")
                break
        else:
            table[name] = _parse_value(text.strip())
            overridden[".".join([*tables, name])] = override
    return overridden, problems


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return Typed(text)
    return _typed(parsed["value"]) if parsed.keys() == {"value"} else Typed(text)


def _typed(value: object) -> object:
    if isinstance(value, str):
        return Typed(value)
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------------------------- explaining what is wrong

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path in a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "invalid-json-value": "a value JSON can hold",
}


def _describe(error: ErrorDetails) -> Iterator[str]:
    """One pydantic error as lines in the words of the recipe."""
    key, kind, seen, limits = _dotted(error["loc"]), error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        yield _unknown_key(error["loc"])
    elif kind == "missing":
        yield f"{key} is missing{_doc(error['loc'])}"
    elif kind in _EXPECTED:
        yield f"{key} must be {_EXPECTED[kind]}, not {_shown(seen)}"
    elif kind == "literal_error":
        yield f"{key} must be {limits['expected']}, not {_shown(seen)}"
    elif kind == "too_short" and seen:
        return  # pydantic counts items that were themselves refused; those have lines of their own
    elif kind in ("too_short", "string_too_short"):
        yield f"{key} must not be empty"
    elif kind == "value_error":
        # A message from a section's own check starts with the key it is about, one from a field's does not.
        joint = "" if not error["loc"] else "." if _section_at(error["loc"]) else " "
        for line in str(limits["error"]).splitlines():
            yield f"{key}{joint}{line}"
    else:
        reason = error["msg"].removeprefix("Input should be ").replace("greater than or equal to", "at least")
        yield f"{key} must be {reason}, not {_shown(seen)}"


def _blame(line: str, loc: Sequence[int | str], overridden: Mapping[str, str]) -> str:
    """Name the override that wrote the key, so nobody searches the file for it."""
    key = _dotted(loc)
    for name, override in overridden.items():
        if key == name or key.startswith((f"{name}.", f"{name}[")) or name.startswith(f"{key}."):
            return f"--set {override}: {line}"
    return line


def _dotted(loc: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _section_at(loc: Sequence[int | str]) -> type[Section] | None:
    section: type[Section] | None = Recipe
    for part in loc:
        if isinstance(part, str):  # a number only says which table of a list
            field = section.model_fields.get(part) if section else None
            section = _section_of(field) if field else None
    return section


def _doc(loc: Sequence[int | str]) -> str:
    owner = _section_at(loc[:-1])
    field = owner.model_fields.get(str(loc[-1])) if owner else None
    return f": {field.description}" if field and field.description else ""


def _unknown_key(loc: Sequence[int | str]) -> str:
    owner, name = _section_at(loc[:-1]) or Recipe, str(loc[-1])
    place = f"[{_dotted(loc[:-1])}]" if loc[:-1] else "the recipe"
    elsewhere = [key.name for key in recipe_keys() if key.name.rpartition(".")[2] == name]
    if elsewhere and name not in owner.model_fields:
        # TOML's usual slip: a key written below the wrong header.
        nearest = min(elsewhere, key=lambda key: key.count("."))
        return f"{_dotted(loc)} is not a key of {place}; did you mean {nearest}?"
    return f"{_dotted(loc)} is not a key of {place}; {_suggest(name, list(owner.model_fields))}"


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------------------------- writing


def render_toml(recipe: Recipe) -> str:
    """The recipe as TOML with every default written out; loading it again gives an equal recipe."""
    return tomli_w.dumps(recipe_data(recipe))


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON values, absent keys left out."""
    return recipe.model_dump(mode="json", exclude_none=True)


def differing_keys(old: Recipe, new: Recipe) -> list[str]:
    """Lines such as `nll.window: 512 -> 256`, one per dotted key that differs."""
    before, after = dict(_leaves(recipe_data(old))), dict(_leaves(recipe_data(new)))
    keys = [*before, *(key for key in after if key not in before)]
    absent = "(absent)"
    return [
        f"{key}: {before.get(key, absent)} -> {after.get(key, absent)}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _shown(value)


@dataclass(frozen=True)
class Key:
    """One key a recipe may hold: dotted name, type and default as a reader would write them, and meaning."""

    name: str
    type: str
    default: str
    doc: str


def recipe_keys() -> list[Key]:
    """Every key of the recipe, in order."""
    return list(_keys_of(Recipe, ""))


def _keys_of(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        if inner := _section_of(field):
            many = "[]" if "tuple[" in str(field.annotation) else ""  # a list of tables
            yield from _keys_of(inner, f"{prefix}{name}{many}.")
        else:
            yield Key(f"{prefix}{name}", _type_name(field), _default(field), field.description or "")


def _type_name(field: FieldInfo) -> str:
    text = str(field.annotation)
    if choices := re.search(r"Literal\[(.*?)\]", text):
        words = choices[1].replace("'", '"').replace(", ", " | ")
        return f"list of {words}" if "tuple[" in text else words
    names = {"tuple[float": "list of numbers", "tuple[": "list of strings", "dict[": "table", "Path": "path"}
    names |= {"int": "integer", "float": "number", "bool": "true | false"}
    return next((shown for part, shown in names.items() if part in text), "string")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    extra = field.json_schema_extra
    if isinstance(extra, dict) and isinstance(makers := extra.get("made_by"), list):
        return f"from {' or '.join(map(str, makers))}"
    return "none" if field.default is None else _shown(field.default)
