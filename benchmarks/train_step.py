"""Forward and backward of SmolLM2-135M on one GPU, compared with transformers in the same run.

    python benchmarks/train_step.py                 # 16 rows of 2048 tokens, bfloat16
    python benchmarks/train_step.py --packed 8      # also with 8 documents packed into every row

Prints one table: tokens/s, time, peak memory, MFU, and each row's ratio to compiled transformers. MFU counts the
matrix products of the model (causal attention once, no recomputation) against the H200's data-sheet 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from etude.kernels.loss import linear_cross_entropy
from etude.model import Documents, ModelConfig, Transformer, compile_blocks, initialize
from etude.model.describe import training_flops_per_token
from etude.model.known import KNOWN_MODELS

PEAK_FLOPS = 989e12
SOURCE = KNOWN_MODELS["smollm2-135m"].config
Step = Callable[[Tensor], Tensor]


@dataclass
class StepTiming:
    name: str
    tokens_per_second: float
    milliseconds: float
    peak_gib: float
    mfu: float
    loss: float
    first_step_s: float


def transformers_step(compiled: bool) -> Step:
    import transformers

    options = {k: v for k, v in SOURCE.items() if k not in ("model_type", "torch_dtype", "architectures")}
    config = transformers.AutoConfig.for_model(SOURCE["model_type"], **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
    run = torch.compile(model) if compiled else model

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def our_step(compiled: bool, documents: Documents | None = None) -> Step:
    model = initialize(ModelConfig.from_hugging_face(SOURCE), seed=0, dtype=torch.bfloat16).cuda()
    if compiled:
        compile_blocks(model)

    def step(tokens: Tensor) -> Tensor:
        loss = next_token_loss(model, tokens, documents)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def next_token_loss(model: Transformer, tokens: Tensor, documents: Documents | None) -> Tensor:
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    hidden = model.hidden(tokens, documents=documents)
    loss = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets.flatten())
    return loss / (targets.numel() - targets.shape[0])


def measure(name: str, build: Callable[[], Step], batches: list[Tensor], steps: int) -> StepTiming:
    gc.collect()
    torch.cuda.empty_cache()
    step = build()
    start = time.perf_counter()
    loss = step(batches[0]).item()
    first = time.perf_counter() - start
    for batch in batches[:3]:
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for i in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step(batches[i % len(batches)])
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    ms = sorted(times)[len(times) // 2]
    tokens = batches[0].numel()
    rate = tokens / ms * 1e3
    flops = training_flops_per_token(ModelConfig.from_hugging_face(SOURCE), batches[0].shape[1])
    peak = torch.cuda.max_memory_allocated() / 2**30
    return StepTiming(name, rate, ms, peak, rate * flops / PEAK_FLOPS, loss, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--packed", type=int, default=8, help="documents per row in the packed case; 0 skips it")
    parser.add_argument("--compiled-only", action="store_true", help="skip the eager cases")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("train_step: this benchmark needs a CUDA GPU")
    generator = torch.Generator().manual_seed(0)
    shape = (args.rows, args.tokens)
    batches = [torch.randint(SOURCE["vocab_size"], shape, generator=generator).cuda() for _ in range(4)]
    cases: dict[str, Callable[[], Step]] = {
        "transformers eager": lambda: transformers_step(False),
        "transformers compiled": lambda: transformers_step(True),
        "etude eager": lambda: our_step(False),
        "etude compiled": lambda: our_step(True),
    }
    if args.compiled_only:
        cases = {name: build for name, build in cases.items() if "compiled" in name}
    if args.packed:
        length = args.tokens // args.packed
        packing = [[length] * (args.packed - 1) + [args.tokens - length * (args.packed - 1)]] * args.rows
        cases[f"etude compiled, {args.packed} packed"] = lambda: our_step(True, Documents.pack(packing, "cuda"))
    results = [measure(name, build, batches, args.steps) for name, build in cases.items()]
    report(results, args.rows, args.tokens)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=2))


def report(results: list[StepTiming], rows: int, tokens: int) -> None:
    baseline = next(r for r in results if r.name == "transformers compiled")
    titles = f"{'tok/s':>9}{'ms':>8}{'peak GiB':>10}{'MFU':>7}{'x compiled':>12}{'memory':>8}{'loss':>8}{'1st s':>7}"
    print(f"\n{'':28}{titles}")
    for r in results:
        print(
            f"{r.name:28}{r.tokens_per_second:9,.0f}{r.milliseconds:8.1f}{r.peak_gib:10.2f}{r.mfu:7.1%}"
            f"{r.tokens_per_second / baseline.tokens_per_second:11.2f}x{r.peak_gib / baseline.peak_gib:7.2f}x"
            f"{r.loss:8.3f}{r.first_step_s:7.1f}"
        )
    device, versions = torch.cuda.get_device_name(), f"torch {torch.__version__}"
    print(f"\nForward and backward of SmolLM2-135M, {rows} x {tokens} tokens, bfloat16, on {device} ({versions}).")


if __name__ == "__main__":
    main()
