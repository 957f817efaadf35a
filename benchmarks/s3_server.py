"""An S3 server (moto) as a process of its own, with a bucket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

BUCKET = "runs"
START_S = 60.0


@contextmanager
def s3_server(host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[Mapping[str, str]]:
    """Run the server until the block ends; give the environment with which clients reach its bucket `BUCKET`.

    `prefix` is put before its command, to run it in another network namespace say, of which `host` is an address.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    own = {"AWS_ACCESS_KEY_ID": "any-key", "AWS_SECRET_ACCESS_KEY": "anything", "AWS_DEFAULT_REGION": "us-east-1"}
    own |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    command = [*prefix, sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            make_bucket({**os.environ, **own}, prefix)
            yield own
        finally:
            process.kill()


def make_bucket(environment: Mapping[str, str], prefix: Sequence[str]) -> None:
    """Make the bucket as soon as the server answers."""
    script = f"import s3fs; s3fs.S3FileSystem().mkdir({BUCKET!r})"
    deadline = time.monotonic() + START_S
    while True:
        command = [*prefix, sys.executable, "-c", script]
        made = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
        if made.returncode == 0:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the S3 server did not answer: {made.stderr[-500:]}")
        time.sleep(0.2)
