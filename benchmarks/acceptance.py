"""Acceptance of MTP drafts on held-out code: tokens per forward of the main model. It measures no speed.

    python benchmarks/acceptance.py runs/scratch/checkpoints/extend-147 runs/scratch/artefacts/corpus-stdlib

Speculative decoding by the engine: prompts are the beginnings of held-out documents, completed greedily
and sampled at temperature 1. 1.00 is decoding without drafts; the distribution of the output is the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from etude.data.shards import Shards
from etude.inference.engine import Engine
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model import load
from etude.model.mtp import load_mtp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--split", default="held_out")
    parser.add_argument("--mtp", type=Path, help="checkpoint with MTP layers; the model's own by default")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.model, device=device)
    mtp = load_mtp(args.mtp or args.model, model.config, model.head_weight.dtype, device)
    shards = Shards.open(args.corpus, args.split)
    long = [i for i, n in enumerate(shards.lengths) if n > args.prompt_tokens][: args.prompts]
    prompts = [shards.read(i, 0, args.prompt_tokens).tolist() for i in long]
    print(f"{'':18}{'tokens a forward':>18}   accepted by depth")
    for name, temperature in (("greedy", 0.0), ("sampled, T = 1", 1.0)):
        engine = Engine(model, EngineOptions(drafts=args.drafts), mtp=mtp)
        for number, prompt in enumerate(prompts):
            engine.submit(prompt, Sampling(args.new_tokens, temperature, seed=number))
        while engine.step():
            pass
        assert engine.speculator is not None
        found = engine.speculator.acceptance
        shares = "  ".join(f"{count / max(1, found.rounds):.2f}" for count in found.accepted)
        print(f"{name:18}{found.length:18.2f}   {shares}")
    setting = (
        f"{len(prompts)} prompts of {args.prompt_tokens} tokens of held-out code, {args.new_tokens} new tokens each"
    )
    print(f"\n{setting}, on {device}.")


if __name__ == "__main__":
    main()
