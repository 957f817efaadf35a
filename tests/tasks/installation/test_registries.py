"""Registries are those of the settings of this host's package managers, which programs of the same names print here."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from local_index import serving_files

from etude.tasks.installation.package_index import IndexSettings, open_package_index
from etude.tasks.installation.registries import addresses, cargo_urls, without_credentials

QUESTION = """
import json
from etude.tasks.installation import registries
from etude.tasks.installation.registries import debian_hosts, index_url, registry_environment, registry_hosts
hosts = {name: registry_hosts(name) for name in ("python", "node", "go", "rust")}
print(json.dumps([index_url(), hosts, debian_hosts(), registry_environment(), registries.npm_registry_url()]))
"""
PROGRAMS = {
    "npm": "echo https://name:word@npm.example.org/team/",
    "yarn": "echo https://yarn.example.org:8443",
    "go": """echo '{"GOPROXY": "https://go.example.org,direct", "GOSUMDB": "sum.example.org"}'""",
    "apt-get": "echo http://deb.example.org/debian; echo file:/srv/debian",
}


def settings_of_host(directory: Path, **variables: str) -> list:
    """Return what the settings of a host with these variables and PROGRAMS are read as."""
    for name, line in PROGRAMS.items():
        (directory / name).write_text(f"#!/bin/sh\n{line}\n")
        (directory / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment = {**kept, "PATH": f"{directory}:/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull, **variables}
    done = subprocess.run([sys.executable, "-c", QUESTION], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def test_each_package_manager_is_asked(tmp_path: Path) -> None:
    index, hosts, debian, environment, npm = settings_of_host(
        tmp_path, PIP_INDEX_URL="https://pip.example.org/simple", CARGO_HOME=str(tmp_path)
    )
    assert index == "https://pip.example.org/simple"
    assert hosts["python"] == hosts["rust"] == []
    assert hosts["node"] == ["npm.example.org:443", "yarn.example.org:8443"]
    assert hosts["go"] == ["go.example.org:443", "sum.example.org:443"]
    assert debian == ["deb.example.org:80"]
    assert npm == "https://npm.example.org/team/"  # without the password
    assert environment["GOPROXY"] == "https://go.example.org,direct"


def test_without_settings_the_index_is_pips_own(tmp_path: Path) -> None:
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    own = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert settings_of_host(tmp_path, HOME=str(tmp_path))[0] == own


def test_cargo_is_read_from_its_configuration_or_from_what_it_has_used(tmp_path: Path) -> None:
    used = tmp_path / "registry/index/crates.example.org-1949cf8c6b5b557f"
    used.mkdir(parents=True)
    (used / "config.json").write_text(json.dumps({"dl": "https://files.example.org/crates"}))
    assert addresses(cargo_urls(tmp_path, {})) == ("crates.example.org:443", "files.example.org:443")
    (tmp_path / "config.toml").write_text('[source.ours]\nregistry = "sparse+http://127.0.0.1:1/index/"\n')
    assert addresses(cargo_urls(tmp_path, {})) == ("127.0.0.1:1",)


def test_only_web_addresses_count() -> None:
    assert addresses(["file:///srv", "direct", "off", "http://a.example.org:8080/x", "https://[::1]/"]) == (
        "a.example.org:8080",
        "[::1]:443",
    )
    assert without_credentials("https://name:word@a.example.org:8080/x?token=1") == "https://a.example.org:8080/x"


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm")
def test_npm_gets_packages_of_its_registry_from_the_host_and_each_is_fetched_once(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in {"package.json": '{"name": "@a/pad", "version": "1.0.0"}', "index.js": "let x = 1\n"}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    files: dict[str, bytes] = {"/@a/pad/-/pad-1.0.0.tgz": raw.getvalue()}
    with serving_files(files) as (url, requests):
        dist = {"tarball": f"{url}/@a/pad/-/pad-1.0.0.tgz", "shasum": hashlib.sha1(raw.getvalue()).hexdigest()}
        versions = {"1.0.0": {"name": "@a/pad", "version": "1.0.0", "dist": dist}}
        document = {"name": "@a/pad", "dist-tags": {"latest": "1.0.0"}, "versions": versions}
        files["/@a%2fpad"] = json.dumps(document).encode()
        for number in range(2):  # two installations, each with a server of its own
            project = tmp_path / f"project-{number}"
            project.mkdir()
            (project / "package.json").write_text('{"dependencies": {"@a/pad": "^1.0.0"}}')
            with open_package_index(IndexSettings("http://127.0.0.1:1/", cache=tmp_path / "cache", npm=url)) as index:
                settings = index.environment("all") | {"npm_config_cache": str(tmp_path / f"npm-{number}")}
                command = ["npm", "install", "--no-audit", "--no-fund", "--no-update-notifier"]
                environment = {**os.environ, **settings, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
                subprocess.run(command, cwd=project, env=environment, check=True, capture_output=True, timeout=120)
                assert index.npm is not None
                assert index.npm.get("../secret", "*/*", "http://127.0.0.1/").status == 404
                assert index.npm.get("missing", "*/*", "http://127.0.0.1/").status == 404
            assert (project / "node_modules/@a/pad/index.js").read_text() == "let x = 1\n"
    assert [path for path, _ in requests].count("/@a/pad/-/pad-1.0.0.tgz") == 1
    assert [status for path, status in requests if path == "/@a%2fpad"] == [200, 304]


def test_a_document_that_is_younger_than_the_date_is_not_fetched_again(tmp_path: Path) -> None:
    with serving_files({"/pad": b"{}"}) as (url, requests):
        for as_of in ("", "2024-05-31", "2024-05-31", "2999-01-01"):
            settings = IndexSettings("http://127.0.0.1:1/", as_of=as_of, cache=tmp_path, npm=url)
            with open_package_index(settings) as index:
                assert index.npm is not None
                assert index.npm.get("pad", "application/json", index.npm_url).data == b"{}"
    assert [status for _, status in requests] == [200, 304]
