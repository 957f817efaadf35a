"""Opens model clients: a checkpoint in this process, an Etude server by token ids, or an OpenAI-compatible endpoint.

A model comes with the settings of its sessions: those of its profile, changed by the options of the command.
"""

import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.harness.model_client import SEED_LIMIT, ChatModelClient, ModelClient, TokenModelClient
from etude.harness.model_options import ModelOptions
from etude.harness.profile import AgentProfile
from etude.inference.clients.http import HttpPolicy
from etude.inference.clients.openai import OpenAIChat
from etude.inference.clients.transport import RetryPolicy, ServerError
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model.config import ModelConfig

CHAT_WINDOW = 128_000  # tokens, for an endpoint that reports no limit
RETRY = RetryPolicy(timeout=900.0, attempts=4)  # interactive use
PAGE = 16


@dataclass(frozen=True)
class OpenedModel:
    """A model client, and the settings of its sessions."""

    client: ModelClient
    profile: AgentProfile


def checkpoint_profile(directory: Path, window: int, changes: Mapping[str, Any]) -> AgentProfile:
    """Return the settings of sessions with a checkpoint whose context has `window` tokens."""
    return AgentProfile.for_model(AgentProfile.load(directory), window, changes)


def endpoint_profile(facts: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> AgentProfile:
    """Return the settings of sessions with a model that an endpoint describes in its list of models."""
    window, own = facts.get("max_model_len"), facts.get("etude")  # reported by vLLM and by `etude serve`
    if not isinstance(window, int) or window <= 0:
        window = changes.get("window") or CHAT_WINDOW
    found = own.get("profile") if isinstance(own, dict) else None
    profile = AgentProfile.from_json(json.dumps(found), f"{where}/models") if found else None
    return AgentProfile.for_model(profile, window, changes)


@asynccontextmanager
async def open_model_client(model: ModelOptions, session: str) -> AsyncIterator[OpenedModel]:
    """Open a model for one session and close its resources afterwards."""
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
    async with opened as found:
        yield found


@asynccontextmanager
async def _local_checkpoint(model: ModelOptions, session: str) -> AsyncIterator[OpenedModel]:
    directory = model.directory
    if directory is None:
        raise InputError(f"--model {model.name}: no such directory; a model by name needs --endpoint URL")
    tokenizer = Tokenizer.load(directory)

    # Imported here because torch's compiler and the engine are slow to load.
    from etude.inference.clients.inprocess import InProcessPolicy
    from etude.inference.engine import open_engine
    from etude.inference.service import EngineService

    profile = checkpoint_profile(directory, ModelConfig.load(directory).max_length, model.session)
    window = profile.window or 0
    options = EngineOptions(kv_cache_tokens=-(-window // PAGE) * PAGE + 2 * PAGE, page_size=PAGE, max_sequences=1)
    async with EngineService(open_engine(directory, options, device=model.device)) as service:
        yield _token_client(model, InProcessPolicy(service), tokenizer, profile, session)


@asynccontextmanager
async def _served_checkpoint(model: ModelOptions, session: str) -> AsyncIterator[OpenedModel]:
    """Use an Etude server by token ids; the tokenizer is loaded from the model directory."""
    directory = model.directory
    assert directory is not None
    chat = OpenAIChat(model.endpoint, model.key(), model="", retry=RETRY)
    try:
        served = await chat.models()
    finally:
        await chat.close()
    if not (ours := [each for each in served if each.get("owned_by") == "etude"]):
        raise InputError(
            f"--model {model.name}: {model.endpoint} is not an Etude server and takes no token ids; give a model's name"
        )
    policy = HttpPolicy(model.endpoint.rstrip("/").removesuffix("/v1"), model.key(), retry=RETRY)
    try:
        window = min(ModelConfig.load(directory).max_length, ours[0].get("max_model_len") or CHAT_WINDOW)
        profile = checkpoint_profile(directory, window, model.session)
        yield _token_client(model, policy, Tokenizer.load(directory), profile, session)
    finally:
        await policy.close()


def _token_client(
    model: ModelOptions, policy: Policy, tokenizer: Tokenizer, profile: AgentProfile, session: str
) -> OpenedModel:
    seed = random.randrange(SEED_LIMIT) if model.seed is None else model.seed
    sampling = Sampling(temperature=profile.temperature, seed=seed)
    dialect, name, window = dialect_for(tokenizer, profile.dialect), Path(model.name).name, profile.window or 0
    client = TokenModelClient(policy, dialect, sampling, window=window, session=session, model=name)
    return OpenedModel(client, profile)


@asynccontextmanager
async def _chat_endpoint(model: ModelOptions) -> AsyncIterator[OpenedModel]:
    url = urlsplit(model.endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise InputError(f"--endpoint {model.endpoint}: expected a URL such as http://127.0.0.1:8000/v1")
    client = OpenAIChat(model.endpoint, model.key(), model=model.name, retry=RETRY)
    try:
        served = await _list_models(client, model)
        client.model = client.model or _only_model(served, model)
        listed = next((each for each in served if each.get("id") == client.model), {})
        profile = endpoint_profile(listed, model.session, model.endpoint)
        sampling = Sampling(temperature=profile.temperature, seed=model.seed or 0)
        yield OpenedModel(ChatModelClient(client, sampling, window=profile.window or 0), profile)
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
