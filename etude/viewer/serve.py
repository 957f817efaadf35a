"""Run the viewer's HTTP server until a signal stops it."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.system.http import bind, serving, url_of
from etude.viewer.server import make_app


async def serve(path: Path, host: str, port: int, ready: Callable[[str], None], hosts: Sequence[str] = ()) -> None:
    """Serve a run, or a directory of runs, under the names of this machine and `hosts`; `ready` gets the URL."""
    pages = make_app(path, (host, *hosts))
    with bind(host, port) as listener:
        for api in list(pages.state.runs.values())[:1]:  # fill its caches while the browser is being opened
            threading.Thread(target=api.run, daemon=True).start()
        async with serving(pages, listener) as stopped:
            ready(f"{url_of(listener)}/")
            await stopped.wait()
