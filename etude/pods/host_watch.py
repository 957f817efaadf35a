"""Watches the hosts of a fleet: their reports go to the router, and each change of what a host can do is one line."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from etude.errors import EtudeError, InputError
from etude.pods.host_client import HostClient, HostGone, HostRefused
from etude.pods.host_system import HostSystem
from etude.pods.scheduling.router import HostReport, PodRouter

ISOLATION_OPTION = "ETUDE_POD_ISOLATION"  # "strong": no pods where they are isolated less than as root
REPORT_INTERVAL_S = 1.0
REPORT_TIMEOUT_S = 5.0
HostState = Literal["", "gone", "refused", "draining", "full"]

log = logging.getLogger("etude.pods")


def strong_isolation() -> bool:
    """Return whether this environment refuses pods that are isolated less than by the strongest backend as root."""
    wanted = os.environ.get(ISOLATION_OPTION, "any")
    if wanted not in ("any", "strong"):
        raise InputError(f"{ISOLATION_OPTION}={wanted}: expected any or strong")
    return wanted == "strong"


class HostWatch:
    """Polls hosts. `clients` is by address. The router knows hosts by name; a host has a new one after a restart."""

    def __init__(self, clients: Mapping[str, HostClient], router: PodRouter) -> None:
        self.clients, self.router = clients, router
        self.states: dict[str, tuple[HostState, str]] = {}  # by address, with the reason
        self.reports: dict[str, HostReport] = {}  # by address
        self.was_full: set[str] = set()
        self.started = False
        self.polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Get the first report of every host, and poll them from then on. Raise an error if none can be used."""
        await self._poll()
        self.started = True
        if not self.usable():
            reasons = "\n".join(f"  {reason}" for _, reason in self.states.values())
            passing = any(state != "refused" for state, _ in self.states.values())
            raise (HostGone if passing else HostRefused)(f"no pod host can be used:\n{reasons}")
        for state, reason in self.states.values():
            if state:
                log.warning("%s; other hosts take its work", reason)
        self.polling = asyncio.create_task(self._poll_forever())

    async def close(self) -> None:
        if self.polling is not None:
            self.polling.cancel()

    def usable(self) -> list[HostClient]:
        """Return the hosts that take new pods, now or once others have ended."""
        return [client for url, client in self.clients.items() if self.states.get(url, ("gone", ""))[0] in ("", "full")]

    def answers(self, client: HostClient) -> bool:
        """Return whether a host answered when it was asked last, also if it takes no pods."""
        return self.states.get(client.url, ("", ""))[0] not in ("gone", "refused")

    def system(self) -> HostSystem:
        """Return the system that most hosts had when they answered last."""
        found = Counter(report.system for report in self.reports.values())
        return max(sorted(found, key=str), key=lambda system: found[system], default=HostSystem())

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self._poll()

    async def _poll(self) -> None:
        await asyncio.gather(*map(self._poll_host, list(self.clients.values())))

    async def _poll_host(self, client: HostClient) -> None:
        state: HostState
        try:
            report = await asyncio.wait_for(client.report(), REPORT_TIMEOUT_S)
            state, reason = self._take(client, report)
        except TimeoutError:
            state, reason = "gone", f"host {client.url} does not answer within {REPORT_TIMEOUT_S:g} s"
        except (EtudeError, OSError) as error:  # the router leaves out a host without reports
            state, reason = "refused" if isinstance(error, HostRefused) else "gone", str(error)
        self._note(client.url, state, reason)

    def _take(self, client: HostClient, report: HostReport) -> tuple[HostState, str]:
        """Pass a report to the router; return what keeps the host from taking pods."""
        if reason := self._unsuitable(client, report):
            self.router.forget(client.name)
            return "refused", f"host {client.url} {reason}"
        if report.host != client.name:  # the host was restarted at the same address
            self.router.forget(client.name)
            client.name = report.host
        self.router.report(report)
        self.reports[client.url] = report
        if report.draining:
            return "draining", f"host {client.url} is draining and takes no new pods"
        if report.pods >= report.max_pods:
            return "full", f"host {client.url} is full: it has {report.pods} pods of at most {report.max_pods}"
        return "", ""

    def _unsuitable(self, client: HostClient, report: HostReport) -> str:
        """Return why a host that answers is not used."""
        if strong_isolation() and report.lacks:
            return f"isolates pods without {'; '.join(report.lacks)}, which {ISOLATION_OPTION}=strong refuses"
        for url, other in self.reports.items():
            if url != client.url and other.host == report.host:
                return f"is the same as {url}"
            if url != client.url and other.system.machine != report.system.machine:
                return f"has another processor ({report.system.machine}) than {url} ({other.system.machine})"
        return ""

    def _note(self, url: str, state: HostState, reason: str) -> None:
        """Log a change of a host's state; that it is full only once, because that comes and goes."""
        before = self.states.get(url, ("", ""))[0]
        self.states[url] = (state, reason)
        if not self.started or state == before or (state == "full" and url in self.was_full):
            return
        if state:
            log.warning("%s; other hosts take its work", reason)
        elif before != "full":
            log.warning("host %s takes pods again", url)
        if state == "full":
            self.was_full.add(url)
