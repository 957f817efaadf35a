"""Quantised checkpoints load with the values that the libraries behind their formats give; broken ones are named."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import random_tokens, small_config, twin
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.chat.tokenizer import Tokenizer, train_tokenizer
from etude.errors import InputError
from etude.model import load, save
from etude.model.checkpoint import checkpoint_views
from etude.model.cli import import_
from etude.model.quantised import StoredTensor, find_quantised

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
Module = dict[str, Tensor]


def config_of(family: str) -> dict[str, Any]:
    changes = {key: SIZES[key] for key in SIZES if key in small_config(family) or key == "hidden_size"}
    return small_config(family, **changes, **(LATENT if family == "deepseek_v3" else {}))


def quantise(
    family: str, directory: Path, settings: dict[str, Any], one: Callable[[Tensor], Module]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a checkpoint with its matrices quantised; return its config and the tensors before."""
    config = config_of(family)
    twin(config, 3).to(torch.bfloat16).save_pretrained(directory)
    before, after = load_file(directory / "model.safetensors"), {}
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and not module.endswith(("embed_tokens", "lm_head", "mlp.gate")):
            after |= {f"{module}.{part}": value.contiguous() for part, value in one(tensor).items()}
        else:
            after[name] = tensor
    save_file(after, directory / "model.safetensors", metadata={"format": "pt"})
    change(directory, quantization_config=settings)
    return config, before


def change(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def their_logits(directory: Path, tokens: Tensor, **options: Any) -> tuple[transformers.PreTrainedModel, Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager", **options)
    with torch.no_grad():
        return model, model.eval()(tokens).logits


# --------------------------------------------------------------------------------------------------------- FP8


def fp8_blocks(block: int) -> Callable[[Tensor], Module]:
    """Return a quantiser of DeepSeek-V3's format, block by block."""

    def one(weight: Tensor) -> Module:
        rows, columns = (math.ceil(size / block) for size in weight.shape)
        scale, values = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                scale[i, j] = weight[at].float().abs().max() / 448
                values[at] = (weight[at].float() / scale[i, j]).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}

    return one


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "qwen2"])
def test_fp8_blocks_are_what_transformers_dequantises(family: str, tmp_path: Path) -> None:
    config, before = quantise(family, tmp_path / "m", {**FP8, "weight_block_size": [16, 16]}, fp8_blocks(16))
    ours = load(tmp_path / "m")
    assert ours.embed.weight.dtype == torch.bfloat16
    exact = load(tmp_path / "m", dtype=torch.float32)
    settings = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    tokens = random_tokens(config, 2, 9)
    theirs, _ = their_logits(tmp_path / "m", tokens, quantization_config=settings, dtype=torch.bfloat16)
    save(ours, tmp_path / "ours")
    again, wanted = their_logits(tmp_path / "ours", tokens, dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())
    named = dict(theirs.named_parameters())
    assert all(torch.equal(value, named[name]) for name, value in again.named_parameters())
    apart = 0.0
    for name, view in checkpoint_views(exact).items():
        apart = max(apart, (view - before[name].float()).abs().max().item())
        torch.testing.assert_close(view, before[name].float(), atol=0.05, rtol=0.07)
    assert apart > 1e-3  # it did go through FP8
    torch.testing.assert_close(load(tmp_path / "ours", dtype=torch.float32)(tokens), wanted.float(), atol=0.3, rtol=0.1)


@pytest.mark.parametrize("block", [7, 16, 128])
def test_blocks_may_be_cut_short_at_the_edges(block: int) -> None:
    """As in DeepSeek-V3, where 576 rows are four blocks of 128 and a half; against the definition, value by value."""
    seed = random.randrange(1000)
    print(f"seed {seed}")
    weight = torch.randn(37, 150, generator=torch.Generator().manual_seed(seed))
    parts = fp8_blocks(block)(weight)
    stored = {
        "m.weight": StoredTensor((37, 150), "F8_E4M3"),
        "m.weight_scale_inv": StoredTensor(tuple(parts["weight_scale_inv"].shape), "F32"),
    }
    found = find_quantised(stored, {**FP8, "weight_block_size": [block, block]}, "here")["m.weight"]
    got = found.read(lambda name: parts[name.removeprefix("m.")])
    for i in range(37):
        for j in range(150):
            wanted = parts["weight"][i, j].float() * parts["weight_scale_inv"][i // block, j // block]
            assert got[i, j] == wanted


def test_the_command_writes_a_plain_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantise("qwen2", tmp_path / "m", {**FP8, "weight_block_size": [16, 16]}, fp8_blocks(16))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        import_(str(tmp_path / "m"), tmp_path / "copy")
    tokenizer = train_tokenizer(["a b c d"], 300)
    tokenizer.save(tmp_path / "m")
    import_(str(tmp_path / "m"), tmp_path / "copy")
    assert capsys.readouterr().out == f"model: {tmp_path / 'copy'}\n"
    copy = json.loads((tmp_path / "copy/config.json").read_text())
    assert "quantization_config" not in copy
    assert {tensor.dtype for tensor in load_file(tmp_path / "copy/model.safetensors").values()} == {torch.bfloat16}
    assert Tokenizer.load(tmp_path / "copy").encode("a b") == tokenizer.encode("a b")
    for name, view in checkpoint_views(load(tmp_path / "copy")).items():
        assert torch.equal(view, checkpoint_views(load(tmp_path / "m"))[name])
    (tmp_path / "m/adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="is an adapter; merge it"):
        import_(str(tmp_path / "m"), tmp_path / "again")
    assert not (tmp_path / "again").exists()


# ----------------------------------------------------------------------------------------- compressed-tensors


def int4_groups(weight: Tensor) -> Module:
    """Quantise as Kimi K2.5: groups of 32 in a row, eight values in a word, the first one lowest."""
    rows, columns = weight.shape
    scale = (weight.float().view(rows, -1, 32).abs().amax(-1) / 7.5).to(torch.bfloat16)
    whole = (weight.float().view(rows, -1, 32) / scale.float()[..., None]).round().clamp(-8, 7).view(rows, columns)
    words = [
        [sum((int(whole[i, j + k]) + 8) << (4 * k) for k in range(8)) for j in range(0, columns, 8)]
        for i in range(rows)
    ]
    packed = torch.tensor(words, dtype=torch.int64).where(torch.tensor(words) < 2**31, torch.tensor(words) - 2**32)
    return {
        "weight_packed": packed.to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }


def pack_quantized(**weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def test_int4_groups_load_where_kimi_has_its_settings(tmp_path: Path) -> None:
    config, before = quantise("deepseek_v3", tmp_path / "m", {}, int4_groups)
    tensors = load_file(tmp_path / "m/model.safetensors")
    save_file({f"language_model.{k}": v for k, v in tensors.items()}, tmp_path / "m/model.safetensors")
    text = {**config, "model_type": "kimi_k2", "quantization_config": pack_quantized()}
    (tmp_path / "m/config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    ours = load(tmp_path / "m", dtype=torch.float32)
    for name, view in checkpoint_views(ours).items():
        plain = name.removeprefix("language_model.")
        module = plain.removesuffix(".weight")
        if f"{module}.weight_scale" in tensors:
            steps = view / tensors[f"{module}.weight_scale"].float().repeat_interleave(32, 1)
            torch.testing.assert_close(steps, steps.round(), atol=1e-5, rtol=0)
            assert (view - before[plain].float()).abs().max() < 0.7 * tensors[f"{module}.weight_scale"].max()
        else:
            assert torch.equal(view, before[plain].float())
    save(ours, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())["text_config"]
    assert torch.equal(load(tmp_path / "plain").blocks[1].mlp.experts.down, ours.blocks[1].mlp.experts.down)


INT4 = {
    "m.weight_packed": StoredTensor((8, 8), "I32"),
    "m.weight_scale": StoredTensor((8, 2), "BF16"),
    "m.weight_shape": StoredTensor((2,), "I64", (8, 64)),
}
FLOAT8 = {"m.weight": StoredTensor((8, 64), "F8_E4M3"), "m.weight_scale_inv": StoredTensor((1, 1), "F32")}


@pytest.mark.parametrize(
    ("stored", "settings", "words"),
    [
        (INT4, {"quant_method": "awq"}, "quantisation 'awq' is not supported; expected fp8 or compressed-tensors"),
        (INT4, {}, "quantisation None is not supported"),
        (INT4, pack_quantized() | {"format": "marlin-24"}, "'marlin-24' of compressed-tensors is not supported"),
        (INT4, pack_quantized() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (INT4, pack_quantized() | {"transform_config": {"config_groups": {"R1": {}}}}, "transformed before"),
        (INT4, pack_quantized(num_bits=3), "expected 4 or 8 bits a value"),
        (INT4 | {"m.weight_shape": StoredTensor((2,), "I64", (9, 64))}, pack_quantized(), r"of a matrix \[9, 64\]"),
        (INT4 | {"m.weight_scale": StoredTensor((8, 3), "BF16")}, pack_quantized(), r"shape \[8, 3\], which does not"),
        (
            INT4 | {"m.weight_g_idx": StoredTensor((64,), "I32")},
            pack_quantized(),
            "m.weight_g_idx: groups in the order",
        ),
        (
            {k: v for k, v in INT4.items() if "scale" not in k},
            pack_quantized(),
            "m.weight_scale is missing; m.weight is",
        ),
        ({k: v for k, v in INT4.items() if "shape" not in k}, pack_quantized(), "m.weight_shape is missing"),
        (
            INT4,
            pack_quantized() | {"config_groups": ["Linear"]},
            "config_groups of the quantisation is .*expected a table",
        ),
        (FLOAT8, FP8 | {"weight_block_size": [128]}, r"the size \[128\]; expected two integers"),
        ({"m.weight": FLOAT8["m.weight"]}, FP8, "m.weight_scale_inv is missing"),
        (FLOAT8 | {"m.weight": StoredTensor((2, 8, 64), "F8_E4M3")}, FP8, r"shape \[2, 8, 64\]; expected a matrix"),
        (FLOAT8 | {"m.weight_scale_inv": StoredTensor((3, 1), "F32")}, FP8, r"shape \[3, 1\], which does not divide"),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_one_line(
    stored: dict[str, StoredTensor], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        find_quantised(stored, settings, "here")
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)


PRESETS = (
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "INT8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "MXFP4A16",
    "MXFP8A16",
    "NVFP4A16",
)


def preset_scheme(name: str) -> Any:
    """Return one of compressed-tensors' schemes, with groups and blocks of small matrices."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"]).model_dump()
    weights = scheme["weights"]
    if weights.get("group_size") == 128:
        weights["group_size"] = 32
    if weights.get("block_structure"):
        weights["block_structure"] = [16, 16]
    return QuantizationScheme(**scheme)


def compress_with_library(weight: Tensor, scheme: Any) -> Module:
    """Compress one matrix with compressed-tensors, scales from the largest values of each group, block, row or all."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, (rows, columns) = scheme.weights, weight.shape
    strategy = str(getattr(args.strategy, "value", args.strategy))
    grid = {"group": (1, args.group_size), "tensor_group": (1, args.group_size), "channel": (1, columns)}
    height, width = grid.get(strategy, (rows, columns)) if strategy != "block" else args.block_structure
    cells = weight.view(rows // height, height, columns // width, width)
    low, high = cells.amin(dim=(1, 3)), cells.amax(dim=(1, 3))
    if strategy == "tensor":
        low, high = low.flatten(), high.flatten()
    module: Module = {"weight": weight}
    if strategy == "tensor_group":
        module["weight_global_scale"] = generate_gparam(weight.amin().view(1), weight.amax().view(1))
    module["weight_scale"], zero = calculate_qparams(low, high, args, module.get("weight_global_scale"))
    module["weight_zero_point"] = zero
    kind = infer_module_format(torch.nn.Linear, scheme)
    compressed: Module = BaseCompressor.get_value_from_registry(kind.value).compress(module, scheme)
    return {part: value for part, value in compressed.items() if value is not None}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_compressed_tensors_gives_the_same_values(family: str, preset: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="installed with the extra test-slow")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    scheme = preset_scheme(preset)
    kind = infer_module_format(torch.nn.Linear, scheme)
    settings = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head", "re:.*mlp.gate$"],
        format=kind.value,
        quantization_status="compressed",
    ).model_dump()
    modules: dict[int, Module] = {}

    def one(weight: Tensor) -> Module:
        return modules.setdefault(len(modules), compress_with_library(weight, scheme))

    config, before = quantise(family, tmp_path / "m", {**settings, "quant_method": "compressed-tensors"}, one)
    stored = load_file(tmp_path / "m/model.safetensors")
    rounded = load(tmp_path / "m", dtype=torch.bfloat16)
    decompress, checked = BaseCompressor.get_value_from_registry(kind.value).decompress, 0
    for name, view in checkpoint_views(rounded).items():
        module = name.removesuffix("weight")
        parts = {part.removeprefix(module): t for part, t in stored.items() if part.startswith(module)}
        if "weight_scale" in parts:
            wanted = decompress(parts, scheme)["weight"].to(torch.bfloat16)
            torch.testing.assert_close(view, wanted, atol=0, rtol=0, msg=f"{preset}: {name}")
            assert 0 < (view.float() - before[name].float()).abs().mean() < 0.05
            checked += 1
    assert checked > 10
    if family == "qwen2" and preset.partition("_")[0].endswith("A16"):  # in the others, activations are rounded too
        tokens = random_tokens(config, 2, 9)
        _, wanted = their_logits(
            tmp_path / "m",
            tokens,
            dtype=torch.bfloat16,
            quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        )
        with torch.no_grad():
            torch.testing.assert_close(rounded(tokens), wanted, atol=0.05, rtol=0.05)
