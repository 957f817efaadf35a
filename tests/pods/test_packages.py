"""A real package is installed in a pod through the egress proxy, explicit and transparent, and refused without a rule.

Needs the package index that pip itself would use; the tests are skipped with pip's message if it is unreachable.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from etude.pods import Egress
from etude.pods.fleet import open_host

pytestmark = pytest.mark.slow
PACKAGE = "six"
INSTALL = (
    f"python3 -m venv /work/v && /work/v/bin/pip install --no-cache-dir --retries 0 {PACKAGE} && "
    f"/work/v/bin/python -c 'import {PACKAGE}; print({PACKAGE}.__file__)'"
)


def index_hosts() -> tuple[str, ...]:
    """Return the hosts of pip's default index, from pip itself."""
    code = "from pip._internal.models.index import PyPI as p; print(p.simple_url, p.file_storage_domain)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return urlsplit(found[0]).netloc, found[1]


@pytest.fixture(scope="module")
def reachable() -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "0", "-qd", "/dev/null/no", PACKAGE]
    output = subprocess.run(command, capture_output=True, text=True).stderr
    if "Could not find a version" in output or "Max retries" in output:
        pytest.skip(f"the package index cannot be reached: {output.strip().splitlines()[-1]}")


@pytest.mark.parametrize("transparent", [False, True])
def test_pip_installs_through_the_egress_proxy_and_other_hosts_are_refused(
    tmp_path: Path, reachable: None, transparent: bool
) -> None:
    async def act() -> None:
        host = await open_host("namespace", tmp_path / "state")
        try:
            egress = Egress.to(*index_hosts(), transparent=transparent, private=True)
            pod = await host.create(egress=egress)
            result = await pod.exec(INSTALL, timeout=300)
            assert result.stdout.splitlines()[-1].startswith("/work/v/"), result
            other = "python3 -c \"import urllib.request as u; u.urlopen('https://example.org/', timeout=5)\""
            assert not (await pod.exec(other, timeout=30)).ok
            seen = [event.facts for event in pod.events() if event.kind == "egress"]
            assert {facts["host"] for facts in seen if facts["allowed"]} == set(index_hosts())
            assert [facts["host"] for facts in seen if not facts["allowed"]] == ["example.org"]
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(act())


def test_pip_is_refused_without_a_rule_for_its_index(tmp_path: Path) -> None:
    async def act() -> None:
        host = await open_host("namespace", tmp_path / "state")
        try:
            pod = await host.create(egress=Egress.to("example.org"))
            assert not (await pod.exec(INSTALL, timeout=300)).ok
            refused = [event.facts for event in pod.events() if event.kind == "egress"]
            assert refused
            assert not any(facts["allowed"] for facts in refused)
            assert {facts["host"] for facts in refused} == {index_hosts()[0]}
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(act())
