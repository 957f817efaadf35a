"""The GGUF import: a tiny file written here, bit for bit; SmolLM2 against transformers; and bad files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from etude.chat.tokenizer import Tokenizer, train_tokenizer
from etude.errors import InputError
from etude.model.gguf import import_gguf

HIDDEN, LAYERS, HEADS, KV_HEADS, FF = 64, 2, 4, 2, 96
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 320)


@pytest.fixture(scope="module")
def llama(tokenizer: Tokenizer) -> Any:
    """A random, untied Llama of transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    build: Any = transformers.LlamaForCausalLM
    model = build(config)
    for name, value in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(value, mean=1.0, std=0.1)
    return model.eval()


def llama_cpp_tensors(model: Any) -> Weights:
    """The weights as llama.cpp names and orders them: `permute` is its conversion script's."""

    def permute(weights: Any, heads: int) -> Any:
        rows, columns = weights.shape
        return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    found = {}
    for name, value in model.state_dict().items():
        values = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = permute(values, HEADS if "q_proj" in name else KV_HEADS)
        found[f"{names.get_name(name.removesuffix('.weight'))}.weight"] = np.ascontiguousarray(values)
    return found


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str) -> None:
    state = json.loads(tokenizer.backend.to_str())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    control = {token["content"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template or "")


def write_gguf(
    path: Path,
    tokenizer: Tokenizer,
    tensors: Weights,
    *,
    kind: Kind = Kind.F32,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    write_tokenizer(writer, tokenizer, pre)
    extra(writer)
    for name, values in tensors.items():
        if values.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(llama: Any, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tokenizer, llama_cpp_tensors(llama))


class TestTinyLlama:
    def test_comes_back_bit_for_bit(self, tiny: Path, llama: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        import_gguf(tiny, tmp_path / "out")
        again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert not again.config.tie_word_embeddings
        assert all(torch.equal(again.state_dict()[name], value) for name, value in llama.state_dict().items())
        tokens = torch.arange(40)[None]
        assert torch.equal(again.eval()(tokens).logits, llama(tokens).logits)

        loaded = Tokenizer.load(tmp_path / "out")
        assert loaded.digest == tokenizer.digest
        assert loaded.stop_ids == tokenizer.stop_ids
        assert loaded.chat_template == tokenizer.chat_template
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    @pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
    def test_quantised_comes_back_as_the_format_rounds_it(
        self, kind: Kind, llama: Any, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        path = write_gguf(tmp_path / "q.gguf", tokenizer, llama_cpp_tensors(llama), kind=kind)
        import_gguf(path, tmp_path / "out")
        ours = load_file(tmp_path / "out" / "model.safetensors")
        for name, value in llama.state_dict().items():
            # A block never spans two rows, so rounding does not care in which order llama.cpp keeps them.
            whole = value.numpy()
            rounded = gguf.quants.dequantize(gguf.quants.quantize(whole, kind), kind) if whole.ndim > 1 else whole
            assert np.array_equal(ours[name].numpy(), rounded), name

    def test_is_written_in_the_type_asked_for(self, tiny: Path, llama: Any, tmp_path: Path) -> None:
        import_gguf(tiny, tmp_path / "out", dtype=torch.bfloat16)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
        ours = load_file(tmp_path / "out" / "model.safetensors")
        expected = llama.state_dict()
        assert all(torch.equal(value, expected[name].bfloat16()) for name, value in ours.items())

    def test_without_an_output_matrix_is_tied(self, llama: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
        tensors = llama_cpp_tensors(llama)
        del tensors["output.weight"]
        import_gguf(write_gguf(tmp_path / "tied.gguf", tokenizer, tensors), tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
        assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


class TestBadInput:
    """Each is one InputError that names the file, and leaves nothing behind."""

    def refused(self, source: str | Path, tmp_path: Path) -> str:
        with pytest.raises(InputError) as caught:
            import_gguf(source, tmp_path / "target" / "out")
        assert not list((tmp_path / "target").iterdir())
        message = str(caught.value)
        assert Path(source).name in message
        assert "\n" not in message
        return message

    @pytest.mark.parametrize("tenths", range(10))
    def test_a_file_cut_short(self, tiny: Path, tmp_path: Path, tenths: int) -> None:
        data = tiny.read_bytes()
        (tmp_path / "cut.gguf").write_bytes(data[: len(data) * tenths // 10])
        assert "not a GGUF file, or cut short" in self.refused(tmp_path / "cut.gguf", tmp_path)

    def test_a_file_cut_inside_its_metadata(self, tiny: Path, tmp_path: Path) -> None:
        data = tiny.read_bytes()
        start = data.index(b"tokenizer.ggml.merges")
        for length in (3, 7, 23, 40, 201, start, start + 40, start + 333):
            (tmp_path / "cut.gguf").write_bytes(data[:length])
            assert "not a GGUF file, or cut short" in self.refused(tmp_path / "cut.gguf", tmp_path)

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "not.gguf").write_bytes(b"PK\x03\x04" + bytes(1000))
        assert "not a GGUF file" in self.refused(tmp_path / "not.gguf", tmp_path)

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"architecture": "mamba"}, "the architecture mamba is not supported"),
            ({"pre": "tekken"}, "the pre-tokenizer tekken is not supported; known are gpt-2, smollm"),
            ({"extra": lambda writer: writer.add_expert_count(8)}, "a mixture of 8 experts"),
            ({"extra": lambda writer: writer.add_rope_dimension_count(8)}, "rope over 8 of 16 dimensions"),
            (
                {"extra": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
                "rope scaling of type yarn",
            ),
            ({"extra": lambda writer: writer.add_add_bos_token(True)}, "begins every text with a token"),
            (
                {"extra": lambda writer: writer.add_bos_token_id(999)},
                "bos_token_id 999 is not in the vocabulary",
            ),
        ],
    )
    def test_what_we_cannot_honour(
        self, changes: Any, complaint: str, llama: Any, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        path = write_gguf(tmp_path / "odd.gguf", tokenizer, llama_cpp_tensors(llama), **changes)
        assert complaint in self.refused(path, tmp_path)

    @pytest.mark.parametrize(
        ("old", "new", "complaint"),
        [
            ("blk.1.attn_q.weight", None, "missing, the first is model.layers.1.self_attn.q_proj.weight"),
            ("token_embd.weight", None, "the tensor token_embd.weight is missing"),
            ("blk.1.attn_q.weight", "blk.1.attn_q.bias", "the tensor blk.1.attn_q.bias does not belong"),
            (
                "output.weight",
                "blk.7.attn_q.weight",
                "model.layers.7.self_attn.q_proj.weight is beyond the 2 layers",
            ),
        ],
    )
    def test_tensors_that_do_not_make_a_llama(
        self, old: str, new: str | None, complaint: str, llama: Any, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        tensors = llama_cpp_tensors(llama)
        moved = tensors.pop(old)
        path = write_gguf(tmp_path / "odd.gguf", tokenizer, tensors | ({new: moved} if new else {}))
        assert complaint in self.refused(path, tmp_path)

    def test_a_tokenizer_too_big_for_the_model(self, llama: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
        tensors = llama_cpp_tensors(llama)
        tensors["token_embd.weight"] = tensors["token_embd.weight"][:300]
        path = write_gguf(tmp_path / "big.gguf", tokenizer, tensors)
        assert "ids up to 319, but the model's vocab_size is 300" in self.refused(path, tmp_path)

    @pytest.mark.parametrize(
        ("source", "complaint"),
        [
            ("nowhere.gguf", "no such file"),
            ("some/where", "no such file"),
            ("no-such-package", "neither a .gguf file nor an installed package"),
            ("pytest", "expected one .gguf file in the installed package, found none"),
        ],
    )
    def test_a_source_that_is_not_there(self, source: str, complaint: str, tmp_path: Path) -> None:
        assert complaint in self.refused(source, tmp_path)

    def test_a_target_that_is_taken(self, tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with pytest.raises(InputError, match="already exists"):
            import_gguf(tiny, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_the_gguf_package_the_error_says_what_to_install(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"pip install etude\[gguf\]"):
        import_gguf(tiny, tmp_path / "out")


class TestSmolLM2:
    def test_config_is_that_of_the_model(self, smollm2_dir: Path) -> None:
        config = json.loads((smollm2_dir / "config.json").read_text())
        expected = {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "rope_theta": 100000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        assert config | expected == config

    def test_every_tensor_is_what_transformers_reads(self, smollm2_dir: Path, smollm2_oracle: Any) -> None:
        ours = load_file(smollm2_dir / "model.safetensors")
        assert sum(value.numel() for value in ours.values()) == 134_515_008
        oracle = dict(smollm2_oracle.named_parameters())
        assert ours.keys() == oracle.keys()
        worst = max(float((ours[name] - value.detach()).abs().max()) for name, value in oracle.items())
        print(f"largest difference of a weight: {worst:g}")
        assert worst <= 1e-6

    def test_transformers_gives_the_same_logits_from_our_directory(
        self, smollm2_dir: Path, smollm2_oracle: Any
    ) -> None:
        from transformers import AutoModelForCausalLM

        ours: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
        tokens = torch.tensor([Tokenizer.load(smollm2_dir).encode("def factorial(n):\n    return")])
        with torch.no_grad():
            assert (ours.eval()(tokens).logits - smollm2_oracle(tokens).logits).abs().max() < 1e-3
