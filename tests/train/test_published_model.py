"""A run that starts from a checkpoint as DeepSeek publishes them: FP8 blocks and an MTP layer after the others."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from families import random_tokens, small_config
from safetensors.torch import load_file, save_file

from etude.chat.tokenizer import train_tokenizer
from etude.model import ModelConfig, initialize, load
from etude.model.mtp import count_mtp_layers, initialize_mtp, load_mtp, write_model_with_mtp
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run

RECIPE = """
name = "published"
stages = ["base", "corpus", "extend", "sft"]
[base]
source = "./deepseek"
[[corpus.build]]
name = "code"
sources = ["code"]
[[corpus.build]]
name = "chat"
sources = ["chat.jsonl"]
chat = true
[extend]
mix = [{ corpus = "code" }]
length = 256
tokens = 1024
rows = 2
rope_theta = 40000.0
learning_rate = 1e-2
[sft]
mix = [{ corpus = "chat" }]
length = 64
tokens = 256
rows = 2
learning_rate = 1e-2
lora = { rank = 2 }
"""
BLOCK = 16


def publish(directory: Path) -> None:
    """Write a tiny DeepSeek-V3 with one MTP layer and tokenizer, its projections in FP8 blocks."""
    tokenizer = train_tokenizer(["def f(x): return x + 1"] * 3, 320)
    config = small_config("deepseek_v3", vocab_size=len(tokenizer), num_nextn_predict_layers=1, initializer_range=0.1)
    model = initialize(ModelConfig.from_hugging_face(config), 0)
    directory.mkdir()
    write_model_with_mtp(model, initialize_mtp(model.config, 1, 1, torch.float32), directory)
    tokenizer.save(directory)
    stored = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.dim() == 2 and "_proj" in name:
            rows, columns = (-(-size // BLOCK) for size in tensor.shape)
            scale = torch.full((rows, columns), tensor.abs().max().item() / 448)
            stored[f"{name}_scale_inv"] = scale
            tensor = (tensor / scale[0, 0]).to(torch.float8_e4m3fn)
        stored[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


def test_stages_train_the_published_layers_and_leave_them_where_they_were(tmp_path: Path) -> None:
    publish(tmp_path / "deepseek")
    (tmp_path / "code").mkdir()
    text = "".join(f"def f_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(200))
    (tmp_path / "code/a.py").write_text(text)
    turns = [[{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": f"{2 * i}"}] for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    (tmp_path / "r.toml").write_text(RECIPE)
    run_recipe(load_recipe(tmp_path / "r.toml"), tmp_path / "run")
    run = Run.read(tmp_path / "run")

    base, extended = (tmp_path / f"run/checkpoints/{name}" for name in ("base-0", "extend-2"))
    published = load_file(tmp_path / "deepseek/model.safetensors")
    first, second = (load_file(directory / "model.safetensors") for directory in (base, extended))
    names = {name for name in published if not name.endswith("_scale_inv")}
    assert first.keys() == second.keys() == names
    assert all(tensor.dtype == torch.float32 for tensor in first.values())
    assert "mtp_1_kl" in run.metrics("extend")[-1]
    own = [name for name in names if name.startswith("model.layers.3.") and "bias" not in name]
    experts = [name for name in own if ".mlp.experts." in name]
    assert experts
    assert all(not torch.equal(first[name], second[name]) for name in own if name not in experts)
    assert torch.equal(second["model.layers.3.embed_tokens.weight"], second["model.embed_tokens.weight"])

    ours = load(extended)
    tokens = random_tokens({"vocab_size": ours.config.vocab_size}, 2, 20)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        extended, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    assert count_mtp_layers(extended) == 1

    adapted = run.find("checkpoint").path  # of sft, which trains adapters and, in full, the MTP layer
    assert (adapted / "adapter_model.safetensors").exists()
    layer = load_mtp(adapted, ours.config, torch.float32).layers[0]
    before = load_mtp(extended, ours.config, torch.float32).layers[0]
    assert not torch.equal(layer.project.weight, before.project.weight)
