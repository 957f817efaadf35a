"""Uploading files and applying changes: no secret is uploaded, no edit overwritten, nothing written outside."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent import upload
from etude.agent.apply import apply_changes, link_escapes
from etude.agent.diff import FileDiff, find_changes, find_renames, format_file_patch, format_patch
from etude.agent.manifest import CACHE_DIRECTORIES, LIST_PROGRAM, ManifestEntry, is_workspace_path, parse_listing
from etude.agent.upload import recent_files, select_files, write_tar
from etude.errors import EtudeError, InputError

TIDY = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}


@pytest.fixture(autouse=True)
def own_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in TIDY.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def git(directory: Path, *command: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "protocol.file.allow=always")
    return subprocess.run(
        ["git", "-C", str(directory), *identity, *command], check=True, capture_output=True, text=True
    ).stdout


def repository(directory: Path, files: dict[str, str]) -> Path:
    """A git work tree in which all of these are committed."""
    write(directory, files)
    git(directory, "init", "-q", "-b", "main")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "first")
    return directory


def write(directory: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)


def packed(directory: Path, **options: object) -> tuple[dict[str, ManifestEntry], Path]:
    """Pack a directory for upload and unpack it beside the directory; return its manifest and the copy."""
    selection = select_files(directory, **options)  # type: ignore[arg-type]
    file = io.BytesIO()
    manifest = write_tar(directory, selection, file)
    file.seek(0)
    there = directory.parent / f"{directory.name}-pod"
    shutil.rmtree(there, ignore_errors=True)
    with tarfile.open(fileobj=file) as tar:
        tar.extraction_filter = staticmethod(lambda member, path: member)  # type: ignore[assignment]
        tar.extractall(there)
    return dict(manifest), there


def listed(there: Path, known: dict[str, ManifestEntry]) -> dict[str, ManifestEntry]:
    """Run the pod's listing program on a directory."""
    command = [sys.executable, "-I", "-S", "-c", LIST_PROGRAM, json.dumps(CACHE_DIRECTORIES), "1000", "1000000"]
    given = "\0".join(known).encode("utf-8", "surrogateescape")
    done = subprocess.run(command, cwd=there, input=given, capture_output=True, check=True)
    return dict(parse_listing(done.stdout))


class Disk:
    """A fake pod on a directory, with the methods that `find_changes` needs."""

    id = "disk"

    def __init__(self, root: Path) -> None:
        self.root = root

    async def exec(self, command: list[str], *, cwd: str, stdin: bytes, **_: object) -> object:
        from etude.pods.pod import ExecResult

        done = subprocess.run([sys.executable, *command[1:]], cwd=cwd, input=stdin, capture_output=True)
        return ExecResult(done.returncode, done.stdout, done.stderr)

    async def read(self, path: str, **_: object) -> bytes:
        return Path(path).read_bytes()


def changed(there: Path, before: dict[str, ManifestEntry]) -> list[FileDiff]:
    import asyncio

    return asyncio.run(find_changes(Disk(there), str(there), before))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- upload


def test_ignored_files_and_possible_secrets_are_not_uploaded(tmp_path: Path) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", ".gitignore": ".env\nbuild/\n", "sub/b.py": "y"})
    write(here, {".env": "KEY=1", "build/out": "z", "new.py": "untracked"})
    git(here, "remote", "add", "origin", "https://user:password@example.org/r.git")
    git(here, "config", "http.extraHeader", "Authorization: basic password")
    (here / ".git" / "credentials").write_text("password")
    manifest, there = packed(here)
    assert sorted(manifest) == [".gitignore", "a.py", "new.py", "sub/b.py"]
    assert git(there, "log", "--format=%s") == "first\n"
    assert git(there, "status", "--short") == "?? new.py\n"
    found = subprocess.run(["grep", "-r", "password", str(there)], capture_output=True, text=True)
    assert found.stdout == ""


def test_an_ignored_path_can_be_included(tmp_path: Path) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", ".gitignore": "data/\n"})
    write(here, {"data/one": "1", "data/two": "2"})
    manifest, there = packed(here, include=["data"])
    assert {"data/one", "data/two"} < manifest.keys()
    assert listed(there, manifest) == manifest  # although git ignores them there as well
    for wrong in ("../w/a.py", "/etc/passwd", "nothing", ".git"):
        with pytest.raises(InputError, match="--include"):
            select_files(here, [wrong])


def test_symlinks_stay_symlinks_and_special_files_are_skipped(tmp_path: Path) -> None:
    here = tmp_path / "w"
    write(here, {"a.py": "x"})
    (here / "link").symlink_to("/etc/passwd")
    os.mkfifo(here / "pipe")
    (here / "b.sh").write_text("#!/bin/sh\n")
    (here / "b.sh").chmod(0o755)
    manifest, there = packed(here)
    assert manifest["link"] == ManifestEntry("link", "/etc/passwd")
    assert manifest["b.sh"].executable
    assert "pipe" not in manifest
    assert os.readlink(there / "link") == "/etc/passwd"
    assert listed(there, manifest) == manifest


def test_a_linked_work_tree_has_its_own_head_in_the_pod(tmp_path: Path) -> None:
    main = repository(tmp_path / "main", {"a.py": "x"})
    git(main, "worktree", "add", "-q", "-b", "other", str(tmp_path / "w"))
    _, there = packed(tmp_path / "w")
    assert git(there, "branch", "--show-current") == "other\n"
    assert git(there, "status", "--short") == ""


def test_packed_refs_and_submodules_are_uploaded(tmp_path: Path) -> None:
    inner = repository(tmp_path / "inner", {"deep.py": "d"})
    here = repository(tmp_path / "w", {"a.py": "x"})
    git(here, "submodule", "--quiet", "add", str(inner), "lib")
    git(here, "commit", "-qm", "second")
    git(here, "gc", "-q")
    manifest, there = packed(here)
    assert "lib/deep.py" in manifest
    assert git(there, "log", "--format=%s").splitlines() == ["second", "first"]
    assert listed(there, manifest) == manifest


def test_a_subdirectory_is_uploaded_without_the_rest_and_with_a_note(tmp_path: Path) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", "sub/b.py": "y"})
    selection = select_files(here / "sub")
    assert (selection.files, selection.history) == (["b.py"], ())
    assert "not the rest" in selection.notes[0]


def test_a_directory_that_is_too_large_is_refused_with_its_largest_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", "data/big": "b" * 5000})
    monkeypatch.setattr(upload, "MAX_BYTES", 4000)
    with pytest.raises(InputError, match=r"(?s)more than.*data .*--no-history.*--direct") as caught:
        select_files(here)
    assert caught.value.exit_code == 2
    monkeypatch.setattr(upload, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(upload, "MAX_FILES", 1)
    with pytest.raises(InputError, match="or 1 files"):
        select_files(here, history=False)


def test_a_home_directory_is_not_a_project(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    for place in (tmp_path / "home", Path("/")):
        with pytest.raises(InputError, match="not a project"):
            select_files(place)


def test_a_directory_ignored_by_its_repository_is_a_plain_directory(tmp_path: Path) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", ".gitignore": "scratch/\n"})
    write(here, {"scratch/b.py": "y"})
    manifest, _ = packed(here / "scratch")
    assert list(manifest) == ["b.py"]
    assert recent_files(here / "scratch") == ()


def test_recent_files_are_those_with_uncommitted_changes_newest_first(tmp_path: Path) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", "b.py": "y", "c.py": "z"})
    assert recent_files(here) == ()
    write(here, {"c.py": "1", "a.py": "2", "new.py": "3"})
    for age, name in enumerate(("a.py", "new.py", "c.py")):
        os.utime(here / name, (1000 - age, 1000 - age))
    assert recent_files(here) == ("a.py", "new.py", "c.py")
    assert recent_files(tmp_path) == ()


@pytest.mark.parametrize("name", ["x", "a=b.c"])
def test_git_does_not_run_the_filters_of_a_repository(tmp_path: Path, name: str) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", ".gitattributes": f"*.py filter={name}"})
    with (here / ".git" / "config").open("a") as config:
        config.write(f'[filter "{name}"]\n\tclean = touch {tmp_path}/ran; cat\n\trequired = true\n')
    write(here, {"a.py": "y"})  # of the same size: git must read it to know
    os.utime(here / "a.py", (1000, 1000))
    assert recent_files(here) == ("a.py",)
    select_files(here)
    assert not (tmp_path / "ran").exists()


def test_a_repository_that_git_refuses_is_not_taken_for_a_plain_directory(tmp_path: Path) -> None:
    write(tmp_path / "w", {".gitignore": ".env", ".env": "secret", ".git": "gitdir: /nowhere"})
    with pytest.raises(InputError, match="not copied"):
        select_files(tmp_path / "w")


# ------------------------------------------------------------------------------------------------- changes


def test_changes_of_every_kind_are_found_and_caches_are_not(tmp_path: Path) -> None:
    files = {"same": "s", "old": "o\n", "gone": "g", "moved": "m" * 20, "mode": "x", "type": "t", "dir/f": "f"}
    here = repository(tmp_path / "w", {**files, ".gitignore": "*.log\n"})
    manifest, there = packed(here)
    (there / "old").write_text("new\n")
    (there / "gone").unlink()
    (there / "moved").rename(there / "place")
    (there / "mode").chmod(0o755)
    (there / "type").unlink()
    (there / "type").symlink_to("same")
    (there / "bin").write_bytes(b"\0\1")
    write(there, {"x.log": "ignored", "__pycache__/a.pyc": "c", "dir/.pytest_cache/y": "c"})
    (there / ".git" / "hooks").mkdir(exist_ok=True)
    (there / ".git" / "hooks" / "pre-commit").write_text("evil")
    changes = changed(there, manifest)
    verbs = {change.path: change.verb for change in changes}
    assert verbs == {
        "bin": "new",
        "gone": "deleted",
        "mode": "mode",
        "moved": "deleted",
        "old": "changed",
        "place": "new",
        "type": "file to link",
    }
    assert find_renames(changes) == {"place": "moved"}
    text = format_patch(changes, here)
    for line in ("rename from moved", "deleted file mode 100644", "old mode 100644", "Binary files", "+new", "-o"):
        assert line in text
    applied = apply_changes(here, changes)
    assert applied.refused == ()
    assert changed(there, dict(packed(here)[0])) == []


FILES = st.dictionaries(st.sampled_from(["a", "b c", 'd"e', "f/g", "ü"]), st.text("ab\n\r\f ", max_size=40), max_size=4)


@settings(max_examples=15, deadline=None)
@given(old=FILES, new=FILES)
def test_the_patch_is_one_that_git_applies(old: dict[str, str], new: dict[str, str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        here, there, copy = (Path(place) / name for name in ("here", "there", "copy"))
        for directory, files in ((here, old), (there, new), (copy, old)):
            directory.mkdir()
            for path, text in files.items():
                (directory / path).parent.mkdir(exist_ok=True)
                (directory / path).write_bytes(text.encode())
        before = listed(here, {})
        changes = changed(there, before)
        text = format_patch(changes, here).encode("utf-8", "surrogateescape")
        if text:
            subprocess.run(["git", "apply", "-"], cwd=copy, input=text, check=True, capture_output=True)
        applied = apply_changes(here, changes)
        assert applied.refused == ()
        for result in (here, copy):
            found = {str(p.relative_to(result)): p.read_bytes() for p in result.rglob("*") if p.is_file()}
            assert found == {path: text.encode() for path, text in new.items()}


def test_a_huge_sparse_file_is_named_in_the_error(tmp_path: Path) -> None:
    there = tmp_path / "w"
    there.mkdir()
    with (there / "hole").open("wb") as file:
        file.truncate(1 << 40)
    assert listed(there, {})["hole"] == ManifestEntry("file", "too large", 1 << 40)
    with pytest.raises(EtudeError, match=r"over 512 MiB, with hole of 1,099,511,627,776 bytes"):
        changed(there, {})


def test_the_listing_of_a_pod_is_checked() -> None:
    rows = [["../x", "file", "d", 1, False], [".git/hooks/x", "file", "d", 1, True], ["ok", "file", "d", 1, False]]
    assert list(parse_listing("\n".join(map(json.dumps, rows)).encode())) == ["ok"]
    for wrong in (b"{}", b"[1]", b'["a", "socket", "d", 1, false]', b'["a", "file", "d", "1", false]', b"\xff"):
        with pytest.raises(EtudeError, match="listing is malformed"):
            parse_listing(wrong)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../a", "a/../b", "a//b", "./a", ".git/x", "a/.GIT/x", "a\0b"])
def test_paths_outside_the_workspace(path: str) -> None:
    assert not is_workspace_path(path)


# ------------------------------------------------------------------------------------------------- applying


def file(text: str, executable: bool = False) -> ManifestEntry:
    import hashlib

    return ManifestEntry("file", hashlib.sha256(text.encode()).hexdigest(), len(text), executable)


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, {"edited": "mine", "appeared": "mine", "kept": "old", "mode": "old"})
    (tmp_path / "dir").mkdir()
    (tmp_path / "mode").chmod(0o755)
    changes = [
        FileDiff("edited", file("old"), file("new"), b"new"),
        FileDiff("appeared", None, file("new"), b"new"),
        FileDiff("vanished", file("old"), file("new"), b"new"),
        FileDiff("kept", file("old"), file("new"), b"new"),
        FileDiff("mode", file("old"), file("new"), b"new"),
        FileDiff("dir", None, file("new"), b"new"),
        FileDiff("edited", file("old"), None),
    ]
    applied = apply_changes(tmp_path, changes)
    assert [change.path for change in applied.applied] == ["kept"]
    reasons = {change.path: why for change, why in applied.refused}
    assert reasons["appeared"] == "a file of that name appeared on disk meanwhile"
    assert reasons["vanished"] == "it was deleted on disk meanwhile"
    assert reasons["edited"] == reasons["mode"] == "it changed on disk meanwhile"
    assert "not a file" in reasons["dir"]
    assert (tmp_path / "edited").read_text() == (tmp_path / "appeared").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["appeared", "dir", "edited", "kept", "mode"]


def test_a_change_that_is_already_on_disk_is_not_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a": "new"})
    changes = [FileDiff("a", file("old"), file("new"), b"new"), FileDiff("gone/deep", file("x"), None)]
    assert apply_changes(tmp_path, changes).refused == ()


def test_nothing_is_written_through_a_link_or_outside(tmp_path: Path) -> None:
    here, outside = tmp_path / "here", tmp_path / "outside"
    for place in (here, outside):
        place.mkdir()
    (here / "way").symlink_to(outside)
    (here / "file").symlink_to(outside / "secret")
    changes = [
        FileDiff("way/evil", None, file("x"), b"x"),
        FileDiff("../outside/evil", None, file("x"), b"x"),
        FileDiff(str(outside / "evil"), None, file("x"), b"x"),
        FileDiff(".git/hooks/pre-commit", None, file("x", True), b"x"),
        FileDiff("file", file(""), file("x"), b"x"),
        FileDiff("up", None, ManifestEntry("link", "../outside")),
        FileDiff("abs", None, ManifestEntry("link", "/etc")),
        FileDiff("fine", None, ManifestEntry("link", "dir/x")),
    ]
    applied = apply_changes(here, changes)
    assert [change.path for change in applied.applied] == ["fine"]
    assert list(outside.iterdir()) == []
    assert not (here / ".git").exists()


@pytest.mark.parametrize(
    ("path", "target", "out"),
    [
        ("a", "b", False),
        ("d/a", "../b", False),
        ("d/a", "../../b", True),
        ("a", "../b", True),
        ("a", "/b", True),
        ("a", "d/../../b", True),
        ("a", "d/..", True),  # d may be a link itself
        ("a", "", True),
        ("d/e/a", "./../../x", False),
    ],
)
def test_links_that_point_outside(path: str, target: str, out: bool) -> None:
    assert link_escapes(path, target) is out


def test_permissions_are_kept_and_empty_directories_removed(tmp_path: Path) -> None:
    write(tmp_path, {"private": "old", "script": "old", "d/e/f": "old", "d/g": "stays"})
    (tmp_path / "private").chmod(0o600)
    (tmp_path / "script").chmod(0o640)
    changes = [
        FileDiff("private", file("old"), file("new"), b"new"),
        FileDiff("script", file("old"), file("new", True), b"new"),
        FileDiff("d/e/f", file("old"), None),
        FileDiff("d/h/i", None, file("new", True), b"new"),
    ]
    assert apply_changes(tmp_path, changes).refused == ()
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "script").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "d/h/i").stat().st_mode & 0o111
    assert not (tmp_path / "d/e").exists()


def test_a_file_can_replace_a_directory(tmp_path: Path) -> None:
    write(tmp_path, {"d/f": "old"})
    changes = [FileDiff("d", None, file("new"), b"new"), FileDiff("d/f", file("old"), None)]
    assert apply_changes(tmp_path, changes).refused == ()
    assert (tmp_path / "d").read_text() == "new"


def test_the_patch_of_a_file_whose_original_is_gone_has_a_note(tmp_path: Path) -> None:
    write(tmp_path, {"a": "edited"})
    text = format_file_patch(FileDiff("a", file("old"), file("new"), b"new"), tmp_path)
    assert "changed on disk meanwhile" in text
