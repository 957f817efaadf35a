"""Check whether an agent could find a task's solution in its environment instead of working it out.

The solution's own lines are searched where agents have been seen to look: git objects (reachable or not), bytecode,
installed copies of the package, caches of pip and uv, build/ and egg-info, archives, and the network. The scan runs
as root in a new pod of the task.
"""

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.pods.fleet import Fleet
from etude.pods.payload import START, pack
from etude.pods.workspace import FileChange
from etude.syntax import parse_tree
from etude.tasks.base_images import HostSettings
from etude.tasks.environment import open_environment
from etude.tasks.task import Task

SCAN_TIMEOUT_S = 60.0
MIN_LINE_LENGTH = 6  # shorter lines are not distinctive


@dataclass(frozen=True)
class LeakFinding:
    """One leak of the solution: a reason code and its evidence."""

    code: str
    evidence: str


def solution_lines(change: FileChange, others: set[str]) -> list[str]:
    """Return the distinctive lines of a changed file that neither its original nor `others` has."""
    before = {line.strip() for line in change.lines("before")}
    after = [line.strip() for line in change.lines("after")]
    return sorted(
        {line for line in after if len(line) >= MIN_LINE_LENGTH and line not in before and line not in others}
    )


def solution_names(changes: Sequence[FileChange]) -> list[str]:
    """Return the functions and classes that the solution adds."""
    before, after = set[str](), set[str]()
    for change in changes:
        if change.path.endswith(".py"):
            before |= _names(change.text("before"))
            after |= _names(change.text("after"))
    return sorted(after - before)


def _names(data: bytes) -> set[str]:
    try:
        tree = parse_tree(data)
    except (SyntaxError, ValueError):
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def git_ids(data: bytes) -> list[str]:
    """Return the git object ids of these contents, SHA-1 and SHA-256."""
    blob = b"blob %d\0" % len(data) + data
    return [hashlib.sha1(blob).hexdigest(), hashlib.sha256(blob).hexdigest()]


def scan_request(workspace: str, changes: Sequence[FileChange]) -> dict[str, Any]:
    """Return the JSON request of `leak_scan.py`."""
    texts = [change for change in changes if change.after is not None and change.after.kind == "file"]
    files = [
        {"path": change.path, "lines": solution_lines(change, set()), "ids": git_ids(change.text("after"))}
        for change in texts
        if not change.path.startswith("/")
    ]
    return {"workspace": workspace, "files": files, "names": solution_names(texts), "seconds": SCAN_TIMEOUT_S}


async def find_leaks(
    fleet: Fleet, task: Task, changes: Sequence[FileChange], host_settings: HostSettings | None = None
) -> tuple[LeakFinding, ...]:
    """Return the leaks of the solution, whose changes are given."""
    settings = host_settings or HostSettings()
    found = list(_network_findings(task, settings))
    async with open_environment(fleet, task, host_settings=settings) as environment:
        request = json.dumps(scan_request(environment.workspace, changes)).encode()
        command = ["python3", "-I", "-S", "-c", START, "leak_scan"]
        done = await environment.pod.exec(
            command,
            stdin=pack("etude.tasks.leak_scan:main") + request,
            timeout=4 * SCAN_TIMEOUT_S,
            max_output=1 << 22,
            user="root",
        )
    if done.exit_code == 127:
        return (*found, LeakFinding("not-searched", "the image has no python3 to run the leak scan with"))
    if not done.ok:
        return (*found, LeakFinding("not-searched", f"the leak scan failed: {done.stderr[-500:]}"))
    return (*found, *(LeakFinding(each["code"], each["evidence"]) for each in json.loads(done.stdout)))


def _network_findings(task: Task, host_settings: HostSettings) -> list[LeakFinding]:
    """Report network access that is actually granted; "public" alone grants none."""
    network = task.agent.network or task.machine.network
    if network.mode == "allowlist":
        return [LeakFinding("network", f"the agent may connect to {', '.join(network.hosts)}")]
    if network.mode == "public" and host_settings.egress.allow:
        return [LeakFinding("network", f"the agent may connect to {', '.join(host_settings.egress.allow)}")]
    return []
