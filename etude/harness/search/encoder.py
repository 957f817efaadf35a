"""The embedding model: a BERT encoder with mean pooling, such as all-MiniLM-L6-v2, that returns unit vectors.

It has its own forward pass of thirty lines, because the harness must not depend on transformers; tests compare the two.
Weights and tokenizer are files of an installed package: nothing is downloaded.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from etude.errors import InputError

MAX_TOKENS = 128  # as in its training; 256 found no more, at twice the time
BATCH = {"cpu": 32, "cuda": 2048}  # texts per batch: half a second on two cores
BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}  # of one forward pass, with padding; small batches fit a CPU's caches
FILES = ("config.json", "model.safetensors", "tokenizer.json")


class BertEncoder:
    """The loaded model. Not thread-safe: `Embedder` calls it from one thread."""

    def __init__(self, directory: Path, device: str | None = None) -> None:
        missing = [name for name in FILES if not (directory / name).is_file()]
        if missing:
            raise InputError(f"{directory} is no embedding model: it has no {', '.join(missing)}")
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        _check(config, directory)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.batch = BATCH.get(self.device.type, BATCH["cpu"])
        self.batch_tokens = BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])
        self.heads: int = config["num_attention_heads"]
        self.layers: int = config["num_hidden_layers"]
        self.eps: float = config["layer_norm_eps"]
        self.dimensions: int = config["hidden_size"]
        self.max_tokens = min(MAX_TOKENS, config["max_position_embeddings"])
        weights = load_file(directory / "model.safetensors", device=str(self.device))
        self.weights = {name: tensor.float() for name, tensor in weights.items() if tensor.is_floating_point()}
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.no_padding()  # the file pads everything to 128
        self.tokenizer.enable_truncation(self.max_tokens)
        self.tokenizer.encode_special_tokens = True  # "[SEP]" in a file is plain text
        self.id = _identity(directory, self.max_tokens)

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one unit vector per text, in order. Texts of similar length share a batch to reduce padding."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        out = np.empty((len(rows), self.dimensions), dtype=np.float32)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * len(rows[order[stop]]) <= self.batch_tokens:
                stop += 1
            batch = order[start:stop]
            out[batch] = self.pooled([rows[row] for row in batch]).cpu().numpy()
            start = stop
        return out

    @torch.inference_mode()
    def pooled(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the normalized mean of the last hidden states of each row of token ids."""
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        real = torch.zeros(len(rows), width, dtype=torch.bool)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
            real[index, : len(row)] = True
        real = real.to(self.device)
        hidden = self.hidden(ids.to(self.device), real)
        mean = (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1)

    @torch.inference_mode()
    def hidden(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of `ids` (rows, width); `real` is False for padding."""
        w = self.weights
        B, T = ids.shape
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x + w["embeddings.position_embeddings.weight"][:T], "embeddings.LayerNorm")
        mask = None if bool(real.all()) else real[:, None, None, :]
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            q, k, v = (
                self._linear(x, f"{name}.attention.self.{part}").view(B, T, self.heads, -1).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, T, -1)
            attended = self._linear(attended, f"{name}.attention.output.dense")
            x = self._norm(x + attended, f"{name}.attention.output.LayerNorm")
            inner = F.gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return x

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(
            x, (self.dimensions,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps=self.eps
        )


def _check(config: dict[str, Any], directory: Path) -> None:
    """Raise InputError for a configuration that this forward pass does not support."""
    expected = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise InputError(f"{directory}/config.json: {key} is {config[key]!r}; this encoder knows only {value!r}")


def _identity(directory: Path, max_tokens: int) -> str:
    """Return an id of everything the vectors depend on, so that vectors of two models never mix in a cache."""
    digest = hashlib.sha256()
    for name in FILES:
        with open(directory / name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"mean-{max_tokens}-{digest.hexdigest()[:32]}"
