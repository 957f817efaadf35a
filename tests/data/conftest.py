"""A small tokenizer with the tokens of chats, repositories and fill-in-the-middle; made once."""

from pathlib import Path

import pytest

from etude.chat.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    code = Path(__file__).read_text(encoding="utf-8")
    return train_tokenizer([code, "user assistant system tool naïve 東京\n" * 3], 700)


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(directory)
    return directory
