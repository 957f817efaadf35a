"""Create a git directory with exactly one commit: the whole history of a task's workspace.

`git fast-import` takes contents as they are: no filter, no hook, no checkout. The same files give the same bytes, so
that generated tasks are reproducible.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from etude.errors import EtudeError

COMMITTER = "Developer <developer@localhost> 1700000000 +0000"
KEPT_PATHS = ("HEAD", "config", "index", "refs/", "objects/pack/")
# independent of the host's and the user's git configuration
GIT_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C", "TZ": "UTC"}


def single_commit_git_dir(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the contents of a `.git` directory whose only commit contains `files`."""
    with tempfile.TemporaryDirectory(prefix="etude-seal-") as directory:
        git = Path(directory) / "repository"
        _git(git, "init", "-q", "--bare", "-b", "main", "--template=", str(git))
        _git(git, "-c", "fastimport.unpackLimit=0", "fast-import", "--quiet", stdin=_stream(files))
        (git / "config").write_text(
            "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n"
            "[user]\n\tname = Developer\n\temail = developer@localhost\n"
        )
        _git(git, "read-tree", "main")  # index entries without timestamps: git compares contents
        created = {path.relative_to(git).as_posix(): path for path in sorted(git.rglob("*")) if path.is_file()}
        return {
            name: path.read_bytes()
            for name, path in created.items()
            if name.startswith(KEPT_PATHS) and name[-5:] != ".keep"
        }


def _stream(files: Mapping[str, bytes]) -> bytes:
    parts = [
        b"feature done\ncommit refs/heads/main\n",
        f"committer {COMMITTER}\n".encode(),
        b"data 15\nInitial commit\n\n",
    ]
    for path in sorted(files):
        mode = "100755" if path.endswith(".sh") else "100644"
        parts.append(f'M {mode} inline "{_quoted(path)}"\ndata {len(files[path])}\n'.encode())
        parts.append(files[path] + b"\n")
    return b"".join([*parts, b"done\n"])


def _quoted(path: str) -> str:
    return path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _git(directory: Path, *arguments: str, stdin: bytes = b"") -> None:
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "GIT_DIR": str(directory), **GIT_ENV}
    try:
        done = subprocess.run(["git", *arguments], input=stdin, capture_output=True, env=env, check=False)
    except FileNotFoundError:
        raise EtudeError("git was not found; install it, task workspaces contain a git repository") from None
    if done.returncode:
        raise EtudeError(f"git {' '.join(arguments)} failed: {done.stderr.decode('utf-8', 'replace')[-500:]}")
