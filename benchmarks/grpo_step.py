"""One GRPO step beside TRL's, in one run on a CPU: CPU-seconds of sampling, advantages and update together.

    python -m pip install trl                  # once, beside this package and the same torch
    python benchmarks/grpo_step.py             # 2 groups of 8 completions of 64 tokens, 1.3M parameters, 2 threads
    python benchmarks/grpo_step.py --prompt-tokens 256

Both start from the same weights, read the same prompts, draw as many tokens at temperature 1 with nothing to end them
early, and take one AdamW step with the same settings, no KL, in float32 without recomputation (TRL's defaults of
bfloat16 and recomputation are slower on a CPU and are turned off). They take turns, a step each, so that other work
on the machine hits both alike; the medians are of the steps after the warm-up. Threads that wait sleep: if they spun,
as OpenMP has them do, waiting would count as work, and on a busy machine as most of it. TRL's first step is repeated
here on the very tokens it drew: the two updates must point the same way, or there is nothing to compare.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from etude.harness.trace import Segment, Tape
from etude.inference.engine import Engine, EngineOptions
from etude.inference.sampling import Sampling
from etude.model import ModelConfig, Transformer, initialize, load, save
from etude.model.checkpoint import views
from etude.rl.advantages import advantages, worths
from etude.rl.objective import PolicyGradient
from etude.rl.packing import Piece, pack
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer

SOURCE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
}
ADAM = AdamSettings(learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0)
ALIKE = 0.99  # the cosine of two updates below which something other than rounding differs


@dataclass(frozen=True)
class Spent:
    """CPU-seconds, user and system, of this process and the children it has waited for; and seconds on the wall."""

    cpu: float
    wall: float

    @classmethod
    def so_far(cls) -> Spent:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(sum(u.ru_utime + u.ru_stime for u in used), time.perf_counter())

    def since(self, before: Spent) -> Spent:
        return Spent(self.cpu - before.cpu, self.wall - before.wall)


@dataclass(frozen=True)
class StepCost:
    sampling: Spent  # up to the rewards
    update: Spent  # from there on

    @property
    def whole(self) -> Spent:
        return Spent(self.sampling.cpu + self.update.cpu, self.sampling.wall + self.update.wall)


@dataclass(frozen=True)
class Shape:
    """What one step consists of."""

    groups: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def completions(self) -> int:
        return self.groups * self.group_size


def reward(tokens: Sequence[int]) -> float:
    """The share of even tokens: cheap, and never the same for a whole group."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


# ------------------------------------------------------------------------------------------------- ours


def pieces_of(segments: Sequence[Segment], group_size: int) -> list[Piece]:
    """Segments in the order of their groups, with the worth of their tokens; divided by the deviation, as TRL does."""
    rewards = [reward(segment.tokens[segment.made].tolist()) for segment in segments]
    found = []
    for start in range(0, len(segments), group_size):
        group = slice(start, start + group_size)
        for segment, advantage in zip(segments[group], advantages(rewards[group], divide_by_std=True), strict=True):
            found.append(Piece(segment, worths(advantage, [int(segment.made.sum())])[0]))
    return found


class Ours:
    """A sampler and a trainer with weights of their own, as when they are two services."""

    def __init__(self, checkpoint: Path, shape: Shape) -> None:
        self.shape = shape
        self.trainer = Trainer(load(checkpoint), ADAM)
        self.objective = PolicyGradient()
        length = shape.prompt_tokens + shape.new_tokens
        room = 2 * shape.completions * length
        self.engine = Engine(load(checkpoint), EngineOptions(tokens=room, max_streams=shape.completions, budget=2048))

    def step(self, prompts: Sequence[Sequence[int]], seed: int) -> StepCost:
        start = Spent.so_far()
        self.engine.load(self.trainer.model.state_dict(), version=self.trainer.step_count)
        segments = self.sample(prompts, seed)
        sampled = Spent.so_far()
        self.update(pieces_of(segments, self.shape.group_size))
        self.objective.mismatch()
        return StepCost(sampled.since(start), Spent.so_far().since(sampled))

    def sample(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Segment]:
        size, new = self.shape.group_size, self.shape.new_tokens
        streams = []
        for index, prompt in enumerate(prompts):
            first = (seed * len(prompts) + index) * size  # every sample its own luck
            streams += self.engine.submit(prompt, Sampling(max_tokens=new, samples=size, seed=first))
        while self.engine.step():
            pass
        segments = []
        for stream in streams:
            tape = Tape("start", stream.prompt)
            tape.make(stream.made, stream.logprobs, stream.raw_logprobs, stream.versions)
            segments.append(tape.segment())
        return segments

    def update(self, pieces: Sequence[Piece]) -> None:
        length = self.shape.prompt_tokens + self.shape.new_tokens  # one rollout a row, as TRL has them
        config = self.trainer.model.config
        [batches] = pack(pieces, config, length=length, rows=self.shape.completions, padding=0)
        self.trainer.step(batches, self.objective)


# ------------------------------------------------------------------------------------------------- TRL


@dataclass
class Drawn:
    """What TRL drew in a step, as it tells its reward function, and when it did."""

    completions: list[list[int]] = field(default_factory=list)
    at: Spent = field(default_factory=Spent.so_far)


def peer(checkpoint: Path, prompts: Sequence[Sequence[int]], shape: Shape, output: Path, drawn: Drawn) -> Any:
    """TRL's trainer with our settings: whatever its defaults cost beyond them on a CPU is turned off."""
    import datasets  # type: ignore[import-not-found,unused-ignore]
    import transformers
    import trl  # type: ignore[import-not-found,unused-ignore]

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        drawn.completions, drawn.at = completion_ids, Spent.so_far()
        return [reward(tokens) for tokens in completion_ids]

    talk: Any = transformers.utils.logging
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    settings = trl.GRPOConfig(
        output_dir=str(output),
        num_generations=shape.group_size,
        per_device_train_batch_size=shape.completions,
        max_completion_length=shape.new_tokens,
        max_steps=len(prompts) // shape.groups,
        learning_rate=ADAM.learning_rate,
        adam_beta1=ADAM.betas[0],
        adam_beta2=ADAM.betas[1],
        adam_epsilon=ADAM.eps,
        weight_decay=ADAM.weight_decay,
        max_grad_norm=ADAM.clip,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer, texts = number_tokenizer(SOURCE["vocab_size"]), [" ".join(map(str, prompt)) for prompt in prompts]
    assert tokenizer(texts)["input_ids"] == prompts
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        reward_funcs=even,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def number_tokenizer(size: int) -> Any:
    """A word for every token id, so that a prompt's text is its tokens; the end is an id no model can draw."""
    import tokenizers
    import transformers

    words = {str(number): number for number in range(size)} | {"<end>": size}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


def after_each_step(act: Callable[[], None]) -> Any:
    import transformers

    class AfterEachStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            act()

    return AfterEachStep()


# ------------------------------------------------------------------------------------------------- side by side


def likeness(
    checkpoint: Path, prompts: Sequence[Sequence[int]], completions: list[list[int]], theirs: Any, shape: Shape
) -> float:
    """The cosine between TRL's first update and ours from the same weights on the same tokens."""
    segments = []
    for index, tokens in enumerate(completions):
        tape = Tape("start", prompts[index // shape.group_size])
        nothing = [0.0] * len(tokens)  # TRL keeps no log-probabilities of its sampler
        tape.make(tokens, nothing, nothing, [0] * len(tokens))
        segments.append(tape.segment())
    ours = Ours(checkpoint, shape)
    ours.update(pieces_of(segments, shape.group_size))
    before, after = (
        {name: tensor.detach() for name, tensor in views(m).items()} for m in (load(checkpoint), ours.trainer.model)
    )
    there = {name: tensor.detach() for name, tensor in theirs.named_parameters()}
    assert there.keys() == before.keys(), f"parameters differ: {there.keys() ^ before.keys()}"
    mine, other = (
        torch.cat([(end[name] - start).flatten() for name, start in before.items()]) for end in (after, there)
    )
    return torch.cosine_similarity(mine.double(), other.double(), dim=0).item()


@dataclass
class Result:
    ours: list[StepCost]
    theirs: list[StepCost]
    cosine: float


def run(checkpoint: Path, shape: Shape, warm_up: int, steps: int) -> Result:
    rng = random.Random(0)
    total = shape.groups * (warm_up + steps)
    prompts = [[rng.randrange(SOURCE["vocab_size"]) for _ in range(shape.prompt_tokens)] for _ in range(total)]
    ours, drawn, result = Ours(checkpoint, shape), Drawn(), Result([], [], 0.0)
    trainer = peer(checkpoint, prompts, shape, checkpoint.parent / "trl", drawn)
    start = Spent.so_far()

    def take_turns() -> None:
        """TRL has made a step: write it down, and make one here."""
        nonlocal start
        result.theirs.append(StepCost(drawn.at.since(start), Spent.so_far().since(drawn.at)))
        number = len(result.ours)
        assert [len(tokens) for tokens in drawn.completions] == [shape.new_tokens] * shape.completions
        turn = prompts[number * shape.groups : (number + 1) * shape.groups]
        if number == 0:
            result.cosine = likeness(checkpoint, turn, drawn.completions, trainer.model, shape)
        result.ours.append(ours.step(turn, seed=number))
        start = Spent.so_far()

    trainer.add_callback(after_each_step(take_turns))
    trainer.train()
    return Result(result.ours[warm_up:], result.theirs[warm_up:], result.cosine)


def report(result: Result, shape: Shape, model: Transformer) -> None:
    import transformers
    import trl

    table = Table(title=f"one GRPO step on a CPU, {torch.get_num_threads()} threads")
    for column in ("", "ours", "TRL", "ours / TRL"):
        table.add_column(column, justify="left" if not column else "right")
    rows: dict[str, Callable[[StepCost], float]] = {
        "CPU-seconds of a step": lambda cost: cost.whole.cpu,
        "  sampling": lambda cost: cost.sampling.cpu,
        "  advantages and update": lambda cost: cost.update.cpu,
        "seconds on the wall": lambda cost: cost.whole.wall,
    }
    for name, value in rows.items():
        mine, theirs = (statistics.median(map(value, costs)) for costs in (result.ours, result.theirs))
        table.add_row(name, f"{mine:.3f}", f"{theirs:.3f}", f"{mine / theirs:.2f}x")
    table.add_row("cosine of the first updates", f"{result.cosine:.5f}", "", "")
    Console(width=120).print(table)
    parameters = sum(p.numel() for p in model.parameters())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}"
    print(
        f"Medians of {len(result.ours)} steps in turns: {shape.completions} completions of {shape.new_tokens} tokens "
        f"({shape.groups} groups, prompts of {shape.prompt_tokens}), {parameters / 1e6:.2f}M parameters, float32; "
        f"{versions}."
    )
    if result.cosine < ALIKE:
        sys.exit(f"grpo_step: the first updates have a cosine of {result.cosine:.4f}; expected at least {ALIKE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15, help="measured, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    try:
        import trl  # noqa: F401
    except ImportError as problem:
        wanted = f"python -m pip install trl torch=={torch.__version__.partition('+')[0]}"
        sys.exit(f"grpo_step: the peer is missing ({problem}); install it beside this package: {wanted}")
    torch.set_num_threads(args.threads)
    shape = Shape(args.groups, args.group_size, args.prompt_tokens, args.new_tokens)
    with tempfile.TemporaryDirectory() as place:
        model = initialize(ModelConfig.from_hugging_face(SOURCE))
        save(model, Path(place) / "model")
        report(run(Path(place) / "model", shape, args.warm_up, args.steps), shape, model)


if __name__ == "__main__":
    main()
