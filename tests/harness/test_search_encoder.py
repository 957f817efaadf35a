"""The embedding model compared with transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from etude.errors import InputError
from etude.harness.search.encoder import BertEncoder
from etude.harness.search.model_package import PACKAGE, find_model

TEXTS = [
    "def read_lines(path):\n    return path.read_text().splitlines()",
    "How is a file split into lines?",
    "the weather is fine today",
    "x",
    "ünïcode, 中文 and [SEP] as text " * 60,  # cut at the model's length
]


@pytest.fixture(scope="module")
def model() -> Path:
    found = find_model()
    if found is None:
        pytest.skip(f"{PACKAGE} is not installed")
    return found


@pytest.fixture(scope="module")
def encoder(model: Path) -> BertEncoder:
    return BertEncoder(model, device="cpu")


def test_hidden_states_equal_those_of_transformers(model: Path, encoder: BertEncoder) -> None:
    oracle = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    rows = [encoding.ids for encoding in encoder.tokenizer.encode_batch(TEXTS)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        expected = oracle(input_ids=ids, attention_mask=real).last_hidden_state
    ours = encoder.hidden(ids, real.bool())
    assert ours.shape == expected.shape
    assert (ours - expected)[real.bool()].abs().max() < 1e-5


def test_a_vector_does_not_depend_on_its_batch(encoder: BertEncoder) -> None:
    together = encoder.encode(TEXTS)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-5
    assert np.allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)


def test_texts_of_similar_meaning_are_near(encoder: BertEncoder) -> None:
    code, question, weather, *_ = encoder.encode(TEXTS)
    assert code @ question > 0.4
    assert code @ weather < 0.2


def test_a_control_token_in_a_text_is_text(encoder: BertEncoder) -> None:
    ids = encoder.tokenizer.encode("a [SEP] b [CLS]").ids
    separator, start = encoder.tokenizer.token_to_id("[SEP]"), encoder.tokenizer.token_to_id("[CLS]")
    assert ids.count(separator) == 1
    assert ids.count(start) == 1
    assert ids[0] == start
    assert ids[-1] == separator


def test_an_unsupported_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json, model\.safetensors, tokenizer\.json"):
        BertEncoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="model_type is 'roberta'"):
        BertEncoder(tmp_path)
