"""Tiny models with scripted output, and a real server around them, for tests of service, server and clients.

A parrot is an ordinary llama whose blocks do nothing and whose head knows, for each token of a script, the next one.
The script's parts are tokens of their own, so that any text can be written, split anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import uvicorn
from families import small_config
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from etude.chat.tokenizer import END_OF_TURN, Tokenizer, train_tokenizer
from etude.inference import server
from etude.inference.engine import Engine
from etude.inference.service import EngineService
from etude.inference.settings import EngineOptions
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer
from etude.system.http import UvicornServer

NAME = "tiny"
TEXTS = ["def add(a, b):\n    return a + b\n", "Zürich, 東京, naïve café\n"]
VOCABULARY = 330
LENGTH = 2048


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS * 3, 300)


def config_of(family: str, **changes: Any) -> ModelConfig:
    changes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "tie_word_embeddings": False, **changes}
    return ModelConfig.from_hugging_face(small_config(family, **changes))


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> Transformer:
    """Return a model with large random weights."""
    torch.manual_seed(seed)
    model = Transformer(config_of(family, **changes)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(0, 0.3)
    return model


def tiny_engine(family: str = "llama", *, tokenizer: bool = True, seed: int = 0, **options: Any) -> Engine:
    sizes = {"kv_cache_tokens": 8192, "page_size": 8, "max_sequences": 16, **options}
    return Engine(tiny_model(family, seed), EngineOptions(**sizes), tokenizer=tiny_tokenizer() if tokenizer else None)


def parrot(*parts: str | int, end: bool = True, **options: Any) -> Engine:
    """Return an engine that completes every chat with these parts (texts, or single bytes) and then ends its turn."""
    tokenizer = extended_tokenizer(parts)
    tokens = [token_of(tokenizer, part) for part in parts]
    stop = tokenizer.token_id(END_OF_TURN)
    assert stop is not None
    begin = tokenizer.encode(tokenizer.render([{"role": "user", "content": "x"}]), special=True)[-1]
    chain = [begin, *tokens, *([stop] if end else [tokens[0]])]
    sizes = {"kv_cache_tokens": 8192, "page_size": 8, "max_sequences": 16, **options}
    return Engine(follow(chain), EngineOptions(**sizes), tokenizer=tokenizer)


def extended_tokenizer(parts: Sequence[str | int]) -> Tokenizer:
    """Return the tiny tokenizer with a token for each text that it has none for."""
    own = tiny_tokenizer()
    backend = Backend.from_str(own.backend.to_str())
    new = [part for part in parts if isinstance(part, str) and backend.token_to_id(part) is None]
    backend.add_tokens([AddedToken(part, normalized=False) for part in new])
    return Tokenizer(backend, chat_template=own.chat_template, config=own.config)


def token_of(tokenizer: Tokenizer, part: str | int) -> int:
    if isinstance(part, int):
        return byte_token(tokenizer, part)
    token = tokenizer.token_id(part)
    assert token is not None
    assert tokenizer.decode([token]) == part
    return token


def byte_token(tokenizer: Tokenizer, value: int) -> int:
    """Return the token of one byte, which may be part of a character."""
    vocabulary = json.loads(tokenizer.backend.to_str())["model"]["vocab"]
    # GPT-2's printable characters for bytes.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    spelt = chr(value) if value in plain else chr(256 + others.index(value))
    found: int = vocabulary[spelt]
    return found


def follow(chain: Sequence[int]) -> Transformer:
    """Return a model in which every token of a chain is followed by the next, at any usual temperature."""
    assert len(set(chain[:-1])) == len(chain) - 1, "a token cannot have two successors"
    torch.manual_seed(1)
    model = Transformer(config_of("llama", hidden_size=256)).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.startswith("blocks.") and tensor.dim() > 1:
                tensor.zero_()
        model.norm.weight.fill_(1.0)
        model.embed.weight.normal_()
        assert model.head is not None
        model.head.weight.zero_()
        for token, following in pairwise(chain):
            row = model.embed.weight[token]
            model.head.weight[following] += 10.0 * row / row.norm()
    return model


class ScriptedModel(Transformer):
    """A model that writes a script, whose first token has the position `start` in every sequence."""

    def __init__(self, config: ModelConfig, start: int, script: Sequence[int]) -> None:
        super().__init__(config)
        self.start, self.script = start, script

    def hidden(self, tokens: torch.Tensor, *, cache: Any = None, **_: Any) -> torch.Tensor:
        return cache.batch.positions[None, :, None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(*hidden.shape[:-1], self.config.vocab_size)
        for row, position in enumerate(hidden[..., 0].long().tolist()):
            scores[row, self.script[min(max(0, position + 1 - self.start), len(self.script) - 1)]] = 100.0
        return scores


def scripted(tokenizer: Tokenizer, start: int, script: Sequence[int]) -> Engine:
    """Return an engine that answers a prompt of `start` tokens with a script."""
    changes = {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}
    config = ModelConfig.from_hugging_face(small_config("llama", **changes))
    return Engine(ScriptedModel(config, start, script), EngineOptions(kv_cache_tokens=8192), tokenizer=tokenizer)


@contextlib.asynccontextmanager
async def serving(service: EngineService, **options: Any) -> AsyncIterator[str]:
    """Run a server around a service in this event loop; yield its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    names = {key: options.pop(key) for key in ("dialect", "profile") if key in options}
    model = server.ServedModel.of(NAME, service.engine.tokenizer, **names)
    application = server.app(service, model, server.Access(options.pop("token", "")), **options)
    async with running(application, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def running(application: Any, listener: socket.socket) -> AsyncIterator[None]:
    web = UvicornServer(uvicorn.Config(application, log_level="error", access_log=False, lifespan="off"))
    task = asyncio.create_task(web.serve(sockets=[listener]))
    while not web.started and not task.done():
        await asyncio.sleep(0.005)
    try:
        yield
    finally:
        web.should_exit = web.force_exit = True
        await task


@contextlib.contextmanager
def served(engine: Engine, *, max_waiting: int = 64, **options: Any) -> Iterator[tuple[str, EngineService]]:
    """Run a server in a thread of its own, so that a test can use blocking clients."""
    ready, stop = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    async def work() -> None:
        async with EngineService(engine, max_waiting=max_waiting) as service, serving(service, **options) as url:
            found.update(url=url, service=service)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    assert ready.wait(120)
    try:
        yield found["url"], found["service"]
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive()


async def until(true: Any, seconds: float = 60.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
