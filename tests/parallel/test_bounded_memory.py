"""Loading, saving and publishing a model that no rank could hold: each needs memory for a few times its own part."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import small_config
from ranks import RankFailed, Ranks, open_ranks

from etude.model import ModelConfig, Transformer, load
from etude.model.checkpoint import checkpoint_views, write_config, write_tensors
from etude.model.layout import checkpoint_pieces
from etude.parallel.mesh import open_mesh
from etude.parallel.settings import ParallelSettings
from etude.train.checkpoint_files import write_weights
from etude.train.sharding import collect_tensors, load_sharded
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher
from etude.weights.versions import Part, follow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's RLIMIT_DATA"),
]
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
RANKS = 4
FILE, MARGIN = 8 << 20, 64 << 20


def private() -> int:
    """Return this process's private memory in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def limit(extra: int) -> None:
    if extra:
        resource.setrlimit(resource.RLIMIT_DATA, (private() + extra,) * 2)


def load_save_publish(place: Path, name: str, extra: int) -> None:
    """Do on this rank what a training job does with a checkpoint, in so much memory more than now."""
    settings = ParallelSettings(dp_shard=RANKS)
    with open_mesh(settings, torch.device("cpu")) as mesh:
        assert mesh is not None
        limit(extra)
        model = load_sharded(place / name, mesh, torch.float32)
        out = place / f"{name}-saved"
        if mesh.leads:
            out.mkdir()
        mesh.barrier()
        write_weights(model, None, out, torch.bfloat16, mesh)
        store, pieces = ObjectStore(place / f"{name}-store"), checkpoint_pieces(model.config)
        with Publisher(store, part=Part(mesh.rank, mesh.size), shard_bytes=FILE) as publisher:
            for number in range(2):
                publisher.publish_soon(number, collect_tensors(model, mesh, pieces, torch.bfloat16))
                publisher.flush(120)


def load_whole(place: Path, name: str, extra: int) -> None:
    limit(extra)
    load(place / name, torch.float32)


def write_checkpoint(directory: Path, layers: int) -> int:
    """Write a checkpoint; return the bytes of its parameters in float32."""
    config = ModelConfig.from_hugging_face(small_config("qwen3", vocab_size=320, num_hidden_layers=layers, **SIZES))
    directory.mkdir()
    with torch.device("meta"):
        views = checkpoint_views(Transformer(config))
    tensors = (
        (name, torch.full(view.shape, float(number % 16), dtype=torch.bfloat16))
        for number, (name, view) in enumerate(views.items())
    )
    write_tensors(directory, tensors, shard_bytes=FILE)
    write_config(config, torch.bfloat16, directory)
    return 4 * sum(view.numel() for view in views.values())


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with open_ranks(RANKS) as ranks:  # of their own: a limit stays
        yield ranks


@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "control: whole"])
def test_a_rank_needs_memory_for_a_few_times_its_part(whole: bool, ranks: Ranks, tmp_path: Path) -> None:
    size = write_checkpoint(tmp_path / "large", layers=60)
    write_checkpoint(tmp_path / "tiny", layers=2)
    # Its float32 part, and three times the part that it publishes in bfloat16: the last one, the new one, a copy.
    extra = size // RANKS + 3 * size // RANKS // 2 + MARGIN
    ranks.run(load_save_publish, tmp_path, "tiny", 0)
    if whole:
        with pytest.raises(RankFailed, match=r"memory|alloc"):
            ranks.run(load_whole, tmp_path, "large", extra)
        return
    ranks.run(load_save_publish, tmp_path, "large", extra)
    print(f"{size / 2**20:.0f} MiB of parameters in float32; {extra / 2**20:.0f} MiB more for a rank suffice")
    with torch.device("meta"):
        names = list(checkpoint_views(Transformer(ModelConfig.load(tmp_path / "large"))))
    for found in (checkpoint_views(load(tmp_path / "large-saved")), follow(ObjectStore(tmp_path / "large-store"))[1]):
        for number, name in enumerate(names):
            assert found[name].min() == found[name].max() == number % 16
