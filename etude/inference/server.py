"""HTTP server of an engine: OpenAI's chat and completion endpoints, and the token-exact endpoints that training uses.

    POST /v1/chat/completions  /v1/completions     GET /v1/models
    POST /generate             /weights            GET /weights
    POST /pause  /resume  /drain                   GET /health  /metrics

All input is validated and bounded; invalid input is a 4xx with OpenAI's error object. The requests of a client that
disconnects are cancelled. What changes the server (CHANGES) needs a token; the other endpoints need it too if the
operator gave one, and on addresses that other machines can reach.
"""

import asyncio
import contextlib
import json
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etude.chat.dialects import dialect_for
from etude.chat.dialects.turns import TurnDialect
from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError, InputError
from etude.inference.api_schema import (
    BadField,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    LoadWeightsRequest,
    parse_request,
)
from etude.inference.generate_protocol import check_logprobs_finite, completion_to_json, routing_to_json
from etude.inference.metrics import prometheus
from etude.inference.responses import ChatChoice, Choice, ResponseBuilder, TextChoice
from etude.inference.service import (
    ContextLengthExceeded,
    Draining,
    EngineBroken,
    EngineService,
    Generation,
    QueueFull,
    ServiceState,
)
from etude.system.http import RequestGuard, cancel_on_disconnect, serving

MAX_BODY = 64 << 20  # bytes of a JSON body: a prompt of a few million tokens
GRACE_S = 30.0  # for running requests to finish when the server is stopped
WATCH_S = 0.5  # between two checks whether the engine still works
CHANGES = frozenset(("POST", path) for path in ("/weights", "/pause", "/resume", "/drain"))


@dataclass(frozen=True)
class ServedModel:
    """How a model is served: its name for clients, the dialect of chats, and the profile in its checkpoint."""

    name: str
    dialect: TurnDialect | None = None
    problem: str = "this model is served without a tokenizer; send token ids to /generate"  # why there is no dialect
    profile: Mapping[str, Any] | None = None  # agent.json; clients of ours use it

    @classmethod
    def of(
        cls, name: str, tokenizer: Tokenizer | None, dialect: str = "", profile: Mapping[str, Any] | None = None
    ) -> "ServedModel":
        """Return a model with the given dialect, that of its profile, or the one that fits its tokenizer.

        A model whose chat template fits no dialect is served without chats.
        """
        if tokenizer is None:
            return cls(name, profile=profile)
        chosen = dialect or (profile or {}).get("dialect", "auto")
        try:
            return cls(name, dialect_for(tokenizer, chosen), profile=profile)
        except InputError as error:
            if chosen != "auto":
                raise
            problem = f"{error}: start the server with --dialect NAME, or use /v1/completions"
            return cls(name, None, problem, profile)

    @property
    def dialect_name(self) -> str | None:
        return self.dialect.name if self.dialect is not None else None

    @property
    def temperature(self) -> float:
        """Return the temperature of requests that give none: that of the model's training sessions."""
        return float((self.profile or {}).get("temperature", 1.0))

    def chat_dialect(self) -> TurnDialect:
        if self.dialect is None:
            raise InputError(self.problem)
        return self.dialect


class InferenceServer:
    """The endpoints, one method each."""

    def __init__(self, service: EngineService, model: ServedModel, max_body: int) -> None:
        self.service, self.served, self.max_body = service, model, max_body
        self.name = model.name
        self.started = int(time.time())
        # A full set of weights in float32 and its header, with room to spare.
        engine = service.engine
        parts = [engine.model, *([engine.mtp] if engine.mtp is not None else [])]
        self.max_weights = (64 << 20) + 5 * sum(each.numel() for part in parts for each in part.state_dict().values())

    # ------------------------------------------------------------------------------------------- OpenAI API

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"id": self.name, "object": "model", "created": self.started, "owned_by": "etude"}
        facts["max_model_len"] = self.service.max_sequence_tokens  # vLLM's name
        return facts | {"etude": {"profile": self.served.profile, "dialect": self.served.dialect_name}}

    async def chat(self, request: Request) -> Response:
        body = parse_request(ChatRequest, await self._json(request))
        self._check_model(body.model)
        dialect, messages, tools = self.served.chat_dialect(), body.chat(), body.usable_tools
        try:
            prompt = await asyncio.to_thread(dialect.render, messages, tools)
        except RecursionError:
            raise BadField("a tool's parameters are nested too deeply to be serialized", "tools") from None
        first_call = sum(len(message.calls) for message in messages)
        choices = [ChatChoice(i, dialect, body.stops, body.logprobs, tools, first_call) for i in range(body.n)]
        return await self._respond(request, body, prompt, choices)

    async def complete(self, request: Request) -> Response:
        body = parse_request(CompletionRequest, await self._json(request))
        tokenizer = self._check_model(body.model)
        given = body.one_prompt
        if isinstance(given, str):
            prompt = [*tokenizer.prefix, *await asyncio.to_thread(tokenizer.encode, given)]
        else:
            prompt = given
        choices = [TextChoice(i, tokenizer, body.stops, body.logprobs is not None) for i in range(body.n)]
        return await self._respond(request, body, prompt, choices)

    async def _respond(
        self, request: Request, body: ChatRequest | CompletionRequest, prompt: list[int], choices: Sequence[Choice]
    ) -> Response:
        room = max(1, self.service.max_sequence_tokens - len(prompt))
        stop = self._check_model(body.model).stop_ids
        sampling = body.sampling(room, self.served.temperature, random.getrandbits(60), stop)
        submitting = self.service.submit(prompt, sampling, streaming=body.stream)
        response = ResponseBuilder(self.name, await cancel_on_disconnect(request, submitting), choices)
        if body.stream:
            return CancellableResponse(response.events(body.include_usage), response.generation, "text/event-stream")
        return JSONResponse(await cancel_on_disconnect(request, response.full()))

    def _check_model(self, name: str | None) -> Tokenizer:
        tokenizer = self.service.engine.tokenizer
        if name is not None and name != self.name:
            raise NoSuchModel(f"the model {name!r:.200} is not served here; this server has {self.name!r}")
        if tokenizer is None:
            raise InputError("this model is served without a tokenizer; send token ids to /generate")
        return tokenizer

    # ------------------------------------------------------------------------------------------- token-exact

    async def generate(self, request: Request) -> Response:
        body = parse_request(GenerateRequest, await self._json(request))
        submitting = self.service.submit(body.tokens, body.sampling, streaming=body.stream)
        generation = await cancel_on_disconnect(request, submitting)
        if body.stream:
            return CancellableResponse(completion_lines(generation, body), generation, "application/x-ndjson")

        async def all_completions() -> dict[str, Any]:
            async with generation:
                completions = await generation.completions()
            samples = [completion_to_json(completion, body.routing, body.known_routing) for completion in completions]
            return {"samples": samples}

        return JSONResponse(await cancel_on_disconnect(request, all_completions()))

    async def weights(self, _: Request) -> Response:
        return JSONResponse({"version": self.service.version, "on_swap": self.service.engine.options.on_swap})

    async def load(self, request: Request) -> Response:
        """Load a checkpoint that this machine can read, by path, or tensors sent as a safetensors file."""
        if is_json(request):
            body = parse_request(LoadWeightsRequest, await self._json(request))
            return JSONResponse(asdict(await self.service.load(body.path, body.version)))
        version = request.query_params.get("version", "")
        if not (version.isascii() and version.isdecimal()) or len(version) > 18:
            raise BadField(f"version is {version!r:.40}; send it as /weights?version=N with the tensors", "version")
        with tempfile.TemporaryDirectory(prefix="etude-weights-") as directory:
            file = Path(directory) / "weights.safetensors"
            await receive_file(request, file, self.max_weights)
            try:
                tensors = await asyncio.to_thread(load_file, file)
            except SafetensorError as error:
                raise InputError(f"the body is not a safetensors file: {error}") from None
            return JSONResponse(asdict(await self.service.load(tensors, int(version))))

    # ------------------------------------------------------------------------------------------- operations

    async def pause(self, _: Request) -> Response:
        await self.service.pause()
        return self._state()

    async def resume(self, _: Request) -> Response:
        await self.service.resume()
        return self._state()

    async def drain(self, _: Request) -> Response:
        """Refuse new requests from now on; /health shows how many are still open."""
        self.service.start_draining()
        return self._state(202)

    async def health(self, _: Request) -> Response:
        return self._state(503 if self.service.state in ("draining", "broken", "closed") else 200)

    def _state(self, status: int = 200) -> JSONResponse:
        failure = self.service.failure
        state = {"status": self.service.state, "version": self.service.version, "open": self.service.open_sequences}
        return JSONResponse(state | ({"error": str(failure)} if failure else {}), status)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(prometheus(self.service.stats()), media_type="text/plain; version=0.0.4")

    async def _json(self, request: Request) -> Any:
        return await read_json(request, self.max_body)


class NoSuchModel(InputError):
    """The request names a model that is not served here."""


class CancellableResponse(StreamingResponse):
    """A streamed body; however it ends, what still runs for it is cancelled."""

    def __init__(self, content: AsyncIterator[bytes], generation: Generation, media_type: str) -> None:
        super().__init__(content, media_type=media_type, headers={"cache-control": "no-store"})
        self.generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.generation.cancel()


async def completion_lines(generation: Generation, body: GenerateRequest) -> AsyncIterator[bytes]:
    """Yield deltas of completions, one JSON object a line; the last of each has the ending and the routing."""
    try:
        async for delta in generation.deltas():
            check_logprobs_finite(delta.logprobs, delta.raw_logprobs)
            line = asdict(delta)
            if delta.ending is None:
                del line["ending"]
            else:
                whole = generation.sequences[delta.index].result()
                line |= {"cached": whole.cached, "preempted": whole.preempted}
                line["routing"] = routing_to_json(whole.routing, body.known_routing) if body.routing else None
            yield json.dumps(line).encode() + b"\n"
    except EtudeError as error:
        yield json.dumps(error_body(str(error), "server_error", "engine_broken")).encode() + b"\n"


async def read_json(request: Request, limit: int) -> Any:
    """Return a request's body, which is JSON of at most `limit` bytes."""
    if not is_json(request):
        raise HTTPException(415, "send the body as `content-type: application/json`")
    data = bytearray()
    async for chunk in read_body(request, limit):
        data += chunk
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON: {error}") from None


def is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


async def read_body(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield a request's body as it arrives; one whose declared length is too large is refused before."""
    too_large = HTTPException(413, f"the body has over {limit:,} bytes, the limit of this server")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        yield chunk


async def receive_file(request: Request, file: Path, limit: int) -> None:
    """Write a request's body to a file as it arrives."""
    with open(file, "xb") as out:
        async for chunk in read_body(request, limit):
            await asyncio.to_thread(out.write, chunk)


# --------------------------------------------------------------------------------------------------- errors


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def error_response(_: Request, error: Exception) -> Response:
    """Return any error as OpenAI's error object."""
    bad = "invalid_request_error"
    match error:
        case HTTPException():
            codes = {413: "body_too_large", 404: "not_found", 405: "method_not_allowed"}
            body = error_body(str(error.detail), bad, codes.get(error.status_code))
            return JSONResponse(body, error.status_code, error.headers)
        case QueueFull():
            return _retry_later(429, error_body(str(error), "rate_limit_error", "queue_full"), error.retry_after)
        case Draining():
            return _retry_later(503, error_body(str(error), "server_error", "draining"), error.retry_after)
        case EngineBroken():
            return JSONResponse(error_body(str(error), "server_error", "engine_broken"), 503)
        case NoSuchModel():
            return JSONResponse(error_body(str(error), bad, "model_not_found", "model"), 404)
        case ContextLengthExceeded():
            return JSONResponse(error_body(str(error), bad, "context_length_exceeded"), 400)
        case InputError():
            return JSONResponse(error_body(str(error), bad, None, getattr(error, "param", None)), 400)
        case ClientDisconnect():
            return Response(status_code=499)  # the client is gone
        case EtudeError():
            return JSONResponse(error_body(str(error), "server_error"), 500)
    return JSONResponse(error_body(f"{type(error).__name__}: {error}", "server_error", "internal_error"), 500)


def _refuse(status: int, message: str) -> Response:
    known = {401: ("authentication_error", "invalid_api_key")}
    return JSONResponse(error_body(message, *known.get(status, ("invalid_request_error",))), status)


def _retry_later(status: int, body: Mapping[str, Any], seconds: float) -> Response:
    return JSONResponse(body, status, {"retry-after": f"{seconds:g}"})


# --------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Access:
    """Who is answered: with a token those who send it, on every path but /health or only for `CHANGES`; no web page of
    another origin; and only under the names of this machine, IP addresses and `hosts`."""

    token: str = ""
    changes_only: bool = False
    hosts: tuple[str, ...] = ()

    def needs_token(self, method: str, path: str) -> bool:
        return (method, path) in CHANGES if self.changes_only else path != "/health"


def app(
    service: EngineService,
    model: ServedModel,
    access: Access = Access(),  # noqa: B008  (frozen)
    *,
    max_body: int = MAX_BODY,
) -> Starlette:
    """Return the application around a running service."""
    server = InferenceServer(service, model, max_body)

    def route(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, endpoint, methods=[method])

    routes = [
        route("POST", "/v1/chat/completions", server.chat),
        route("POST", "/v1/completions", server.complete),
        route("GET", "/v1/models", server.models),
        route("GET", "/v1/models/{name:path}", server.model),
        route("POST", "/generate", server.generate),
        route("POST", "/weights", server.load),
        route("GET", "/weights", server.weights),
        route("POST", "/pause", server.pause),
        route("POST", "/resume", server.resume),
        route("POST", "/drain", server.drain),
        route("GET", "/health", server.health),
        route("GET", "/metrics", server.metrics),
    ]
    return guarded_app(routes, access)


def guarded_app(routes: Sequence[Route], access: Access) -> Starlette:
    """Return an application with these endpoints, our access rules and our errors."""
    guard = Middleware(
        RequestGuard, refuse=_refuse, token=access.token, needs_token=access.needs_token, hosts=access.hosts
    )
    handlers = dict.fromkeys((HTTPException, EtudeError, ClientDisconnect, Exception), error_response)
    return Starlette(routes=list(routes), middleware=[guard], exception_handlers=handlers)


class Stoppable(Protocol):
    """What is served: an engine's service, or one in front of another server."""

    @property
    def state(self) -> ServiceState: ...

    @property
    def failure(self) -> EngineBroken | None: ...

    @property
    def open_sequences(self) -> int: ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...


async def run(
    service: EngineService,
    listener: socket.socket,
    model: ServedModel,
    access: Access = Access(),  # noqa: B008  (frozen)
    *,
    grace: float = GRACE_S,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve a model until SIGTERM or SIGINT."""
    await serve(app(service, model, access), service, listener, grace=grace, ready=ready)


async def serve(
    application: Starlette,
    service: Stoppable,
    listener: socket.socket,
    *,
    grace: float,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new requests, give running ones `grace` seconds and fail the rest.

    A broken service ends it too, so that a supervisor can start another process.
    """
    async with serving(application, listener) as stopped:
        ready()
        while not stopped.is_set() and service.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), WATCH_S)
        if service.state == "running" or (service.state == "draining" and service.open_sequences):
            with contextlib.suppress(TimeoutError, EtudeError):
                await asyncio.wait_for(service.drain(), grace)
        await service.close()  # before the connections: waiting clients get an error instead of a truncated response
