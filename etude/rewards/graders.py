"""Built-in graders: further scorers of a change, which run if they have a weight."""

import asyncio
import json
from collections import Counter
from functools import cache
from importlib import metadata

from etude.errors import InputError
from etude.rewards.reward import TermResult, VerifiedTrial, grader

LINT_S = 60.0


@grader
async def new_lints(trial: VerifiedTrial) -> TermResult:
    """Penalise lint findings (ruff's default rules) that the change brings into Python files: 0.1 each, at most 1.

    Ruff reads the text of a file and executes nothing; `--isolated` ignores the configuration of the workspace.
    """
    new: list[str] = []
    for change in trial.verifier_result.changes:
        if change.path.endswith((".py", ".pyi")) and change.after is not None:
            texts = change.text("before"), change.text("after")
            before, after = await asyncio.gather(*(_lint(change.path, text) for text in texts))
            new += [f"{change.path}: {code}" for code in (after - before).elements()]
    return TermResult(-min(1.0, len(new) / 10), {"new": new[:20]})


async def _lint(path: str, text: bytes) -> Counter[str]:
    """Return how often each rule is broken."""
    options = ["check", "--isolated", "--no-cache", "--output-format=json", f"--stdin-filename={path}", "-"]
    pipe = asyncio.subprocess.PIPE
    ruff = await asyncio.create_subprocess_exec(
        _find_ruff(), *options, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, cwd="/"
    )
    try:
        async with asyncio.timeout(LINT_S):
            output, _ = await ruff.communicate(text)
    finally:
        if ruff.returncode is None:
            ruff.kill()
    return Counter(str(finding["code"]) for finding in json.loads(output or b"[]"))


@cache
def _find_ruff() -> str:
    try:
        files = metadata.files("ruff") or ()
    except metadata.PackageNotFoundError:
        files = ()
    found = next((file for file in files if file.name == "ruff"), None)
    if found is None:
        raise InputError("rewards: new_lints needs the package ruff; install it, or remove the weight")
    return str(found.locate())
