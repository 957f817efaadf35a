"""Compare one GRPO step with TRL's on a CPU: CPU-seconds of sampling, advantages and update together.

    python -m pip install trl                  # once, in the same environment, with the same torch
    python benchmarks/grpo_step.py             # 2 groups of 8 completions of 64 tokens, 1.3M parameters, 2 threads
    python benchmarks/grpo_step.py --prompt-tokens 256

Both start from the same weights, use the same prompts, sample the same number of tokens at temperature 1 without stop
tokens, and take one AdamW step with the same settings, no KL, in float32 without recomputation (TRL's defaults of
bfloat16 and recomputation are slower on a CPU and are turned off). They alternate, a step each, so that other work on
the machine affects both alike; medians are over the steps after the warm-up. Waiting threads sleep: if they spun, as
OpenMP lets them by default, waiting would count as CPU time, and on a busy machine as most of it. TRL's first step is
repeated here on the tokens it sampled: the two updates must point the same way, or the comparison is void.
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

from etude.harness.trace import Segment, SegmentBuilder
from etude.inference.engine import Engine
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model import ModelConfig, Transformer, initialize, load, save
from etude.model.checkpoint import checkpoint_views
from etude.rl.advantages import token_advantages
from etude.rl.objective import PolicyGradient
from etude.rl.packing import TrainingSequence, pack
from etude.rollouts.group_advantages import group_advantages
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
ADAM = AdamSettings(learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
MIN_COSINE = 0.99  # of the two updates; below it more than rounding differs


@dataclass(frozen=True)
class TimeUsed:
    """CPU-seconds, user and system, of this process and its finished children; and wall-clock seconds."""

    cpu: float
    wall: float

    @classmethod
    def so_far(cls) -> TimeUsed:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(sum(u.ru_utime + u.ru_stime for u in used), time.perf_counter())

    def since(self, before: TimeUsed) -> TimeUsed:
        return TimeUsed(self.cpu - before.cpu, self.wall - before.wall)


@dataclass(frozen=True)
class StepCost:
    sampling: TimeUsed  # up to the rewards
    update: TimeUsed  # after them

    @property
    def total(self) -> TimeUsed:
        return TimeUsed(self.sampling.cpu + self.update.cpu, self.sampling.wall + self.update.wall)


@dataclass(frozen=True)
class StepShape:
    """The size of one step."""

    groups: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def completions(self) -> int:
        return self.groups * self.group_size


def reward(tokens: Sequence[int]) -> float:
    """Return the share of even tokens: cheap, and hardly ever the same for a whole group."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


# ------------------------------------------------------------------------------------------------- Etude


def training_sequences(segments: Sequence[Segment], group_size: int) -> list[TrainingSequence]:
    """Return segments, group after group, with token advantages divided by the standard deviation, as in TRL."""
    rewards = [reward(segment.tokens[segment.sampled].tolist()) for segment in segments]
    sequences = []
    for start in range(0, len(segments), group_size):
        group = slice(start, start + group_size)
        for segment, advantage in zip(
            segments[group], group_advantages(rewards[group], divide_by_std=True), strict=True
        ):
            sequences.append(TrainingSequence(segment, token_advantages(advantage, [int(segment.sampled.sum())])[0]))
    return sequences


class EtudeStep:
    """A sampler and a trainer with separate weights, as when they are two processes."""

    def __init__(self, checkpoint: Path, shape: StepShape) -> None:
        self.shape = shape
        self.trainer = Trainer(load(checkpoint), ADAM)
        self.objective = PolicyGradient()
        length = shape.prompt_tokens + shape.new_tokens
        cache_tokens = 2 * shape.completions * length
        self.engine = Engine(
            load(checkpoint),
            EngineOptions(kv_cache_tokens=cache_tokens, max_sequences=shape.completions, max_step_tokens=2048),
        )

    def step(self, prompts: Sequence[Sequence[int]], seed: int) -> StepCost:
        start = TimeUsed.so_far()
        self.engine.load(self.trainer.model.state_dict(), version=self.trainer.step_count)
        segments = self.sample(prompts, seed)
        sampled = TimeUsed.so_far()
        self.update(training_sequences(segments, self.shape.group_size))
        self.objective.mismatch(self.engine.version)
        return StepCost(sampled.since(start), TimeUsed.so_far().since(sampled))

    def sample(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Segment]:
        size, new = self.shape.group_size, self.shape.new_tokens
        sequences = []
        for index, prompt in enumerate(prompts):
            first = (seed * len(prompts) + index) * size  # a different seed for every sample
            sequences += self.engine.submit(prompt, Sampling(max_tokens=new, samples=size, seed=first))
        while self.engine.step():
            pass
        segments = []
        for sequence in sequences:
            builder = SegmentBuilder("start", sequence.prompt)
            builder.append_sampled(sequence.output, sequence.logprobs, sequence.raw_logprobs, sequence.versions)
            segments.append(builder.segment())
        return segments

    def update(self, sequences: Sequence[TrainingSequence]) -> None:
        length = self.shape.prompt_tokens + self.shape.new_tokens  # one rollout per row, as in TRL
        config = self.trainer.model.config
        batches = pack(sequences, config, length=length, rows=self.shape.completions, padding=0)
        self.trainer.step(batches, self.objective)


# ------------------------------------------------------------------------------------------------- TRL


@dataclass
class TrlSamples:
    """The completions that TRL passes to its reward function in a step, and the time used up to then."""

    completions: list[list[int]] = field(default_factory=list)
    at: TimeUsed = field(default_factory=TimeUsed.so_far)


def trl_trainer(
    checkpoint: Path, prompts: Sequence[Sequence[int]], shape: StepShape, output: Path, samples: TrlSamples
) -> Any:
    """Return TRL's trainer with the same settings, without the defaults that only cost time on a CPU."""
    import datasets  # type: ignore[import-not-found,unused-ignore]
    import transformers
    import trl  # type: ignore[import-not-found,unused-ignore]

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        samples.completions, samples.at = completion_ids, TimeUsed.so_far()
        return [reward(tokens) for tokens in completion_ids]

    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
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
        max_grad_norm=ADAM.max_grad_norm,
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
    """Return a tokenizer with a word for every token id; its end token is an id that the model cannot sample."""
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


# ------------------------------------------------------------------------------------------------- comparison


def update_cosine(
    checkpoint: Path, prompts: Sequence[Sequence[int]], completions: list[list[int]], trl_model: Any, shape: StepShape
) -> float:
    """Return the cosine between TRL's first update and ours from the same weights on the same tokens."""
    segments = []
    for index, tokens in enumerate(completions):
        builder = SegmentBuilder("start", prompts[index // shape.group_size])
        zeros = [0.0] * len(tokens)  # TRL keeps no log-probabilities of its sampler
        builder.append_sampled(tokens, zeros, zeros, [0] * len(tokens))
        segments.append(builder.segment())
    ours = EtudeStep(checkpoint, shape)
    ours.update(training_sequences(segments, shape.group_size))
    before, after = (
        {name: tensor.detach() for name, tensor in checkpoint_views(m).items()}
        for m in (load(checkpoint), ours.trainer.model)
    )
    trl_after = {name: tensor.detach() for name, tensor in trl_model.named_parameters()}
    assert trl_after.keys() == before.keys(), f"parameters differ: {trl_after.keys() ^ before.keys()}"
    our_update, trl_update = (
        torch.cat([(end[name] - start).flatten() for name, start in before.items()]) for end in (after, trl_after)
    )
    return torch.cosine_similarity(our_update.double(), trl_update.double(), dim=0).item()


@dataclass
class ComparisonResult:
    ours: list[StepCost]
    trl: list[StepCost]
    cosine: float


def run(checkpoint: Path, shape: StepShape, warm_up: int, steps: int) -> ComparisonResult:
    rng = random.Random(0)
    total = shape.groups * (warm_up + steps)
    prompts = [[rng.randrange(SOURCE["vocab_size"]) for _ in range(shape.prompt_tokens)] for _ in range(total)]
    ours, samples, result = EtudeStep(checkpoint, shape), TrlSamples(), ComparisonResult([], [], 0.0)
    trainer = trl_trainer(checkpoint, prompts, shape, checkpoint.parent / "trl", samples)
    start = TimeUsed.so_far()

    def after_trl_step() -> None:
        """Record TRL's step, then make one of ours."""
        nonlocal start
        result.trl.append(StepCost(samples.at.since(start), TimeUsed.so_far().since(samples.at)))
        number = len(result.ours)
        assert [len(tokens) for tokens in samples.completions] == [shape.new_tokens] * shape.completions
        step_prompts = prompts[number * shape.groups : (number + 1) * shape.groups]
        if number == 0:
            result.cosine = update_cosine(checkpoint, step_prompts, samples.completions, trainer.model, shape)
        result.ours.append(ours.step(step_prompts, seed=number))
        start = TimeUsed.so_far()

    trainer.add_callback(after_each_step(after_trl_step))
    trainer.train()
    return ComparisonResult(result.ours[warm_up:], result.trl[warm_up:], result.cosine)


def report(result: ComparisonResult, shape: StepShape, model: Transformer) -> None:
    import transformers
    import trl

    table = Table(title=f"one GRPO step on a CPU, {torch.get_num_threads()} threads")
    for column in ("", "ours", "TRL", "ours / TRL"):
        table.add_column(column, justify="left" if not column else "right")
    rows: dict[str, Callable[[StepCost], float]] = {
        "CPU-seconds of a step": lambda cost: cost.total.cpu,
        "  sampling": lambda cost: cost.sampling.cpu,
        "  advantages and update": lambda cost: cost.update.cpu,
        "wall-clock seconds": lambda cost: cost.total.wall,
    }
    for name, value in rows.items():
        ours, trl_value = (statistics.median(map(value, costs)) for costs in (result.ours, result.trl))
        table.add_row(name, f"{ours:.3f}", f"{trl_value:.3f}", f"{ours / trl_value:.2f}x")
    table.add_row("cosine of the first updates", f"{result.cosine:.5f}", "", "")
    Console(width=120).print(table)
    parameters = sum(p.numel() for p in model.parameters())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}"
    print(
        f"Medians of {len(result.ours)} alternate steps: {shape.completions} completions of {shape.new_tokens} tokens "
        f"({shape.groups} groups, prompts of {shape.prompt_tokens}), {parameters / 1e6:.2f}M parameters, float32; "
        f"{versions}."
    )
    if result.cosine < MIN_COSINE:
        sys.exit(f"grpo_step: the first updates have a cosine of {result.cosine:.4f}; expected at least {MIN_COSINE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15, help="measured steps, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    try:
        import trl  # noqa: F401
    except ImportError as problem:
        command = f"python -m pip install trl torch=={torch.__version__.partition('+')[0]}"
        sys.exit(f"grpo_step: TRL is missing ({problem}); install it in the same environment: {command}")
    torch.set_num_threads(args.threads)
    shape = StepShape(args.groups, args.group_size, args.prompt_tokens, args.new_tokens)
    with tempfile.TemporaryDirectory() as directory:
        model = initialize(ModelConfig.from_hugging_face(SOURCE))
        save(model, Path(directory) / "model")
        report(run(Path(directory) / "model", shape, args.warm_up, args.steps), shape, model)


if __name__ == "__main__":
    main()
