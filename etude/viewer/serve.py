"""Run the viewer's HTTP server until a signal stops it."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from etude.errors import InputError
from etude.viewer.server import make_app

ANY_ADDRESS = ("0.0.0.0", "::")
LOCAL_NAMES = ["localhost", "127.0.0.1", "::1", "[::1]"]


async def serve(path: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve a run, or a directory of runs; `ready` is called with the URL."""
    pages = make_app(path, ["*"] if host in ANY_ADDRESS else [*LOCAL_NAMES, host, f"[{host}]"])
    with _bind(host, port) as listener:
        bound_port = listener.getsockname()[1]
        for api in list(pages.state.runs.values())[:1]:  # fill its caches while the browser is being opened
            threading.Thread(target=api.run, daemon=True).start()
        ready(f"http://{f'[{host}]' if ':' in host else host}:{bound_port}/")
        server = _Server(
            uvicorn.Config(pages, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.end)
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which raise the signal again: being stopped is not a failure here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}; choose another address") from None
