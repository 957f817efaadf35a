"""The table of `etude model describe`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from etude.model.config import ModelConfig
from etude.model.known import KnownModel
from etude.system.units import format_bytes


def describe_table(config: ModelConfig, facts: dict[str, Any], known: KnownModel | None) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    counts, sizes = facts["parameters"], facts["bytes"]
    table.add_row(
        "model", f"{facts['model']}  ({config.family}, vocabulary {config.vocab_size:,}, context {config.max_length:,})"
    )
    table.add_row("layers", _layers(config))
    table.add_row("attention", _attention(config))
    table.add_row(
        "parameters", f"{format_count(counts['total'])} total, {format_count(counts['active'])} active per token"
    )
    if config.latent:  # MTP layers are part of this family's design
        with_mtp = format_count(counts["total"] + counts["mtp_layer"])
        table.add_row("", f"{with_mtp} with one multi-token-prediction layer (+{format_count(counts['mtp_layer'])})")
    if known:
        table.add_row("published", known.published + (f"  ({known.remark})" if known.remark else ""))
    table.add_row("weights", f"{format_bytes(sizes['weights'])} in bfloat16")
    table.add_row(
        "training state", f"{format_bytes(sizes['training_state'])}: weights, gradients and two moments in float32"
    )
    table.add_row("KV cache", f"{format_bytes(sizes['kv_cache_per_token'])} per token in bfloat16")
    if "mesh" in facts:
        _add_training(table, facts)
    return table


def _add_training(table: Table, facts: dict[str, Any]) -> None:
    """Add the memory and the communication of one GPU of a mesh."""
    mesh, step = facts["mesh"], facts["step"]
    sizes = ", ".join(f"{name} {mesh[name]}" for name in ("dp_replicate", "dp_shard", "cp", "ep") if mesh[name] > 1)
    trained = f", adapters of rank {step['lora_rank']}" if step["lora_rank"] else ""
    trained += f", {step['mtp_layers']} MTP layers" if step["mtp_layers"] else ""
    table.add_row("", "")
    table.add_row(f"{mesh['gpus']} GPUs" if mesh["gpus"] > 1 else "1 GPU", sizes)
    table.add_row(
        "step",
        f"{step['micro_batches']} micro-batches of {step['rows']} x {step['length']:,} tokens in {step['precision']}"
        f"{', with recomputation' if step['recompute'] else ''}{trained}",
    )
    for title, kinds in (("memory", facts["bytes_per_gpu"]), ("received", facts["bytes_received_per_step"])):
        table.add_row(title, "of each GPU at the peak of a step" if title == "memory" else "by each GPU in a step")
        for name, size in kinds.items():
            table.add_row(f"  {name}", f"{format_bytes(size):>10}")


def _layers(config: ModelConfig) -> str:
    if config.moe is None:
        return f"{config.layers} dense, hidden {config.hidden_size:,}, mlp {config.mlp_size:,}"
    moe = config.moe
    dense = config.layers - len(moe.layers)
    shared = f" and a shared one of {moe.shared_size:,}" if moe.shared_size else ""
    return (
        f"{config.layers} ({dense} dense, {len(moe.layers)} with {moe.experts} experts of {moe.expert_size:,}, "
        f"{moe.per_token} per token{shared}), hidden {config.hidden_size:,}"
    )


def _attention(config: ModelConfig) -> str:
    if config.latent is None:
        return f"grouped-query, {config.heads} heads of {config.head_dim}, {config.kv_heads} key-value heads"
    latent = config.latent
    return f"latent, {config.heads} heads, latents of {latent.kv_rank} + {latent.rope_dim} rotary"


def format_count(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            value = count / size
            return f"{value:.2f}{unit}" if value < 10 else f"{value:.1f}{unit}"
    return str(count)
