"""A git directory with exactly one commit: the whole history that a task's workspace has.

Made by `git fast-import`, which takes contents as they are: no filter, no hook, no checkout. The same files give the
same bytes, so that a task is the same whenever it is made.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from etude.errors import EtudeError

WHO = "Developer <developer@localhost> 1700000000 +0000"
KEPT = ("HEAD", "config", "index", "refs/", "objects/pack/")
# the same on every machine, whoever's it is
SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C", "TZ": "UTC"}


def sealed_git(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of `.git` (named from it) for a workspace whose only commit holds `files`."""
    with tempfile.TemporaryDirectory(prefix="etude-seal-") as directory:
        git = Path(directory) / "repository"
        _git(git, "init", "-q", "--bare", "-b", "main", "--template=", str(git))
        _git(git, "-c", "fastimport.unpackLimit=0", "fast-import", "--quiet", stdin=_stream(files))
        (git / "config").write_text(
            "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n"
            "[user]\n\tname = Developer\n\temail = developer@localhost\n"
        )
        _git(git, "read-tree", "main")  # entries without times: git looks at the files themselves
        made = {path.relative_to(git).as_posix(): path for path in sorted(git.rglob("*")) if path.is_file()}
        return {
            name: path.read_bytes() for name, path in made.items() if name.startswith(KEPT) and name[-5:] != ".keep"
        }


def _stream(files: Mapping[str, bytes]) -> bytes:
    parts = [b"feature done\ncommit refs/heads/main\n", f"committer {WHO}\n".encode(), b"data 15\nInitial commit\n\n"]
    for path in sorted(files):
        mode = "100755" if path.endswith(".sh") else "100644"
        parts.append(f'M {mode} inline "{_quoted(path)}"\ndata {len(files[path])}\n'.encode())
        parts.append(files[path] + b"\n")
    return b"".join([*parts, b"done\n"])


def _quoted(path: str) -> str:
    return path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _git(directory: Path, *arguments: str, stdin: bytes = b"") -> None:
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "GIT_DIR": str(directory), **SETTINGS}
    try:
        done = subprocess.run(["git", *arguments], input=stdin, capture_output=True, env=env, check=False)
    except FileNotFoundError:
        raise EtudeError("there is no git on this machine; tasks have a repository with one commit") from None
    if done.returncode:
        raise EtudeError(f"git {' '.join(arguments)} failed: {done.stderr.decode('utf-8', 'replace')[-500:]}")
