"""Programs in a pod trust the machine's certificate bundle, and the image's: TLS servers with private CAs in these."""

import asyncio
import contextlib
import functools
import os
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pods import Egress
from etude.pods.fleet import open_fleet, open_host
from etude.pods.images import certificates
from etude.pods.images.certificates import BUNDLES, CERTIFICATE_VARIABLES, merge_bundles
from etude.pods.images.dockerfile import build
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.pod import Pod, PodError
from tests.pods.serving import need_namespaces

PROGRAMS = {
    "python": "python3 -c \"import urllib.request as u; print(u.urlopen('URL').read())\"",
    "curl": "curl -sS URL",
    "git": "git ls-remote URL/x.git",  # the server has no repository: git gets an answer that it does not understand
    "pip": "python3 -m pip download --no-deps --no-cache-dir --retries 0 -d /tmp -i URL/simple nothing",
    "node": "node -e \"require('https').get('URL', r => r.pipe(process.stdout))\"",
}


ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/root", "PYTHONDONTWRITEBYTECODE": "1"}


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


def programs_image(store: Store, bundle: bytes) -> Image:
    """Return an image with a root of its own, without binds: some of this machine's programs, and a bundle."""
    names = [name for name in ("sh", "env", "cat", "sha256sum", "python3", "curl", "git") if shutil.which(name)]
    files = {os.path.realpath(str(shutil.which(name, path="/usr/bin:/bin"))): f"usr/bin/{name}" for name in names}
    helper = Path("/usr/lib/git-core/git-remote-https")
    if helper.exists():
        files[str(helper.resolve())] = str(helper)[1:]
    version = subprocess.run(["/usr/bin/python3", "--version"], capture_output=True, text=True).stdout
    library = Path("/usr/lib", "python" + ".".join(version.split()[1].split(".")[:2]))
    loaded = [*files, *map(str, (library / "lib-dynload").glob("_[hs]*.so"))]
    listed = subprocess.run(["ldd", *loaded], capture_output=True, text=True).stdout
    files |= {path: path[1:] for path in re.findall(r"(/[^ :]+)(?: \(0x)", listed)}

    def fill(target: Path) -> None:
        for name in ("proc", "dev", "etc/ssl/certs", "usr/bin", "usr/lib", "usr/lib64", "work", "tmp", "root"):
            (target / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            os.symlink(f"usr/{name}", target / name)
        for source, name in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
        unused = shutil.ignore_patterns("test", "config-*", "idlelib", "lib2to3", "tkinter", "pydoc_data")
        shutil.copytree(library, target / str(library)[1:], ignore=unused)
        (target / "etc/resolv.conf").touch()
        (target / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
        (target / "etc/ssl/certs/ca-certificates.crt").write_bytes(bundle)

    return Image.of((store.add_layer(fill),), "own-root", env=ENVIRONMENT, workdir="/work")


def test_programs_of_other_images_trust_both_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_namespaces()
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    (tmp_path / "Dockerfile").write_text("FROM own-root\nARG URL\nRUN curl -sS $URL > answer\n")

    async def act() -> None:
        with tls_server(first) as (of_image, image_authority), tls_server(second) as (of_host, host_authority):
            host_bundle = tmp_path / "bundle.pem"
            host_bundle.write_bytes(host_authority)
            monkeypatch.setattr(certificates, "BUNDLES", (str(host_bundle),))
            async with open_fleet("namespace", state=tmp_path / "state") as fleet:
                assert fleet.local is not None
                image = programs_image(fleet.local.store, image_authority)
                urls = [f"https://127.0.0.1:{port}" for port in (of_image, of_host)]
                egress = Egress.to(*(f"127.0.0.1:{port}" for port in (of_image, of_host)))
                async with await fleet.create(image, egress=egress) as pod:
                    await reach_all(pod, urls, ["python", "curl", "git"])
                    assert await pod.diff() == {}
                    await pod.write("/work/file", "x")
                    (child,) = await pod.fork()  # and the pod is restarted on its layers
                    for each in (pod, child):
                        await reach_all(each, urls, ["curl"])
                    assert set(await pod.diff()) == {"/work/file"}
                    assert await child.diff() == {}
                    await child.close()
                images = {"own-root": image}
                build_ = functools.partial(build, fleet.local.builder, tmp_path / "Dockerfile", tmp_path, images)
                made = await build_({"URL": urls[1]}, egress)
                assert "SSL_CERT_FILE" not in made.env
                async with await fleet.create(made) as pod:
                    assert (await pod.exec("cat answer; env")).stdout.startswith("reached")
                    assert "SSL_CERT_FILE" not in (await pod.exec("env")).stdout
                monkeypatch.setenv("ETUDE_POD_CERTIFICATES", "none")
                async with await fleet.create(image, egress=egress) as pod:
                    assert not set(CERTIFICATE_VARIABLES) & {*(await pod.exec("env")).stdout.replace("=", "\n").split()}
                    assert (await pod.exec(["curl", "-sS", urls[0]])).stdout == "reached"
                    assert "certificate" in (await pod.exec(["curl", "-sS", urls[1]])).stderr

    asyncio.run(act())


async def reach_all(pod: Pod, urls: list[str], programs: list[str]) -> None:
    """Check that programs of the image trust the servers."""
    for url in urls:
        for name in programs:
            command = PROGRAMS[name].replace("URL", url)
            if not (await pod.exec(f"command -v {command.split()[0]}")).ok:
                continue
            done = await pod.exec(command, timeout=60)
            output = (done.stdout + done.stderr).lower()
            assert "certificate" not in output, (name, url, output)
            assert "self-signed" not in output, (name, url, output)
            assert name != "curl" or done.stdout == "reached", done


def test_bundles_are_merged_without_duplicates_and_with_a_limit() -> None:
    one, two = (f"-----BEGIN CERTIFICATE-----\n{x}\n-----END CERTIFICATE-----" for x in ("AAAA", "BBBB"))
    merged = merge_bundles(f"# comment\n{one}\n".encode(), f"{one}\r\n{two}".encode())
    assert merged.count(b"BEGIN") == 2
    assert b"comment" not in merged
    assert merge_bundles(b"", b"") == b""
    with pytest.raises(PodError, match="ETUDE_POD_CERTIFICATES"):
        merge_bundles(b"", one.replace("AAAA", "A" * (4 << 20)).encode())


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
