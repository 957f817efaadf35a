"""The policy gradient beside what can be written down by hand."""

import pytest
import torch
from families import small_config

from etude.kernels.loss import IGNORE
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize
from etude.rl.advantages import advantages
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer


def model_of(family: str = "llama") -> Transformer:
    return initialize(ModelConfig.from_hugging_face(small_config(family)), seed=1)


def rollouts(rows: int = 4, length: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and which of them a model made."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(40, (rows, length), generator=generator)
    made = torch.rand(rows, length, generator=generator) < 0.6
    made[:, 0] = False
    return tokens, made


def batch_of(tokens: torch.Tensor, made: torch.Tensor, worths: torch.Tensor, sampler: torch.Tensor) -> RolloutBatch:
    """`worths` and `sampler` are of the tokens; a batch holds them where the token is predicted."""
    targets = torch.full_like(tokens, IGNORE)
    targets[:, :-1] = torch.where(made[:, 1:], tokens[:, 1:], IGNORE)
    shifted = [torch.nn.functional.pad(part[:, 1:] * made[:, 1:], (0, 1)) for part in (worths, sampler)]
    lengths = tuple((tokens.shape[1],) for _ in tokens)
    return RolloutBatch(tokens, targets, lengths, (), int(made.sum()), worths=shifted[0], sampler=shifted[1])


def logprobs_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """log p of every token but the first of each row, by the plain forward."""
    found = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def gradients(model: Transformer, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("correction", [0.0, 2.0])
def test_the_gradient_is_minus_worth_times_that_of_the_log_probability(family: str, correction: float) -> None:
    model, (tokens, made) = model_of(family), rollouts()
    advantage = torch.tensor(advantages([1.0, 0.0, 0.5, 0.0]))[:, None].expand(tokens.shape)
    sampler = logprobs_of(model, tokens).detach() - 0.3 * torch.randn(
        tokens.shape, generator=torch.Generator().manual_seed(3)
    )
    batch = batch_of(tokens, made, advantage, sampler)
    mine = gradients(model, PolicyGradient(correction)(model, batch).total)
    logprobs = logprobs_of(model, tokens)
    ratio = (logprobs.detach() - sampler).exp().clamp(max=correction) if correction else 1.0
    theirs = gradients(model, -(ratio * advantage * logprobs * made).sum())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))


def test_a_group_of_equal_rewards_moves_nothing() -> None:
    model, (tokens, made) = model_of(), rollouts()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    worth = torch.tensor(advantages([0.7] * 4))[:, None].expand(tokens.shape)
    trainer = Trainer(model, AdamSettings(weight_decay=0.0))
    result = trainer.step([batch_of(tokens, made, worth, torch.zeros(tokens.shape))], PolicyGradient())
    assert result.gradient_norms["model"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_chain_in_one_row_or_in_rows_of_its_own_has_the_same_gradient() -> None:
    model, (tokens, made) = model_of(), rollouts(rows=2)
    worths = torch.full(tokens.shape, 0.4)
    sampler = torch.zeros(tokens.shape)
    together = PolicyGradient()(model, batch_of(tokens, made, worths, sampler)).total
    apart = [
        PolicyGradient()(model, batch_of(tokens[row : row + 1], made[row : row + 1], worths[:1], sampler[:1])).total
        for row in range(2)
    ]
    pairs = zip(gradients(model, together), gradients(model, apart[0] + apart[1]), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_the_difference_to_the_sampler_is_measured_on_made_tokens_only() -> None:
    model, (tokens, made) = model_of(), rollouts()
    sampler = logprobs_of(model, tokens).detach() + 0.25
    objective = PolicyGradient()
    objective(model, batch_of(tokens, made, torch.zeros(tokens.shape), sampler))
    mean, tail = objective.mismatch()
    assert mean == pytest.approx(0.25, abs=1e-4)
    assert tail == pytest.approx(0.25, abs=1e-4)
    assert objective.mismatch() == (0.0, 0.0)


def test_the_policy_gradient_climbs() -> None:
    """A bandit: of eight first tokens one is paid; after some steps on-policy the model says it."""
    torch.manual_seed(0)
    model = model_of()
    trainer = Trainer(model, AdamSettings(learning_rate=3e-3, weight_decay=0.0))
    prompt = torch.zeros(64, 1, dtype=torch.int64)
    for _ in range(40):
        odds = model(prompt)[:, -1, :8].softmax(-1)
        drawn = odds.multinomial(1)
        tokens = torch.cat((prompt, drawn), dim=1)
        rewards = (drawn[:, 0] == 5).float()
        worth = torch.tensor(advantages(rewards.tolist()))[:, None].expand(tokens.shape)
        made = torch.tensor([[False, True]]).expand(tokens.shape)
        trainer.step([batch_of(tokens, made, worth, logprobs_of(model, tokens).detach())], PolicyGradient())
    assert model(prompt[:1])[0, -1, :8].softmax(-1)[5] > 0.9
