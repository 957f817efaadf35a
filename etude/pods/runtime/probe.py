"""Find which backend works on this machine, by creating a pod, running a command in it and removing it.

The strongest one is cached for the process. A backend that does not work gives a reason that a person can act on.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from etude.errors import InputError
from etude.pods.images.sources import host_image
from etude.pods.images.store import Store
from etude.pods.pod import Capabilities, Limits, PodError, Unsupported
from etude.pods.runtime import landlock
from etude.pods.runtime.backend import Backend, PodSpec
from etude.pods.runtime.directories import LandlockBackend, SubprocessBackend
from etude.pods.runtime.namespaces import NamespaceBackend
from etude.pods.runtime.native.build import require_helper

BACKENDS: dict[str, Callable[[Path, Store, Path], Backend]] = {
    "namespace": NamespaceBackend,
    "landlock": LandlockBackend,
    "subprocess": SubprocessBackend,
}
ORDER = ("namespace", "landlock")  # tried by "auto", the stronger isolation first; "subprocess" only by name
PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ProbeResult:
    """Whether a backend works on this machine."""

    backend: str
    works: bool
    reason: str  # why not, or how it was tried
    capabilities: Capabilities | None = None

    def summary(self) -> str:
        """Return the backend with what it lacks on this machine."""
        lacks = self.capabilities.lacks() if self.capabilities else []
        return f"{self.backend}, without {'; '.join(lacks)}" if lacks else self.backend


_strongest: list[ProbeResult] = []  # the one that works, cached for the process


def make_backend(name: str, state: Path, store: Store) -> Backend:
    """Return a backend by name, without probing it."""
    if name not in BACKENDS:
        raise InputError(f"unknown pod backend {name!r}; expected one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](state, store, require_helper(state))


async def probe(name: str, *, disk_limits: bool = False) -> ProbeResult:
    """Create a pod on this backend and run a command in it; with `disk_limits` also one that has such a limit."""
    if name == "landlock" and landlock.abi() == 0:
        return ProbeResult(
            name, False, "this kernel has no Landlock (since 5.13, and it must be among the active LSMs)"
        )
    state = Path(tempfile.mkdtemp(prefix="etude-probe-"))
    (state / "pods").mkdir()
    backend = None
    started = time.perf_counter()
    try:
        store = Store(state / "store")
        backend = await asyncio.to_thread(make_backend, name, state, store)
        spec = PodSpec(id="probe", image=host_image(store), limits=Limits())
        pod = await asyncio.wait_for(backend.start(spec), PROBE_TIMEOUT_S)
        try:
            result = await pod.exec("echo probe > probe && cat probe", timeout=PROBE_TIMEOUT_S)
            mounts = (await pod.exec("cat /proc/self/mountinfo", timeout=PROBE_TIMEOUT_S)).stdout
        finally:
            await pod.end()
        if result.stdout != "probe\n":
            why = result.stderr.strip() or result.exit_code
            return ProbeResult(name, False, f"a pod started, but its command failed: {why}")
        took = (time.perf_counter() - started) * 1000
        own_mounts = backend.capabilities.isolation == "namespace"
        notes = (*backend.capabilities.notes, *(shared_notes(mounts, spec.image.binds) if own_mounts else ()))
        notes += tuple(await try_disk_limit(backend, spec)) if disk_limits else ()
        capabilities = replace(backend.capabilities, notes=notes)
        return ProbeResult(name, True, f"created a pod and ran a command in {took:.0f} ms", capabilities)
    except (OSError, PodError, TimeoutError) as error:
        return ProbeResult(name, False, with_hints(name, str(error) or "no answer in time"))
    finally:
        if backend is not None:
            await backend.shutdown()
        shutil.rmtree(state, ignore_errors=True)


async def try_disk_limit(backend: Backend, spec: PodSpec) -> list[str]:
    """Return a note on why a pod with files on disk and a limit cannot be created, if that is so."""
    limited = replace(spec, id="probe-disk", storage="disk", limits=Limits(disk=16 << 20, inodes=1000))
    try:
        pod = await asyncio.wait_for(backend.start(limited), PROBE_TIMEOUT_S)
    except (OSError, PodError, TimeoutError) as error:
        return [f"pods with files on disk and a limit are refused: {str(error) or 'no answer in time'}"]
    await pod.end()
    return []


def shared_notes(mounts: str, shared: Sequence[str]) -> list[str]:
    """Return a note on the shared directories that a pod sees on the machine's own file systems, not on overlays."""
    machine = {line.split()[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()}  # device numbers
    plain = []
    for _, _, device, _, point, *_ in map(str.split, mounts.splitlines()):
        inside = any(point == path or point.startswith(f"{path}/") for path in shared)
        if inside and device in machine and os.path.isdir(point):
            plain.append(point)
    if not plain:
        return []
    return [
        f"{', '.join(sorted(set(plain)))}: the file system cannot be a layer of an overlay, so pods reach the host's "
        "sockets and FIFOs there, and see by inotify which files are used"
    ]


def with_hints(name: str, error: str) -> str:
    """Return an error together with its usual causes on this machine."""
    if name != "namespace":
        return error
    hints = []
    limit = _number("/proc/sys/user/max_user_namespaces")
    if limit == 0:
        hints.append("user namespaces are disabled: sysctl user.max_user_namespaces=15000")
    if _number("/proc/sys/kernel/unprivileged_userns_clone") == 0 and os.geteuid():
        hints.append("not allowed for ordinary users: sysctl kernel.unprivileged_userns_clone=1")
    if _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1 and os.geteuid():
        hints.append("AppArmor forbids them: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a profile")
    if "Operation not permitted" in error and not hints:
        hints.append("a container's seccomp filter or missing privileges; in Docker: --privileged, or a wider profile")
    return "; ".join([error, *hints])


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


async def choose_backend(name: str) -> str:
    """Return the backend to use: the one named, or for "auto" the strongest that works here."""
    return (await strongest_backend()).backend if name == "auto" else name


async def strongest_backend() -> ProbeResult:
    """Return the strongest backend that works here; raise Unsupported if none can isolate a pod."""
    if _strongest:
        return _strongest[0]
    failures = []
    for candidate in ORDER:
        result = await probe(candidate)
        if result.works:
            _strongest[:] = [result]
            return result
        failures.append(result)
    if len({result.reason for result in failures}) == 1:  # such as a missing compiler
        raise Unsupported(failures[0].reason)
    reasons = "\n".join(f"  {result.backend}: {result.reason}" for result in failures)
    raise Unsupported(
        f'no backend can isolate a pod on this machine:\n{reasons}\n  for trusted code only: backend="subprocess"'
    )
