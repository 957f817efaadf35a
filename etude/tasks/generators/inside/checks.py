"""The verifier of generated tasks: run the checks that execute code, then judge all checks against expectations.

    checks.json     the checks in order: kind and parameters, which the tested code may see
    expected.json   the expectation of each check; read only after all tested code has ended
    suite/          files copied into the workspace first
    original/, mutants/, equal/   files of single checks

The reward is the minimum of the checks' scores, each 0 to 1.
"""

from __future__ import annotations

import json
import os
from typing import Any

from etude.tasks.generators.inside import executed_checks, judges
from etude.tasks.runner.guard import (
    HERE,
    JsonObject,
    VerifierBroken,
    prepare_workspace,
    restore_suite,
    restrict_verifier_files,
    write_rewards,
)

EXECUTORS = {"pytest": executed_checks.pytest, "mutants": executed_checks.mutants, "wheel": executed_checks.wheel}
JUDGES = {
    "pytest": judges.judge_pytest,
    "mutants": judges.judge_mutants,
    "wheel": judges.judge_wheel,
    "names": judges.judge_names,
    "code": judges.judge_code,
    "docstrings": judges.judge_docstrings,
    "scope": judges.judge_scope,
    "patterns": judges.judge_patterns,
    "findings": judges.judge_findings,
    "answer": judges.judge_answer,
}


def load(name: str) -> Any:
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return json.load(file)


def main() -> int:
    seal = restrict_verifier_files()
    spec = load("checks.json")
    workspace = spec["workspace"]
    view = judges.WorkspaceView(workspace, judges.digests(workspace))  # before anything is copied or run there
    restore_suite(os.path.join(HERE, "suite"), workspace)
    prepare_workspace(workspace)
    try:
        results = [
            EXECUTORS[check["kind"]](check, workspace) if check["kind"] in EXECUTORS else {} for check in spec["checks"]
        ]
    except VerifierBroken as error:
        print(f"verifier: {error}")
        return 1
    expected = load("expected.json")
    scores: list[float] = []
    report: list[JsonObject] = []
    for check, result, expectation in zip(spec["checks"], results, expected, strict=True):
        score, problems = JUDGES[check["kind"]](view, expectation, result)
        scores.append(score)
        report.append({"kind": check["kind"], "score": score, "problems": problems})
        print(f"{check['kind']}: {score:g}")
        for problem in problems[:40]:
            print(f"  {problem}")
    passed = sum(score >= 1 for score in scores)
    rewards = {"reward": min(scores), "right": float(passed), "of": float(len(scores))}
    write_rewards(rewards, seal, {"checks": report})
    return 0
