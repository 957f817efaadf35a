"""The one typed configuration tree, read from TOML. Its tables are in `sections`, with every default of the system.

A knob acts or errors: an unknown key, a key of the wrong type, a section whose stage does not run and a key
that the chosen stages would ignore are all errors, reported together. Nothing is coerced.

The order of the stages' lines in `Recipe` is the order of the pipeline. Relative paths mean "from the recipe file"; a
loaded recipe holds absolute ones only.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from etude.errors import InputError
from etude.recipe.sections import (
    EXPERTS,
    BaseStage,
    CorpusStage,
    ExtendStage,
    InitStage,
    MtpStage,
    NllStage,
    PretrainStage,
    RlStage,
    Section,
    SftStage,
    Stage,
    TasksStage,
    TokenizerStage,
    TrainingStage,
    Typed,
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
    tasks: TasksStage | None = None
    corpus: CorpusStage | None = None
    pretrain: PretrainStage | None = None
    mtp: MtpStage | None = None
    extend: ExtendStage | None = None
    sft: SftStage | None = None
    rl: RlStage | None = None
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
    def _task_sets_are_built(self) -> Self:
        sets = {each.name: each for each in self.tasks.build} if self.tasks else {}
        for corpus in self.corpus.build if self.corpus else ():
            for source in corpus.sources:
                name = source.removeprefix(EXPERTS)
                if name != source and (name not in sets or not sets[name].experts):
                    raise ValueError(
                        f'corpus.build {corpus.name}: "{source}" needs a set {name} in [[tasks.build]] with experts'
                    )
        named = [("rl.tasks", self.rl.tasks)] if self.rl else []
        measured = self.rl.evaluation.tasks if self.rl and self.rl.evaluation else ()
        named += [("rl.evaluation.tasks", name) for name in measured]
        for key, name in named:
            if name not in sets and not os.path.isabs(name):
                advice = _suggest(name, list(sets)) if sets else "build it in [[tasks.build]] or give a path"
                raise ValueError(f'{key} names the tasks "{name}", which this recipe does not build; {advice}')
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
    return _cut(_text(value))


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------------------------- writing


def render_toml(recipe: Recipe) -> str:
    """The recipe as TOML with every default written out; loading it again gives an equal recipe."""
    return tomli_w.dumps(recipe_data(recipe))


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON values, absent keys left out."""
    return recipe.model_dump(mode="json", exclude_none=True)


def differing_keys(old: Recipe, new: Recipe) -> list[str]:
    """Lines such as `nll.window: 512 -> 256` or `tasks.build[train].count: 9 -> 5`, one per key that differs."""
    before, after = ({key: _text(value) for key, value in _leaves(recipe_data(each))} for each in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(key, before.get(key, "(absent)"), after.get(key, "(absent)")) for key in keys]
    return [f"{key}: {_apart(was, now)}" for key, was, now in pairs if was != now]


def _apart(was: str, now: str) -> str:
    """Two texts in few words, or in as many as it takes to tell them apart."""
    short = _cut(was), _cut(now)
    return " -> ".join(short if short[0] != short[1] else (was, now))


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Every value under its dotted key; those in a list of tables under the table's name, or its place."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{inner.get('name', place)}]")
    else:
        yield key, value


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
