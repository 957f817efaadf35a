"""Whether an agent could find a task's answer instead of working it out, and where.

The answer is what the solution changes: the lines only it has. They are looked for where agents have been seen to look:
git's objects (reachable or not), compiled files, installed copies of the package, caches of pip and uv, build/ and
egg-info, archives, and the network. Looking happens in a pod of the task, as root, before any agent has been there.
"""

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.pods.fleet import Fleet
from etude.tasks.base_images import Provision
from etude.tasks.environment import open_ground
from etude.tasks.task import Task
from etude.tasks.verifier_result import FileChange

INSIDE = Path(__file__).with_name("reach_inside.py")
SECONDS = 60.0  # of looking, at most
SHORTEST = 6  # characters of a line that says something


@dataclass(frozen=True)
class Finding:
    """A way to the answer: a reason code, and what was seen."""

    code: str
    evidence: str


def own_lines(change: FileChange, others: set[str]) -> list[str]:
    """The lines that only the solution has: long enough to mean something, and nowhere in the files as they were."""
    before = {line.strip() for line in change.lines("before")}
    after = [line.strip() for line in change.lines("after")]
    return sorted({line for line in after if len(line) >= SHORTEST and line not in before and line not in others})


def own_names(changes: Sequence[FileChange]) -> list[str]:
    """Functions, classes and variables that the solution defines and the files before it did not."""
    before, after = set[str](), set[str]()
    for change in changes:
        if change.path.endswith(".py"):
            before |= _names(change.before)
            after |= _names(change.after)
    return sorted(after - before)


def _names(data: bytes | None) -> set[str]:
    try:
        tree = ast.parse(data or b"")
    except (SyntaxError, ValueError):
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def git_ids(data: bytes) -> list[str]:
    """What git calls these contents, in both of its formats."""
    blob = b"blob %d\0" % len(data) + data
    return [hashlib.sha1(blob).hexdigest(), hashlib.sha256(blob).hexdigest()]


def request_for(workspace: str, changes: Sequence[FileChange]) -> dict[str, Any]:
    """What is looked for, in the form that the search inside takes."""
    texts = [change for change in changes if change.kind == "file" and change.after is not None]
    files = [
        {"path": change.path, "lines": own_lines(change, set()), "ids": git_ids(change.after or b"")}
        for change in texts
        if not change.path.startswith("/")
    ]
    return {"workspace": workspace, "files": files, "names": own_names(texts), "seconds": SECONDS}


async def find_answer(
    fleet: Fleet, task: Task, changes: Sequence[FileChange], provision: Provision | None = None
) -> tuple[Finding, ...]:
    """Ways to the answer that the solution's `changes` are."""
    given = provision or Provision()
    found = list(_network(task, given))
    async with open_ground(fleet, task, provision=given) as ground:
        request = json.dumps(request_for(ground.workspace, changes)).encode()
        await ground.pod.write("/run/reach.py", INSIDE.read_bytes())
        command = ["python3", "-I", "-S", "/run/reach.py"]
        done = await ground.pod.exec(command, stdin=request, timeout=4 * SECONDS, max_output=1 << 22, user="root")
    if done.exit_code == 127:
        return (*found, Finding("not-searched", "there is no python3 in the image: the answer was not looked for"))
    if not done.ok:
        return (*found, Finding("not-searched", f"the search failed: {done.stderr[-500:]}"))
    return (*found, *(Finding(each["code"], each["evidence"]) for each in json.loads(done.stdout)))


def _network(task: Task, provision: Provision) -> list[Finding]:
    """A network that is really there; a task that only says "public" gets none."""
    network = task.agent.network or task.machine.network
    if network.mode == "allowlist":
        return [Finding("network", f"the agent may connect to {', '.join(network.hosts)}")]
    if network.mode == "public" and provision.egress.allow:
        return [Finding("network", f"the agent may connect to {', '.join(provision.egress.allow)}")]
    return []
