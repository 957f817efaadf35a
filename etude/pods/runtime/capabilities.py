"""Linux capabilities: the set that a pod's root keeps; the zygote drops all others permanently.

Dropping also cuts the bounding set, so that no program run later, set-user-ID or with file capabilities, regains one.
"""

from collections.abc import Collection
from pathlib import Path

NAMES = (  # by number, as in linux/capability.h
    *("chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner"),
    *("sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice"),
    *("sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap"),
    *("mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf"),
    "checkpoint_restore",
)

# The capabilities that package managers, build tools and tests need when run as the pod's root: Docker's set without
#   mknod        devices are created with the pod; a user namespace refuses them anyway
#   net_raw      a raw socket can forge packets on the link to the egress proxy; ping works on a datagram socket
#   setpcap      changes capability sets, which must not change
#   audit_write  the log is the host's; the system-call filter reports "no audit", which su and useradd accept
# Unpacking an archive as root needs dac_override, fowner, chown and fsetid; setuid, setgid and kill let root become
# and stop the pod's other users; packages such as ping set file capabilities on installation, which needs setfcap.
KEEP = frozenset(
    {
        *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid"),
        *("net_bind_service", "sys_chroot", "setfcap"),
    }
)


def mask(keep: Collection[str] = KEEP) -> int:
    """Return these capabilities as a number, bit n for capability n, as in /proc/self/status."""
    if isinstance(keep, str):
        raise ValueError(f"capabilities: expected a collection of names, not the string {keep!r}")
    if unknown := set(keep) - set(NAMES):
        raise ValueError(f"capabilities: {', '.join(sorted(unknown))} not known; names look like {NAMES[0]!r}")
    return sum(1 << NAMES.index(name) for name in set(keep))


def permitted() -> int:
    """Return the permitted capabilities of this process as a number."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapPrm:"))
