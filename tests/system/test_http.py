"""Requests as browsers, rebinding pages and ordinary clients send them, to a real server."""

import asyncio
import contextlib
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import patient_http
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from etude.errors import InputError
from etude.system.http import RequestGuard, UvicornServer, bind, host_name, read_token, stored_token, url_of

TOKEN = "0123456789abcdef"
TEXT, JSON, BYTES = ({"content-type": kind} for kind in ("text/plain", "application/json", "application/octet-stream"))
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@contextlib.contextmanager
def served(token: str = "") -> Iterator[str]:
    import uvicorn

    async def echo(request: Request) -> Response:
        return PlainTextResponse(await request.body())

    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("open")
        await websocket.close()

    guard = Middleware(
        RequestGuard,
        refuse=lambda status, message: PlainTextResponse(message, status),
        token=token,
        needs_token=lambda method, path: path == "/change",
        hosts=["allowed.example"],
    )
    routes = [Route(path, echo, methods=["GET", "POST"]) for path in ("/read", "/change")]
    app = Starlette(routes=[*routes, WebSocketRoute("/socket", socket)], middleware=[guard])
    with bind("127.0.0.1", 0) as listener:
        server = UvicornServer(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def test_pages_of_other_origins_and_foreign_names_are_refused() -> None:
    with served() as url:
        port = url.rpartition(":")[2]
        own = {"origin": f"http://localhost:{port}", "host": f"localhost:{port}", "sec-fetch-site": "same-origin"}
        cases: list[tuple[int, dict[str, str]]] = [
            (200, {}),
            (200, {"host": f"localhost:{port}"}),
            (200, {"host": f"[::1]:{port}"}),
            (200, {"host": "ALLOWED.example."}),
            (200, own),
            (421, {"host": f"rebind.example:{port}"}),
            (421, {"host": f"127.0.0.1.rebind.example:{port}"}),
            (421, {"host": "localhost@rebind.example"}),
            (403, {"origin": "http://evil.example"}),
            (403, {"origin": "null"}),
            (403, {"origin": "http://localhost:1"}),  # another program of this machine
            (403, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}),
            (403, {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}),
        ]
        for status, headers in cases:
            assert patient_http.get(f"{url}/read", headers=headers).status_code == status, headers
            assert patient_http.post(f"{url}/change", headers=headers).status_code == status, headers
        assert patient_http.get(f"{url}/read", headers=LINK).status_code == 200  # a link to a page
        assert patient_http.post(f"{url}/read", headers=LINK).status_code == 403  # a form


def test_a_body_has_a_type_that_pages_cannot_send_unasked() -> None:
    with served() as url:
        for status, headers in [(200, JSON), (200, BYTES), (415, TEXT), (415, {})]:
            assert patient_http.post(f"{url}/read", content=b"1", headers=headers).status_code == status, headers
            chunks = iter([b"1", b"2"])
            assert patient_http.post(f"{url}/read", content=chunks, headers=headers).status_code == status, headers
        assert (
            patient_http.post(f"{url}/read", headers={"content-type": "application/json; charset=utf-8"}).status_code
            == 200
        )
        assert patient_http.post(f"{url}/read", files={"a": b"1"}).status_code == 415


def test_changes_need_the_token_and_with_it_any_name_will_do() -> None:
    with served(TOKEN) as url:
        known = {"authorization": f"Bearer {TOKEN}"}
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": f"Bearer {TOKEN}x"}):
            assert patient_http.post(f"{url}/change", headers=headers).status_code == 401
            assert patient_http.get(f"{url}/read", headers=headers).status_code == 200
        assert patient_http.post(f"{url}/change", headers=known).status_code == 200
        assert patient_http.post(f"{url}/change", headers=known | {"host": "gpu7.cluster"}).status_code == 200
        assert patient_http.post(f"{url}/change", headers=known | {"origin": "http://evil.example"}).status_code == 403


def test_a_websocket_of_another_origin_is_refused() -> None:
    with served() as url:
        address = url.replace("http", "ws") + "/socket"
        with connect(address) as socket:
            assert socket.recv() == "open"
        with connect(address, origin=url) as socket:  # type: ignore[arg-type]
            assert socket.recv() == "open"
        for options in ({"origin": "http://evil.example"}, {"additional_headers": {"sec-fetch-site": "cross-site"}}):
            with pytest.raises(InvalidStatus, match="403"):
                connect(address, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "name"),
    [("a", "a"), ("A:1", "a"), ("[::1]:8000", "::1"), ("[::1]", "::1"), ("", ""), ("a.:80", "a")],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


def test_tokens_are_read_made_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_token("0.0.0.0", tmp_path / "token", False) == TOKEN
    assert read_token("0.0.0.0", None, False, "UNSET") is None
    assert read_token("127.0.0.1", None, True) == ""
    monkeypatch.setenv("SET", TOKEN)
    assert read_token("127.0.0.1", None, False, "SET") == TOKEN
    for host, variable, complaint in [("0.0.0.0", "UNSET", "needs a token"), ("127.0.0.1", "SET", "there is one in")]:
        with pytest.raises(InputError, match=complaint):
            read_token(host, None, True, variable)
    made = stored_token(tmp_path / "made")
    assert len(made) == 48
    assert stored_token(tmp_path / "made") == made
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o600
