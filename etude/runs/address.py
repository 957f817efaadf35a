"""Where the run service of a run listens, and the token that admits to it.

`rl/service.json` records the address: a service that is restarted takes the same one, because processes elsewhere know
no other. The token is in a file that only its owner can read, and is passed to processes in their environment.
"""

import contextlib
import json
import os
import random
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from etude.config import AbsolutePath, Settings, read_toml
from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.runs.layout import RunLayout
from etude.system.http import is_loopback, stored_token

TOKEN_VARIABLE = "ETUDE_RUN_TOKEN"
CERTIFICATE_VARIABLE = "ETUDE_RUN_CERTIFICATE"  # PEM text: what to trust beside the system's certificates
PORTS = 12_000  # below the range of outgoing connections, one of which could take the port while the service restarts
TABLE = "service"  # of a recipe


class ServiceSettings(Settings):
    """Where the run service listens."""

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0: reachable from other machines")
    port: int = Field(default=0, ge=0, le=65535, description="port; 0: a free one, which the run keeps")
    url: str = Field(default="", description="URL under which other machines reach it; default: from host and port")
    certificate: AbsolutePath | None = Field(default=None, description="TLS certificate in PEM; default: plain HTTP")
    key: AbsolutePath | None = Field(default=None, description="the certificate's private key")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: give both or none")
        if self.url and not self.url.startswith("https://" if self.certificate else "http://"):
            raise ValueError(
                f"url must begin with http{'s' if self.certificate else ''}://, as there is "
                f"{'a' if self.certificate else 'no'} certificate"
            )
        return self

    def url_of(self, port: int) -> str:
        """Return the URL under which a service on this port is reached."""
        if self.url:
            return self.url.rstrip("/")
        name = self.host.strip("[]")
        if name in ("0.0.0.0", "::"):
            name = socket.gethostname()
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}"


@dataclass(frozen=True)
class RunAddress:
    """The address of a run service."""

    url: str
    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)


def service_settings(layout: RunLayout) -> ServiceSettings:
    """Return the table [service] of the recorded recipe."""
    return ServiceSettings.model_validate(read_toml(layout.recipe).get(TABLE, {}), context={"directory": layout.run})


def read_address(layout: RunLayout) -> RunAddress | None:
    """Return the recorded address; None if no service was started yet."""
    try:
        return RunAddress(**json.loads(layout.service_address.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise EtudeError(f"{layout.service_address}: damaged: {error}; remove it") from None


def choose_address(layout: RunLayout, own: str = "127.0.0.1") -> RunAddress:
    """Record where the run service will listen: as before if that port is free. Only the run's writer may call this.

    `own` is the address under which the processes of the run reach this machine, if the recipe names none.
    """
    settings, before = service_settings(layout), read_address(layout)
    if is_loopback(settings.host):
        settings = settings.model_copy(update={"host": own})
    port = settings.port or next(
        port for port in _candidates(before.port if before else 0) if _is_free(settings.host, port)
    )
    address = RunAddress(settings.url_of(port), settings.host, port)
    write_atomically(layout.service_address, json.dumps(asdict(address)), durable=True)
    return address


def _candidates(before: int) -> Iterator[int]:
    if before:
        yield before
    low = 32768
    with contextlib.suppress(OSError, ValueError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        yield random.randrange(max(1024, low - PORTS), low) if low > 1024 else random.randrange(1024, 65536)
    raise InputError("there is no free port for the run service; give one in [service] port")


def _is_free(host: str, port: int) -> bool:
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host.strip("[]"), port), family=family):
            return True
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise InputError(f"[service] host {host}: {error.strerror}") from None
        return False


# ------------------------------------------------------------------------------------------- admission


def run_token(layout: RunLayout) -> str:
    """Return the token of a run; the first call makes it."""
    layout.root.mkdir(parents=True, exist_ok=True)
    return stored_token(layout.service_token)


def given_token() -> str:
    """Return the token that this process was started with."""
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return token
    raise InputError(f"${TOKEN_VARIABLE} is not set: it must hold the token of the run (the file service.token there)")


def run_certificate(layout: RunLayout) -> str:
    """Return the certificates that clients trust beside those of the system, in PEM."""
    given = service_settings(layout).certificate
    try:
        return given.read_text(encoding="ascii") if given else ""
    except (OSError, UnicodeError) as error:
        raise InputError(f"[service] certificate {given}: {error}") from None


def service_environment(layout: RunLayout) -> dict[str, str]:
    """Return the variables with which a process on any machine is admitted to the run service."""
    found = {TOKEN_VARIABLE: run_token(layout)}
    if certificate := run_certificate(layout):
        found[CERTIFICATE_VARIABLE] = certificate
    return found


def client_context(certificate: str, environment: Mapping[str, str] = os.environ) -> ssl.SSLContext:
    """Return the TLS settings of a client that also trusts these certificates."""
    context = ssl.create_default_context()
    try:
        if certificate := certificate or environment.get(CERTIFICATE_VARIABLE, ""):
            context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(f"the certificate of the run service cannot be read: {error}") from None
    return context
