"""The recipe: the settings classes of all packages as one typed tree, read from TOML.

Every key acts or is an error: unknown keys, wrong types, tables of stages that do not run and keys that the chosen
stages would ignore are all reported, together. Nothing is coerced. Relative paths are resolved against the recipe
file; a loaded recipe holds absolute ones only. The order of the stages' fields in `Recipe` is the pipeline order.

To add a stage: give its settings class a field here, and write a `etude.pipeline.stage.Stage` that
`etude.pipeline.stages.STAGES` names.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from etude.cluster.settings import ClusterSettings
from etude.config import (
    StageSettings,
    import_plugins,
    is_plugin_file,
    load_settings,
    resolve_path,
    suggest,
    table_of,
)
from etude.data.settings import DEMONSTRATIONS, CorporaSettings, TokenizerSettings
from etude.errors import InputError
from etude.evaluation.settings import NllSettings
from etude.model.settings import BaseModelSettings, InitSettings
from etude.parallel.settings import ParallelSettings
from etude.rl.settings import ControlSettings, RlSettings
from etude.rollouts.settings import EvaluationSettings
from etude.runs.address import ServiceSettings
from etude.runs.run import RunSettings
from etude.tasks.settings import TaskSetsSettings
from etude.tasks.sources import TASK_SOURCES, TaskSource
from etude.train.settings import ExtendSettings, MtpSettings, PretrainSettings, SftSettings, TrainingSettings


def _in_pipeline_order(stages: tuple[str, ...]) -> tuple[str, ...]:
    order = list(stage_settings())
    for stage in stages:
        if stage not in order:
            raise ValueError(f'names "{stage}", which is not a stage; {suggest(stage, order)}')
        if stages.count(stage) > 1:
            raise ValueError(f'names "{stage}" twice; a stage runs once')
    ordered = sorted(stages, key=order.index)
    if list(stages) != ordered:
        raise ValueError(f"must be in pipeline order: {json.dumps(ordered)}")
    return stages


def _resolve_plugin(name: Any, info: ValidationInfo) -> Any:
    return resolve_path(name, info) if isinstance(name, str) and is_plugin_file(name) else name


Plugin = Annotated[str, Field(min_length=1), BeforeValidator(_resolve_plugin)]
StageNames = Annotated[tuple[str, ...], Field(strict=False, min_length=1), AfterValidator(_in_pipeline_order)]


class Recipe(RunSettings):
    """Everything one run does."""

    renamed_keys: ClassVar[dict[str, str]] = {"track": "loggers"}

    stages: StageNames = Field(description="stages to run, in pipeline order")
    plugins: tuple[Plugin, ...] = Field(
        default=(), strict=False, description="modules or Python files to import in every process of the run"
    )
    plugin_digests: dict[str, str] = Field(
        default={}, description="digest of each plugin's source; recorded by a run, and then checked"
    )

    service: ServiceSettings = Field(
        default_factory=ServiceSettings, description="where the run service of the stages rl and evaluation listens"
    )
    parallel: ParallelSettings | None = Field(
        default=None, description="processes of each training stage and of rl, unless its table has its own `parallel`"
    )
    cluster: ClusterSettings | None = Field(
        default=None, description="where the services of rl and evaluation run; default: this machine"
    )
    tokenizer: TokenizerSettings | None = None
    base: BaseModelSettings | None = None
    init: InitSettings | None = None
    tasks: TaskSetsSettings | None = None
    corpus: CorporaSettings | None = None
    pretrain: PretrainSettings | None = None
    mtp: MtpSettings | None = None
    extend: ExtendSettings | None = None
    sft: SftSettings | None = None
    control: ControlSettings | None = None
    rl: RlSettings | None = None
    nll: NllSettings | None = None
    evaluation: EvaluationSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _import_plugins(cls, data: Any, info: ValidationInfo) -> Any:
        """Import the plugins before the tables are checked, which may name things that plugins register."""
        plugins = data.get("plugins") if isinstance(data, dict) else None
        if not isinstance(plugins, list | tuple) or not all(isinstance(name, str) for name in plugins):
            return data
        try:
            digests = import_plugins([_resolve_plugin(name, info) for name in plugins], data.get("plugin_digests"))
        except InputError as error:
            raise ValueError(str(error)) from None
        return {**data, "plugin_digests": digests}

    @model_validator(mode="before")
    @classmethod
    def _add_default_tables(cls, data: Any) -> Any:
        """Give a stage without a table its defaults; a required key it lacks is then reported by name."""
        if not isinstance(data, dict) or not isinstance(stages := data.get("stages"), list | tuple):
            return data
        known = stage_settings()
        tables = {**{stage: {} for stage in stages if isinstance(stage, str) and stage in known}, **data}
        if (shared := data.get("parallel")) is not None:
            training = [name for name, table in known.items() if "parallel" in table.model_fields and name in tables]
            if not training:
                raise ValueError("parallel would not be used: no training stage is in stages")
            for name in training:
                if isinstance(tables[name], dict):
                    tables[name] = {"parallel": shared, **tables[name]}
        return tables

    @model_validator(mode="after")
    def _mixtures_name_corpora_that_are_built(self) -> Self:
        built = [corpus.name for corpus in self.corpus.build] if self.corpus else []
        for stage, settings in self:
            if not isinstance(settings, TrainingSettings):
                continue
            used = [("mix", part.corpus) for part in settings.mix]
            used += [("held_out", settings.held_out.corpus)] if settings.held_out else []
            for key, corpus in used:
                if corpus not in built and not os.path.isabs(corpus):
                    advice = suggest(corpus, built) if built else "build it in [[corpus.build]] or give a path"
                    raise ValueError(
                        f'{stage}.{key} names the corpus "{corpus}", which this recipe does not build; {advice}'
                    )
        return self

    @model_validator(mode="after")
    def _task_sets_are_built(self) -> Self:
        sets = {each.name: each for each in self.tasks.build} if self.tasks else {}
        for each in sets.values():
            if each.source is not None and each.source not in TASK_SOURCES:
                advice = TASK_SOURCES.advice(each.source)
                raise ValueError(f'tasks.build {each.name}: there is no task source "{each.source}"; {advice}')
            makes_none = each.source and TASK_SOURCES[each.source].demonstrations is TaskSource.demonstrations
            if each.demonstrations and makes_none:
                raise ValueError(f"tasks.build {each.name}: the task source {each.source} makes no demonstrations")
        for corpus in self.corpus.build if self.corpus else ():
            for source in corpus.sources:
                name = source.removeprefix(DEMONSTRATIONS)
                if name != source and (name not in sets or not sets[name].demonstrations):
                    wanted = f'"{source}" needs a set {name} in [[tasks.build]] with demonstrations'
                    raise ValueError(f"corpus.build {corpus.name}: {wanted}")
        named = [("rl.tasks", self.rl.tasks)] if self.rl else []
        if evaluation := self.evaluation:
            named += evaluation.measured()
        for key, name in named[1:]:
            if self.rl and name == self.rl.tasks:
                raise ValueError(f'{key} names "{name}", which rl trains on: score other tasks')
        for key, name in named:
            if name not in sets and not os.path.isabs(name):
                advice = suggest(name, list(sets)) if sets else "build it in [[tasks.build]] or give a path"
                raise ValueError(f'{key} names the tasks "{name}", which this recipe does not build; {advice}')
        return self

    @model_validator(mode="after")
    def _control_is_given_once(self) -> Self:
        if self.control is None:
            return self
        if self.rl is None:
            raise ValueError('the stage "control" needs the stage "rl", of which it is a control: add it to stages')
        if self.rl.control != "none":
            raise ValueError(
                f'rl.control = "{self.rl.control}" beside the stage "control": set control.kind, or leave the stage out'
            )
        if self.control.kind == "imitation" and self.sft is None:
            raise ValueError('control.kind = "imitation" needs the demonstrations of the stage "sft": add it to stages')
        return self

    @model_validator(mode="after")
    def _measured_models_are_made(self) -> Self:
        for name in (self.evaluation.models or ()) if self.evaluation else ():
            if name not in self.stages:
                raise ValueError(
                    f'evaluation.models names "{name}", which is not in stages; {suggest(name, self.stages)}'
                )
        return self

    @model_validator(mode="after")
    def _evaluations_during_rl_have_a_run(self) -> Self:
        if self.evaluation is None:
            return self
        if self.rl is not None:
            if self.rl.in_flight == 1:
                raise ValueError("rl.in_flight = 1 leaves no rollout for training while an evaluation runs: give 2")
            own = self.evaluation.sampler.urls if self.evaluation.sampler else ()
            if shared := [url for url in own if url in self.rl.sampler.urls]:
                raise ValueError(f"evaluation.sampler.urls: {shared[0]} is one of rl.sampler.urls too: give others")
            return self
        for key in ("benchmarks", "sampler"):
            if getattr(self.evaluation, key):
                raise ValueError(f'evaluation.{key} would not be used: it needs the stage "rl", which is not in stages')
        return self

    @model_validator(mode="after")
    def _cluster_is_used(self) -> Self:
        if self.cluster is None:
            return self
        if self.rl is None and self.evaluation is None:
            raise ValueError("cluster would not be used: neither rl nor evaluation is in stages")
        devices = [("rl.device", self.rl.device), ("rl.sampler.device", self.rl.sampler.device)] if self.rl else []
        if self.evaluation and self.evaluation.sampler:
            devices.append(("evaluation.sampler.device", self.evaluation.sampler.device))
        if self.evaluation and self.evaluation.sessions:
            devices.append(("evaluation.sessions.sampler.device", self.evaluation.sessions.sampler.device))
        for key, device in devices:
            if ":" in device and not self.cluster.is_local:
                given = f"{key} = {device} names a GPU of one machine, but cluster.address is {self.cluster.address}"
                raise ValueError(f"{given}, which chooses GPUs: give {device.partition(':')[0]} or auto")
        return self

    @model_validator(mode="after")
    def _every_key_is_used(self) -> Self:
        tables = {name: dict(settings) for name, settings in self if isinstance(settings, StageSettings)}
        if problems := list(_unused_and_missing_keys(self.stages, tables)):
            raise ValueError("\n".join(problems))
        return self


def stage_settings() -> dict[str, type[StageSettings]]:
    """Return the settings class of every stage by name, in pipeline order."""
    tables = {name: table_of(field) for name, field in Recipe.model_fields.items()}
    return {name: table for name, table in tables.items() if table and issubclass(table, StageSettings)}


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply overrides such as `nll.window=256`. All problems come as one InputError."""
    return load_settings(path, Recipe, overrides, _check_tables_as_written)


def _check_tables_as_written(data: Mapping[str, Any]) -> Iterator[str]:
    """Check the use of keys where a field error kept the validators of the whole recipe from running."""
    stages = data.get("stages")
    if not isinstance(stages, list) or not all(
        isinstance(stage, str) and stage in stage_settings() for stage in stages
    ):
        return
    tables = {name: value for name, value in data.items() if isinstance(value, dict)}
    yield from _unused_and_missing_keys(stages, tables)


def _unused_and_missing_keys(stages: Sequence[str], tables: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Yield a line for every table or key that the stages would ignore, and for every input they would miss."""
    for name, settings in stage_settings().items():
        given = {key for key, value in tables.get(name, {}).items() if value is not None}
        if name not in stages:
            if name in tables:
                yield (
                    f'[{name}] would not be used: "{name}" is not in stages = {json.dumps(list(stages))}; '
                    "add it or remove the table"
                )
            continue
        for key, field in settings.model_fields.items():
            extra = field.json_schema_extra
            makers = extra.get("made_by") if isinstance(extra, dict) else None
            if not isinstance(makers, list):
                continue
            running = [maker for maker in makers if maker in stages]
            if running and key in given:
                yield f'{name}.{key} would not be used: the stage "{running[0]}" makes it; remove one of them'
            elif not running and key not in given:
                yield f'{name}.{key} is needed, as no stage makes it: set it or add the stage "{makers[0]}"'
