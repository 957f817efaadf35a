"""Helpers for the tests of `etude agent`: a project with its own state directory, and a tiny random checkpoint."""

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from samplers import config_of
from session_helpers import chatml

from etude import cli
from etude.model import save
from etude.model.transformer import Transformer
from etude.pods.fleet import open_host
from etude.pods.pod import Unsupported

FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": 'from calc import add\n\nassert add(2, 3) == 5\nprint("passed")\n',
    ".gitignore": "*.log\n.env\n",
}
ETUDE = [sys.executable, "-m", "etude.cli"]


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of one run of the command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.startswith("{"), self
        found: dict[str, Any] = json.loads(self.out)
        return found


@dataclass(frozen=True)
class AgentWorkspace:
    """A project directory, and the state directory of the commands that are run in it."""

    project: Path
    state: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    @property
    def sessions(self) -> Path:
        return self.state / "etude" / "sessions"

    def read(self, name: str) -> str:
        return (self.project / name).read_text()

    def agent(self, *arguments: str, typed: str = "") -> CommandResult:
        """Run the command in this process, from the project; `typed` is its standard input."""
        self.capsys.readouterr()
        self.monkeypatch.chdir(self.project)
        self.monkeypatch.setattr(sys, "argv", ["etude", "agent", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = int(error.code or 0)
        return CommandResult(code, *self.capsys.readouterr())

    @property
    def environment(self) -> Mapping[str, str]:
        return dict(os.environ)


def project(directory: Path, files: Mapping[str, str] = FILES) -> Path:
    """A git work tree with these files."""
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(directory), *command], check=True)
    return directory


@contextlib.contextmanager
def open_pods() -> Iterator[Path]:
    """Yield the state directory for the pods of a test module, with one zygote; skip where pods are unsupported."""
    with tempfile.TemporaryDirectory(prefix="etude-agent-") as directory:
        state = Path(directory) / "pods"

        async def open_and_close(shutdown: bool) -> None:
            host = await open_host(state=state)
            await host.close()
            if shutdown:
                await host.backend.shutdown()

        try:
            asyncio.run(open_and_close(shutdown=False))
        except Unsupported as reason:
            pytest.skip(str(reason))
        try:
            yield state
        finally:
            asyncio.run(open_and_close(shutdown=True))


def make_workspace(
    directory: Path,
    pods: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> AgentWorkspace:
    """Create a workspace in an empty directory; the user's own files are neither read nor written."""
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    monkeypatch.setenv("ETUDE_PODS", str(pods))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name in ("ETUDE_AGENT_MODEL", "ETUDE_AGENT_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return AgentWorkspace(project(directory / "project").resolve(), directory / "state", monkeypatch, capsys)


@cache
def _tiny(vocabulary: int) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config_of("llama", vocab_size=vocabulary, max_position_embeddings=32_768)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(0, 0.1)
    return model


def tiny_checkpoint(directory: Path) -> Path:
    """Save a model with random weights, our chat template and a large context window."""
    tokenizer = chatml().tokenizer
    save(_tiny(len(tokenizer) + 8), directory)
    tokenizer.save(directory)
    return directory


def messages_of(asked: Mapping[str, Any], role: str) -> Sequence[str]:
    """Return the contents of one role's messages in a chat request."""
    return [message["content"] for message in asked["messages"] if message["role"] == role]
