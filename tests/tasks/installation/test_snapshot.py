"""Reading a revision executes nothing, and bad repositories give one line each."""

import os
import subprocess
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.tasks.installation import snapshot as module
from etude.tasks.installation.snapshot import checkout, split_revision

ENV = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
ENV |= {f"GIT_{who}_{what}": "a@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", directory, *arguments], capture_output=True, text=True, env=ENV, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    top = tmp_path / "thing"
    top.mkdir()
    git(top, "init", "-q", "-b", "main")
    (top / "a.py").write_text("one")
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "link").symlink_to("a.py")
    git(top, "add", ".")
    git(top, "commit", "-qm", "first", "--date", "2024-05-01T12:00:00Z")
    git(top, "tag", "v1.2.3")
    (top / "a.py").write_text("two")
    git(top, "commit", "-qam", "second")
    return top


def test_a_revision_is_read_with_modes_links_and_the_version_of_its_tag(repository: Path) -> None:
    (repository / "a.py").write_text("not committed")
    head, first = checkout(repository), checkout(*split_revision(f"{repository}@v1.2.3"))
    assert (head.text("a.py"), first.text("a.py")) == ("two", "one")
    assert (head.version, first.version) == ("1.2.3.post1", "1.2.3")
    assert head.files["run.sh"].executable
    assert head.files["link"].target == "a.py"
    assert first.commit == git(repository, "rev-parse", "v1.2.3")
    assert head.date.startswith("20")
    bare = repository.parent / "clone.git"
    subprocess.run(["git", "clone", "-q", "--bare", repository, bare], check=True, env=ENV)
    assert checkout(bare).files == head.files
    assert checkout(bare).name == "clone"


def test_a_plain_directory_and_an_archive_have_no_commit(repository: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.py").write_text("x")
    assert (checkout(plain).commit, checkout(plain).text("a.py")) == ("", "x")
    archive = tmp_path / "thing-1.5.tar.gz"
    git(repository, "archive", "--prefix=thing-1.5/", "-o", str(archive), "HEAD")
    found = checkout(archive)
    assert (found.name, found.version, found.text("a.py")) == ("thing", "1.5", "two")


def test_a_hostile_git_directory_executes_nothing(repository: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    program.chmod(0o755)
    for key in (
        "core.fsmonitor",
        "filter.x.smudge",
        "filter.x.process",
        "core.pager",
        "gpg.program",
        "diff.x.textconv",
    ):
        git(repository, "config", key, str(program))
    git(repository, "config", "log.showSignature", "true")
    hooks = repository / ".git/hooks"
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(program.read_text())
        (hooks / name).chmod(0o755)
    (repository / ".git/info/attributes").write_text("* filter=x diff=x\n")
    assert checkout(repository).text("a.py") == "two"
    assert not proof.exists()


def test_bad_repositories_give_one_clear_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    file = tmp_path / "file.txt"
    file.write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / ".git").write_text("gitdir: /nowhere\n")
    cases = {
        (tmp_path / "nothing", ""): "no such repository",
        (file, ""): "expected a git repository",
        (empty, ""): "no commit",
        (repository, "v9"): "no revision 'v9'",
        (repository, "--help"): "not a revision",
        (tmp_path, "main"): "not a git repository",
        (broken, ""): "git",
    }
    for (path, revision), message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            checkout(path, revision)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2)
    with pytest.raises(InputError, match=r"a\.py has 3 bytes, more than 2"):
        checkout(repository)


@pytest.mark.slow
def test_a_blob_of_two_gigabytes_is_refused_before_it_is_read(repository: Path) -> None:
    zeros = subprocess.Popen(["head", "-c", str(2 << 30), "/dev/zero"], stdout=subprocess.PIPE)
    write = ["git", "-C", repository, "-c", "core.bigFileThreshold=1m", "hash-object", "-w", "--stdin"]
    blob = subprocess.run(write, stdin=zeros.stdout, capture_output=True, text=True, check=True).stdout.strip()
    git(repository, "update-index", "--add", "--cacheinfo", f"100644,{blob},big.bin")
    git(repository, "commit", "-qm", "big")
    with pytest.raises(InputError, match=r"big\.bin has 2,147,483,648 bytes"):
        checkout(repository)


def test_submodules_are_listed(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{commit},vendor/x")
    git(repository, "commit", "-qm", "submodule")
    assert checkout(repository).submodules == ("vendor/x",)
