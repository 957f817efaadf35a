"""The stages of continued pretraining, each a recipe section turned into a `Phase`: pretrain, mtp, extend, sft.

pretrain reads the bulk of the corpus at the base length. mtp trains multi-token-prediction layers alone, on top of the
checkpoint in the middle of pretrain, so that they do not lean on one state of the model. extend lengthens the context
and sft learns from conversations; both train those layers along.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.data.mixture import Mixture, Source, read_on
from etude.data.shards import Shards
from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.checkpoint import load, write_model
from etude.model.config import ModelConfig, with_rope
from etude.model.describe import training_flops_per_token
from etude.model.evaluate import loss_by_position, stream_nll
from etude.model.mtp import FILE as MTP_FILE
from etude.model.mtp import MTP, initialize_mtp, load_mtp, save_mtp
from etude.model.tokenizer import Tokenizer, check_vocabulary
from etude.model.transformer import Transformer, compile_blocks
from etude.progress import Report
from etude.recipe import Recipe
from etude.run import Artefact, Run
from etude.sections import ExtendStage, SftStage, TrainingStage
from etude.train.guard import Guard
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings, Schedule
from etude.train.phase import Phase, check_tokenizer, checkpoints_of, train
from etude.train.trainer import Trainer

Facts = dict[str, Any]
# Whose weights a stage goes on from: the last of these that ran.
BEFORE = {
    "pretrain": ("base", "init"),
    "mtp": ("pretrain",),
    "extend": ("base", "init", "pretrain"),
    "sft": ("base", "init", "pretrain", "extend"),
}


def pretrain(run: Run, recipe: Recipe, report: Report) -> Facts:
    """The bulk: next-token prediction at the base length."""
    assert recipe.pretrain is not None  # the recipe checks that every stage it names has its section
    parts = assemble(run, recipe, "pretrain", recipe.pretrain)
    return train(run, make_phase(run, recipe, parts, next_token), report)


def mtp(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Multi-token-prediction layers alone, distilled from the main head of a mid-run checkpoint."""
    section = recipe.mtp
    assert section is not None
    parts = assemble(run, recipe, "mtp", section)
    if parts.mtp is None:
        fresh = initialize_mtp(parts.model.config, section.layers, recipe.seed, parts.model.head_weight.dtype)
        parts.mtp = fresh.to(parts.model.head_weight.device)
    parts.model.requires_grad_(False)
    return train(
        run, make_phase(run, recipe, parts, with_mtp(parts.mtp, distance=section.distance, joint=False)), report
    )


def extend(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Longer sequences, positions stretched, long documents preferred; MTP layers go along if there are any."""
    assert recipe.extend is not None
    parts = assemble(run, recipe, "extend", recipe.extend)
    return train(run, make_phase(run, recipe, parts, joint(recipe, parts)), report)


def sft(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Conversations, kept whole; only what the assistant wrote is learned. MTP layers go along if there are any."""
    assert recipe.sft is not None
    parts = assemble(run, recipe, "sft", recipe.sft)
    return train(run, make_phase(run, recipe, parts, joint(recipe, parts)), report)


def joint(recipe: Recipe, parts: Parts) -> Objective:
    if parts.mtp is None:
        return next_token
    return with_mtp(parts.mtp, distance=recipe.mtp.distance if recipe.mtp else "kl")


# --------------------------------------------------------------------------------------------- putting together


@dataclass
class Parts:
    stage: str
    section: TrainingStage
    origin: Artefact | Path  # the weights this stage started from
    model: Transformer
    mtp: MTP | None
    tokenizer: Tokenizer
    mixture: Mixture


def assemble(run: Run, recipe: Recipe, stage: str, section: TrainingStage) -> Parts:
    """Model, MTP layers, tokenizer and reader; the weights are this stage's own newest if it was interrupted."""
    origin = section.model or _origin(run, stage)
    directory = origin.path if isinstance(origin, Artefact) else origin
    own = checkpoints_of(run, stage)
    weights = own[-1][1].path if own and stage != "mtp" else directory
    tokenizer = Tokenizer.load(directory)
    device, dtype = usable_device(section.device), getattr(torch, section.precision)
    model = load(weights, dtype=dtype, device=device, config=_config(directory, section))
    check_vocabulary(tokenizer, model.config.vocab_size, str(directory))
    if section.length > model.config.max_length:
        raise InputError(
            f"{stage}.length {section.length} exceeds the {model.config.max_length} tokens this model reads"
        )
    model.recompute = section.recompute
    if section.compile:
        compile_blocks(model)
    layers = _mtp_directory(run, stage, weights, own)
    mtp = load_mtp(layers, model.config, dtype, device) if layers else None
    sources = [Source(part.corpus, _shards(run, part.corpus, "train"), part.weight) for part in section.mix]
    mixture = Mixture(
        sources,
        length=section.length,
        seed=recipe.seed,
        whole=isinstance(section, SftStage),
        min_document=section.min_document if isinstance(section, ExtendStage) else 1,
    )
    check_tokenizer(mixture, tokenizer.digest)
    return Parts(stage, section, origin, model, mtp, tokenizer, mixture)


def make_phase(run: Run, recipe: Recipe, parts: Parts, objective: Objective) -> Phase:
    section, stage, model = parts.section, parts.stage, parts.model
    adam = AdamSettings(section.learning_rate, section.betas, 1e-8, section.weight_decay, section.clip)
    beside = {"mtp": parts.mtp} if parts.mtp else {}
    steps = -(-section.tokens // (section.rows * section.micro_batches * section.length))
    warmup = round(section.warmup * steps)

    def open_checkpoint(step: int) -> AbstractContextManager[Path]:
        if stage == "mtp":
            return run.artefact(f"mtp-{step}", kind="mtp", stage=stage, parents=[parts.origin])
        return run.checkpoint(stage, step, parents=[parts.origin])

    def save_weights(place: Path) -> None:
        if stage != "mtp":
            write_model(model, place)
            parts.tokenizer.save(place)
        if parts.mtp:
            save_mtp(parts.mtp, place)

    return Phase(
        name=stage,
        trainer=Trainer(model, adam, dict(beside)),
        objective=objective,
        schedule=Schedule(steps, warmup, section.decay, section.final),
        mixture=parts.mixture,
        guard=Guard(section.spike, run.path / "failures" / stage),
        rows=section.rows,
        micro_batches=section.micro_batches,
        padding=parts.tokenizer.end_of_text,
        flops_per_token=training_flops_per_token(model.config, section.length),
        evaluate=lambda: evaluate(run, parts),
        evaluate_every=section.evaluate_every,
        checkpoint_every=section.checkpoint_every,
        keep=section.keep,
        open_checkpoint=open_checkpoint,
        save_weights=save_weights,
    )


def evaluate(run: Run, parts: Parts) -> Facts:
    """The held-out measure: summed NLL over a rolling window, and by position where the context is being extended."""
    held_out = parts.section.held_out
    if held_out is None or parts.stage == "mtp":
        return {}
    shards = _shards(run, held_out.corpus, held_out.split)
    ids = read_on(shards, held_out.max_tokens)
    window = min(held_out.window, parts.model.config.max_length)
    nats = stream_nll(parts.model, ids, parts.tokenizer.end_of_text, window=window, stride=max(1, window // 2))
    found: Facts = {"held_out_nats": nats, "held_out_loss": nats / len(ids), "held_out_tokens": len(ids)}
    if parts.stage == "extend":
        found["loss_by_position"] = loss_by_position(parts.model, shards, parts.section.length, rows=held_out.long_rows)
    return found


def _origin(run: Run, stage: str) -> Artefact:
    found = [a for a in run.artefacts("checkpoint") if a.stage in BEFORE[stage]]
    if not found:
        raise InputError(f"stage {stage} has no weights to start from; give {stage}.model or run a stage before it")
    if stage != "mtp":
        latest = max(found, key=lambda a: BEFORE[stage].index(a.stage)).stage
        return [a for a in found if a.stage == latest][-1]
    steps = checkpoints_of(run, "pretrain")
    return next(artefact for step, artefact in steps if 2 * step >= steps[-1][0])


def _config(directory: Path, section: TrainingStage) -> ModelConfig:
    config = ModelConfig.load(directory)
    if isinstance(section, ExtendStage):
        return with_rope(config, length=section.length, theta=section.rope_theta, scaling=section.rope_scaling)
    return config


def _mtp_directory(run: Run, stage: str, weights: Path, own: list[tuple[int, Artefact]]) -> Path | None:
    if stage == "mtp":
        return own[-1][1].path if own else None
    if (weights / MTP_FILE).exists():
        return weights
    trained = run.artefacts("mtp")
    return trained[-1].path if trained and stage != "pretrain" else None


def _shards(run: Run, corpus: str, split: str) -> Shards:
    """A corpus of this run by its name, or one on disk by its path."""
    if Path(corpus).is_absolute():
        return Shards.open(corpus, split)
    named = {a.name: a.path for a in run.artefacts("corpus")}
    if f"corpus-{corpus}" not in named:
        raise InputError(f"this run has no corpus {corpus!r}; build it in [[corpus.build]] or give a path")
    return Shards.open(named[f"corpus-{corpus}"], split)
