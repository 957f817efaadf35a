"""Checkpoints: sharded or single, read back equal; every defect is one line that names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, random_tokens, small_config
from safetensors.torch import load_file, save_file

from etude.errors import BusyError, InputError
from etude.model import ModelConfig, initialize, load, save
from etude.model.checkpoint import new_directory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(initialize(ModelConfig.from_hugging_face(small_config("qwen3_moe")), seed=0), tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_with_an_index_equal_one_file(family: str, tmp_path: Path) -> None:
    config = small_config(family)
    model = initialize(ModelConfig.from_hugging_face(config), seed=0)
    save(model, tmp_path / "shards", shard_bytes=5_000)
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    tokens = random_tokens(config, 1, 9)
    again = load(tmp_path / "shards")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "shards", dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-4, rtol=0)


def test_dtype_follows_the_files_unless_asked(tmp_path: Path) -> None:
    config = ModelConfig.from_hugging_face(small_config("deepseek_v3"))
    save(initialize(config, dtype=torch.bfloat16), tmp_path / "m")
    assert load(tmp_path / "m").embed.weight.dtype == torch.bfloat16
    wide = load(tmp_path / "m", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    stored = load_file(tmp_path / "m/model.safetensors")
    biases = {v.dtype for k, v in stored.items() if k.endswith("e_score_correction_bias")}
    assert biases == {torch.float32}


def test_a_routers_correction_bias_is_never_rounded(tmp_path: Path) -> None:
    """Loaded into bfloat16, or cast to it after loading: the bias is the float32 one of the file."""
    model = initialize(ModelConfig.from_hugging_face(small_config("deepseek_v3")), dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer.normal_(generator=torch.Generator().manual_seed(0))
    expected = {name: value for name, value in model.named_buffers() if name.endswith("router.bias")}
    save(model, tmp_path / "m")
    for again in (load(tmp_path / "m"), load(tmp_path / "m", dtype=torch.float32).to(torch.bfloat16)):
        for name, bias in expected.items():
            assert torch.equal(again.get_buffer(name), bias)


def test_a_tied_head_may_be_stored_twice_if_both_are_equal(tmp_path: Path) -> None:
    save(initialize(ModelConfig.from_hugging_face(small_config("llama", tie_word_embeddings=True))), tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "m/model.safetensors")
    load(tmp_path / "m")
    for other in (tensors["lm_head.weight"] + 1, torch.ones(3, 3)):
        save_file({**tensors, "lm_head.weight": other}, tmp_path / "m/model.safetensors")
        with pytest.raises(InputError, match=r"lm_head\.weight differs from the embedding"):
            load(tmp_path / "m")


def test_changes_reach_a_nested_config() -> None:
    from etude.model.describe import find_config

    assert find_config("kimi-k2.5").evolve(num_hidden_layers=2).layers == 2


def test_a_second_writer_of_a_directory_is_refused(tmp_path: Path) -> None:
    with new_directory(tmp_path / "m") as first:
        (first / "mine").write_text("1")
        with pytest.raises(BusyError, match=r"is in use by pid"), new_directory(tmp_path / "m"):
            pass
    assert (tmp_path / "m/mine").read_text() == "1"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_directory(tmp_path / "link") as place:
        (place / "x").write_text("2")
    assert (tmp_path / "real/x").read_text() == "2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "m", "real"]


def test_unknown_config_keys_survive_a_round_trip(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "another_tools_key": [1, 2]}))
    save(load(saved), tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["another_tools_key"] == [1, 2]


Damage = Callable[[Path], None]


def change_config(**changes: object) -> Damage:
    def damage(place: Path) -> None:
        config = json.loads((place / "config.json").read_text())
        config = {k: v for k, v in {**config, **changes}.items() if v is not ...}
        (place / "config.json").write_text(json.dumps(config))

    return damage


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(place: Path) -> None:
        tensors = load_file(place / "model.safetensors")
        edit(tensors)
        save_file(tensors, place / "model.safetensors")

    return damage


def truncate(place: Path) -> None:
    os.truncate(place / "model.safetensors", 20_000)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, r"model\.safetensors: not a complete safetensors file"),
        (lambda p: (p / "model.safetensors").unlink(), r"model\.safetensors: not found"),
        (lambda p: (p / "model.safetensors").write_bytes(b""), "not a complete safetensors file"),
        (lambda p: (p / "config.json").unlink(), r"config\.json: not found"),
        (lambda p: (p / "config.json").write_text("{"), "not readable as JSON"),
        (lambda p: (p / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "not a checkpoint index"),
        (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "not a checkpoint index"),
        (lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": []}'), "not a checkpoint index"),
        (
            lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
            "not a checkpoint index",
        ),
        (change_config(num_hidden_layers=-1), "num_hidden_layers is -1; expected an integer"),
        (change_config(head_dim=7), "head_dim is 7; rotary"),
        (change_config(hidden_size="24"), "hidden_size is '24'; expected an integer"),
        (change_config(tie_word_embeddings="false"), "tie_word_embeddings is 'false'; expected true or false"),
        (change_config(rms_norm_eps=-1), "rms_norm_eps is -1; expected a number above 0"),
        (change_config(decoder_sparse_step=0), "decoder_sparse_step is 0"),
        (change_tensors(lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)})), "is F8_E4M3; expected"),
        (change_config(model_type="gpt2"), r"model_type is 'gpt2'; choose from deepseek_v3"),
        (change_config(model_type=...), "model_type is None"),
        (change_config(hidden_size=...), "hidden_size is missing"),
        (change_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (change_config(num_experts_per_tok=9), "between 1 and the 8 experts"),
        (change_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope scaling 'dynamic'"),
        (change_config(rope_parameters={"rope_type": "yarn"}), "factor is missing"),
        (
            change_config(quantization_config={"quant_method": "gptq", "bits": 4}),
            "quantisation 'gptq' is not supported; expected fp8 or compressed-tensors",
        ),
        (change_config(vocab_size=62), r"embed_tokens\.weight has shape \[61, 24\]; config.json requires \[62, 24\]"),
        (change_config(num_hidden_layers=2), r"tensor model\.layers\.2\.\S+ does not belong"),
        (change_tensors(lambda t: t.pop(EXPERT)), f"tensor {EXPERT} is missing"),
        (change_tensors(lambda t: t.update(stray=torch.ones(2))), "tensor stray does not belong"),
        (
            change_tensors(lambda t: t.update({EXPERT: torch.ones(3, 24)})),
            r"experts\.3\.up_proj\.weight has shape \[3, 24\]",
        ),
        (change_tensors(lambda t: t.update({k: v.to(torch.int8) for k, v in t.items()})), "is I8; expected"),
    ],
)
def test_a_bad_checkpoint_is_named_in_one_line(saved: Path, damage: Damage, words: str) -> None:
    damage(saved)
    with pytest.raises(InputError, match=words) as caught:
        load(saved)
    assert "\n" not in str(caught.value)


def test_saving_never_overwrites(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="already exists"):
        save(initialize(ModelConfig.from_hugging_face(small_config("llama"))), saved)
    assert (saved / "model.safetensors").read_bytes() == before


def test_a_killed_save_leaves_no_directory_of_that_name(tmp_path: Path) -> None:
    """The writer is killed between its first and its last shard."""
    script = textwrap.dedent(
        f"""
        import os, signal, torch
        from pathlib import Path
        from etude.model.checkpoint import new_directory, write_tensors
        def tensors():
            for i in range(6):
                if i == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield f"t{{i}}", torch.ones(1000)
        with new_directory(Path({str(tmp_path)!r}) / "m") as place:
            write_tensors(place, tensors(), shard_bytes=5000)
        """
    )
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "m").exists()
    save(initialize(ModelConfig.from_hugging_face(small_config("llama"))), tmp_path / "m")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
