"""Opens model clients: a checkpoint in this process, an Etude server by token ids, or an OpenAI-compatible endpoint."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.harness.model_client import SEED_LIMIT, ChatModelClient, ModelClient, TokenModelClient
from etude.harness.model_options import ModelOptions
from etude.inference.clients.http import HttpPolicy
from etude.inference.clients.openai import OpenAIChat
from etude.inference.clients.transport import RetryPolicy, ServerError
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.model.config import ModelConfig

CHAT_WINDOW = 128_000  # tokens, for an endpoint that reports no limit
RETRY = RetryPolicy(timeout=900.0, attempts=4)  # interactive use
PAGE = 16


@asynccontextmanager
async def open_model_client(model: ModelOptions, session: str) -> AsyncIterator[ModelClient]:
    """Open the model client of one session and close its resources afterwards."""
    if not model.name and not model.endpoint:
        raise InputError(
            "no model: give --model DIRECTORY for a checkpoint, or --endpoint URL for an OpenAI-compatible server"
        )
    if "@" in urlsplit(model.endpoint).netloc:  # it would be saved with the session
        raise InputError(
            "--endpoint: a URL with a password in it; put the key in a variable and name it with --key-env"
        )
    if not model.endpoint:
        opened = _local_checkpoint(model, session)
    elif model.directory is not None:
        opened = _served_checkpoint(model, session)
    else:
        opened = _chat_endpoint(model)
    async with opened as client:
        yield client


@asynccontextmanager
async def _local_checkpoint(model: ModelOptions, session: str) -> AsyncIterator[ModelClient]:
    directory = model.directory
    if directory is None:
        raise InputError(f"--model {model.name}: no such directory; a model by name needs --endpoint URL")
    tokenizer = Tokenizer.load(directory)

    # Imported here because torch's compiler and the engine are slow to load.
    from etude.chat.tokenizer import check_vocabulary
    from etude.inference.clients.inprocess import InProcessPolicy
    from etude.inference.engine import Engine, EngineOptions
    from etude.inference.service import EngineService
    from etude.kernels import usable_device
    from etude.model.checkpoint import load

    network = load(directory, device=usable_device(model.device))
    check_vocabulary(tokenizer, network.config.vocab_size, str(directory))
    window = _window(model, network.config.max_length)
    options = EngineOptions(kv_cache_tokens=-(-window // PAGE) * PAGE + 2 * PAGE, page_size=PAGE, max_sequences=1)
    async with EngineService(Engine(network, options, tokenizer=tokenizer)) as service:
        yield _token_client(
            model, InProcessPolicy(service), tokenizer, min(window, service.max_sequence_tokens), session
        )


@asynccontextmanager
async def _served_checkpoint(model: ModelOptions, session: str) -> AsyncIterator[ModelClient]:
    """Use an Etude server by token ids; the tokenizer is loaded from the model directory."""
    directory = model.directory
    assert directory is not None
    chat = OpenAIChat(model.endpoint, model.key(), model="", retry=RETRY)
    try:
        served = await chat.models()
    finally:
        await chat.close()
    if not any(each.get("owned_by") == "etude" for each in served):
        raise InputError(
            f"--model {model.name}: {model.endpoint} is not an Etude server and takes no token ids; give a model's name"
        )
    policy = HttpPolicy(model.endpoint.rstrip("/").removesuffix("/v1"), model.key(), retry=RETRY)
    try:
        window = _window(model, ModelConfig.load(directory).max_length)
        yield _token_client(model, policy, Tokenizer.load(directory), window, session)
    finally:
        await policy.close()


def _token_client(
    model: ModelOptions, policy: Policy, tokenizer: Tokenizer, window: int, session: str
) -> TokenModelClient:
    seed = random.randrange(SEED_LIMIT) if model.seed is None else model.seed
    sampling = Sampling(temperature=model.temperature, seed=seed)
    dialect = dialect_for(tokenizer, model.dialect or None)
    return TokenModelClient(policy, dialect, sampling, window=window, session=session, model=Path(model.name).name)


@asynccontextmanager
async def _chat_endpoint(model: ModelOptions) -> AsyncIterator[ModelClient]:
    url = urlsplit(model.endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise InputError(f"--endpoint {model.endpoint}: expected a URL such as http://127.0.0.1:8000/v1")
    # OpenAI's newer models reject the older name.
    limit = "max_completion_tokens" if url.hostname == "api.openai.com" else "max_tokens"
    client = OpenAIChat(model.endpoint, model.key(), model=model.name, limit=limit, retry=RETRY)
    try:
        served = await _list_models(client, model)
        client.model = client.model or _only_model(served, model)
        listed = next((each for each in served if each.get("id") == client.model), {})
        known = listed.get("max_model_len")  # reported by vLLM
        window = _window(model, known) if isinstance(known, int) and known > 0 else model.window or CHAT_WINDOW
        sampling = Sampling(temperature=model.temperature, seed=model.seed or 0)
        yield ChatModelClient(client, sampling, window=window)
    finally:
        await client.close()


async def _list_models(client: OpenAIChat, model: ModelOptions) -> list[Mapping[str, Any]]:
    """Return the models the endpoint lists; an endpoint without a list is accepted if the model was named."""
    try:
        return await client.models()
    except ServerError as error:
        if not model.name or error.status in (401, 403):
            raise
        return []


def _only_model(served: list[Mapping[str, Any]], model: ModelOptions) -> str:
    names = [str(each.get("id")) for each in served]
    if len(names) != 1:
        shown = ", ".join(names[:10]) or "none"
        raise InputError(f"--endpoint {model.endpoint}: choose a model with --model; it serves {shown}")
    return names[0]


def _window(model: ModelOptions, known: int) -> int:
    if model.window > known:
        raise InputError(f"--window {model.window:,}: this model's window has {known:,} tokens")
    return model.window or known
