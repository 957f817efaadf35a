"""Converting, loading and saving under a memory limit: beside the model itself, a few files' worth is enough."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from families import small_config
from safetensors import safe_open

from etude.chat.tokenizer import train_tokenizer
from etude.model import ModelConfig, Transformer
from etude.model.checkpoint import checkpoint_views, write_config, write_tensors

SHARD = 10 << 20  # bytes of a file; the checkpoints have about ten
MARGIN = 6 * SHARD  # two of the source, one of the copy, and what the allocator does not give back
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}

# The limit is on private memory: what is allocated, and the files that are mapped while they are open. It is set after
# the same work on a tiny model, so that it does not depend on how much torch itself takes.
PROGRAM = """
import resource, sys, torch
from pathlib import Path
from safetensors.torch import load_file
from etude.model import load
from etude.model.checkpoint import write_model
from etude.model.convert import convert_checkpoint

torch.set_num_threads(1)
large, tiny, out, extra = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])

def private():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))

def work(source, out):
    out.mkdir(parents=True)
{work}

work(tiny, out / "tiny")
resource.setrlimit(resource.RLIMIT_DATA, (private() + extra,) * 2)
work(large, out / "large")
"""
CONVERT = f"convert_checkpoint(source, out, torch.bfloat16, shard_bytes={SHARD})"
LOAD_AND_SAVE = f"write_model(load(source), out, shard_bytes={SHARD})"
ALL_AT_ONCE = "held = [load_file(path) for path in source.glob('*.safetensors')]"


def write_checkpoint(directory: Path, *, fp8: bool, **changes: int) -> int:
    """Write a checkpoint whose tensors are constant, each with a value of its own; return the bytes of its files."""
    tokenizer = train_tokenizer(["a b c d"] * 3, 300)
    config = ModelConfig.from_hugging_face(small_config("qwen3", vocab_size=len(tokenizer), **changes))
    directory.mkdir()
    with torch.device("meta"):
        views = checkpoint_views(Transformer(config))

    def tensors() -> object:
        for number, (name, view) in enumerate(views.items()):
            value = torch.full(view.shape, float(number % 16), dtype=torch.bfloat16)
            if fp8 and value.dim() == 2 and "proj" in name:
                yield name, value.to(torch.float8_e4m3fn)
                yield f"{name}_scale_inv", torch.full([-(-size // 128) for size in view.shape], 0.5)
            else:
                yield name, value

    write_tensors(directory, tensors(), shard_bytes=SHARD)
    write_config(config, torch.bfloat16, directory)
    if fp8:
        source = json.loads((directory / "config.json").read_text())
        quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        (directory / "config.json").write_text(json.dumps(source | quantised))
    tokenizer.save(directory)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_DATA") or sys.platform != "linux", reason="needs Linux's RLIMIT_DATA")
@pytest.mark.parametrize(
    ("fp8", "work"),
    [
        (True, CONVERT),
        pytest.param(False, CONVERT, marks=pytest.mark.slow),
        pytest.param(True, LOAD_AND_SAVE, marks=pytest.mark.slow),
    ],
)
def test_memory_is_bounded_by_a_few_files(fp8: bool, work: str, tmp_path: Path) -> None:
    size = write_checkpoint(tmp_path / "large", fp8=fp8, num_hidden_layers=60 if fp8 else 30, **SIZES)
    write_checkpoint(tmp_path / "tiny", fp8=fp8)
    assert size > 9 * SHARD
    model = 0 if work == CONVERT else 2 * size  # FP8 becomes bfloat16

    def run(work: str, extra: int, out: str) -> subprocess.CompletedProcess[str]:
        program = PROGRAM.replace("{work}", textwrap.indent(work, "    "))
        arguments = [tmp_path / "large", tmp_path / "tiny", tmp_path / out, extra]
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    streamed = run(work, model + MARGIN, "streamed")
    assert streamed.returncode == 0, streamed.stderr
    if not fp8:  # the limit is one that holding the files would break
        assert run(ALL_AT_ONCE, MARGIN, "held").returncode != 0
    factor, found = (0.5 if fp8 else 1.0), 0
    config = ModelConfig.load(tmp_path / "large")
    with torch.device("meta"):
        names = list(checkpoint_views(Transformer(config)))
    for path in (tmp_path / "streamed/large").glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                tensor = tensors.get_tensor(name)
                wanted = names.index(name) % 16 * (factor if "proj" in name else 1.0)
                assert tensor.dtype == torch.bfloat16
                assert tensor.min() == tensor.max() == wanted
                found += 1
    assert found == len(names)
