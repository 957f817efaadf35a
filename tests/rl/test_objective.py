"""The policy gradient against plain reference computations."""

import pytest
import torch
from families import small_config

from etude.kernels.loss import IGNORE
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rollouts.group_advantages import group_advantages
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer


def model_of(family: str = "llama") -> Transformer:
    return initialize(ModelConfig.from_hugging_face(small_config(family)), seed=1)


def rollouts(rows: int = 4, length: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and which of them are sampled."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(40, (rows, length), generator=generator)
    sampled = torch.rand(rows, length, generator=generator) < 0.6
    sampled[:, 0] = False
    return tokens, sampled


def batch_of(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    sampler: torch.Tensor,
    versions: torch.Tensor | None = None,
) -> RolloutBatch:
    """Build a batch; advantages and sampler log-probabilities are given by token, and shifted to their prediction."""
    targets = torch.full_like(tokens, IGNORE)
    targets[:, :-1] = torch.where(sampled[:, 1:], tokens[:, 1:], IGNORE)
    shifted = [torch.nn.functional.pad(part[:, 1:] * sampled[:, 1:], (0, 1)) for part in (advantages, sampler)]
    lengths = tuple((tokens.shape[1],) for _ in tokens)
    given = torch.zeros_like(tokens) if versions is None else torch.nn.functional.pad(versions[:, 1:], (0, 1))
    parts = {"token_advantages": shifted[0], "sampler_logprobs": shifted[1], "sampler_versions": given}
    return RolloutBatch(tokens, targets, lengths, (), int(sampled.sum()), **parts)


def logprobs_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Return log p of every token but the first of each row, from the plain forward pass."""
    found = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def gradients(model: Transformer, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("max_ratio", [0.0, 2.0])
def test_the_gradient_is_minus_advantage_times_that_of_the_log_probability(family: str, max_ratio: float) -> None:
    model, (tokens, sampled) = model_of(family), rollouts()
    advantage = torch.tensor(group_advantages([1.0, 0.0, 0.5, 0.0]))[:, None].expand(tokens.shape)
    sampler = logprobs_of(model, tokens).detach() - 0.3 * torch.randn(
        tokens.shape, generator=torch.Generator().manual_seed(3)
    )
    batch = batch_of(tokens, sampled, advantage, sampler)
    found = gradients(model, PolicyGradient(max_ratio)(model, batch).loss)
    logprobs = logprobs_of(model, tokens)
    ratio = (logprobs.detach() - sampler).exp().clamp(max=max_ratio) if max_ratio else 1.0
    expected = gradients(model, -(ratio * advantage * logprobs * sampled).sum())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_a_group_of_equal_rewards_changes_no_weights() -> None:
    model, (tokens, sampled) = model_of(), rollouts()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    advantages = torch.tensor(group_advantages([0.7] * 4))[:, None].expand(tokens.shape)
    trainer = Trainer(model, AdamSettings(weight_decay=0.0))
    result = trainer.step([batch_of(tokens, sampled, advantages, torch.zeros(tokens.shape))], PolicyGradient())
    assert result.gradient_norms["model"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_rows_in_one_batch_or_several_have_the_same_gradient() -> None:
    model, (tokens, sampled) = model_of(), rollouts(rows=2)
    advantages = torch.full(tokens.shape, 0.4)
    sampler = torch.zeros(tokens.shape)
    together = PolicyGradient()(model, batch_of(tokens, sampled, advantages, sampler)).loss
    apart = [
        PolicyGradient()(
            model, batch_of(tokens[row : row + 1], sampled[row : row + 1], advantages[:1], sampler[:1])
        ).loss
        for row in range(2)
    ]
    pairs = zip(gradients(model, together), gradients(model, apart[0] + apart[1]), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_the_mismatch_is_over_sampled_tokens_and_apart_for_the_same_and_for_older_weights() -> None:
    model, (tokens, sampled) = model_of(), rollouts()
    versions = torch.tensor([7, 7, 6, 5])[:, None].expand(tokens.shape)
    off = torch.where(versions == 7, 0.25, 2.0)
    objective = PolicyGradient()
    batch = batch_of(tokens, sampled, torch.zeros(tokens.shape), logprobs_of(model, tokens).detach() + off, versions)
    objective(model, batch)
    expected = {"numerics": 0.25, "staleness": 2.0}
    found = objective.mismatch(7)
    assert found == {
        f"mismatch_{name}_{form}": pytest.approx(value, abs=1e-4)
        for name, value in expected.items()
        for form in ("mean", "p99")
    }
    assert objective.mismatch(7) == {}
    objective(model, batch)
    assert objective.mismatch(8).keys() == {"mismatch_staleness_mean", "mismatch_staleness_p99"}


def test_the_policy_gradient_increases_the_reward() -> None:
    """A bandit: one of eight tokens is rewarded; after some on-policy steps the model samples it."""
    torch.manual_seed(0)
    model = model_of()
    trainer = Trainer(model, AdamSettings(learning_rate=3e-3, weight_decay=0.0))
    prompt = torch.zeros(64, 1, dtype=torch.int64)
    for _ in range(40):
        probabilities = model(prompt)[:, -1, :8].softmax(-1)
        drawn = probabilities.multinomial(1)
        tokens = torch.cat((prompt, drawn), dim=1)
        rewards = (drawn[:, 0] == 5).float()
        advantages = torch.tensor(group_advantages(rewards.tolist()))[:, None].expand(tokens.shape)
        sampled = torch.tensor([[False, True]]).expand(tokens.shape)
        trainer.step([batch_of(tokens, sampled, advantages, logprobs_of(model, tokens).detach())], PolicyGradient())
    assert model(prompt[:1])[0, -1, :8].softmax(-1)[5] > 0.9
