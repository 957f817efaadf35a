"""An engine behind HTTP: OpenAI's chats and completions, and the token-exact endpoints that training uses.

    POST /v1/chat/completions  /v1/completions     GET /v1/models
    POST /generate             /weights            GET /weights
    POST /pause  /resume  /drain                   GET /health  /metrics

Nothing that comes in is believed or unbounded; whatever is wrong with it is a 4xx in OpenAI's error object. A client
that hangs up has its samples cancelled. On a loopback address a token is optional, elsewhere it is not.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import random
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError, InputError
from etude.inference.api_schema import BadField, ChatAsk, CompletionAsk, GenerateAsk, WeightsAsk, parse
from etude.inference.chat_format import Dialect, Hermes
from etude.inference.generate_protocol import array_to_json, check_numbers, sample_to_json
from etude.inference.incremental_text import Text
from etude.inference.metrics import prometheus
from etude.inference.responses import Answer, Choice, chat_shape, completion_shape
from etude.inference.service import Draining, EngineBroken, EngineService, Generation, QueueFull, TooLong

MAX_BODY = 64 << 20  # bytes of a JSON body: a prompt of a few million tokens
GRACE_S = 30.0  # that running requests have to finish when the server is told to stop
WATCH_S = 0.5  # between two looks whether the engine still works

T = TypeVar("T")


class Guard:
    """Lets in whoever has the token, and everybody who only asks for its health."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.token and scope["path"] != "/health":
            scheme, _, given = Request(scope).headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token):
                message = "the token is missing or wrong; send the server's as `Authorization: Bearer`"
                body = error_body(message, "authentication_error", "invalid_api_key")
                await JSONResponse(body, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Server:
    """The answers. One method per endpoint."""

    def __init__(self, service: EngineService, name: str, dialect: Dialect | None, max_body: int) -> None:
        self.service, self.name, self.max_body = service, name, max_body
        self.started = int(time.time())
        tokenizer = service.engine.tokenizer
        self.dialect = dialect or (Hermes(tokenizer) if tokenizer is not None else None)
        # A full set of weights in float32 and its header, with room to spare.
        engine = service.engine
        parts = [engine.model, *([engine.mtp] if engine.mtp is not None else [])]
        self.max_weights = (64 << 20) + 5 * sum(each.numel() for part in parts for each in part.state_dict().values())

    # ------------------------------------------------------------------------------------------- OpenAI's

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "etude"}

    async def chat(self, request: Request) -> Response:
        ask = parse(ChatAsk, await self._json(request))
        tokenizer = self._check_model(ask.model)
        assert self.dialect is not None
        messages = [message.plain() for message in ask.messages]
        try:
            prompt = await asyncio.to_thread(self.dialect.encode, messages, ask.usable_tools)
        except RecursionError:
            raise BadField("a tool's parameters are nested too deeply to be written out", "tools") from None
        shape = chat_shape(self.name, tokenizer, ask.logprobs)
        reader = self.dialect.reader if ask.usable_tools else lambda: None
        choices = [Choice(i, Text(tokenizer, ask.stops, tokenizer.stop_ids), reader()) for i in range(ask.n)]
        return await self._answer(request, ask, prompt, lambda generation: Answer(generation, shape, choices))

    async def complete(self, request: Request) -> Response:
        ask = parse(CompletionAsk, await self._json(request))
        tokenizer = self._check_model(ask.model)
        given = ask.one_prompt
        if isinstance(given, str):
            prompt = [*tokenizer.prefix, *await asyncio.to_thread(tokenizer.encode, given)]
        else:
            prompt = given
        shape = completion_shape(self.name, tokenizer, ask.logprobs is not None)
        choices = [Choice(i, Text(tokenizer, ask.stops, tokenizer.stop_ids)) for i in range(ask.n)]
        return await self._answer(request, ask, prompt, lambda generation: Answer(generation, shape, choices))

    async def _answer(
        self,
        request: Request,
        ask: ChatAsk | CompletionAsk,
        prompt: list[int],
        make: Callable[[Generation], Answer],
    ) -> Response:
        tokenizer = self._check_model(ask.model)
        room = self.service.room - len(prompt)
        if room < 1:
            raise TooLong(f"the prompt has {len(prompt):,} tokens; with an answer {self.service.room:,} fit here")
        sampling = ask.sampling(ask.limit or room, random.getrandbits(60), tokenizer.stop_ids)
        submitting = self.service.submit(prompt, sampling, streaming=ask.stream)
        answer = make(await unless_gone(request, submitting))
        if ask.stream:
            return Pouring(answer.events(ask.include_usage), answer.generation, "text/event-stream")
        return JSONResponse(await unless_gone(request, answer.whole()))

    def _check_model(self, name: str | None) -> Tokenizer:
        tokenizer = self.service.engine.tokenizer
        if name is not None and name != self.name:
            raise NoSuchModel(f"the model {name!r:.200} is not here; this server has {self.name!r}")
        if tokenizer is None:
            raise InputError("this model is served without a tokenizer; ask with token ids at /generate")
        return tokenizer

    # ------------------------------------------------------------------------------------------- token-exact

    async def generate(self, request: Request) -> Response:
        ask = parse(GenerateAsk, await self._json(request))
        sampling = ask.sampling.sampling()
        submitting = self.service.submit(ask.tokens, sampling, streaming=ask.stream)
        generation = await unless_gone(request, submitting)
        if ask.stream:
            return Pouring(sample_lines(generation, ask.routing), generation, "application/x-ndjson")

        async def all_samples() -> dict[str, Any]:
            async with generation:
                samples = await generation.samples()
            return {"samples": [sample_to_json(sample, ask.routing) for sample in samples]}

        return JSONResponse(await unless_gone(request, all_samples()))

    async def weights(self, _: Request) -> Response:
        return JSONResponse({"version": self.service.version, "on_swap": self.service.engine.options.on_swap})

    async def load(self, request: Request) -> Response:
        """A checkpoint that this machine can read, by its path; or the tensors themselves as a safetensors file."""
        if is_json(request):
            ask = parse(WeightsAsk, await self._json(request))
            return JSONResponse(asdict(await self.service.load(ask.path, ask.version)))
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
        """Take nothing new from now on; /health tells when all has ended."""
        self.service.start_draining()
        return self._state(202)

    async def health(self, _: Request) -> Response:
        return self._state(503 if self.service.state in ("draining", "broken", "closed") else 200)

    def _state(self, status: int = 200) -> JSONResponse:
        failure = self.service.failure
        state = {"status": self.service.state, "version": self.service.version, "open": self.service.held}
        return JSONResponse(state | ({"error": str(failure)} if failure else {}), status)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(prometheus(self.service.stats()), media_type="text/plain; version=0.0.4")

    async def _json(self, request: Request) -> Any:
        if not is_json(request):
            # A page of another origin can send anything else to a loopback address without being asked.
            raise HTTPException(415, "send the body as `content-type: application/json`")
        data = bytearray()
        async for chunk in body_of(request, self.max_body):
            data += chunk
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the body is not JSON: {error}") from None


class NoSuchModel(InputError):
    """The request names a model that is not served here."""


class Pouring(StreamingResponse):
    """A body as it is made; however it ends, what still runs for it is cancelled."""

    def __init__(self, content: AsyncIterator[bytes], generation: Generation, media_type: str) -> None:
        super().__init__(content, media_type=media_type, headers={"cache-control": "no-store"})
        self.generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.generation.cancel()


async def sample_lines(generation: Generation, routing: bool) -> AsyncIterator[bytes]:
    """Pieces of samples, one JSON object a line; a sample's last has its ending and what is known only then."""
    try:
        async for piece in generation.pieces():
            check_numbers(piece.logprobs, piece.raw_logprobs)
            line = asdict(piece)
            if piece.ending is None:
                del line["ending"]
            else:
                whole = generation.streams[piece.index].result()
                chosen = whole.routing if routing else None
                line |= {"cached": whole.cached, "preempted": whole.preempted}
                line["routing"] = None if chosen is None else array_to_json(chosen)
            yield json.dumps(line).encode() + b"\n"
    except EtudeError as error:
        yield json.dumps(error_body(str(error), "server_error", "engine_broken")).encode() + b"\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up."""
    task = asyncio.create_task(work)

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(hung_up())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


async def body_of(request: Request, limit: int) -> AsyncIterator[bytes]:
    """A request's body as it comes; one that says that it is too large is not even waited for."""
    too_large = HTTPException(413, f"the body has over {limit:,} bytes, the most that is taken here")
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
    """Write a request's body to a file as it comes."""
    with open(file, "xb") as out:
        async for chunk in body_of(request, limit):
            await asyncio.to_thread(out.write, chunk)


# --------------------------------------------------------------------------------------------------- errors


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def show_error(_: Request, error: Exception) -> Response:
    """Any error as OpenAI's error object."""
    bad = "invalid_request_error"
    match error:
        case HTTPException():
            codes = {413: "body_too_large", 404: "not_found", 405: "method_not_allowed"}
            body = error_body(str(error.detail), bad, codes.get(error.status_code))
            return JSONResponse(body, error.status_code, error.headers)
        case QueueFull():
            return _busy(429, error_body(str(error), "rate_limit_error", "queue_full"), error.retry_after)
        case Draining():
            return _busy(503, error_body(str(error), "server_error", "draining"), error.retry_after)
        case EngineBroken():
            return JSONResponse(error_body(str(error), "server_error", "engine_broken"), 503)
        case NoSuchModel():
            return JSONResponse(error_body(str(error), bad, "model_not_found", "model"), 404)
        case TooLong():
            return JSONResponse(error_body(str(error), bad, "context_length_exceeded"), 400)
        case InputError():
            return JSONResponse(error_body(str(error), bad, None, getattr(error, "param", None)), 400)
        case ClientDisconnect():
            return Response(status_code=499)  # nobody reads it
        case EtudeError():
            return JSONResponse(error_body(str(error), "server_error"), 500)
    return JSONResponse(error_body(f"{type(error).__name__}: {error}", "server_error", "internal_error"), 500)


def _busy(status: int, body: Mapping[str, Any], after: float) -> Response:
    return JSONResponse(body, status, {"retry-after": f"{after:g}"})


# --------------------------------------------------------------------------------------------------- running


def app(
    service: EngineService,
    *,
    name: str,
    token: str = "",
    dialect: Dialect | None = None,
    max_body: int = MAX_BODY,
) -> Starlette:
    """The application around a running service; without a token, for everybody who can connect."""
    server = Server(service, name, dialect, max_body)

    def route(method: str, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, answer, methods=[method])

    return Starlette(
        routes=[
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
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers=dict.fromkeys((HTTPException, EtudeError, ClientDisconnect, Exception), show_error),
    )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(host: str, file: Path | None) -> str:
    """The token of a file; empty only where nobody but this machine can connect."""
    if file is None:
        if not is_loopback(host):
            raise InputError(f"--host {host} can be reached from outside; that needs a token: give --token-file")
        return ""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeError) as error:
        raise InputError(f"--token-file {file}: {error}") from None
    if len(token) < 16 or not token.isascii():
        raise InputError(f"--token-file {file}: a token has at least 16 ASCII characters (`openssl rand -hex 24`)")
    return token


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free."""
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}; name another") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it a small answer takes 40 ms
    return listener


class Uvicorn(uvicorn.Server):
    """uvicorn, with signals left to us: it would raise them again before what runs is finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(
    service: EngineService,
    listener: socket.socket,
    *,
    name: str,
    token: str = "",
    grace: float = GRACE_S,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT: then nothing new, what runs has `grace` seconds, and the rest is told so.

    A broken engine ends it too, so that whoever supervises the process can start another.
    """
    config = uvicorn.Config(
        app(service, name=name, token=token),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = Uvicorn(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        ready()
    while not stop.is_set() and not serving.done() and service.failure is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), WATCH_S)
    if service.state == "running" or (service.state == "draining" and service.held):
        with contextlib.suppress(TimeoutError, EtudeError):
            await asyncio.wait_for(service.drain(), grace)
    await service.close()  # before the connections: whoever still waits gets an error, not an answer cut off
    server.should_exit = True
    await serving
