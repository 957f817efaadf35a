"""Adapters: equal to a merged model in transformers and to PEFT itself; trainer and sampler agree on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import engine_of, finish, gap, model_of, prompts_of
from families import FAMILIES, random_tokens, small_config

from etude.data.packing import Batch
from etude.errors import InputError
from etude.inference.sampling import Sampling
from etude.model import ModelConfig, Transformer, initialize, load, save
from etude.model.adapters import adapter_views, adapters, add_adapters, fit_adapters, merge_adapters, published_views
from etude.model.checkpoint import checkpoint_views
from etude.model.peft import load_beside, merge_directory, read_adapter, write_adapter
from etude.model.settings import LoraSettings
from etude.train.objectives import next_token
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer

LORA = LoraSettings(rank=3, alpha=5.0)


def adapted(family: str, lora: LoraSettings = LORA, seed: int = 0, **changes: Any) -> Transformer:
    """Return a random model whose adapters do something."""
    model = add_adapters(model_of(family, seed, **changes), lora, seed)
    with torch.no_grad():
        for adapter in adapters(model):
            adapter.up.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    return model


def saved(family: str, tmp_path: Path, **changes: Any) -> Transformer:
    """Write a base model and an adapter beside it; return the model with its adapters."""
    model = adapted(family, **changes)
    save(model, tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    write_adapter(model, tmp_path / "adapter", "../base")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_changes_the_output_as_the_merged_weights_do(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    tokens = random_tokens(small_config(family), 2, 11)
    with torch.no_grad():
        wanted = model(tokens)
        assert not torch.allclose(wanted, model_of(family)(tokens), atol=1e-2)
        merged = merge_adapters(load(tmp_path / "adapter"))
        assert not adapters(merged)
        save(merged, tmp_path / "merged")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32, experts_implementation="eager"
        )
        torch.testing.assert_close(theirs(tokens).logits, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_pefts_file_holds_one_pair_for_every_matrix_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """By hand, from the two files alone: base weight + alpha / r x B x A for every pair."""
    from safetensors.torch import load_file

    model = saved(family, tmp_path)
    pairs, described = load_file(tmp_path / "adapter/adapter_model.safetensors"), load_config(tmp_path / "adapter")
    base = load_file(tmp_path / "base/model.safetensors")
    names = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in pairs}
    linear = {name.removesuffix(".weight") for name, tensor in base.items() if tensor.dim() == 2}
    assert names == {name for name in linear if "embed" not in name and "lm_head" not in name and name[-5:] != ".gate"}
    merged = checkpoint_views(merge_adapters(model))
    for name in names:
        a, b = (pairs[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        wanted = base[f"{name}.weight"] + described["lora_alpha"] / described["r"] * b @ a
        torch.testing.assert_close(merged[f"{name}.weight"], wanted)


def load_config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_are_trained_and_a_new_one_changes_nothing(family: str) -> None:
    model = add_adapters(model_of(family), LORA, seed=3)
    tokens = random_tokens(small_config(family), 2, 17)
    with torch.no_grad():
        assert torch.equal(model(tokens), model_of(family)(tokens))
    before = {name: tensor.clone() for name, tensor in checkpoint_views(model).items()}
    trainer = Trainer(model, AdamSettings(learning_rate=1e-2))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ((16,), (16,)), (), 32)
    first = trainer.step([batch], next_token).metrics["loss"]
    for _ in range(8):
        last = trainer.step([batch], next_token).metrics["loss"]
    assert last < first - 0.1
    assert all(torch.equal(before[name], tensor) for name, tensor in checkpoint_views(model).items())
    state = trainer.optimizer.state_dict()
    assert state
    assert all(".adapter" in name or "_adapter." in name for name in state)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampler_that_gets_only_the_adapters_agrees_with_the_trainer(family: str) -> None:
    """Latent attention decodes with absorbed matrices, prefill and trainer do not: all must use the update."""
    trained = adapted(family, seed=5)
    plain = model_of(family, seed=5)
    engine = engine_of(family, model=add_adapters(plain, LORA, seed=9))
    views = published_views(trained, torch.float32)
    assert views.keys() == adapter_views(trained).keys()
    engine.load(views, 1)
    sequences = [engine.submit(prompt, Sampling(max_tokens=25, seed=2))[0] for prompt in prompts_of((9, 20, 33))]
    finish(engine)
    for sequence in sequences:
        assert gap(trained, sequence) < 2e-4
        assert gap(model_of(family, seed=5), sequence) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_adapter_shares_the_frozen_weights(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    tokens = random_tokens(small_config(family), 1, 9)
    with torch.no_grad():
        wanted = model(tokens)
        trained = load(tmp_path / "adapter")
        for adapter in adapters(trained):
            adapter.up.add_(1.0)
        twin = load_beside(trained, tmp_path / "adapter")
        torch.testing.assert_close(twin(tokens), wanted)
        assert not torch.allclose(trained(tokens), wanted)
    assert twin.embed.weight.data_ptr() == trained.embed.weight.data_ptr()


def test_a_model_trains_its_own_adapters_further_or_has_them_merged(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path)
    tokens = random_tokens(small_config("qwen3_moe"), 1, 9)
    wanted = model(tokens).detach()
    same = fit_adapters(load(tmp_path / "adapter"), LORA, 0)
    assert len(adapters(same)) == len(adapters(model))
    other = fit_adapters(load(tmp_path / "adapter"), LoraSettings(rank=2, targets=("attention",)), 0)
    full = fit_adapters(load(tmp_path / "adapter"), None, 0)
    assert [len(adapters(each)) for each in (other, full)] == [6, 0]
    assert all(p.requires_grad for p in full.parameters())
    with torch.no_grad():
        for each in (same, other, full):
            torch.testing.assert_close(each(tokens), wanted, atol=1e-5, rtol=1e-5)


def test_merging_a_directory_keeps_the_files_that_say_how_the_model_is_used(tmp_path: Path) -> None:
    from rl_runs import make_model

    base = make_model(tmp_path / "base")
    (base / "agent.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    write_adapter(add_adapters(load(base), LORA), tmp_path / "adapter", str(base))
    merge_directory(tmp_path / "adapter", tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {path.name for path in base.iterdir()}
    assert load(tmp_path / "merged").lora is None
    with pytest.raises(InputError, match=r"base: there is no adapter_config\.json"):
        merge_directory(base, tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = true is not supported"),
        ({"peft_type": "LOKR"}, 'peft_type = "LOKR" is not supported'),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"r": 0}, "r and lora_alpha"),
        ({"r": 4}, r"has shape .3, 48.; expected .4, 48."),
        ({"base_model_name_or_path": "gone"}, "its base model gone is not a directory here"),
        ({"base_model_name_or_path": "."}, "is an adapter itself"),
        ("no JSON", "not readable"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_named(change: Any, message: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(change if isinstance(change, str) else json.dumps({**load_config(path.parent), **change}))
    with pytest.raises(InputError, match=message):
        load(tmp_path / "adapter")


def test_targets_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(InputError, match=r"lora\.targets names experts, which this llama model does not have"):
        add_adapters(model_of("llama"), LoraSettings(targets=("experts",)))
    with pytest.raises(InputError, match=r"lora\.targets names mlp, .* it has attention, experts"):
        add_adapters(model_of("qwen3_moe"), LoraSettings(targets=("mlp",)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_peft_reads_and_writes_the_same_adapters(family: str, tmp_path: Path) -> None:
    """transformers fuses experts into one parameter, which PEFT cannot adapt by name: attention only, with experts."""
    peft = pytest.importorskip("peft")
    targets = ("attention",) if family == "deepseek_v3" else None
    config = ModelConfig.from_hugging_face(small_config(family))
    save(initialize(config, seed=1), tmp_path / "base")
    model = add_adapters(load(tmp_path / "base"), LORA.model_copy(update={"targets": targets}), 1)
    with torch.no_grad():
        for adapter in adapters(model):
            adapter.up.normal_(0, 0.3)
    (tmp_path / "ours").mkdir()
    write_adapter(model, tmp_path / "ours", str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tokens = random_tokens(small_config(family), 2, 13)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-4, rtol=0)
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
        theirs.save_pretrained(tmp_path / "theirs")
        again = read_adapter(load(tmp_path / "base"), tmp_path / "theirs")
        torch.testing.assert_close(again(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
