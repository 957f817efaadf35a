"""Codebase NLL against an independent computation, and generation against greedy decoding without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import pair, random_tokens, small_config
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.tokenizer import Tokenizer, train_tokenizer
from etude.errors import InputError
from etude.evaluation.codebase_nll import codebase_nll
from etude.model import ModelConfig, initialize, load
from etude.model.generate import generate, stream_text
from etude.train.held_out_nll import rolling_spans


@given(total=st.integers(0, 200), window=st.integers(1, 50), data=st.data())
def test_every_token_is_scored_once_with_enough_context(total: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    spans = rolling_spans(total, window, stride)
    scored = [i for _, first, end in spans for i in range(first, end)]
    assert scored == list(range(total))
    for begin, first, end in spans:
        assert end - begin <= window
        assert first - begin >= min(first, window - stride)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_codebase_nll_equals_a_plain_sum_over_transformers_logits(family: str, tmp_path: Path) -> None:
    code = {"b.py": "def f(x):\n    return x + 1\n" * 4, "a.py": "import os\nprint(os.name)\n", "c.py": "x = 'é'\n"}
    for name, text in code.items():
        (tmp_path / name).write_text(text)
    files = sorted(tmp_path.glob("*.py"))
    tokenizer = train_tokenizer(code.values(), 300)
    config = small_config(family, vocab_size=len(tokenizer))
    theirs, ours = pair(config, 0, tmp_path / "m")
    window, stride = 24, 10
    got = codebase_nll(ours, tokenizer, files, window=window, stride=stride)

    ids = [tokenizer.end_of_text]
    for name in ("a.py", "b.py", "c.py"):
        ids += tokenizer.encode(code[name])
    want, at = 0.0, 1
    while at < len(ids):  # token by token, each in the window that scores it
        end = window + 1 if at <= window else min(len(ids), window + 1 + -(-(at - window) // stride) * stride)
        begin = max(0, end - 1 - window)
        with torch.no_grad():
            logits = theirs(torch.tensor([ids[begin : end - 1]])).logits[0, at - 1 - begin]
        want -= logits.double().log_softmax(-1)[ids[at]].item()
        at += 1
    assert got.nats == pytest.approx(want, rel=1e-5)
    assert (got.tokens, got.files, got.bytes) == (len(ids) - 1, 3, sum(len(t.encode()) for t in code.values()))


@pytest.mark.slow
def test_smollm2_matches_the_logits_of_transformers(smollm2_dir: Path, smollm2_oracle: Any) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    text = Path(__file__).read_text()[:1500]
    tokens = torch.tensor([tokenizer.encode(text)])
    ours = load(smollm2_dir)
    with torch.no_grad():
        want = smollm2_oracle(tokens).logits
        assert (ours(tokens) - want).abs().max() < 1e-3
    rolled = codebase_nll(ours, tokenizer, [Path(__file__)], window=256, stride=128)
    assert 0.5 < rolled.bits_per_byte < 2.0  # a model that knows Python; a uniform one has 8


@pytest.mark.slow
def test_smollm2_answers_a_question(smollm2_dir: Path) -> None:
    tokenizer, model = Tokenizer.load(smollm2_dir), load(smollm2_dir)
    asked = tokenizer.render([{"role": "user", "content": "What is the capital of France?"}])
    tokens = generate(model, tokenizer.encode(asked, special=True), max_tokens=12, stop=tokenizer.stop_ids)
    assert "Paris" in "".join(stream_text(tokens, tokenizer))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_generation_equals_greedy_decoding_without_a_cache(family: str) -> None:
    config = small_config(family, initializer_range=0.2)
    model = initialize(ModelConfig.from_hugging_face(config), seed=1)
    tokens = random_tokens(config, 1, 5)
    got = list(generate(model, tokens[0].tolist(), max_tokens=20))
    with torch.no_grad():
        for _ in range(20):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert got == tokens[0, 5:].tolist()
    assert (
        list(generate(model, tokens[0, :5].tolist(), max_tokens=20, stop=frozenset(got[7:8])))
        == got[: got.index(got[7])]
    )


def test_sampling_is_deterministic_in_the_seed_and_greedy_at_low_temperature() -> None:
    model = initialize(ModelConfig.from_hugging_face(small_config("llama")), seed=0)
    runs = [list(generate(model, [3], max_tokens=16, temperature=1.0, seed=s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    cold = list(generate(model, [3], max_tokens=16, temperature=1e-4, seed=5))
    assert cold == list(generate(model, [3], max_tokens=16))


def test_streamed_text_holds_back_partial_characters() -> None:
    tokenizer = train_tokenizer(["plain"], 300)
    ids = tokenizer.encode("a€b")
    pieces = list(stream_text(iter(ids), tokenizer))
    assert "".join(pieces) == "a€b"
    assert not any("�" in piece for piece in pieces)


def test_bytes_are_counted_in_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    tokenizer = train_tokenizer(["x = 1\n"], 300)
    model = initialize(ModelConfig.from_hugging_face(small_config("llama", vocab_size=300)), seed=0)
    assert codebase_nll(model, tokenizer, [tmp_path / "a.py"], window=8, stride=4).bytes == 14
    (tmp_path / "a.py").write_text("")
    with pytest.raises(InputError, match="nothing to score"):
        codebase_nll(model, tokenizer, [tmp_path / "a.py"], window=8, stride=4)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    model = initialize(ModelConfig.from_hugging_face(small_config("llama")), seed=0)
    tokenizer = train_tokenizer(["x"], 300)
    (tmp_path / "a.py").write_text("x")
    with pytest.raises(InputError, match="empty"):
        next(generate(model, [], max_tokens=1))
    for wrong in ({"temperature": float("nan")}, {"temperature": 1e-40}, {"seed": 2**70, "temperature": 1.0}):
        with pytest.raises(InputError, match=r"temperature|seed"):
            next(generate(model, [1], max_tokens=1, **wrong))
    with pytest.raises(InputError, match="exceed the model's 128"):
        next(generate(model, [1] * 100, max_tokens=29))
    with pytest.raises(InputError, match="ids up to"):
        codebase_nll(model, tokenizer, [tmp_path / "a.py"], window=8, stride=4)
    with pytest.raises(InputError, match="no files"):
        codebase_nll(model, tokenizer, [], window=8, stride=4)
    with pytest.raises(InputError, match="stride 9"):
        codebase_nll(model, tokenizer, [tmp_path / "a.py"], window=8, stride=9)
    with pytest.raises(InputError, match="longer than the 128"):
        codebase_nll(model, tokenizer, [tmp_path / "a.py"], window=129, stride=9)
