"""The verifier of generated tasks: runs what has to be run, then judges everything against what was expected.

    checks.json     what is looked at, in order: a kind and what the tested code may know of it
    expected.json   what must come of each; read when no tested code is left that could have seen it
    suite/          files put at their places in the workspace before
    original/, mutants/, equal/   files that single checks need

The reward is the least of the checks' scores, each 0 to 1.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from etude.tasks.generators.inside import executed_checks
from etude.tasks.generators.inside import judges as looking
from etude.tasks.runner.guard import HERE, Broken, Message, lock_up, prepare, restore, settle

RUNS = {"pytest": executed_checks.pytest, "mutants": executed_checks.mutants, "wheel": executed_checks.wheel}
JUDGES = {
    "pytest": looking.judge_pytest,
    "mutants": looking.judge_mutants,
    "wheel": looking.judge_wheel,
    "names": looking.judge_names,
    "code": looking.judge_code,
    "docstrings": looking.judge_docstrings,
    "scope": looking.judge_scope,
    "patterns": looking.judge_patterns,
    "findings": looking.judge_findings,
    "answer": looking.judge_answer,
}


def load(name: str) -> Any:
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return json.load(file)


def main() -> int:
    seal = lock_up()
    given = load("checks.json")
    workspace = given["workspace"]
    seen = looking.Seen(workspace, looking.digests(workspace))  # before anything is put or run there
    restore(os.path.join(HERE, "suite"), workspace)
    prepare(workspace)
    try:
        results = [RUNS[check["kind"]](check, workspace) if check["kind"] in RUNS else {} for check in given["checks"]]
    except Broken as error:
        print(f"verifier: {error}")
        return 1
    expected = load("expected.json")
    scores: list[float] = []
    report: list[Message] = []
    for check, result, wanted in zip(given["checks"], results, expected, strict=True):
        score, problems = JUDGES[check["kind"]](seen, wanted, result)
        scores.append(score)
        report.append({"kind": check["kind"], "score": score, "problems": problems})
        print(f"{check['kind']}: {score:g}")
        for problem in problems[:40]:
            print(f"  {problem}")
    passed = sum(score >= 1 for score in scores)
    rewards = {"reward": min(scores), "right": float(passed), "of": float(len(scores))}
    settle(rewards, seal, {"checks": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
