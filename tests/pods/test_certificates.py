"""Programs in a pod trust the machine's certificate bundle: a TLS server whose private CA is only in that bundle."""

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pods import Egress
from etude.pods.fleet import open_host
from etude.pods.images.host_image import BUNDLES, CERTIFICATE_VARIABLES
from tests.pods.serving import need_namespaces

PROGRAMS = {
    "python": "python3 -c \"import urllib.request as u; print(u.urlopen('URL').read())\"",
    "curl": "curl -sS URL",
    "git": "git ls-remote URL/x.git",  # the server has no repository: git gets an answer that it does not understand
    "pip": "python3 -m pip download --no-deps --no-cache-dir --retries 0 -d /tmp -i URL/simple nothing",
    "node": "node -e \"require('https').get('URL', r => r.pipe(process.stdout))\"",
}


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"reached")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def tls_server(directory: Path) -> Iterator[tuple[int, bytes]]:
    """Serve on loopback with a certificate of a new CA; yield the port and the CA's certificate."""
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=private"]
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.pem"]
    subprocess.run([*new, *extra], cwd=directory, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "ca.pem", directory / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, (directory / "ca.pem").read_bytes()
        server.shutdown()


def test_programs_in_a_pod_trust_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_namespaces()
    bundle = next((path for path in BUNDLES if Path(path).is_file()), "")
    if not bundle:
        pytest.skip("this machine has no certificate bundle")

    async def act() -> None:
        host = await open_host("namespace", tmp_path / "state")
        try:
            with tls_server(tmp_path) as (port, authority):
                pod = await host.create(egress=Egress.to(f"127.0.0.1:{port}"))
                for trusted in (False, True):
                    if trusted:  # as if it were in the machine's bundle
                        await pod.write(bundle, await pod.read(bundle) + authority)
                    for name, command in PROGRAMS.items():
                        if not (await pod.exec(f"command -v {command.split()[0]}")).ok:
                            continue
                        done = await pod.exec(command.replace("URL", f"https://127.0.0.1:{port}"), timeout=60)
                        output = (done.stdout + done.stderr).lower()
                        assert ("certificate" in output or "self-signed" in output) is not trusted, (name, output)
                assert (await pod.exec("echo $PIP_CERT")).stdout.strip() == bundle
                closed = await host.create()
                assert (await closed.exec("echo $PIP_CERT")).stdout.strip() == ""
                monkeypatch.setenv("ETUDE_POD_CERTIFICATES", "none")
                plain = await host.create(egress=Egress.to("example.org"))
                assert not set(CERTIFICATE_VARIABLES) & {*(await plain.exec("env")).stdout.replace("=", "\n").split()}
                monkeypatch.setenv("ETUDE_POD_CERTIFICATES", str(tmp_path / "ca.pem"))
                with pytest.raises(InputError, match="expected none, or a file below"):
                    await host.create(egress=Egress.to("example.org"))
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(act())
