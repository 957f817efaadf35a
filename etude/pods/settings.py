"""Where pods run: on this machine, or on hosts that serve them (`etude pods serve`). The one place that reads how to
reach those: from a recipe, and from the variables that commands use."""

import os
import ssl
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from etude.config import AbsolutePath, Settings
from etude.errors import InputError

TOKEN_VARIABLE = "ETUDE_PODS_TOKEN"
TOKEN_FILE_VARIABLE = "ETUDE_PODS_TOKEN_FILE"
CERTIFICATE_VARIABLE = "ETUDE_PODS_CERTIFICATE"


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    cleaned = tuple(check_address(url) for url in hosts)
    if twice := [url for url in cleaned if cleaned.count(url) > 1]:
        raise ValueError(f"{twice[0]} is given twice")
    return cleaned


def check_address(url: str) -> str:
    """Return the address of a host without a slash at its end; raise ValueError if it is none."""
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/")
        or "@" in parts.netloc
    ):
        raise ValueError(f"{url!r} is not the address of `etude pods serve`, such as https://host-a:7741")
    return url.rstrip("/")


class PodSettings(Settings):
    """The hosts of pods, and how to reach them. All of them have one token."""

    hosts: Annotated[tuple[str, ...], AfterValidator(_check_hosts)] = Field(
        default=(), strict=False, description="addresses of `etude pods serve`; default: pods run on this machine"
    )
    token_file: AbsolutePath | None = Field(
        default=None, description=f"file with the hosts' token; default: ${TOKEN_FILE_VARIABLE}, or ${TOKEN_VARIABLE}"
    )
    certificate: AbsolutePath | None = Field(
        default=None,
        description="PEM file with the authority of the hosts' certificates; "
        f"default: ${CERTIFICATE_VARIABLE}, or those that this machine trusts",
    )
    lease_s: float = Field(
        default=60.0,
        ge=3,
        le=86400,
        description="seconds until the pods of a dead worker end, and until those of a silent host are given up",
    )

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        given = [name for name, key in type(self).model_fields.items() if getattr(self, name) != key.default]
        if given and not self.hosts:
            raise ValueError(f"{given[0]} would not be used: there are no hosts")
        return self

    def token(self) -> str:
        """Return the token of the hosts; empty if none is given."""
        file = self.token_file or os.environ.get(TOKEN_FILE_VARIABLE)
        if not file:
            return os.environ.get(TOKEN_VARIABLE, "").strip()
        try:
            return Path(file).expanduser().read_text(encoding="ascii").strip()
        except (OSError, UnicodeError) as error:
            raise InputError(f"token of the pod hosts: {file} cannot be read: {error}") from None

    def tls(self) -> ssl.SSLContext:
        """Return the context of connections to hosts with https."""
        file = self.certificate or os.environ.get(CERTIFICATE_VARIABLE)
        try:
            return ssl.create_default_context(cafile=str(Path(file).expanduser()) if file else None)
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"certificate of the pod hosts: {file}: {error}; expected a PEM file") from None
