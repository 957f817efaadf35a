"""Debian packages are installed in pods over the host's own programs, which stay as they are."""

import asyncio
import os
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pods.fleet import open_host
from etude.pods.images.host_image import host_image
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.images.writable_system import writable_system

PACKAGE = """\
set -e
mkdir -p p/DEBIAN p/usr/bin
printf '#!/bin/sh\\necho installed\\n' > p/usr/bin/etude-probe
chmod 755 p/usr/bin/etude-probe
printf 'Package: etude-probe\\nVersion: 1\\nArchitecture: all\\n' > p/DEBIAN/control
printf 'Maintainer: a <a@localhost>\\nDescription: x\\n' >> p/DEBIAN/control
dpkg-deb -b p probe.deb
apt-get install -y -q ./probe.deb
echo changed > /usr/bin/env
rm /usr/bin/printf
"""


def test_system_directories_are_linked_and_credentials_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = {
        "usr/bin/tool": 0o755,
        "usr/share/secret": 0o600,
        "usr/closed/file": 0o644,
        "var/lib/dpkg/status": 0o644,
        "var/lib/dpkg/status-old": 0o644,
        "var/lib/dpkg/info/tool.list": 0o644,
        "etc/apt/sources.list": 0o644,
        "etc/apt/auth.conf": 0o644,
        "etc/apt/auth.conf.d/token.conf": 0o644,
        "etc/passwd": 0o644,
    }
    for path, mode in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
        (root / path).chmod(mode)
    (root / "usr/closed").chmod(0o700)
    store = Store(tmp_path / "store")
    bound = Image.of((), "bound", binds=("/usr", "/opt"))

    def contents() -> set[str]:
        image = writable_system(store, bound, root=root)
        assert image.binds == ("/opt",)
        tops = [store.layer_path(layer) for layer in image.layers]
        return {str(path.relative_to(top)) for top in tops for path in top.rglob("*") if path.is_file()}

    made = contents()
    written = {"etc/apt/apt.conf.d/99pod", "etc/dpkg/dpkg.cfg.d/pod", "usr/sbin/policy-rc.d"}
    assert made - written == {
        "usr/bin/tool",
        "var/lib/dpkg/status",
        "var/lib/dpkg/info/tool.list",
        "etc/apt/sources.list",
    }
    system = store.layer_path(writable_system(store, bound, root=root).layers[0])
    assert (system / "usr/bin/tool").samefile(root / "usr/bin/tool")
    (root / "usr/bin/new").write_text("new")
    assert contents() == {*made, "usr/bin/new"}
    store.add_image(bound)
    writable_system(store, bound, root=root)
    assert store.image("bound").binds == bound.binds
    with pytest.raises(InputError, match="no dpkg"):
        writable_system(store, bound, root=tmp_path)


@pytest.mark.slow
def test_a_package_is_installed_in_a_pod_and_in_its_snapshot_but_not_on_the_host(tmp_path: Path) -> None:
    programs = {name: Path(f"/usr/bin/{name}").read_bytes() for name in ("env", "printf")}

    async def act() -> None:
        host = await open_host("namespace", tmp_path / "state")
        try:
            try:
                image = writable_system(host.store, host_image(host.store))
            except InputError as error:
                pytest.skip(str(error))
            pod = await host.create(image, storage="disk")
            done = await pod.exec(["bash", "-c", PACKAGE], timeout=300)
            assert done.ok, done.stdout + done.stderr
            copy = await host.create(await pod.snapshot("fs"))
            for each in (pod, copy):
                assert (await each.exec("etude-probe")).stdout == "installed\n"
                assert "install ok installed" in (await each.exec("dpkg -s etude-probe")).stdout
                assert not (await each.exec("test -e /usr/bin/printf")).ok
                assert (await each.exec("cat /usr/bin/env")).stdout == "changed\n"
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(act())
    assert programs == {name: Path(f"/usr/bin/{name}").read_bytes() for name in programs}
    assert not os.path.exists("/usr/bin/etude-probe")
