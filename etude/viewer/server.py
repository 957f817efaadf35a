"""The pages over HTTP: one run at `/`, or a list of runs with each under `/run/NAME/`.

Reads only. What it serves was written by models and by programs in pods, so nothing of it may run: every answer is data
(JSON), pages may load nothing but our own files and may not turn text into markup (Trusted Types), and a name that
points here from elsewhere is refused.
"""

import json
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from etude.errors import EtudeError
from etude.viewer.api import Answers, NotHere, tell_runs
from etude.viewer.run_reader import find_runs

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def asset(name: str) -> bytes:
    """A file of the front end."""
    return files("etude.viewer").joinpath("pages").joinpath(name).read_bytes()


def assets() -> list[str]:
    """Their names."""
    return sorted(each.name for each in files("etude.viewer").joinpath("pages").iterdir() if each.is_file())


def dump(value: Any) -> bytes:
    """JSON that every browser reads. What is no number there is null; text that is no Unicode is escaped."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def app(path: Path, hosts: list[str] | None = None) -> Starlette:
    """The pages of a run, or of every run in a directory, for whoever asks under one of the names `hosts`."""
    runs = find_runs(path)
    single = list(runs) == [""]
    known = {name: Answers(where) for name, where in runs.items()}
    names = frozenset(assets())

    def find(name: str) -> Answers | None:
        """A run by its name; one that was begun meanwhile too."""
        if name not in known and not single and name in (now := find_runs(path)):
            known[name] = Answers(now[name])
        return known.get(name)

    async def page(request: Request) -> Response:
        if "name" in request.path_params and find(request.path_params["name"]) is None:
            return _error(404, f"there is no run {request.path_params['name']!r} here")
        mode = "run" if single else "run-of-many" if "name" in request.path_params else "runs"
        text = asset("index.html").replace(b'data-mode="run"', f'data-mode="{mode}"'.encode())
        return Response(text, media_type="text/html", headers=HEADERS)

    async def slash(request: Request) -> Response:
        return RedirectResponse(f"{request.url.path}/", headers=HEADERS)

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in names:
            return _error(404, "there is no such file")
        return Response(asset(name), media_type=KINDS[name.rpartition(".")[2]], headers=HEADERS)

    async def api(request: Request) -> Response:
        answers = find(request.path_params.get("name", ""))
        if answers is None:
            return _error(404, "there is no such run")
        return await run_in_threadpool(_answer, partial(answers.answer, request.path_params["address"]))

    async def listing(request: Request) -> Response:
        return await run_in_threadpool(_answer, lambda: tell_runs(find_runs(path)))

    if single:
        routes = [Route("/", page), Route("/api/{address:path}", api)]
    else:
        routes = [
            Route("/", page),
            Route("/api/runs", listing),
            Route("/run/{name}", slash),
            Route("/run/{name}/", page),
            Route("/run/{name}/api/{address:path}", api),
        ]
    routes.append(Route("/pages/{file}", file))
    pages = Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["localhost", "127.0.0.1", "[::1]"]),
            Middleware(GZipMiddleware, minimum_size=4096, compresslevel=3),
        ],
    )
    pages.add_exception_handler(HTTPException, _refuse)
    pages.state.runs = known
    return pages


def _answer(ask: Any) -> Response:
    try:
        return Response(dump(ask()), media_type="application/json", headers=HEADERS)
    except NotHere as error:
        return _error(404, str(error))
    except (EtudeError, OSError) as error:
        return _error(409, str(error))


async def _refuse(request: Request, error: Exception) -> Response:
    """What the routes themselves refuse, under the same headers."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


def _error(status: int, words: str) -> Response:
    return Response(dump({"error": words}), status, headers=HEADERS, media_type="application/json")
