"""Hostile repositories: every setting that makes git run a program writes a marker file when it is obeyed."""

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.agent.upload import filtered_git_config, recent_files, select_files
from etude.data.documents import read_source, source_digest
from etude.errors import InputError
from etude.evaluation.state_tracking import tasks_from_git
from etude.system.git import run_git
from etude.tasks.importers.instance import export_tree

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")


def git(directory: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *IDENTITY, *command], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two commits, a change that git must read to notice, and attributes that name drivers."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / ".gitattributes").write_text("*.py filter=x diff=x merge=x\n")
    for text in ("one\n", "two\n"):
        (root / "a.py").write_text(text)
        git(root, "init", "-q", "-b", "main")
        git(root, "add", "-A")
        git(root, "commit", "-qm", text)
    (root / "a.py").write_text("six\n")
    return root


def filters(root: Path, program: str) -> None:
    for name in ("clean", "smudge"):
        git(root, "config", f"filter.x.{name}", program)
    git(root, "config", "filter.x.required", "true")


def process_filter(root: Path, program: str) -> None:
    git(root, "config", "filter.x.process", program)


def fsmonitor(root: Path, program: str) -> None:
    git(root, "config", "core.fsmonitor", program)


def hooks(root: Path, program: str) -> None:
    for directory in (root / ".git/hooks", root.parent / "hooks"):
        directory.mkdir(exist_ok=True)
        for name in ("post-index-change", "post-checkout", "pre-commit", "reference-transaction", "fsmonitor-watchman"):
            (directory / name).write_text(f"#!/bin/sh\n{program}\n")
            (directory / name).chmod(0o755)
    git(root, "config", "core.hooksPath", str(root.parent / "hooks"))
    os.utime(root / ".gitattributes", (1, 1))  # unchanged, with another time: `git status` writes the index


def diff_programs(root: Path, program: str) -> None:
    for name in ("diff.external", "diff.x.command", "diff.x.textconv", "merge.x.driver"):
        git(root, "config", name, program)


def signatures(root: Path, program: str) -> None:
    commit = git(root, "cat-file", "commit", "HEAD")
    head, _, body = commit.partition("\n\n")
    signed = f"{head}\ngpgsig -----BEGIN PGP SIGNATURE-----\n x\n -----END PGP SIGNATURE-----\n\n{body}"
    made = subprocess.run(
        ["git", "-C", str(root), "hash-object", "-t", "commit", "-w", "--stdin"],
        input=signed.encode(),
        capture_output=True,
        check=True,
    )
    git(root, "update-ref", "refs/heads/main", made.stdout.decode().strip())
    (root.parent / "gpg").write_text(f"#!/bin/sh\n{program}\n")
    (root.parent / "gpg").chmod(0o755)
    git(root, "config", "log.showSignature", "true")
    git(root, "config", "gpg.program", str(root.parent / "gpg"))


def pagers(root: Path, program: str) -> None:
    for name in ("core.pager", "pager.log", "core.editor", "core.sshCommand", "core.askPass", "alias.ls-tree"):
        git(root, "config", name, program)
    git(root, "config", "tar.tar.command", program)
    git(root, "config", "core.alternateRefsCommand", program)


def promisor(root: Path, program: str) -> None:
    """Objects that only the program of a remote could bring, which the repository allows git to start."""
    blob = git(root, "rev-parse", "HEAD:.gitattributes").strip()
    (root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    ignored = git(root, "hash-object", "-w", "-t", "blob", "/dev/null").strip()
    git(root, "update-index", "--add", "--cacheinfo", f"100644,{ignored},.gitignore")
    git(root, "update-index", "--skip-worktree", ".gitignore")
    (root / ".git/objects" / ignored[:2] / ignored[2:]).unlink()
    with (root / ".git/config").open("a") as config:
        config.write(
            f"[core]\n\trepositoryformatversion = 1\n[extensions]\n\tpartialClone = origin\n"
            f'[remote "origin"]\n\turl = .\n\tpromisor = true\n\tuploadpack = "{program}"\n'
            '[protocol "file"]\n\tallow = always\n[protocol]\n\tallow = always\n'
        )


def submodule(root: Path, program: str) -> None:
    inner = root / "lib"
    inner.mkdir()
    (inner / "b.py").write_text("b\n")
    (inner / ".gitattributes").write_text("*.py filter=x\n")
    git(inner, "init", "-q", "-b", "main")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    (root / ".gitmodules").write_text(f'[submodule "lib"]\n\tpath = lib\n\turl = ./lib\n\tupdate = !{program}\n')
    git(root, "add", ".gitmodules", "lib")
    git(root, "commit", "-qm", "submodule")
    for directory in (root, inner):
        git(directory, "config", "submodule.lib.update", f"!{program}")
        git(directory, "config", "submodule.lib.active", "true")
    (inner / "b.py").write_text("c\n")
    fsmonitor(inner, program)
    filters(inner, program)


def alternates(root: Path, program: str) -> None:
    """Objects of another repository, which itself configures programs."""
    other = root.parent / "other"
    git(root.parent, "clone", "-q", "--bare", str(root), str(other))
    promisor(root, program)
    (other / "config").write_text((root / ".git/config").read_text())
    (root / ".git/objects/info/alternates").write_text(f"{other}/objects\n")


ATTACKS = [
    filters,
    process_filter,
    fsmonitor,
    hooks,
    diff_programs,
    signatures,
    pagers,
    promisor,
    submodule,
    alternates,
]


def read_everything(root: Path) -> None:
    """Do everything that Etude does with git on the host; a repository that lacks objects is refused."""
    commands: list[Callable[[], object]] = [
        lambda: select_files(root),
        lambda: recent_files(root),
        lambda: filtered_git_config(root),
        lambda: [file.read() for file in read_source(str(root))],
        lambda: [file.read() for file in read_source(f"{root}@HEAD")],
        lambda: source_digest(f"{root}@HEAD"),
        lambda: tasks_from_git(root, count=3, changes=1),
        lambda: export_tree(root, "HEAD", []),
        lambda: run_git(root, "diff", "HEAD"),
        lambda: run_git(root, "log", "-p"),
        lambda: run_git(root, "show", "HEAD:a.py"),
        lambda: run_git(root, "status", "--short"),
        lambda: run_git(root, "ls-files", "-m", "--recurse-submodules"),
    ]
    for command in commands:
        with contextlib.suppress(InputError):
            command()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_nothing_that_a_repository_configures_is_executed(
    repository: Path, attack: Callable[[Path, str], None]
) -> None:
    marker = repository.parent / "executed"
    attack(repository, f"touch {marker}; false")
    marker.unlink(missing_ok=True)  # written by the git commands that set the attack up
    assert any(file.path == "a.py" for file in read_source(str(repository)))
    read_everything(repository)
    assert not marker.exists()


@pytest.mark.parametrize(
    "attack", [a for a in ATTACKS if a not in (pagers, submodule, alternates)], ids=lambda a: a.__name__
)
def test_the_attacks_are_real(repository: Path, attack: Callable[[Path, str], None]) -> None:
    """Plain git obeys: otherwise the test above would prove nothing."""
    marker = repository.parent / "executed"
    attack(repository, f"touch {marker}; false")
    marker.unlink(missing_ok=True)
    for command in (
        "status",
        "diff",
        "log -p",
        "archive HEAD",
        "ls-files -mo --exclude-standard",
        "checkout-index -af",
    ):
        subprocess.run(["git", "-C", str(repository), *command.split()], capture_output=True)
    assert marker.exists()


def test_an_option_is_not_taken_for_a_commit(repository: Path) -> None:
    with pytest.raises(InputError, match="is not a commit"):
        export_tree(repository, f"--output={repository.parent}/out", [])
    assert not (repository.parent / "out").exists()


def test_a_costly_ignore_pattern_ends_with_an_error(repository: Path) -> None:
    (repository / ".gitignore").write_text("**/*a*/" * 12 + "**/b\n")
    deep = repository
    for _ in range(12):
        deep = deep / ("a" * 20)
    deep.mkdir(parents=True)
    (deep / "c").write_text("")
    with pytest.raises(InputError, match="took more than 1 s; look for costly patterns"):
        run_git(repository, "ls-files", "-o", "--exclude-standard", timeout=1)


def test_variables_of_a_hook_do_not_select_another_repository(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", os.devnull)
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "touch")
    assert run_git(repository, "rev-parse", "--show-toplevel").decode().strip() == str(repository)
