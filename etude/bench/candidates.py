"""Who is compared: checkpoints in this process and models behind OpenAI-compatible endpoints, equal to the trials.

A candidate is what a person named; opened, it plays trials. A checkpoint speaks by its tokens through our own engine,
an endpoint through its chat API. Keys come from environment variables, stay in this process, and are taken out of
whatever an endpoint says before anybody writes it down.
"""

import asyncio
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from etude.bench.chat_rollout import DiscreetChat, run_chat_rollout
from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import EtudeError, InputError
from etude.harness.open_client import CHAT_WINDOW
from etude.inference.clients.transport import Patience, ServerError, Unreachable
from etude.model.config import ModelConfig
from etude.pods.fleet import Fleet
from etude.rollouts.rollout import Rollout, RolloutFailed, Settings, Voice, run_rollout
from etude.runs.run import files_digest
from etude.tasks.task import Task

KEY = "ETUDE_API_KEY"  # the variable that holds an endpoint's key where no other is named
REFUSED = (401, 403, 404)  # a wrong key, a wrong name: asking again does not help
FEW = 10  # models of an endpoint that lists what it has; large ones take names that they do not list
PAGE = 16
MOST_CACHE = 65_536  # tokens of a checkpoint's cache, unless its window alone is larger
FIRST_WORD = Patience(timeout=60.0, attempts=3)  # an endpoint that is not there should be found out at once
PATIENCE = Patience(attempts=12)  # hosted endpoints are often busy, and a trial lost is a session paid for
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "*.safetensors")


@dataclass(frozen=True)
class Price:
    """Dollars for a million tokens: read, made, and read from the endpoint's cache."""

    read: float
    made: float
    cached: float

    def of(self, cost: Mapping[str, Any], made: int) -> float:
        """What a session came to; `cost` is as its record keeps it."""
        prompt, cached = int(cost["prompt"]), int(cost["cached"])
        return ((prompt - cached) * self.read + cached * self.cached + made * self.made) / 1e6


@dataclass(frozen=True)
class Candidate:
    """A policy by the name that the results know it by: a checkpoint's directory, or a model at an endpoint."""

    name: str
    directory: Path | None = None
    url: str = ""  # with its /v1
    model: str = ""
    key_env: str = ""

    @property
    def kind(self) -> Literal["checkpoint", "endpoint"]:
        return "endpoint" if self.directory is None else "checkpoint"

    @property
    def where(self) -> str:
        return f"{self.url}#{self.model}" if self.directory is None else str(self.directory)

    def key(self) -> str:
        """The endpoint's key, if there is one; never kept anywhere."""
        if self.key_env and not os.environ.get(self.key_env):
            raise InputError(f"--key-env {self.name}={self.key_env}: there is no such variable, or it is empty")
        return os.environ.get(self.key_env or KEY, "")


@dataclass(frozen=True)
class Known:
    """What a first look at a candidate tells."""

    window: int  # tokens
    dialect: str
    digest: str = ""  # of a checkpoint's files: results of two models must not be mixed


# ------------------------------------------------------------------------------------------- as a person names them


def read_candidates(
    policies: Sequence[str], key_envs: Sequence[str] = (), option: str = "--policy"
) -> tuple[Candidate, ...]:
    """Candidates from `[NAME=]DIRECTORY` and `[NAME=]URL#MODEL`; each needs a name of its own."""
    found = [_read_candidate(text, option) for text in policies]
    twice = [name for name, count in Counter(each.name for each in found).items() if count > 1]
    if twice:
        raise InputError(f"{option}: two are called {twice[0]}; name them, as in {option} before=DIRECTORY")
    keys = dict(_named(text, "--key-env", "NAME=VARIABLE", [each.name for each in found]) for text in key_envs)
    local = [each.name for each in found if each.directory is not None and each.name in keys]
    if local:
        raise InputError(f"--key-env {local[0]}=...: {local[0]} is a checkpoint, which needs no key")
    return tuple(replace(each, key_env=keys.get(each.name, "")) for each in found)


def read_prices(texts: Sequence[str], names: Sequence[str]) -> dict[str, Price]:
    """Prices from `NAME=READ,MADE[,CACHED]`; without one, what is cached costs what is read."""
    prices = {}
    for text in texts:
        name, numbers = _named(text, "--price", "NAME=IN,OUT[,CACHED]", names)
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        if len(values) not in (2, 3) or not all(0 <= value < float("inf") for value in values):
            raise InputError(f"--price {text}: expected NAME=IN,OUT[,CACHED] in dollars for a million tokens")
        prices[name] = Price(values[0], values[1], values[-1] if len(values) == 3 else values[0])
    return prices


def _read_candidate(text: str, option: str) -> Candidate:
    name, what = "", text
    if not _is_url(text) and not Path(text).expanduser().is_dir():  # the path of a directory may hold an = itself
        name, equals, what = text.partition("=")
        name, what = (name, what) if equals else ("", text)
    if name and not re.fullmatch(r"[\w.-]+", name):
        raise InputError(f"{option} {text}: the name {name!r} may hold letters, digits, dots, - and _ only")
    if _is_url(what):
        return _read_endpoint(name, what, option)
    directory = Path(what).expanduser()
    if not directory.is_dir():
        raise InputError(
            f"{option} {text}: no such directory; expected a checkpoint's directory, or http://HOST/v1#MODEL"
        )
    directory = directory.resolve()
    return Candidate(name or _plain(directory.name), directory)


def _read_endpoint(name: str, what: str, option: str) -> Candidate:
    url, _, model = what.partition("#")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:  # it would be written down with the results
        raise InputError(f"{option}: a URL with a password or a query; put the key in ${KEY} or name it by --key-env")
    if not parts.hostname:
        raise InputError(f"{option} {what}: expected a URL such as http://127.0.0.1:8000/v1#MODEL")
    if not model:
        raise InputError(f"{option} {what}: which model? Name it after a #, as in {url}#MODEL")
    return Candidate(name or _plain(model), url=url.rstrip("/"), model=model)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "policy"


def _named(text: str, option: str, form: str, names: Sequence[str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise InputError(f"{option} {text}: expected {form}")
    if name not in names:
        raise InputError(f"{option} {text}: there is no policy {name}; there are {', '.join(names)}")
    return name, value


# ------------------------------------------------------------------------------------------- a first look


async def look_at(candidate: Candidate, dialect: str = "", window: int = 0) -> Known:
    """See that a candidate can be had, before anything is run; the error names it."""
    try:
        if candidate.directory is None:
            return await _look_at_endpoint(candidate, window)
        return await asyncio.to_thread(_look_at_checkpoint, candidate.directory, dialect, window)
    except InputError as error:
        raise InputError(f"policy {candidate.name}: {error}") from None
    except EtudeError as error:
        raise EtudeError(f"policy {candidate.name}: {error}") from None


def _look_at_checkpoint(directory: Path, dialect: str, window: int) -> Known:
    config = ModelConfig.load(directory)
    tokenizer = Tokenizer.load(directory)
    check_vocabulary(tokenizer, config.vocab_size, str(directory))
    files = sorted({path for pattern in MODEL_FILES for path in directory.glob(pattern) if path.is_file()})
    digest = files_digest((path.name, path) for path in files)
    return Known(_window(window, config.max_length), dialect_for(tokenizer, dialect or None).name, digest)


async def _look_at_endpoint(candidate: Candidate, window: int) -> Known:
    client = _client(candidate, FIRST_WORD)
    try:
        served = await client.models()
    except ServerError as error:
        if error.status in (401, 403):
            raise
        served = []  # it need not say what it serves: we know what to ask for
    finally:
        await client.close()
    facts = next((each for each in served if each.get("id") == candidate.model), None)
    if facts is None and 0 < len(served) <= FEW:
        names = ", ".join(str(each.get("id")) for each in served)
        raise InputError(f"{candidate.url} serves no {candidate.model}; it serves {names}")
    known = (facts or {}).get("max_model_len")  # as vLLM says it
    if isinstance(known, int) and known > 0:
        return Known(_window(window, known), "chat")
    return Known(window or CHAT_WINDOW, "chat")


def _window(asked: int, known: int) -> int:
    if asked > known:
        raise InputError(f"--window {asked:,}: this model can read {known:,} tokens")
    return asked or known


def _client(candidate: Candidate, patience: Patience) -> DiscreetChat:
    # The newer models of OpenAI's own refuse the older name.
    limit = "max_completion_tokens" if urlsplit(candidate.url).hostname == "api.openai.com" else "max_tokens"
    return DiscreetChat(candidate.url, candidate.key(), model=candidate.model, limit=limit, patience=patience)


# ------------------------------------------------------------------------------------------- opened


class Player(ABC):
    """A candidate that is ready to be asked."""

    @abstractmethod
    async def play(
        self, fleet: Fleet, task: Task, settings: Settings, *, seed: int, id: str, facts: Mapping[str, Any]
    ) -> Rollout:
        """One trial: a session in a pod, graded. RolloutFailed when there is nothing to be graded."""

    @abstractmethod
    async def check(self, failure: RolloutFailed) -> None:
        """Raise EtudeError if, after this failure of a trial, there is no use in trying another."""


@asynccontextmanager
async def open_player(
    candidate: Candidate, known: Known, *, at_once: int, device: str = "auto"
) -> AsyncIterator[Player]:
    """Load a checkpoint, or connect to an endpoint; closed with what it holds."""
    if candidate.directory is None:
        client = _client(candidate, PATIENCE)
        try:
            yield EndpointPlayer(candidate, client, known.window)
        finally:
            await client.close()
        return

    # Torch's compiler and the engine are loaded by those who need them only.
    from etude.inference.engine import Engine, EngineOptions
    from etude.inference.service import EngineService
    from etude.kernels import usable_device
    from etude.model.checkpoint import load

    tokenizer = Tokenizer.load(candidate.directory)
    network = await asyncio.to_thread(load, candidate.directory, device=usable_device(device))
    room = max(known.window, min(MOST_CACHE, at_once * known.window))
    options = EngineOptions(tokens=(-(-room // PAGE) + 2) * PAGE, page=PAGE, max_streams=at_once)
    async with EngineService(Engine(network, options, tokenizer=tokenizer)) as service:
        dialect = dialect_for(tokenizer, known.dialect)
        yield CheckpointPlayer(candidate, service, dialect, min(known.window, service.room))


class CheckpointPlayer(Player):
    """A model in this process, by its tokens."""

    def __init__(self, candidate: Candidate, service: Any, dialect: Dialect, window: int) -> None:
        from etude.inference.clients.inprocess import InProcess

        self.service = service
        self.voice = Voice(InProcess(service), dialect, window, candidate.name)

    async def play(
        self, fleet: Fleet, task: Task, settings: Settings, *, seed: int, id: str, facts: Mapping[str, Any]
    ) -> Rollout:
        return await run_rollout(fleet, task, self.voice, settings, seed=seed, id=id, facts=facts)

    async def check(self, failure: RolloutFailed) -> None:
        if self.service.failure is not None:
            raise self.service.failure


class EndpointPlayer(Player):
    """A model behind a chat API."""

    def __init__(self, candidate: Candidate, client: DiscreetChat, window: int) -> None:
        self.candidate, self.client, self.window = candidate, client, window

    async def play(
        self, fleet: Fleet, task: Task, settings: Settings, *, seed: int, id: str, facts: Mapping[str, Any]
    ) -> Rollout:
        # no seed: not every endpoint takes one, and those that do hold it for a wish
        return await run_chat_rollout(fleet, task, self.client, self.window, settings, id=id, facts=facts)

    async def check(self, failure: RolloutFailed) -> None:
        cause = failure.__cause__
        if isinstance(cause, ServerError) and cause.status in REFUSED:
            raise cause
        if isinstance(cause, Unreachable):  # one answer was lost, or is it gone?
            await _look_at_endpoint(self.candidate, 0)
