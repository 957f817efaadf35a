"""The viewer's HTTP application: one run at `/`, or a list of runs with each under `/run/NAME/`.

Read only. The contents of a run were written by models and programs in pods, so none of it may execute: every response
is JSON, pages may load only our own files and may not turn text into markup (Trusted Types), and requests with a
foreign host name or origin are refused.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from etude.errors import EtudeError
from etude.system.http import RequestGuard
from etude.viewer.api import NotFound, RunApi, list_runs
from etude.viewer.run_reader import find_runs

CONTENT_SECURITY_POLICY = {
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
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in CONTENT_SECURITY_POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def asset(name: str) -> bytes:
    """Return a file of the front end."""
    return files("etude.viewer").joinpath("pages").joinpath(name).read_bytes()


def assets() -> list[str]:
    """Return the names of the front end's files."""
    return sorted(each.name for each in files("etude.viewer").joinpath("pages").iterdir() if each.is_file())


def to_json(value: Any) -> bytes:
    """Return JSON that every browser accepts: NaN and infinities become null, invalid Unicode is escaped."""
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


def make_app(path: Path, hosts: Sequence[str] = ()) -> Starlette:
    """Return the application for a run, or every run in a directory; `hosts` are further names of this server."""
    runs = find_runs(path)
    single = list(runs) == [""]
    apis = {name: RunApi(run) for name, run in runs.items()}
    names = frozenset(assets())

    def find(name: str) -> RunApi | None:
        """Return the API of a run, including runs that were started since."""
        if name not in apis and not single and name in (now := find_runs(path)):
            apis[name] = RunApi(now[name])
        return apis.get(name)

    async def page(request: Request) -> Response:
        if "name" in request.path_params and find(request.path_params["name"]) is None:
            return _error(404, f"no run {request.path_params['name']!r} in this directory")
        mode = "run" if single else "run-of-many" if "name" in request.path_params else "runs"
        text = asset("index.html").replace(b'data-mode="run"', f'data-mode="{mode}"'.encode())
        return Response(text, media_type="text/html", headers=HEADERS)

    async def slash(request: Request) -> Response:
        return RedirectResponse(f"{request.url.path}/", headers=HEADERS)

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in names:
            return _error(404, "no such file")
        return Response(asset(name), media_type=MEDIA_TYPES[name.rpartition(".")[2]], headers=HEADERS)

    async def api(request: Request) -> Response:
        run_api = find(request.path_params.get("name", ""))
        if run_api is None:
            return _error(404, "no such run")
        return await run_in_threadpool(_respond, partial(run_api.get, request.path_params["address"]))

    async def listing(request: Request) -> Response:
        return await run_in_threadpool(_respond, lambda: list_runs(find_runs(path)))

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
            Middleware(RequestGuard, refuse=_error, hosts=hosts),
            Middleware(GZipMiddleware, minimum_size=4096, compresslevel=3),
        ],
    )
    pages.add_exception_handler(HTTPException, _http_error)
    pages.state.runs = apis
    return pages


def _respond(get: Any) -> Response:
    try:
        return Response(to_json(get()), media_type="application/json", headers=HEADERS)
    except NotFound as error:
        return _error(404, str(error))
    except (EtudeError, OSError) as error:
        return _error(409, str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the errors of the router itself with the same headers."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


def _error(status: int, message: str) -> Response:
    return Response(to_json({"error": message}), status, headers=HEADERS, media_type="application/json")
