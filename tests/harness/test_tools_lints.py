"""Lints in a real pod: by ruff, uploaded if necessary, new ones marked, under any repository configuration."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from harness_pods import PodFixture, PodTools, shared_pod_fixture

from etude.harness.toolserver.inside.lints import committed
from etude.harness.toolserver.inside.paths import ToolWorkspace

OLD = "import os\n\n\ndef f():\n    return 1\n"


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> PodFixture:
    return shared_pod_fixture(request.config)


def test_new_problems_are_marked_and_old_ones_are_not(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await tools.text("read_lints") == "No Python files have been edited; name the files to check."
        await tools.text("search_replace", file_path="a.py", old_string="def f", new_string="import sys\n\n\ndef f")
        await tools.text("search_replace", file_path="a.py", old_string="return 1", new_string="return x")
        assert await tools.text("read_lints") == (
            "a.py\n"
            "  1:8 F401 `os` imported but unused\n"
            "  4:8 F401 `sys` imported but unused (new)\n"
            "  8:12 F821 Undefined name `x` (new)\n"
            "[3 problems in 1 file, 2 new]"
        )
        await tools.text("write", file_path="new.py", contents="def g(:\n")
        outcome = await tools.call("read_lints", paths=["new.py"])
        assert "new.py\n  1:7 " in outcome.text
        assert "(new)" in outcome.text
        assert outcome.facts["new"] == outcome.facts["problems"] > 0
        assert await tools.text("read_lints", paths=["clean.py"]) == "No problems in 1 file."
        assert " in 3 files, " in await tools.text("read_lints", paths=["."])
        assert "only Python files" in await tools.error("environment", "read_lints", paths=["notes.md"])
        assert "does not exist" in await tools.error("environment", "read_lints", paths=["none.py"])

    rules = 'lint.select = ["F", "E9"]'  # whatever this version of ruff takes for its default
    pods.run(check, files={"a.py": OLD, "clean.py": "x = 1\n", "notes.md": "", "ruff.toml": rules})


def test_changes_by_commands_are_compared_with_the_last_commit(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text(
            "run_terminal_cmd", command="git init -q && git add a.py && git -c user.name=a -c user.email=b commit -qm x"
        )
        await tools.text("run_terminal_cmd", command="echo 'import sys' >> a.py; cp a.py b.py")
        text = await tools.text("read_lints", paths=["a.py", "b.py"])
        assert "1:8 F401 `os` imported but unused\n" in text
        assert "6:8 F401 `sys` imported but unused (new)\n" in text
        assert "b.py\n  1:8 F401 `os` imported but unused (new)\n" in text

    async def without_git(tools: PodTools) -> None:
        text = await tools.text("read_lints", paths=["a.py"])
        assert "(new)" not in text
        assert "no earlier state to compare with" in text

    pods.run(check, files={"a.py": OLD})
    pods.run(without_git, files={"a.py": OLD})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ruff.toml", "line-length = [", "the project's ruff configuration could not be used"),
        ("ruff.toml", 'required-version = "==0.0.1"', "the project's ruff configuration could not be used"),
        ("ruff.toml", 'extend = "/proc/self/environ"', "the project's ruff configuration could not be used"),
        ("ruff.toml", 'fix = true\nunsafe-fixes = true\nfix-only = true\nlint.select = ["F"]', "F401"),
        ("pyproject.toml", '[tool.ruff]\nlint.ignore = ["F401"]', "No problems in 1 file."),
        ("pyproject.toml", "not toml at all", "F401"),
    ],
)
def test_a_repositorys_configuration_is_used_but_can_change_nothing(
    pods: PodFixture, name: str, text: str, expected: str
) -> None:
    async def check(tools: PodTools) -> None:
        assert expected in await tools.text("read_lints", paths=["a.py"])
        assert await tools.read("a.py") == OLD.encode()
        assert sorted(entry.name for entry in await tools.pod.list(tools.root)) == sorted(["a.py", name])

    pods.run(check, files={"a.py": OLD, name: text})


def test_without_ruff_syntax_errors_are_found_with_a_note(pods: PodFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "files", lambda package: None)

    async def check(tools: PodTools) -> None:
        text = await tools.text("read_lints", paths=["a.py", "bad.py", "deep.py", "nul.py"])
        assert "bad.py\n  1:" in text
        assert "a.py\n" not in text
        assert text.endswith("[ruff is not available here: only syntax errors are found]")

    files = {"a.py": OLD, "bad.py": "def f(:\n", "deep.py": "(" * 5000 + ")" * 5000, "nul.py": b"x = '\0'\n"}
    pods.run(check, files=files)


def test_a_repository_cannot_make_git_fetch_objects(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@x")
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path / "w", check=True, capture_output=True)
        return done.stdout.decode().strip()

    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "a.py").write_text("import os\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        git(*command)
    blob = git("rev-parse", "HEAD:a.py")
    (tmp_path / "w" / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    settings = {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::sh -c touch% {tmp_path}/ran",
        "protocol.ext.allow": "always",
    }
    for key, value in settings.items():
        git("config", key, value)
    assert committed(ToolWorkspace(str(tmp_path / "w"), str(tmp_path / "state"), {}), "a.py") == b""
    assert not (tmp_path / "ran").exists()
