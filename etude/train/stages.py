"""The stages of continued pretraining: each turns its settings into a `TrainingPhase` and runs it.

pretrain   next-token prediction on the bulk of the corpus at the base length
mtp        multi-token-prediction layers alone, on the checkpoint at half of pretrain, so that they do not fit
           only the final weights
extend     a longer context; trains the MTP layers together with the model
sft        conversations; trains the MTP layers together with the model
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
from etude.data.mixture import Mixture, MixtureSource, read_concatenated
from etude.data.packing import Batch
from etude.data.shards import Shards
from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.checkpoint import load, write_model
from etude.model.config import PROFILE_FILE, ModelConfig, with_rope
from etude.model.describe import training_flops_per_token
from etude.model.mtp import MTP, initialize_mtp, load_mtp, mtp_file, save_mtp
from etude.model.transformer import Transformer, compile_blocks
from etude.runs.run import Artefact, Run
from etude.system.progress import ProgressCallback
from etude.train.balance import check_balance
from etude.train.guard import LossSpikeGuard
from etude.train.held_out_nll import loss_by_position, stream_nll
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings, LRSchedule
from etude.train.phase import TrainingPhase, intact_checkpoints, list_checkpoints, train
from etude.train.settings import (
    ExtendSettings,
    MtpSettings,
    PretrainSettings,
    SftSettings,
    TrainingSettings,
)
from etude.train.trainer import Trainer

StageSummary = dict[str, Any]
# A stage starts from the weights of the last of these that ran.
PRECEDING_STAGES = {
    "pretrain": ("base", "init"),
    "mtp": ("pretrain",),
    "extend": ("base", "init", "pretrain"),
    "sft": ("base", "init", "pretrain", "extend"),
    "rl": ("base", "init", "pretrain", "extend", "sft"),
}


@dataclass(frozen=True)
class StageContext:
    """Inputs of every training stage in addition to its own settings."""

    run: Run
    seed: int
    report: ProgressCallback
    mtp: MtpSettings | None = None  # settings of the recipe's mtp stage, if it has one
    profile: str = ""  # agent.json of the checkpoints; "": that of the model which the stage starts from


def pretrain(context: StageContext, settings: PretrainSettings) -> StageSummary:
    """Continue pretraining: next-token prediction at the base length."""
    parts = build_components(context, "pretrain", settings)
    return train(context.run, build_phase(context, parts, next_token), context.report)


def mtp(context: StageContext, settings: MtpSettings) -> StageSummary:
    """Train multi-token-prediction layers alone, distilled from the main head of a mid-run checkpoint."""
    parts = build_components(context, "mtp", settings)
    if parts.mtp is None:
        head = parts.model.head_weight
        layers = initialize_mtp(parts.model.config, settings.layers, context.seed, head.dtype)
        parts.mtp = _compiled(layers.to(head.device), settings)
    parts.model.requires_grad_(False)
    objective = with_mtp(parts.mtp, distance=settings.distance, joint=False)
    return train(context.run, build_phase(context, parts, objective), context.report)


def extend(context: StageContext, settings: ExtendSettings) -> StageSummary:
    """Train on longer sequences with a new RoPE base or scaling, and the MTP layers together with the model."""
    parts = build_components(context, "extend", settings)
    return train(context.run, build_phase(context, parts, joint_objective(context, parts)), context.report)


def sft(context: StageContext, settings: SftSettings) -> StageSummary:
    """Fine-tune on whole conversations with the loss on assistant turns only; trains the MTP layers too."""
    parts = build_components(context, "sft", settings)
    return train(context.run, build_phase(context, parts, joint_objective(context, parts)), context.report)


def joint_objective(context: StageContext, parts: StageComponents) -> Objective:
    """Return the next-token objective, with the MTP layers if there are any."""
    if parts.mtp is None:
        return next_token
    return with_mtp(parts.mtp, distance=context.mtp.distance if context.mtp else "kl")


# ------------------------------------------------------------------------------------------------------- setup


@dataclass
class StageComponents:
    """Model, data and settings of one stage."""

    stage: str
    settings: TrainingSettings
    origin: Artefact | Path  # the weights this stage started from
    model: Transformer
    mtp: MTP | None
    tokenizer: Tokenizer
    mixture: Mixture
    held_out: Shards | None
    profile: str  # agent.json of the checkpoints; "": none


def build_components(context: StageContext, stage: str, settings: TrainingSettings) -> StageComponents:
    """Load model, MTP layers, tokenizer and mixture. An interrupted stage loads its own newest intact checkpoint."""
    run = context.run
    origin = settings.model or initial_weights(run, stage)
    directory = origin.path if isinstance(origin, Artefact) else origin
    own = intact_checkpoints(run, stage)
    weights = own[-1][1].path if own and stage != "mtp" else directory
    tokenizer = Tokenizer.load(directory)
    device, dtype = usable_device(settings.device), getattr(torch, settings.precision)
    model = load(weights, dtype=dtype, device=device, config=_config(directory, settings))
    check_balance(settings.balance, model.config, stage)
    check_vocabulary(tokenizer, model.config.vocab_size, str(directory))
    if settings.length > model.config.max_length:
        raise InputError(
            f"{stage}.length {settings.length} exceeds the model's context of {model.config.max_length} tokens"
        )
    model.recompute = settings.recompute
    if settings.compile:
        compile_blocks(model)
    layers = _mtp_directory(run, stage, origin, own)
    mtp = _compiled(load_mtp(layers, model.config, dtype, device), settings) if layers else None
    mixture = build_mixture(run, stage, settings, context.seed, tokenizer)
    held_out = _open_held_out(run, stage, settings, model, tokenizer)
    own_profile = directory / PROFILE_FILE
    profile = context.profile or (own_profile.read_text(encoding="utf-8") if own_profile.exists() else "")
    return StageComponents(stage, settings, origin, model, mtp, tokenizer, mixture, held_out, profile)


def build_mixture(run: Run, stage: str, settings: TrainingSettings, seed: int, tokenizer: Tokenizer) -> Mixture:
    """Return the mixture of a stage's corpora, at its beginning."""
    shards = {part.corpus: _open_shards(run, part.corpus, "train", tokenizer) for part in settings.mix}
    for name, store in shards.items():
        if stage == "sft" and not store.has_mask:
            raise InputError(f"sft learns from conversations; corpus {name} has none: build it with chat = true")
    sources = [MixtureSource(part.corpus, shards[part.corpus], part.weight) for part in settings.mix]
    return Mixture(
        sources,
        length=settings.length,
        seed=seed,
        keep_whole=isinstance(settings, SftSettings),
        min_document=settings.min_document if isinstance(settings, ExtendSettings) else 1,
    )


def _open_held_out(
    run: Run, stage: str, settings: TrainingSettings, model: Transformer, tokenizer: Tokenizer
) -> Shards | None:
    held_out, max_length = settings.held_out, model.config.max_length
    if held_out is None:
        return None
    if held_out.window > max_length:
        raise InputError(f"{stage}.held_out.window {held_out.window} exceeds the model's {max_length} tokens")
    shards = _open_shards(run, held_out.corpus, held_out.split, tokenizer)
    if shards.has_mask:
        corpus = held_out.corpus
        raise InputError(f"{stage}.held_out names {corpus}, a corpus of chats; held-out evaluation needs plain text")
    return shards


def _compiled(mtp: MTP, settings: TrainingSettings) -> MTP:
    if settings.compile:
        for layer in mtp.layers:
            layer.compile()
    return mtp


def build_phase(context: StageContext, parts: StageComponents, objective: Objective) -> TrainingPhase:
    run, settings, stage, model = context.run, parts.settings, parts.stage, parts.model
    s = settings
    adam = AdamSettings(s.learning_rate, s.betas, s.eps, s.weight_decay, s.max_grad_norm)
    steps = -(-settings.tokens // (settings.rows * settings.micro_batches * settings.length))
    warmup = round(settings.warmup * steps)
    metric = f"mtp_1_{context.mtp.distance}" if stage == "mtp" and context.mtp else "loss"

    def open_checkpoint(step: int) -> AbstractContextManager[Path]:
        if stage == "mtp":
            return run.artefact(f"mtp-{step}", kind="mtp", stage=stage, parents=[parts.origin])
        return run.checkpoint(stage, step, parents=[parts.origin])

    def save_weights(directory: Path) -> None:
        if stage != "mtp":
            write_model(model, directory)
            parts.tokenizer.save(directory)
            if parts.profile:
                (directory / PROFILE_FILE).write_text(parts.profile, encoding="utf-8")
        if parts.mtp:
            save_mtp(parts.mtp, directory)

    return TrainingPhase(
        name=stage,
        trainer=Trainer(model, adam, {"mtp": parts.mtp} if parts.mtp else {}, balance=settings.balance),
        objective=objective,
        schedule=LRSchedule(steps, warmup, settings.decay, settings.final_lr_fraction),
        mixture=parts.mixture,
        guard=LossSpikeGuard(settings.spike, run.path / "failures" / stage, metric),
        rows=settings.rows,
        micro_batches=settings.micro_batches,
        padding=parts.tokenizer.end_of_text,
        flops_per_token=_flops_per_token(parts),
        milestones=frozenset({-(-steps // 2)} if stage == "pretrain" and context.mtp else ()),
        evaluate=lambda: evaluate(parts),
        evaluate_every=settings.evaluate_every,
        checkpoint_every=settings.checkpoint_every,
        keep=settings.keep,
        open_checkpoint=open_checkpoint,
        save_weights=save_weights,
    )


def _flops_per_token(parts: StageComponents) -> float:
    """Return the FLOPs of a token: the main model forward and, unless frozen, backward; each MTP layer and its head."""
    config = parts.model.config
    main = training_flops_per_token(config, parts.settings.length)
    if parts.mtp is None:
        return main
    # each layer uses the head three times: teacher, draft, and the draft's gradient
    extra = 6 * sum(p.numel() for p in parts.mtp.parameters())
    extra += len(parts.mtp.layers) * 3 * 2 * config.vocab_size * config.hidden_size
    return (main / 3 if parts.stage == "mtp" else main) + extra


@torch.inference_mode()
def _draft_quality(parts: StageComponents, ids: npt.NDArray[np.int64]) -> StageSummary:
    """Return the held-out acceptance rate of the first layer's drafts: sampled (overlap) and greedy (agreement)."""
    assert parts.mtp is not None
    length = parts.settings.length
    rows = torch.from_numpy(ids[: (len(ids) - 1) // length * length]).view(-1, length)
    following = torch.from_numpy(ids[1 : len(rows) * length + 1]).view(-1, length)
    sums = {"overlap": 0.0, "agreement": 0.0}
    count = 0.0
    for at in range(0, len(rows), parts.settings.rows):
        tokens, targets = rows[at : at + parts.settings.rows], following[at : at + parts.settings.rows]
        batch = Batch(tokens, targets, tuple((length,) for _ in tokens), (), tokens.numel())
        found = with_mtp(parts.mtp, joint=False)(parts.model, batch.to(parts.model.head_weight.device))
        for name in sums:
            sums[name] += found.metrics[f"mtp_1_{name}"].item()
        count += found.metric_counts["mtp_1_overlap"].item()
    return {f"held_out_{name}": value / max(1.0, count) for name, value in sums.items()}


def evaluate(parts: StageComponents) -> StageSummary:
    """Return held-out metrics: summed NLL over a rolling window; by position for extend; draft quality for mtp."""
    held_out, shards = parts.settings.held_out, parts.held_out
    if held_out is None or shards is None:
        return {}
    ids = read_concatenated(shards, held_out.max_tokens)
    if parts.stage == "mtp":
        return _draft_quality(parts, ids)
    window = held_out.window
    nats = stream_nll(parts.model, ids, parts.tokenizer.end_of_text, window=window, stride=max(1, window // 2))
    metrics: StageSummary = {"held_out_nats": nats, "held_out_loss": nats / len(ids), "held_out_tokens": len(ids)}
    if parts.stage == "extend":
        length, rows = parts.settings.length, held_out.long_rows
        metrics["loss_by_position"] = loss_by_position(parts.model, shards, length, rows=rows)
    return metrics


def initial_weights(run: Run, stage: str) -> Artefact:
    """Return the newest weights of the preceding stage; for mtp, the checkpoint at half of pretrain."""
    found = [a for a in run.artefacts("checkpoint") if a.stage in PRECEDING_STAGES[stage]]
    if not found:
        raise InputError(f"stage {stage} has no weights to start from; set {stage}.model or run a preceding stage")
    if stage != "mtp":
        latest = max(found, key=lambda a: PRECEDING_STAGES[stage].index(a.stage)).stage
        return [a for a in found if a.stage == latest][-1]
    steps = list_checkpoints(run, "pretrain")
    return next(artefact for step, artefact in steps if 2 * step >= steps[-1][0])


def _config(directory: Path, settings: TrainingSettings) -> ModelConfig:
    config = ModelConfig.load(directory)
    if isinstance(settings, ExtendSettings):
        return with_rope(config, length=settings.length, theta=settings.rope_theta, scaling=settings.rope_scaling)
    return config


def _mtp_directory(run: Run, stage: str, origin: Artefact | Path, own: list[tuple[int, Artefact]]) -> Path | None:
    """Return the directory of the MTP layers to start from, or None.

    In order of preference: this stage's own checkpoint if it was interrupted, those trained along in extend, those of
    this run's mtp stage, those stored with the given model. pretrain drops them: they would not follow its updates.
    """
    if stage == "pretrain":
        return None
    if own:
        return own[-1][1].path if mtp_file(own[-1][1].path) else None
    if stage == "mtp":
        return None
    directory = origin.path if isinstance(origin, Artefact) else origin
    carried = directory if mtp_file(directory) else None
    trained = run.artefacts("mtp")
    if carried and isinstance(origin, Artefact) and origin.stage == "extend":
        return carried
    return trained[-1].path if trained else carried


def _open_shards(run: Run, corpus: str, split: str, tokenizer: Tokenizer) -> Shards:
    """Open a split of a corpus, given by its name in this run or by its path; check that it fits the tokenizer."""
    named = {a.name: a.path for a in run.artefacts("corpus")}
    path = Path(corpus) if Path(corpus).is_absolute() else named.get(f"corpus-{corpus}")
    if path is None:
        raise InputError(f"this run has no corpus {corpus!r}; build it in [[corpus.build]] or give a path")
    shards = Shards.open(path, split)
    if shards.tokenizer_digest != tokenizer.digest:
        raise InputError(f"corpus {corpus} was built with another tokenizer than the model's; build it again")
    return shards
