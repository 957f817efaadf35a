"""The policies that are compared: checkpoints in this process, and models behind OpenAI-compatible endpoints.

A BenchPolicy is parsed from the command line; `open_policy` opens it for trials. A checkpoint is sampled by our
engine, token for token; an endpoint is asked through its chat API. API keys come from environment variables, stay in
this process, and are removed from an endpoint's answers and errors before anything is written.
"""

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import EtudeError, InputError
from etude.files import files_digest
from etude.harness.open_client import CHAT_WINDOW, checkpoint_profile, endpoint_profile
from etude.harness.profile import AgentProfile
from etude.harness.search.searcher import CodebaseSearcher
from etude.harness.session import SessionSpec
from etude.inference.clients.limiter import RequestLimiter
from etude.inference.clients.openai import NO_METER, OpenAIChat, RequestMeter, thinking_fields
from etude.inference.clients.transport import RetryPolicy, ServerError, ServerUnreachable
from etude.model.config import ModelConfig
from etude.rollouts.rollout import ChatBinding, ModelBinding, PolicyBinding, RolloutFailed, RolloutOptions
from etude.tasks.base_images import HostSettings

DEFAULT_KEY_ENV = "ETUDE_API_KEY"  # the variable that holds an endpoint's API key unless --key-env names another
FATAL_STATUSES = (401, 403, 404)  # wrong key or wrong model: a retry does not help
MAX_LISTED_MODELS = 10  # with more models listed, an endpoint is assumed to accept unlisted names too
PAGE_SIZE = 16
MAX_CACHE_TOKENS = 65_536  # of a checkpoint's engine, unless one context window is larger
PROBE_RETRY = RetryPolicy(timeout=60.0, attempts=3)  # a missing endpoint should be reported soon
TRIAL_RETRY = RetryPolicy(attempts=12, max_retry_after=600.0)  # endpoints are often busy, and a lost trial costs money
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "*.safetensors")


class CostLimitReached(EtudeError):
    """An endpoint is not asked any more, because its answers have cost as much as they may."""


@dataclass(frozen=True)
class TokenPrice:
    """Dollars per million tokens. Field names are keys of bench.json."""

    read: float  # prompt tokens
    made: float  # sampled tokens
    cached: float  # prompt tokens served from the endpoint's cache

    def dollars(self, cost: Mapping[str, Any], made: int) -> float:
        """Return the price of a session from the `cost` of its record and its sampled tokens."""
        prompt, cached = int(cost["prompt"]), int(cost["cached"])
        return ((prompt - cached) * self.read + cached * self.cached + made * self.made) / 1e6


@dataclass(frozen=True)
class BenchPolicy:
    """A policy under the name used in the results: a checkpoint's directory, or a model at an endpoint."""

    name: str
    directory: Path | None = None
    url: str = ""  # with its /v1
    model: str = ""
    key_env: str = ""
    effort: str = ""  # sent as reasoning_effort
    thinking_budget: int | None = None  # tokens of thinking in a turn
    thinking_format: str = ""  # how the thinking budget is sent; default: by the endpoint's host

    @property
    def base_name(self) -> str:
        """The name without the variant."""
        return self.name.partition("@")[0]

    @property
    def endpoint(self) -> tuple[str, str]:
        """The URL and model, whose limits all variants share."""
        return self.url, self.model

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of a request that ask for this variant."""
        fields: dict[str, Any] = {"reasoning_effort": self.effort} if self.effort else {}
        if self.thinking_budget is not None:
            fields |= thinking_fields(self.url, self.thinking_budget, self.thinking_format)
        return fields

    @property
    def kind(self) -> Literal["checkpoint", "endpoint"]:
        return "endpoint" if self.directory is None else "checkpoint"

    @property
    def where(self) -> str:
        return f"{self.url}#{self.model}" if self.directory is None else str(self.directory)

    def key(self) -> str:
        """Return the endpoint's API key, or "" if there is none. It must not be stored."""
        if self.key_env and not os.environ.get(self.key_env):
            raise InputError(f"--key-env {self.name}={self.key_env}: there is no such variable, or it is empty")
        return os.environ.get(self.key_env or DEFAULT_KEY_ENV, "")


@dataclass(frozen=True)
class PolicyProfile:
    """Properties of a policy, found by `probe_policy`."""

    session: AgentProfile  # the settings of its sessions
    dialect: str
    digest: str = ""  # of a checkpoint's files, so that results of two models are not mixed

    @property
    def window(self) -> int:
        return self.session.window or CHAT_WINDOW

    def to_json(self) -> dict[str, Any]:
        """Return the keys of a policy in bench.json."""
        return {
            "window": self.window,
            "dialect": self.dialect,
            "digest": self.digest,
            "session": self.session.model_dump(mode="json"),
        }

    @classmethod
    def from_json(cls, recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> "PolicyProfile":
        """Return the profile of a policy in bench.json, with options that may differ from those recorded."""
        session = AgentProfile.from_json(json.dumps(recorded["session"]), "bench.json")
        session = AgentProfile.for_model(session, recorded["window"], changes)
        return cls(session, recorded["dialect"], recorded["digest"])

    def rollout_options(self, host_settings: HostSettings, searcher: CodebaseSearcher | None) -> RolloutOptions:
        """Return the options of this policy's trials."""
        searching = "codebase_search" in self.session.tool_set.tools
        spec = SessionSpec.of(self.session, searcher=searcher if searching else None)
        return RolloutOptions(spec, temperature=self.session.temperature, host_settings=host_settings)


# ------------------------------------------------------------------------------------------- command line


def parse_policies(policies: Sequence[str], key_envs: Sequence[str] = ()) -> tuple[BenchPolicy, ...]:
    """Parse policies from `[NAME=]DIRECTORY` and `[NAME=]URL#MODEL`; their names must be unique."""
    found = [_parse_policy(text) for text in policies]
    twice = [name for name, count in Counter(each.name for each in found).items() if count > 1]
    if twice:
        raise InputError(f"--policy: two policies are called {twice[0]}; name them, as in --policy base=DIRECTORY")
    keys = dict(_split_option(text, "--key-env", "NAME=VARIABLE", [each.name for each in found]) for text in key_envs)
    local = [each.name for each in found if each.directory is not None and each.name in keys]
    if local:
        raise InputError(f"--key-env {local[0]}=...: {local[0]} is a checkpoint, which needs no key")
    return tuple(replace(each, key_env=keys.get(each.name, "")) for each in found)


def parse_prices(texts: Sequence[str], names: Sequence[str]) -> dict[str, TokenPrice]:
    """Parse prices from `NAME=IN,OUT[,CACHED]`; without CACHED, cached tokens cost IN."""
    prices = {}
    for text in texts:
        name, numbers = _split_option(text, "--price", "NAME=IN,OUT[,CACHED]", names)
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        if len(values) not in (2, 3) or not all(0 <= value < float("inf") for value in values):
            raise InputError(f"--price {text}: expected NAME=IN,OUT[,CACHED] in dollars per million tokens")
        prices[name] = TokenPrice(values[0], values[1], values[-1] if len(values) == 3 else values[0])
    return prices


def _parse_policy(text: str) -> BenchPolicy:
    name, location = "", text
    if not _is_url(text) and not Path(text).expanduser().is_dir():  # the path of a directory may contain "="
        name, equals, location = text.partition("=")
        name, location = (name, location) if equals else ("", text)
    if name and not re.fullmatch(r"[\w.-]+", name):
        raise InputError(f"--policy {text}: the name {name!r} may contain only letters, digits, dots, - and _")
    if _is_url(location):
        return _parse_endpoint(name, location)
    directory = Path(location).expanduser()
    if not directory.is_dir():
        raise InputError(
            f"--policy {text}: no such directory; expected a checkpoint's directory, or http://HOST/v1#MODEL"
        )
    directory = directory.resolve()
    return BenchPolicy(name or _slug(directory.name), directory)


def _parse_endpoint(name: str, location: str) -> BenchPolicy:
    url, _, model = location.partition("#")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:  # the URL is written to the results
        raise InputError(
            f"--policy: a URL with a password or a query; put the key in ${DEFAULT_KEY_ENV}, or in a variable named by "
            "--key-env"
        )
    if not parts.hostname:
        raise InputError(f"--policy {location}: expected a URL such as http://127.0.0.1:8000/v1#MODEL")
    if not model:
        raise InputError(f"--policy {location}: no model; name it after a #, as in {url}#MODEL")
    return BenchPolicy(name or _slug(model), url=url.rstrip("/"), model=model)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "policy"


def _split_option(text: str, option: str, form: str, names: Sequence[str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise InputError(f"{option} {text}: expected {form}")
    if name not in names:
        raise InputError(f"{option} {text}: no policy {name}; the policies are {', '.join(names)}")
    return name, value


# ------------------------------------------------------------------------------------------- probing


async def probe_policy(policy: BenchPolicy, changes: Mapping[str, Any]) -> PolicyProfile:
    """Check that a policy is usable before any trial is run, and return its properties; errors name the policy."""
    try:
        if policy.directory is None:
            return await _probe_endpoint(policy, changes)
        return await asyncio.to_thread(_probe_checkpoint, policy.directory, changes)
    except InputError as error:
        raise InputError(f"policy {policy.name}: {error}") from None
    except EtudeError as error:
        raise EtudeError(f"policy {policy.name}: {error}") from None


def _probe_checkpoint(directory: Path, changes: Mapping[str, Any]) -> PolicyProfile:
    config = ModelConfig.load(directory)
    tokenizer = Tokenizer.load(directory)
    check_vocabulary(tokenizer, config.vocab_size, str(directory))
    files = sorted({path for pattern in MODEL_FILES for path in directory.glob(pattern) if path.is_file()})
    digest = files_digest((path.name, path) for path in files)
    session = checkpoint_profile(directory, config.max_length, changes)
    return PolicyProfile(session, dialect_for(tokenizer, session.dialect).name, digest)


async def _probe_endpoint(policy: BenchPolicy, changes: Mapping[str, Any]) -> PolicyProfile:
    client = _client(policy, PROBE_RETRY)
    try:
        served = await client.models()
    except ServerError as error:
        if error.status in (401, 403):
            raise
        served = []  # listing models is optional
    finally:
        await client.close()
    facts = next((each for each in served if each.get("id") == policy.model), None)
    if facts is None and 0 < len(served) <= MAX_LISTED_MODELS:
        names = ", ".join(str(each.get("id")) for each in served)
        raise InputError(f"{policy.url} serves no {policy.model}; it serves {names}")
    return PolicyProfile(endpoint_profile(facts or {}, changes, policy.url), "chat")


def _client(policy: BenchPolicy, retry: RetryPolicy, **limits: Any) -> OpenAIChat:
    fields = policy.request_fields
    return OpenAIChat(policy.url, policy.key(), model=policy.model, retry=retry, extra=fields, **limits)


# ------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class OpenedPolicy:
    """A policy that trials can use. `check` raises an EtudeError if after this failure all trials would fail."""

    model: ModelBinding
    check: Callable[[RolloutFailed], Awaitable[None]]


@dataclass(frozen=True)
class EndpointLimits:
    """Limits of the requests to an endpoint: their rate and their price."""

    limiter: RequestLimiter | None = None
    meter: RequestMeter = NO_METER


NO_LIMITS = EndpointLimits()


@asynccontextmanager
async def open_policy(
    policy: BenchPolicy,
    profile: PolicyProfile,
    *,
    at_once: int,
    device: str = "auto",
    limits: EndpointLimits = NO_LIMITS,
) -> AsyncIterator[OpenedPolicy]:
    """Load a checkpoint or connect to an endpoint, whose requests the limits apply to."""
    if policy.directory is None:
        client = _client(policy, TRIAL_RETRY, limiter=limits.limiter, meter=limits.meter)
        try:
            yield OpenedPolicy(ChatBinding(client, profile.window), lambda failure: _check_endpoint(policy, failure))
        finally:
            await client.close()
        return

    # Imported here: endpoints need neither torch nor the engine.
    from etude.inference.clients.inprocess import InProcessPolicy
    from etude.inference.engine import open_engine
    from etude.inference.service import EngineService
    from etude.inference.settings import EngineOptions

    kv_cache_tokens = max(profile.window, min(MAX_CACHE_TOKENS, at_once * profile.window))
    options = EngineOptions(
        kv_cache_tokens=(-(-kv_cache_tokens // PAGE_SIZE) + 2) * PAGE_SIZE, page_size=PAGE_SIZE, max_sequences=at_once
    )
    engine = await asyncio.to_thread(open_engine, policy.directory, options, device=device)
    assert engine.tokenizer is not None
    async with EngineService(engine) as service:

        async def check(failure: RolloutFailed) -> None:
            if service.failure is not None:
                raise service.failure

        window, dialect = (
            min(profile.window, service.max_sequence_tokens),
            dialect_for(engine.tokenizer, profile.dialect),
        )
        yield OpenedPolicy(PolicyBinding(InProcessPolicy(service), dialect, window, policy.name), check)


async def _check_endpoint(policy: BenchPolicy, failure: RolloutFailed) -> None:
    cause = failure.__cause__
    if isinstance(cause, ServerError) and cause.status in FATAL_STATUSES:
        raise cause
    if isinstance(cause, ServerUnreachable):  # raises if the endpoint is gone
        await _probe_endpoint(policy, {})
