"""HTTP requests of tests: a busy machine may take longer than the five seconds that httpx waits by default."""

from functools import partial

import httpx

PATIENCE_S = 120.0

get, head, post, request = (
    partial(method, timeout=PATIENCE_S) for method in (httpx.get, httpx.head, httpx.post, httpx.request)
)
open_client = partial(httpx.AsyncClient, timeout=PATIENCE_S)
