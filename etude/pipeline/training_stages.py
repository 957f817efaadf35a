"""The stages that train a model on corpora: `pretrain`, `mtp`, `extend` and `sft`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from etude.data.shards import Shards, read_manifest
from etude.errors import InputError
from etude.harness.profile import AgentProfile
from etude.model.adapters import check_lora
from etude.model.config import with_rope
from etude.model.trainer_parts import check_expert_ranks
from etude.pipeline.data_stages import fix_task_sets
from etude.pipeline.measure import TimeEstimate, step_seconds
from etude.pipeline.memory import (
    ProcessMemory,
    checkpoint_bytes,
    describe_communication,
    describe_lora,
    max_checkpoints,
    trainer_spec,
    training_memory,
)
from etude.pipeline.ranks import joined_ranks
from etude.pipeline.stage import Facts, PlanContext, RecipeInputs, Stage, StageModel, StagePlan, planned_device
from etude.recipe.recipe import Recipe
from etude.runs.run import Run
from etude.system.progress import ProgressCallback
from etude.train import stages
from etude.train.balance import check_balance
from etude.train.phase import list_checkpoints
from etude.train.settings import ExtendSettings, HeldOutSettings, TrainingSettings

SETTLED_STEPS = 5  # steps after which a run's own speed is known


class TrainingStage(Stage[TrainingSettings]):
    """Train on corpora."""

    def find_model(self, inputs: RecipeInputs) -> StageModel | None:
        """Return the model as the stage trains it: with a longer context, or with multi-token prediction."""
        model, settings = super().find_model(inputs), self.settings(inputs.recipe)
        if model is None:
            return None
        layers = inputs.recipe.mtp.layers if inputs.recipe.mtp else model.mtp_layers
        model = replace(model, mtp_layers=0 if self.name == "pretrain" else layers)
        if isinstance(settings, ExtendSettings):
            rope = with_rope(
                model.config, length=settings.length, theta=settings.rope_theta, scaling=settings.rope_scaling
            )
            return replace(model, config=rope)
        return model

    def check(self, inputs: RecipeInputs) -> None:
        settings = self.settings(inputs.recipe)
        with inputs.problems_of(f"{self.name}.device"):
            planned_device(settings.device)
        inputs.check_length(f"{self.name}.length", settings.length, self.name)
        if (model := inputs.models.get(self.name)) is not None:
            with inputs.problems_of(self.name):
                check_balance(settings.balance, model.config, self.name)
                check_lora(settings.lora, model.config, self.name)
            with inputs.problems_of(f"{self.name}.parallel"):
                check_expert_ranks(settings.parallel, model.config)
        for part in settings.mix:
            with inputs.problems_of(f"{self.name}.mix"):
                inputs.corpora[part.corpus] = self._corpus_tokens(part.corpus, "train", inputs)
        if settings.held_out is not None:
            inputs.check_length(f"{self.name}.held_out.window", settings.held_out.window, self.name)
            with inputs.problems_of(f"{self.name}.held_out"):
                self._check_held_out(settings.held_out, inputs)

    def _corpus_tokens(self, name: str, split: str, inputs: RecipeInputs) -> int:
        """Return the number of tokens of a corpus; 0 if it is not built yet."""
        model, tokens = inputs.models.get(self.name), 0
        if not os.path.isabs(name):
            has_chats = _built(name, inputs.recipe).chat
        else:
            if not os.path.isdir(name):
                raise InputError(f"corpus {name} does not exist; name a directory made by `etude data build`")
            shards = Shards.open(Path(name), split)
            if model is not None and model.tokenizer is not None and shards.tokenizer_digest != model.tokenizer.digest:
                raise InputError(f"corpus {name} was made with another tokenizer than the model's; build it again")
            has_chats, tokens = shards.has_mask, shards.tokens
        if self.name == "sft" and split == "train" and not has_chats:
            raise InputError(f"sft trains on conversations; corpus {name} has none: build it with chat = true")
        return tokens

    def _check_held_out(self, held_out: HeldOutSettings, inputs: RecipeInputs) -> None:
        self._corpus_tokens(held_out.corpus, held_out.split, inputs)
        if os.path.isabs(held_out.corpus):
            chat = bool(read_manifest(Path(held_out.corpus))["mask"])
        else:
            corpus = _built(held_out.corpus, inputs.recipe)
            chat = corpus.chat
            if not (corpus.held_out if held_out.split == "held_out" else corpus.validation):
                raise InputError(
                    f"corpus {held_out.corpus} will have nothing in the split {held_out.split}: set {held_out.split}"
                )
        if chat:
            raise InputError(f"{held_out.corpus} is a corpus of conversations; the held-out loss needs plain text")

    def needed_artefacts(self, recipe: Recipe) -> list[tuple[str, str]]:
        settings = self.settings(recipe)
        held_out = [settings.held_out.corpus] if settings.held_out else []
        return [("corpus", name) for name in (*(part.corpus for part in settings.mix), *held_out)]

    def plan(self, context: PlanContext) -> StagePlan:
        settings, model, run = self.settings(context.recipe), context.inputs.models[self.name], context.inputs.run
        steps = -(-settings.tokens // (settings.rows * settings.micro_batches * settings.length))
        saved = list_checkpoints(run, self.name) if run is not None else []
        step = saved[-1][0] if saved else 0
        trained: dict[str, Any] = {"mtp_layers": model.mtp_layers, "frozen": self.name == "mtp"}
        memory = training_memory(model.config, settings, planned_device(settings.device), **trained)
        halfway = self.name == "pretrain" and context.recipe.mtp is not None
        return StagePlan(
            self.name,
            tuple(self._lines(context, steps, step)),
            self._time(context, memory[0], steps, step),
            memory,
            max_checkpoints(settings, steps, halfway=halfway) * checkpoint_bytes(model.config, settings, **trained),
        )

    def _lines(self, context: PlanContext, steps: int, step: int) -> Iterator[str]:
        settings, run = self.settings(context.recipe), context.inputs.run
        micro = f"{settings.micro_batches} x " if settings.micro_batches > 1 else ""
        tokens = steps * settings.rows * settings.micro_batches * settings.length
        yield f"{steps:,} steps of {micro}{settings.rows} rows of {settings.length:,} tokens: {tokens:,} tokens"
        if step:
            yield f"continues after step {step:,}"
        elif run is not None and run.metrics(self.name):
            yield "was interrupted before its first checkpoint: starts again"
        total = sum(part.weight for part in settings.mix)
        built = run.facts("corpus") if run is not None else {}
        for part in settings.mix:
            available = context.inputs.corpora.get(part.corpus) or int(built.get(part.corpus, {}).get("train", 0))
            if available:
                passes = tokens * part.weight / total / available
                amount = f"{passes:.0%}" if passes < 1 else f"{passes:,.1f} times all"
                yield f"reads {amount} of {Path(part.corpus).name} ({available / 1e6:,.2f}M tokens)"
        if settings.lora is not None:
            yield describe_lora(settings.lora, context.inputs.models[self.name].config)
        if layers := context.inputs.models[self.name].mtp_layers:
            how = "alone, with the model frozen" if self.name == "mtp" else "with the model"
            yield f"trains {layers} layer{'s' if layers > 1 else ''} of multi-token prediction {how}"
        if settings.parallel.processes > 1:
            spec = trainer_spec(settings, "cpu", mtp_layers=layers, frozen=self.name == "mtp")
            yield describe_communication(context.inputs.models[self.name].config, spec)

    def _time(self, context: PlanContext, memory: ProcessMemory, steps: int, step: int) -> TimeEstimate | None:
        settings, model, run = self.settings(context.recipe), context.inputs.models[self.name], context.inputs.run
        logged = run.metrics(self.name) if run is not None else []
        speeds = [record["tokens_per_second"] for record in logged if "tokens_per_second" in record]
        tokens = settings.rows * settings.micro_batches * settings.length
        if len(speeds) >= SETTLED_STEPS:
            estimate = TimeEstimate(tokens / median(speeds), f"from the {len(speeds)} earlier steps of this run")
        elif settings.parallel.processes > 1:
            return None
        elif (max_tokens := context.measurable_tokens(memory, settings.rows * settings.length)) is not None:
            estimate = step_seconds(
                model.config,
                settings,
                settings.micro_batches,
                mtp_layers=model.mtp_layers,
                frozen=self.name == "mtp",
                max_tokens=max_tokens,
                budget=context.budget,
            )
        else:
            return None
        seconds = (steps - step) * estimate.seconds
        if settings.held_out is not None:
            evaluations = 2 + ((steps - 1) // settings.evaluate_every if settings.evaluate_every else 0)
            read = settings.held_out.max_tokens or tokens
            # Every token is read twice, in windows that overlap by half; a forward pass is a third of a step.
            seconds += evaluations * 2 * read * estimate.seconds / tokens / 3
        return TimeEstimate(seconds, f"{estimate.basis}: {estimate.seconds:,.2f} s a step")

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        fix_task_sets(run, recipe.evaluation)
        # Demonstrations look like the sessions of the recipe, if it has any.
        sessions = recipe.rl or (recipe.evaluation.sessions if recipe.evaluation else None)
        with_profile = self.name == "sft" and sessions is not None
        profile = AgentProfile.of(sessions, recipe.plugins).to_json() if with_profile and sessions else ""
        settings = self.settings(recipe)
        with joined_ranks(run, self.name, settings.parallel, settings.device) as mesh:
            context = stages.StageContext(run, recipe.seed, report, recipe.mtp, profile, mesh)
            facts: dict[str, Any] = getattr(stages, self.name)(context, settings)
        return facts

    def summarize(self, facts: Facts) -> str:
        parts = [f"{facts['steps']:,} steps, {facts['tokens']:,} tokens"]
        parts += [
            f"{name.removeprefix('first_')} {first:.3f} -> {facts[last]:.3f}"
            for name, first in facts.items()
            if name.startswith("first_") and (last := name.replace("first_", "last_", 1)) in facts
        ]
        if (before := facts.get("held_out_nats_before")) and (after := facts.get("held_out_nats_after")):
            parts.append(f"held-out code {before:,.0f} -> {after:,.0f} nats ({after / before - 1:+.1%})")
        if (after := facts.get("held_out_overlap_after")) is not None:
            before = facts["held_out_overlap_before"]
            parts.append(f"overlap with the model's own next token on held-out code {before:.0%} -> {after:.0%}")
        return "; ".join(parts)


def _built(name: str, recipe: Recipe) -> Any:
    """Return the settings of a corpus of this run; the recipe checks that it builds what it names."""
    assert recipe.corpus is not None
    return next(each for each in recipe.corpus.build if each.name == name)


PRETRAIN, MTP, EXTEND, SFT = (TrainingStage(name) for name in ("pretrain", "mtp", "extend", "sft"))
