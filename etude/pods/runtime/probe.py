"""Which backend this machine can run. Each is tried for real, once: a pod is made, a command run, the pod removed.

The answer is kept for the process. A backend that cannot run says why in words a person can act on.
"""

import asyncio
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from etude.errors import InputError
from etude.pods.images.sources import host_image
from etude.pods.images.store import Store
from etude.pods.pod import Capabilities, Limits, PodError, Unsupported
from etude.pods.runtime import linux
from etude.pods.runtime.backend import Backend, PodSpec
from etude.pods.runtime.landlock import ruleset
from etude.pods.runtime.landlock.backend import LandlockBackend, SubprocessBackend
from etude.pods.runtime.namespaces import NamespaceBackend
from etude.pods.runtime.native.build import find_helper
from etude.system import compiler as compiling

ORDER = ("namespace", "landlock")  # tried by "auto", the stronger first; "subprocess" only by name
TRY_S = 20.0
_chosen: dict[str, str] = {}  # what "auto" meant, found once in a process


@dataclass(frozen=True)
class Verdict:
    """Whether a backend works here."""

    backend: str
    works: bool
    reason: str  # why not, or how it was tried
    capabilities: Capabilities | None = None


def make_backend(name: str, state: Path, store: Store, compiled: bool = True) -> Backend:
    """A backend by name, not tried."""
    if name == "namespace":
        return NamespaceBackend(state, store, find_helper(cache_directory(state))[0] if compiled else None)
    if name == "landlock":
        return LandlockBackend(state, store)
    if name == "subprocess":
        return SubprocessBackend(state, store)
    raise InputError(f"there is no pod backend {name!r}; there are: auto, {', '.join(ORDER)}, subprocess")


def cache_directory(state: Path) -> Path:
    """Where the compiled keeper is kept: once for a user, or with the pods of one who has no home."""
    place = compiling.cache_directory()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return state / "cache"
    return place if os.access(place, os.W_OK | os.X_OK) else state / "cache"


async def probe(name: str, compiled: bool = True) -> Verdict:
    """Make a pod on this backend and run a command in it."""
    if not linux.SUPPORTED and name != "subprocess":
        return Verdict(name, False, f"needs Linux on x86_64 or aarch64, this is {os.uname().sysname}")
    if name == "landlock" and ruleset.abi() == 0:
        return Verdict(name, False, "this kernel has no Landlock (since 5.13, and it must be among the active LSMs)")
    state = Path(tempfile.mkdtemp(prefix="etude-probe-"))
    (state / "pods").mkdir()
    backend = None
    started = time.perf_counter()
    try:
        store = Store(state / "store")
        backend = make_backend(name, state, store, compiled)
        spec = PodSpec(id="probe", image=host_image(store), limits=Limits())
        pod = await asyncio.wait_for(backend.start(spec), TRY_S)
        try:
            result = await pod.exec("echo probe > probe && cat probe", timeout=TRY_S)
        finally:
            await pod.end()
        if result.stdout != "probe\n":
            why = result.stderr.strip() or result.exit_code
            return Verdict(name, False, f"a pod ran, but its command failed: {why}")
        took = (time.perf_counter() - started) * 1000
        return Verdict(name, True, f"made a pod and ran a command in {took:.0f} ms", backend.capabilities)
    except (OSError, PodError, TimeoutError) as error:
        return Verdict(name, False, explain(name, str(error) or "no answer in time"))
    finally:
        if backend is not None:
            await backend.shut()
        shutil.rmtree(state, ignore_errors=True)


def explain(name: str, error: str) -> str:
    """An error of the kernel with what usually causes it."""
    if name != "namespace":
        return error
    hints = []
    limit = _number("/proc/sys/user/max_user_namespaces")
    if limit == 0:
        hints.append("user namespaces are switched off: sysctl user.max_user_namespaces=15000")
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


async def choose(name: str) -> str:
    """The backend to use: the one named, or the strongest that works here."""
    if name != "auto":
        return name
    if name in _chosen:
        return _chosen[name]
    verdicts = []
    for candidate in ORDER:
        verdict = await probe(candidate)
        if verdict.works:
            _chosen[name] = candidate
            return candidate
        verdicts.append(verdict)
    reasons = "\n".join(f"  {verdict.backend}: {verdict.reason}" for verdict in verdicts)
    raise Unsupported(
        f'no backend can isolate a pod on this machine:\n{reasons}\n  for trusted code only: backend="subprocess"'
    )
