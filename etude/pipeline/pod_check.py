"""Which pods a recipe's sessions use: those of this machine, or of the hosts that it names, as they are now."""

import asyncio
import tempfile

from etude.errors import InputError
from etude.pods.fleet import open_fleet
from etude.pods.host_client import HostGone
from etude.pods.pod import Unsupported
from etude.pods.runtime.probe import strongest_backend
from etude.pods.settings import PodSettings


def usable_pods(settings: PodSettings) -> str:
    """Return what pods a run will use, and what they lack; InputError if there are none."""
    try:
        if settings.hosts:
            return ", ".join(asyncio.run(_hosts(settings)))
        return asyncio.run(strongest_backend()).summary()
    except (HostGone, Unsupported) as error:
        raise InputError(str(error)) from None


def weaker_pods(settings: PodSettings) -> str:
    """Return a line about pods that are weaker than they could be; empty if none are."""
    pods = usable_pods(settings)
    return f"pods: {pods}; `etude pods doctor` says more" if "without" in pods else ""


async def _hosts(settings: PodSettings) -> list[str]:
    """Return the hosts that can be used; the others are logged."""
    with tempfile.TemporaryDirectory(prefix="etude-hosts-") as state:
        async with open_fleet(pods=settings, state=state) as fleet:
            found = {client.url: fleet.watch.reports[client.url].lacks for client in fleet.watch.usable()}
    return [f"{url} without {'; '.join(lacks)}" if lacks else url for url, lacks in found.items()]
