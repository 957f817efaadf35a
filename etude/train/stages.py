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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.data.mixture import Mixture, MixtureSource, read_concatenated
from etude.data.packing import Batch
from etude.data.shards import Shards
from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.adapters import add_adapters, check_lora, continues_adapters, merge_adapters
from etude.model.checkpoint import load, write_model
from etude.model.config import PROFILE_FILE, ModelConfig, base_directory, with_rope
from etude.model.describe import training_flops_per_token
from etude.model.mtp import MTP, carried_mtp, count_mtp_layers, initialize_mtp, load_mtp
from etude.model.peft import read_adapter, relative_base
from etude.model.trainer_parts import check_expert_ranks
from etude.model.transformer import Transformer, compile_blocks, compile_forwards
from etude.parallel.led import led
from etude.runs.run import Artefact, Run
from etude.system.progress import ProgressCallback
from etude.train.balance import check_balance
from etude.train.checkpoint_files import write_mtp, write_weights
from etude.train.guard import LossSpikeGuard
from etude.train.held_out_nll import loss_by_position, stream_nll
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings, LRSchedule
from etude.train.phase import MERGED, TrainingPhase, intact_checkpoints, list_checkpoints, train
from etude.train.settings import (
    ExtendSettings,
    MtpSettings,
    PretrainSettings,
    SftSettings,
    TrainingSettings,
)
from etude.train.trainer import Trainer

if TYPE_CHECKING:
    from etude.parallel.mesh import TrainingMesh

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
    mesh: TrainingMesh | None = None  # of the processes that run the stage together


def pretrain(context: StageContext, settings: PretrainSettings) -> StageSummary:
    """Continue pretraining: next-token prediction at the base length."""
    parts = build_components(context, "pretrain", settings)
    return train(context.run, build_phase(context, parts, next_token), context.report)


def mtp(context: StageContext, settings: MtpSettings) -> StageSummary:
    """Train multi-token-prediction layers alone, distilled from the main head of a mid-run checkpoint."""
    parts = build_components(context, "mtp", settings)
    if parts.mtp is None:
        layers = initialize_mtp(parts.model.config, settings.layers, context.seed, _stored_dtype(context, settings))
        parts.mtp = _prepared_mtp(context, layers.to(parts.model.head_weight.device), settings)
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
    base: Path | None  # model to which the adapters belong that are trained; None: all weights are
    mesh: TrainingMesh | None = None


def build_components(context: StageContext, stage: str, settings: TrainingSettings) -> StageComponents:
    """Load model, MTP layers, tokenizer and mixture. An interrupted stage loads its own newest intact checkpoint."""
    run, mesh = context.run, context.mesh
    origin = settings.model or led(mesh, lambda: initial_weights(run, stage))
    directory = origin.path if isinstance(origin, Artefact) else origin
    own = led(mesh, lambda: intact_checkpoints(run, stage))
    weights = own[-1][1].path if own and stage != "mtp" else directory
    tokenizer = Tokenizer.load(directory)
    config = _config(directory, settings)
    check_balance(settings.balance, config, stage)
    check_expert_ranks(settings.parallel, config)
    check_lora(settings.lora, config, stage)
    check_vocabulary(tokenizer, config.vocab_size, str(directory))
    if settings.length > config.max_length:
        raise InputError(f"{stage}.length {settings.length} exceeds the model's context of {config.max_length} tokens")
    model, base = _load_model(context, stage, settings, weights, origin, config)
    model.recompute = settings.recompute
    layers = _mtp_directory(run, stage, origin, own)
    mtp = None
    if layers:
        loaded = load_mtp(layers, config, _stored_dtype(context, settings), model.head_weight.device)
        mtp = _prepared_mtp(context, loaded, settings)
    mixture = build_mixture(run, stage, settings, context.seed, tokenizer)
    held_out = _open_held_out(run, stage, settings, model, tokenizer)
    own_profile = directory / PROFILE_FILE
    profile = context.profile or (own_profile.read_text(encoding="utf-8") if own_profile.exists() else "")
    return StageComponents(stage, settings, origin, model, mtp, tokenizer, mixture, held_out, profile, base, mesh)


def _load_model(
    context: StageContext,
    stage: str,
    settings: TrainingSettings,
    weights: Path,
    origin: Artefact | Path,
    config: ModelConfig,
) -> tuple[Transformer, Path | None]:
    """Load the model that the stage trains, with its adapters; and the directory of their base model, if it has some.

    A stage with the same adapters as the model it starts from trains these further. Others are merged first.
    """
    dtype, lora = getattr(torch, settings.precision), None if stage == "mtp" else settings.lora
    weights = led(context.mesh, lambda: _without_other_adapters(context, stage, settings, weights, origin, config))
    if context.mesh is None:
        model = load(weights, dtype=dtype, device=usable_device(settings.device), config=config)
        if lora is not None and model.lora is None:
            add_adapters(model, lora, context.seed)
        if settings.compile:
            compile_blocks(model)
    else:
        from etude.train.sharding import load_sharded

        model = load_sharded(
            weights, context.mesh, dtype, config=config, lora=lora, seed=context.seed, frozen=stage == "mtp"
        )
        if settings.compile:
            compile_forwards(model.blocks)
    return model, base_directory(weights) if lora is not None else None


def _without_other_adapters(
    context: StageContext,
    stage: str,
    settings: TrainingSettings,
    weights: Path,
    origin: Artefact | Path,
    config: ModelConfig,
) -> Path:
    """Return a directory with weights or with the adapters that are trained further; others are merged, into one."""
    if base_directory(weights) == weights:
        return weights
    with torch.device("meta"):
        shapes = Transformer(config)
    if continues_adapters(read_adapter(shapes, weights), settings.lora):
        return weights
    with context.run.artefact(f"{stage}-base", kind=MERGED, stage=stage, parents=[origin]) as directory:
        model = merge_adapters(load(weights, getattr(torch, settings.precision), config=config))
        write_model(model, directory, extra=carried_mtp(weights, model))
    return next(a.path for a in context.run.artefacts(MERGED) if a.stage == stage)


def _stored_dtype(context: StageContext, settings: TrainingSettings) -> torch.dtype:
    """Return the dtype of trained parameters: on a mesh they are the float32 masters."""
    dtype: torch.dtype = getattr(torch, settings.precision)
    return dtype if context.mesh is None else torch.float32


def _prepared_mtp(context: StageContext, mtp: MTP, settings: TrainingSettings) -> MTP:
    if context.mesh is not None:
        from etude.train.sharding import shard_mtp

        shard_mtp(mtp, context.mesh, getattr(torch, settings.precision))
    if settings.compile:
        compile_forwards(mtp.layers)
    return mtp


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


def build_phase(context: StageContext, parts: StageComponents, objective: Objective) -> TrainingPhase:
    run, settings, stage, model, mesh = context.run, parts.settings, parts.stage, parts.model, context.mesh
    s, dtype = settings, getattr(torch, settings.precision)
    adam = AdamSettings(s.learning_rate, s.betas, s.eps, s.weight_decay, s.max_grad_norm)
    steps = -(-settings.tokens // (settings.rows * settings.micro_batches * settings.length))
    warmup = round(settings.warmup * steps)
    metric = f"mtp_1_{context.mtp.distance}" if stage == "mtp" and context.mtp else "loss"

    def open_checkpoint(step: int) -> AbstractContextManager[Path]:
        if stage == "mtp":
            return run.artefact(f"mtp-{step}", kind="mtp", stage=stage, parents=[parts.origin])
        return run.checkpoint(stage, step, parents=[parts.origin])

    def save_weights(directory: Path) -> None:
        leads = mesh is None or mesh.leads
        if stage != "mtp":
            base = relative_base(directory, parts.base, run.path) if parts.base else None
            write_weights(model, parts.mtp, directory, dtype, mesh, base)
            if leads:
                parts.tokenizer.save(directory)
            if leads and parts.profile:
                (directory / PROFILE_FILE).write_text(parts.profile, encoding="utf-8")
        elif parts.mtp:
            write_mtp(parts.mtp, directory, dtype, mesh)

    modules: dict[str, torch.nn.Module] = {"mtp": parts.mtp} if parts.mtp else {}
    return TrainingPhase(
        name=stage,
        trainer=Trainer(model, adam, modules, balance=settings.balance, mesh=mesh, stored_dtype=dtype),
        objective=objective,
        schedule=LRSchedule(steps, warmup, settings.decay, settings.final_lr_fraction),
        mixture=parts.mixture,
        guard=LossSpikeGuard(settings.spike, _failures(context, stage), metric),
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


def _failures(context: StageContext, stage: str) -> Path:
    """Return where a rank saves the batches of a bad step."""
    directory = context.run.path / "failures" / stage
    return directory if context.mesh is None else directory / f"rank-{context.mesh.rank}"


def _flops_per_token(parts: StageComponents) -> float:
    """Return the FLOPs of a token: the main model forward and, unless frozen, backward; each MTP layer and its head."""
    config = parts.model.config
    main = training_flops_per_token(config, parts.settings.length, frozen=parts.base is not None)
    if parts.mtp is None:
        return main
    # each layer uses the head three times: teacher, draft, and the draft's gradient
    extra = 6 * sum(p.numel() for p in parts.mtp.parameters())
    extra += len(parts.mtp.layers) * 3 * 2 * config.vocab_size * config.hidden_size
    return (main / 3 if parts.stage == "mtp" else main) + extra


@torch.no_grad()
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
        return own[-1][1].path if count_mtp_layers(own[-1][1].path) else None
    if stage == "mtp":
        return None
    directory = origin.path if isinstance(origin, Artefact) else origin
    carried = directory if count_mtp_layers(directory) else None
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
