"""Package registries of this host: those that pip, npm, yarn, go, cargo and apt use by their settings or by default.

Nothing here names a registry. Credentials in the settings stay on the host: pods get addresses, and URLs without them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from etude.errors import InputError
from etude.tasks.installation.proposal import Ecosystem

TIMEOUT_S = 60.0
PORTS = {"http": 80, "https": 443}
_PIP_DEFAULT = re.compile(r"--index-url\b.*?\(default\s+(\S+?)\)", re.S)
_PIP_SETTING = re.compile(r"^(:env:|install|global)\.index-url='(.*)'$", re.M)
_SPARSE = "sparse+"


def index_url() -> str:
    """Return the URL of the simple index that pip uses on this host."""
    settings: dict[str, str] = dict(_PIP_SETTING.findall(_output(sys.executable, "-m", "pip", "config", "list")))
    for place in (":env:", "install", "global"):
        if settings.get(place):
            return settings[place]
    found = _PIP_DEFAULT.search(_output(sys.executable, "-m", "pip", "install", "--help"))
    if found is None:
        raise InputError("pip of this interpreter names no package index; give one with --index-url")
    return str(found[1])


def registry_hosts(ecosystem: Ecosystem) -> tuple[str, ...]:
    """Return the hosts with ports of the registries of an ecosystem, besides the index of Python packages."""
    return addresses(_registry_urls(ecosystem))


def debian_hosts() -> tuple[str, ...]:
    """Return the hosts with ports from which apt gets packages."""
    return addresses(_output("apt-get", "indextargets", "--format", "$(REPO_URI)").split())


def registry_environment() -> dict[str, str]:
    """Return the variables with which go in a pod uses the proxies of this host."""
    go = [without_credentials(each) or each for each in re.split("[,|]", _go_settings().get("GOPROXY", "")) if each]
    found = {"GOPROXY": ",".join(go), "GOSUMDB": _go_settings().get("GOSUMDB", "")}
    return {name: value for name, value in found.items() if value}


def npm_registry_url() -> str:
    """Return the URL of the registry that npm uses on this host, without name and password; empty if it has no npm."""
    return next((url for url in map(without_credentials, _npm_urls()[:1]) if url), "")


def addresses(urls: Iterable[str]) -> tuple[str, ...]:
    """Return host and port of the http(s) URLs among these, without repetitions."""
    found = []
    for each in urls:
        parts = urlsplit(each)
        if parts.scheme in PORTS and parts.hostname:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            found.append(f"{host}:{parts.port or PORTS[parts.scheme]}")
    return tuple(dict.fromkeys(found))


def without_credentials(url: str) -> str:
    """Return an http(s) URL without name and password; empty if it is none."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", "")) if parts.scheme in PORTS else ""


def _registry_urls(ecosystem: Ecosystem) -> list[str]:
    if ecosystem == "node":
        return _npm_urls()
    if ecosystem == "go":
        settings = _go_settings()
        database = settings.get("GOSUMDB", "").split(" ")  # a name, or a name with key, and the URL if it is elsewhere
        named = [database[-1] if "://" in database[-1] else f"https://{database[0].partition('+')[0]}"]
        return [*re.split("[,|]", settings.get("GOPROXY", "")), *(named if database[0] not in ("", "off") else ())]
    if ecosystem == "rust":
        home = Path(os.environ.get("CARGO_HOME") or "~/.cargo").expanduser()
        return list(cargo_urls(home, os.environ))
    return []


def _npm_urls() -> list[str]:
    """Return the registry of npm, then that of yarn."""
    programs = [name for name in ("npm", "yarn") if shutil.which(name)]
    found = [_output(name, "config", "get", "registry").strip() for name in programs]
    return [url for url in found if urlsplit(url).scheme in PORTS]


def _go_settings() -> dict[str, str]:
    text = _output("go", "env", "-json", "GOPROXY", "GOSUMDB")
    return dict(json.loads(text)) if text else {}


# ------------------------------------------------------------------------------------------------- cargo


def cargo_urls(home: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the URLs of the indexes that cargo is configured to use or has used, and of what serves their files."""
    settings: dict[str, Any] = {}
    for name in ("config", "config.toml"):
        if (home / name).is_file():
            settings |= tomllib.loads((home / name).read_text(encoding="utf-8"))
    given = [each.get("registry", "") for each in settings.get("source", {}).values() if isinstance(each, dict)]
    given += [each.get("index", "") for each in settings.get("registries", {}).values() if isinstance(each, dict)]
    given += [value for name, value in environment.items() if re.fullmatch(r"CARGO_REGISTRIES_\w+_INDEX", name)]
    for url in given:
        if url.startswith(_SPARSE):
            yield url.removeprefix(_SPARSE)
            yield from _download_urls(_fetched(f"{url.removeprefix(_SPARSE).rstrip('/')}/config.json"))
    # Without settings, cargo's own default is known by the directory that it made for it: HOST-DIGEST.
    for directory in sorted((home / "registry/index").glob("*-*")) if not given else ():
        file = directory / "config.json"
        yield f"https://{directory.name.rpartition('-')[0]}"
        yield from _download_urls(file.read_text(encoding="utf-8") if file.is_file() else "")


def _download_urls(configuration: str) -> Iterator[str]:
    """Yield the URL of crate files that the config.json of an index names."""
    try:
        value = json.loads(configuration)
    except ValueError:
        return
    if isinstance(value, dict) and isinstance(value.get("dl"), str):
        yield value["dl"]


def _fetched(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return str(response.read(1 << 16).decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError):
        return ""


@cache
def _output(*command: str) -> str:
    """Return what a program of this host prints; empty if it is missing or fails."""
    environment = {**os.environ, "COLUMNS": "1000", "NO_COLOR": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
