"""Lends programs of the host to a pod: static binaries that wheels install, written to the tool server's directory."""

import asyncio
from importlib import metadata
from pathlib import Path

from etude.harness.tools.context import ToolContext

LEND_S = 60.0  # on an overloaded machine
# A rename, because another call may be running the program or writing it too.
INSTALL = 'cat > "$1.$$" && chmod 755 "$1.$$" && mv -f "$1.$$" "$1" || { rm -f "$1.$$"; exit 1; }'


async def lend_program(context: ToolContext, package: str, name: str) -> str:
    """Write a program of an installed package into the pod; return why this is impossible, empty if it was done."""
    try:
        found = next((path for path in metadata.files(package) or () if path.name == name), None)
    except metadata.PackageNotFoundError:
        found = None
    if found is None:
        return f"the package {package} is not installed, or has no program {name} for this machine"
    program = await asyncio.to_thread(Path(str(found.locate())).read_bytes)
    done = await context.server.pod.exec(
        ["sh", "-c", INSTALL, "sh", f"{context.server.state}/{name}"], stdin=program, timeout=LEND_S
    )
    if not done.ok:
        reason = done.stderr.strip()[-200:] or f"exit code {done.exit_code}"
        return f"{name} cannot be written to pod {context.server.pod.id}: {reason}"
    return ""
