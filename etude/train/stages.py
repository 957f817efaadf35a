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

import numpy as np
import numpy.typing as npt
import torch

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.data.mixture import Mixture, Source, read_on
from etude.data.packing import Batch
from etude.data.shards import Shards
from etude.errors import InputError
from etude.evaluation.codebase_nll import loss_by_position, stream_nll
from etude.kernels import usable_device
from etude.model.checkpoint import load, write_model
from etude.model.config import ModelConfig, with_rope
from etude.model.describe import training_flops_per_token
from etude.model.mtp import FILE as MTP_FILE
from etude.model.mtp import MTP, initialize_mtp, load_mtp, save_mtp
from etude.model.transformer import Transformer, compile_blocks
from etude.recipe.recipe import Recipe
from etude.recipe.sections import ExtendStage, SftStage, TrainingStage
from etude.runs.run import Artefact, Run
from etude.system.progress import Report
from etude.train.guard import Guard
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings, Schedule
from etude.train.phase import Phase, checkpoints_of, train
from etude.train.trainer import Trainer

Facts = dict[str, Any]
# Whose weights a stage goes on from: the last of these that ran.
BEFORE = {
    "pretrain": ("base", "init"),
    "mtp": ("pretrain",),
    "extend": ("base", "init", "pretrain"),
    "sft": ("base", "init", "pretrain", "extend"),
    "rl": ("base", "init", "pretrain", "extend", "sft"),
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
        parts.mtp = _compiled(fresh.to(parts.model.head_weight.device), section)
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
    held_out: Shards | None


def assemble(run: Run, recipe: Recipe, stage: str, section: TrainingStage) -> Parts:
    """Model, MTP layers, tokenizer and reader; the weights are this stage's own newest if it was interrupted."""
    origin = section.model or origin_of(run, stage)
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
    layers = _mtp_directory(run, stage, origin, own)
    mtp = _compiled(load_mtp(layers, model.config, dtype, device), section) if layers else None
    shards = {part.corpus: _shards(run, part.corpus, "train", tokenizer) for part in section.mix}
    for name, store in shards.items():
        if stage == "sft" and not store.has_mask:
            raise InputError(f"sft learns from conversations; corpus {name} has none: build it with chat = true")
    sources = [Source(part.corpus, shards[part.corpus], part.weight) for part in section.mix]
    mixture = Mixture(
        sources,
        length=section.length,
        seed=recipe.seed,
        whole=isinstance(section, SftStage),
        min_document=section.min_document if isinstance(section, ExtendStage) else 1,
    )
    held_out = _held_out(run, stage, section, model, tokenizer)
    return Parts(stage, section, origin, model, mtp, tokenizer, mixture, held_out)


def _held_out(run: Run, stage: str, section: TrainingStage, model: Transformer, tokenizer: Tokenizer) -> Shards | None:
    asked = section.held_out
    if asked is None:
        return None
    if asked.window > model.config.max_length:
        raise InputError(f"{stage}.held_out.window {asked.window} exceeds the model's {model.config.max_length} tokens")
    shards = _shards(run, asked.corpus, asked.split, tokenizer)
    if shards.has_mask:
        raise InputError(f"{stage}.held_out names {asked.corpus}, a corpus of chats; the measure is for plain text")
    return shards


def _compiled(mtp: MTP, section: TrainingStage) -> MTP:
    if section.compile:
        for layer in mtp.layers:
            layer.compile()
    return mtp


def make_phase(run: Run, recipe: Recipe, parts: Parts, objective: Objective) -> Phase:
    section, stage, model = parts.section, parts.stage, parts.model
    adam = AdamSettings(section.learning_rate, section.betas, 1e-8, section.weight_decay, section.clip)
    beside = {"mtp": parts.mtp} if parts.mtp else {}
    steps = -(-section.tokens // (section.rows * section.micro_batches * section.length))
    warmup = round(section.warmup * steps)
    watch = f"mtp_1_{recipe.mtp.distance}" if stage == "mtp" and recipe.mtp else "loss"

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
        guard=Guard(section.spike, run.path / "failures" / stage, watch),
        rows=section.rows,
        micro_batches=section.micro_batches,
        padding=parts.tokenizer.end_of_text,
        flops_per_token=_flops_per_token(parts),
        milestones=frozenset({-(-steps // 2)} if stage == "pretrain" and recipe.mtp else ()),
        evaluate=lambda: evaluate(run, parts),
        evaluate_every=section.evaluate_every,
        checkpoint_every=section.checkpoint_every,
        keep=section.keep,
        open_checkpoint=open_checkpoint,
        save_weights=save_weights,
    )


def _flops_per_token(parts: Parts) -> float:
    """Products a step must do: the main model forward and, unless frozen, backward; each MTP layer with the head."""
    config = parts.model.config
    main = training_flops_per_token(config, parts.section.length)
    if parts.mtp is None:
        return main
    # a layer reads the head three times: teacher, draft, and the draft's gradient
    extra = 6 * sum(p.numel() for p in parts.mtp.parameters())
    extra += len(parts.mtp.layers) * 3 * 2 * config.vocab_size * config.hidden_size
    return (main / 3 if parts.stage == "mtp" else main) + extra


@torch.inference_mode()
def _draft_quality(parts: Parts, ids: npt.NDArray[np.int64]) -> Facts:
    """How often held-out drafts of the first layer would be accepted: sampled (overlap), greedy (agreement)."""
    assert parts.mtp is not None
    length = parts.section.length
    rows = torch.from_numpy(ids[: (len(ids) - 1) // length * length]).view(-1, length)
    following = torch.from_numpy(ids[1 : len(rows) * length + 1]).view(-1, length)
    sums = {"overlap": 0.0, "agreement": 0.0}
    count = 0.0
    for at in range(0, len(rows), parts.section.rows):
        tokens, targets = rows[at : at + parts.section.rows], following[at : at + parts.section.rows]
        batch = Batch(tokens, targets, tuple((length,) for _ in tokens), (), tokens.numel())
        found = with_mtp(parts.mtp, joint=False)(parts.model, batch.to(parts.model.head_weight.device))
        for name in sums:
            sums[name] += found.shown[f"mtp_1_{name}"].item()
        count += found.counts["mtp_1_overlap"].item()
    return {f"held_out_{name}": value / max(1.0, count) for name, value in sums.items()}


def evaluate(run: Run, parts: Parts) -> Facts:
    """The held-out measure: summed NLL over a rolling window, and by position where the context is being extended."""
    held_out, shards = parts.section.held_out, parts.held_out
    if held_out is None or shards is None:
        return {}
    ids = read_on(shards, held_out.max_tokens)
    if parts.stage == "mtp":
        return _draft_quality(parts, ids)
    window = held_out.window
    nats = stream_nll(parts.model, ids, parts.tokenizer.end_of_text, window=window, stride=max(1, window // 2))
    found: Facts = {"held_out_nats": nats, "held_out_loss": nats / len(ids), "held_out_tokens": len(ids)}
    if parts.stage == "extend":
        found["loss_by_position"] = loss_by_position(parts.model, shards, parts.section.length, rows=held_out.long_rows)
    return found


def origin_of(run: Run, stage: str) -> Artefact:
    """The newest weights of the last stage before this one; of mtp, those at half the way of pretrain."""
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


def _mtp_directory(run: Run, stage: str, origin: Artefact | Path, own: list[tuple[int, Artefact]]) -> Path | None:
    """This stage's own layers if it was interrupted; then those that came along in extend; then this run's; then the
    ones the given model brought. pretrain has none: they would only fall behind it."""
    if stage == "pretrain":
        return None
    if own:
        return own[-1][1].path if (own[-1][1].path / MTP_FILE).exists() else None
    if stage == "mtp":
        return None
    directory = origin.path if isinstance(origin, Artefact) else origin
    carried = directory if (directory / MTP_FILE).exists() else None
    trained = run.artefacts("mtp")
    if carried and isinstance(origin, Artefact) and origin.stage == "extend":
        return carried
    return trained[-1].path if trained else carried


def _shards(run: Run, corpus: str, split: str, tokenizer: Tokenizer) -> Shards:
    """A corpus of this run by its name, or one on disk by its path; made with the model's tokenizer."""
    named = {a.name: a.path for a in run.artefacts("corpus")}
    path = Path(corpus) if Path(corpus).is_absolute() else named.get(f"corpus-{corpus}")
    if path is None:
        raise InputError(f"this run has no corpus {corpus!r}; build it in [[corpus.build]] or give a path")
    shards = Shards.open(path, split)
    if shards.tokenizer_digest != tokenizer.digest:
        raise InputError(f"corpus {corpus} was made with another tokenizer than the model's; build it again")
    return shards
