"""The gradient of a policy step against exact gradients, by enumeration of every answer of a small policy."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import engine_of, finish, model_of, prompts_of
from rl_runs import random_trace

from etude.harness.trace import Segment, Trace
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling
from etude.model.transformer import Transformer
from etude.rl.advantages import KL_FORMS, EstimatorSettings
from etude.rl.learner import Learner
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rl.packing import TrainingSequence, pack
from etude.rl.settings import RlSettings
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher

VOCABULARY, LENGTH, PROMPT = 6, 3, (0, 3)
ANSWERS = torch.tensor([[*PROMPT, *answer] for answer in itertools.product(range(VOCABULARY), repeat=LENGTH)])
ESTIMATORS = [{}, *({"kl": form, "kl_weight": 0.7} for form in KL_FORMS)]


def answer_logprobs(model: Transformer, temperature: float) -> torch.Tensor:
    """Return log p of every token of every answer, [answers, LENGTH]."""
    logits = model(ANSWERS)[:, len(PROMPT) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(-1, ANSWERS[:, len(PROMPT) :, None])[..., 0]


def learner_of(model: Transformer, reference: Transformer | None, settings: RlSettings, traces: list[Trace]) -> Learner:
    publisher = Publisher(ObjectStore("memory://gradients"))
    objective = PolicyGradient(settings.estimator.max_importance_ratio)
    trainer = Trainer(model, AdamSettings())
    return Learner(settings, trainer, objective, publisher, reference, 0, lambda name: traces[int(name)])


def weigh_rows(batch: RolloutBatch, order: Iterator[int], probabilities: torch.Tensor) -> RolloutBatch:
    """Return a batch with the advantages of each answer multiplied by its probability: the sum is then the mean."""
    weights = torch.zeros(batch.token_advantages.shape, dtype=torch.float64)
    for row, lengths in enumerate(batch.lengths):
        for at, size in zip(itertools.accumulate((0, *lengths)), lengths, strict=False):
            if size == ANSWERS.shape[1]:  # not padding
                weights[row, at : at + size] = probabilities[next(order)].detach()
    return replace(batch, token_advantages=(batch.token_advantages * weights).float())


def gradient(model: Transformer, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))]).double()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda keys: keys.get("kl", "none"))
@pytest.mark.parametrize("max_ratio", [0.0, 2.0])
def test_the_mean_gradient_is_that_of_reward_minus_divergence(
    estimator: dict[str, object], temperature: float, max_ratio: float
) -> None:
    """E[reward] - weight x KL(policy || reference), both policies as they are sampled, at the temperature."""
    model, reference = (model_of("llama", seed, vocabulary=VOCABULARY) for seed in (0, 1))
    settings = RlSettings(
        tasks="./tasks",
        steps=1,
        temperature=temperature,
        estimator=EstimatorSettings(max_importance_ratio=max_ratio, **estimator),  # type: ignore[arg-type]
    )
    penalized = reference.requires_grad_(False) if estimator else None
    rewards = torch.from_numpy(np.random.default_rng(0).random(len(ANSWERS)))
    logprobs = answer_logprobs(model, temperature)
    probabilities = logprobs.sum(1).exp()
    objective = probabilities @ rewards
    if estimator:
        ratios = logprobs - answer_logprobs(reference, temperature)
        objective = objective - settings.estimator.kl_weight * (probabilities @ ratios.sum(1))
    expected = gradient(model, -objective)

    rng, sampled = np.random.default_rng(0), np.arange(ANSWERS.shape[1]) >= len(PROMPT)
    traces: list[Trace] = []
    for tokens, own in zip(ANSWERS, logprobs, strict=True):
        drawn = np.zeros(len(tokens), np.float32)
        drawn[sampled] = own.detach().numpy()
        unused = np.full(len(tokens), np.nan, np.float32)  # the model's own, before temperature
        versions = np.where(sampled, 0, -1).astype(np.int32)
        segment = Segment("start", tokens.numpy().astype(np.uint32), sampled, drawn, unused, versions)
        traces.append(replace(random_trace(rng, segment), facts={"temperature": temperature}))
    learner = learner_of(model, penalized, settings, traces)
    batches, plan = learner.pack([(str(index), float(reward)) for index, reward in enumerate(rewards)])
    order = iter([index for row in plan.rows[0] for index in row])
    weighted = [weigh_rows(batch, order, probabilities) for batch in batches]
    found = gradient(model, sum((learner.objective(model, batch).loss for batch in weighted), torch.zeros(())))
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    assert learner.objective.mismatch(0)["mismatch_numerics_p99"] < 1e-5


def segment_of(sequence: SequenceState) -> Segment:
    size = len(sequence.prompt)
    sampled = np.arange(sequence.length) >= size
    return Segment(
        "start",
        np.array(sequence.prompt + sequence.output, np.uint32),
        sampled,
        np.array([0.0] * size + sequence.logprobs, np.float32),
        np.array([0.0] * size + sequence.raw_logprobs, np.float32),
        np.array([-1] * size + sequence.versions, np.int32),
        sequence.result().routing,
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_on_policy_the_ratio_of_what_the_engine_sampled_is_1(temperature: float) -> None:
    engine = engine_of("llama")
    sampling = Sampling(max_tokens=30, temperature=temperature, seed=3)
    sequences = [engine.submit(prompt, sampling)[0] for prompt in prompts_of((5, 9, 17))]
    finish(engine)
    trained = [TrainingSequence(segment_of(s), np.ones(len(s.output), np.float32), temperature) for s in sequences]
    batches = pack(trained, engine.model.config, length=64, rows=8, padding=0)
    objective = PolicyGradient()
    found = [objective(engine.model, batch).metrics["ratio"].item() / batch.loss_tokens for batch in batches]
    assert found == pytest.approx([1.0] * len(batches), abs=1e-5)
    assert objective.mismatch(0)["mismatch_numerics_p99"] < 1e-5
