"""Lint rules for task directories."""

from pathlib import Path

import pytest

from etude.tasks.harbor import write_task
from etude.tasks.lint import lint_task

GOOD: dict[str, str | bytes] = {
    "task.toml": 'schema_version = "1.4"\n[agent]\nuser = "agent"\n[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /work\nRUN pip install pytest==8.0.0\nCOPY repo/ .\n",
    "environment/repo/a.py": "",
    "tests/test.sh": "#!/bin/sh\n# curl is not used here\necho 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/sh\n",
}
CONFIG = str(GOOD["task.toml"])
PAY = "echo 1 > /logs/verifier/reward.txt"
ALLOW = '"allowlist"\nallowed_hosts = ["a.b"]'


def rules(directory: Path, **changes: str | bytes | None) -> dict[str, str]:
    both = {**GOOD, **{name.replace("__", "/"): data for name, data in changes.items()}}
    write_task(directory, {name: data for name, data in both.items() if data is not None})
    return {finding.rule: finding.level for finding in lint_task(directory)}


def test_a_good_task_has_no_findings(tmp_path: Path) -> None:
    assert rules(tmp_path / "good") == {}


@pytest.mark.parametrize(
    ("rule", "level", "file", "text"),
    [
        ("unknown-config-field", "warning", "task.toml", "colour = 1\n" + CONFIG),
        ("old-config-field", "note", "task.toml", CONFIG + 'memory = "1G"\n'),
        ("schema-version", "note", "task.toml", CONFIG.replace("1.4", "2.0")),
        ("root-agent", "note", "task.toml", CONFIG.replace('"agent"', '"root"')),
        ("public-network", "note", "task.toml", CONFIG.replace("no-network", "public")),
        (
            "network-answer",
            "warning",
            "task.toml",
            CONFIG.replace('"no-network"', ALLOW),
        ),
        ("shared-verifier", "warning", "task.toml", CONFIG + '[metadata]\ngrading = "in-place"\n'),
        ("overlapping-artifacts", "warning", "task.toml", 'artifacts = ["/a/b", "/a"]\n' + CONFIG),
        ("artifact-log-overlap", "warning", "task.toml", 'artifacts = ["/logs/agent"]\n' + CONFIG),
        ("unsupported", "error", "task.toml", CONFIG + "gpus = 1\n"),
        ("unsupported", "error", "task.toml", CONFIG + 'skills_dir = "skills"\n'),
        ("unpinned-image", "warning", "environment/Dockerfile", "FROM python\nWORKDIR /work\n"),
        ("unmapped-image", "note", "environment/Dockerfile", "FROM registry.example.org/a/b:1\nWORKDIR /work\n"),
        (
            "unpinned-python-dependency",
            "warning",
            "environment/Dockerfile",
            "FROM debian:12\nRUN pip install -U requests\n",
        ),
        ("agent-image-test-leak", "error", "environment/Dockerfile", "FROM debian:12\nCOPY tests/ /tests/\n"),
        ("invalid-dockerfile", "error", "environment/Dockerfile", "FROM debian:12\nBUILD x\n"),
        (
            "verifier-runtime-install",
            "warning",
            "tests/test.sh",
            f"pip install pytest\n{PAY}",
        ),
        ("verifier-network-download", "warning", "tests/test.sh", f"curl x\n{PAY}"),
        ("no-reward-written", "warning", "tests/test.sh", "true"),
        ("empty-instruction", "error", "instruction.md", "# canary\n\n"),
    ],
)
def test_each_problem_is_reported_by_its_rule(tmp_path: Path, rule: str, level: str, file: str, text: str) -> None:
    found = rules(tmp_path / "bad", **{file.replace("/", "__"): text})
    assert found.get(rule) == level, found


def test_a_missing_solution_is_reported(tmp_path: Path) -> None:
    assert rules(tmp_path / "x", solution__solve=None, **{"solution__solve.sh": None}) == {"no-solution": "warning"}


def test_unprotected_tests_are_reported(tmp_path: Path) -> None:
    config = CONFIG + '[metadata]\nsource = "ours"\nprotected = ["tests/**"]\n'
    changes = {"task.toml": config, "environment/repo/tests/test_a.py": "", "environment/repo/src/test_b.py": ""}
    write_task(tmp_path / "x", {**GOOD, **changes})
    (finding,) = lint_task(tmp_path / "x")
    assert (finding.rule, finding.where) == ("unprotected-test", "environment/repo/src/test_b.py")


def test_a_task_that_does_not_load_is_one_error(tmp_path: Path) -> None:
    write_task(tmp_path / "x", GOOD)
    (tmp_path / "x/task.toml").write_text("[environment]\ncpus = 'two'\n")
    (finding,) = lint_task(tmp_path / "x")
    assert (finding.rule, finding.level) == ("invalid-task-config", "error")
