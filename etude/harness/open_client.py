"""Who speaks: a checkpoint in this process, one of our servers token for token, or any OpenAI-compatible endpoint."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from etude.agent.options import Model
from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.harness.model_client import SEEDS, ChatSpeaker, Speaker, TokenSpeaker
from etude.inference.clients.http import Http
from etude.inference.clients.openai import OpenAIChat
from etude.inference.clients.transport import Patience, ServerError
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.model.config import ModelConfig

CHAT_WINDOW = 128_000  # tokens, of an endpoint that does not say
PATIENCE = Patience(timeout=900.0, attempts=4)  # a person waits
PAGE = 16


@asynccontextmanager
async def open_speaker(model: Model, session: str) -> AsyncIterator[Speaker]:
    """A speaker for one session; closed with what it holds."""
    if not model.name and not model.endpoint:
        raise InputError(
            "no model: give --model DIRECTORY for a checkpoint, or --endpoint URL for an OpenAI-compatible server"
        )
    if "@" in urlsplit(model.endpoint).netloc:  # it would be written down with the session
        raise InputError(
            "--endpoint: a URL with a password in it; put the key in a variable and name it with --key-env"
        )
    if not model.endpoint:
        opened = _local(model, session)
    elif model.directory is not None:
        opened = _exact(model, session)
    else:
        opened = _chat(model)
    async with opened as speaker:
        yield speaker


@asynccontextmanager
async def _local(model: Model, session: str) -> AsyncIterator[Speaker]:
    directory = model.directory
    if directory is None:
        raise InputError(f"--model {model.name}: no such directory; a model by name needs --endpoint URL")
    tokenizer = Tokenizer.load(directory)

    # Torch's compiler and the engine are loaded by those who need them only.
    from etude.chat.tokenizer import check_vocabulary
    from etude.inference.clients.inprocess import InProcess
    from etude.inference.engine import Engine, EngineOptions
    from etude.inference.service import EngineService
    from etude.kernels import usable_device
    from etude.model.checkpoint import load

    network = load(directory, device=usable_device(model.device))
    check_vocabulary(tokenizer, network.config.vocab_size, str(directory))
    window = _window(model, network.config.max_length)
    options = EngineOptions(tokens=-(-window // PAGE) * PAGE + 2 * PAGE, page=PAGE, max_streams=1)
    async with EngineService(Engine(network, options, tokenizer=tokenizer)) as service:
        yield _by_tokens(model, InProcess(service), tokenizer, min(window, service.room), session)


@asynccontextmanager
async def _exact(model: Model, session: str) -> AsyncIterator[Speaker]:
    """One of our servers: token ids there and back; the tokenizer is read from the directory."""
    directory = model.directory
    assert directory is not None
    chat = OpenAIChat(model.endpoint, model.key(), model="", patience=PATIENCE)
    try:
        served = await chat.models()
    finally:
        await chat.close()
    if not any(each.get("owned_by") == "etude" for each in served):
        raise InputError(
            f"--model {model.name}: {model.endpoint} is not an Etude server and takes no tokens; give a model's name"
        )
    policy = Http(model.endpoint.rstrip("/").removesuffix("/v1"), model.key(), patience=PATIENCE)
    try:
        window = _window(model, ModelConfig.load(directory).max_length)
        yield _by_tokens(model, policy, Tokenizer.load(directory), window, session)
    finally:
        await policy.close()


def _by_tokens(model: Model, policy: Policy, tokenizer: Tokenizer, window: int, session: str) -> TokenSpeaker:
    seed = random.randrange(SEEDS) if model.seed is None else model.seed
    sampling = Sampling(temperature=model.temperature, seed=seed)
    dialect = dialect_for(tokenizer, model.dialect or None)
    return TokenSpeaker(policy, dialect, sampling, window=window, session=session, model=Path(model.name).name)


@asynccontextmanager
async def _chat(model: Model) -> AsyncIterator[Speaker]:
    url = urlsplit(model.endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise InputError(f"--endpoint {model.endpoint}: expected a URL such as http://127.0.0.1:8000/v1")
    # The newer models of OpenAI's own refuse the older name.
    limit = "max_completion_tokens" if url.hostname == "api.openai.com" else "max_tokens"
    client = OpenAIChat(model.endpoint, model.key(), model=model.name, limit=limit, patience=PATIENCE)
    try:
        served = await _served(client, model)
        client.model = client.model or _only(served, model)
        facts = next((each for each in served if each.get("id") == client.model), {})
        known = facts.get("max_model_len")  # as vLLM says it
        window = _window(model, known) if isinstance(known, int) and known > 0 else model.window or CHAT_WINDOW
        sampling = Sampling(temperature=model.temperature, seed=model.seed or 0)
        yield ChatSpeaker(client, sampling, window=window)
    finally:
        await client.close()


async def _served(client: OpenAIChat, model: Model) -> list[Mapping[str, Any]]:
    """What the endpoint says it serves; one that does not say is fine when we know what to ask for."""
    try:
        return await client.models()
    except ServerError as error:
        if not model.name or error.status in (401, 403):
            raise
        return []


def _only(served: list[Mapping[str, Any]], model: Model) -> str:
    names = [str(each.get("id")) for each in served]
    if len(names) != 1:
        shown = ", ".join(names[:10]) or "none"
        raise InputError(f"--endpoint {model.endpoint}: choose a model with --model; it serves {shown}")
    return names[0]


def _window(model: Model, known: int) -> int:
    if model.window > known:
        raise InputError(f"--window {model.window:,}: this model can read {known:,} tokens")
    return model.window or known
