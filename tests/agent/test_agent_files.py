"""Uploading files and applying changes: no secret is uploaded, no edit overwritten, nothing written outside."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from agent_workspace import open_pods
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent import upload
from etude.agent.changes import describe_change, find_changes, find_renames, format_file_patch, format_patch
from etude.agent.upload import open_workspace, recent_files, select_files, upload_directory
from etude.errors import EtudeError, InputError
from etude.pods import open_fleet
from etude.pods.runtime.unisolated import open_unisolated
from etude.pods.workspace import FileChange, FileState, apply_to_directory, is_workspace_path, link_escapes

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


def uploaded(directory: Path, **options: Any) -> tuple[dict[str, FileState], Path]:
    """Upload a directory to another one beside it; return the manifest and the copy."""
    there = directory.parent / f"{directory.name}-pod"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()

    async def go() -> dict[str, FileState]:
        async with open_unisolated(there) as pod:
            return dict((await upload_directory(pod, str(there), directory, **options)).manifest)

    return asyncio.run(go()), there


@pytest.fixture(scope="module")
def pods() -> Any:
    with open_pods() as state:
        yield state


def changes_of(pods: Path, directory: Path, script: str, **options: Any) -> list[FileChange]:
    """Upload a directory to a pod, run a script there and return the changes."""

    async def go() -> list[FileChange]:
        async with open_fleet(state=pods) as fleet, open_workspace(fleet, "host", directory, **options) as (pod, there):
            assert await find_changes(pod, pod.workdir, there.manifest, directory) == []
            done = await pod.exec(["bash", "-ec", script])
            assert done.ok, done.stderr
            return await find_changes(pod, pod.workdir, there.manifest, directory)

    return asyncio.run(go())


# ------------------------------------------------------------------------------------------------- upload


def test_ignored_files_and_possible_secrets_are_not_uploaded(tmp_path: Path) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", ".gitignore": ".env\nbuild/\n", "sub/b.py": "y"})
    write(here, {".env": "KEY=1", "build/out": "z", "new.py": "untracked"})
    git(here, "remote", "add", "origin", "https://user:password@example.org/r.git")
    git(here, "config", "http.extraHeader", "Authorization: basic password")
    (here / ".git" / "credentials").write_text("password")
    manifest, there = uploaded(here)
    assert sorted(manifest) == [".gitignore", "a.py", "new.py", "sub/b.py"]
    assert git(there, "log", "--format=%s") == "first\n"
    assert git(there, "status", "--short") == "?? new.py\n"
    found = subprocess.run(["grep", "-r", "password", str(there)], capture_output=True, text=True)
    assert found.stdout == ""


def test_an_ignored_path_can_be_included(tmp_path: Path, pods: Path) -> None:
    here = repository(tmp_path / "w", {"a.py": "x", ".gitignore": "data/\n"})
    write(here, {"data/one": "1", "data/two": "2"})
    manifest, _ = uploaded(here, include=["data"])
    assert {"data/one", "data/two"} < manifest.keys()
    (change,) = changes_of(pods, here, "echo 3 > data/one; echo new > data/new", include=["data"])
    assert change.path == "data/one"  # although git ignores it there as well
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
    manifest, there = uploaded(here)
    assert manifest["link"] == FileState.symlink("/etc/passwd")
    assert manifest["b.sh"].executable
    assert "pipe" not in manifest
    assert os.readlink(there / "link") == "/etc/passwd"
    assert os.access(there / "b.sh", os.X_OK)


def test_a_linked_work_tree_has_its_own_head_in_the_pod(tmp_path: Path) -> None:
    main = repository(tmp_path / "main", {"a.py": "x"})
    git(main, "worktree", "add", "-q", "-b", "other", str(tmp_path / "w"))
    _, there = uploaded(tmp_path / "w")
    assert git(there, "branch", "--show-current") == "other\n"
    assert git(there, "status", "--short") == ""


@pytest.mark.parametrize("kind", ["file", "link", "commondir", "false worktree", "worktree of another"])
def test_the_history_of_a_repository_that_does_not_know_the_directory_is_refused(tmp_path: Path, kind: str) -> None:
    private = repository(tmp_path / "private", {"secret.py": "password"})
    here = repository(tmp_path / "w", {"a.py": "x"})
    if kind == "commondir":
        write(here, {".git/commondir": f"{private}/.git\n"})
    else:
        shutil.rmtree(here / ".git")
    if kind == "file":
        write(here, {".git": f"gitdir: {private}/.git\n"})
    elif kind == "link":
        (here / ".git").symlink_to(private / ".git")
    elif kind == "false worktree":
        own = "fake/worktrees/w"
        files = {"commondir": f"{private}/.git\n", "gitdir": f"{here}/.git\n", "HEAD": "ref: refs/heads/main\n"}
        write(here, {".git": f"gitdir: {here}/{own}\n", **{f"{own}/{name}": text for name, text in files.items()}})
    elif kind == "worktree of another":
        git(private, "worktree", "add", "-q", "-b", "other", str(tmp_path / "theirs"))
        write(here, {".git": f"gitdir: {private}/.git/worktrees/theirs\n"})
    with pytest.raises(InputError, match=r"(?s)does not name .* as a work tree.*--no-history"):
        select_files(here)
    selection = select_files(here, history=False)
    assert "a.py" in selection.files
    assert not selection.history


def test_the_history_of_a_submodule_is_uploaded_from_within(tmp_path: Path) -> None:
    inner = repository(tmp_path / "inner", {"deep.py": "d"})
    here = repository(tmp_path / "w", {"a.py": "x"})
    git(here, "submodule", "--quiet", "add", str(inner), "lib")
    _, there = uploaded(here / "lib")
    assert git(there, "log", "--format=%s") == "first\n"


def test_packed_refs_and_submodules_are_uploaded(tmp_path: Path, pods: Path) -> None:
    inner = repository(tmp_path / "inner", {"deep.py": "d"})
    here = repository(tmp_path / "w", {"a.py": "x"})
    git(here, "submodule", "--quiet", "add", str(inner), "lib")
    git(here, "commit", "-qm", "second")
    git(here, "gc", "-q")
    manifest, there = uploaded(here)
    assert "lib/deep.py" in manifest
    assert git(there, "log", "--format=%s").splitlines() == ["second", "first"]
    (change,) = changes_of(pods, here, "echo new > lib/new.py")
    assert change.path == "lib/new.py"


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
    manifest, _ = uploaded(here / "scratch")
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


def test_changes_of_every_kind_are_found_and_caches_are_not(tmp_path: Path, pods: Path) -> None:
    files = {
        "same": "s",
        "old": "o\n",
        "gone": "g",
        "moved": "m" * 20,
        "mode": "x",
        "type": "t",
        "dir/f": "f",
        "d/e": "e",
    }
    here = repository(tmp_path / "w", {**files, "d/e": "e", ".gitignore": "*.log\n"})
    script = """
    echo new > old; rm gone; mv moved place; chmod +x mode; rm type; ln -s same type; printf '\\0\\1' > bin; rm -r d
    mkdir -p __pycache__ dir/.pytest_cache .git/hooks; mkfifo pipe
    echo ignored > x.log; echo c > __pycache__/a.pyc; echo c > dir/.pytest_cache/y; echo evil > .git/hooks/pre-commit
    """
    changes = changes_of(pods, here, script)
    assert {change.path: describe_change(change) for change in changes} == {
        "bin": "new",
        "d/e": "deleted",
        "gone": "deleted",
        "mode": "mode",
        "moved": "deleted",
        "old": "changed",
        "place": "new",
        "type": "file to link",
    }
    assert find_renames(changes) == {"place": "moved"}
    text = format_patch(changes)
    for line in ("rename from moved", "deleted file mode 100644", "old mode 100644", "Binary files", "+new", "-o"):
        assert line in text
    assert apply_to_directory(here, changes).refused == ()
    for change in changes:
        path = here / change.path
        assert os.path.lexists(path) == (change.after is not None)
        if change.after is not None and change.after.kind == "file":
            assert path.read_bytes() == change.after.data
    assert os.readlink(here / "type") == "same"
    assert os.access(here / "mode", os.X_OK)
    assert not (here / "d").exists()
    assert not (here / ".git/hooks/pre-commit").exists()


def test_the_original_of_a_file_that_was_edited_meanwhile_is_remembered_or_unknown(tmp_path: Path, pods: Path) -> None:
    here = tmp_path / "w"
    write(here, {"a": "old\n", "b": "old\n"})

    async def go() -> list[FileChange]:
        async with open_fleet(state=pods) as fleet, open_workspace(fleet, "host", here) as (pod, there):
            await pod.exec("echo new > a")
            known = await find_changes(pod, pod.workdir, there.manifest, here)
            await pod.exec("echo new > b")
            write(here, {"a": "mine\n", "b": "mine\n"})
            return await find_changes(pod, pod.workdir, there.manifest, here, known)

    a, b = asyncio.run(go())
    assert "-old" in format_file_patch(a)
    assert "changed on disk meanwhile" in format_file_patch(b)
    assert len(apply_to_directory(here, [a, b]).refused) == 2


FILES = st.dictionaries(st.sampled_from(["a", "b c", 'd"e', "f/g", "ü"]), st.text("ab\n\r\f ", max_size=40), max_size=4)


@settings(max_examples=15, deadline=None)
@given(old=FILES, new=FILES)
def test_the_patch_is_one_that_git_applies(old: dict[str, str], new: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        here, copy = (Path(place) / name for name in ("here", "copy"))
        for directory in (here, copy):
            directory.mkdir()
            for path, text in old.items():
                (directory / path).parent.mkdir(exist_ok=True)
                (directory / path).write_bytes(text.encode())
        states = [{path: file(text) for path, text in files.items()} for files in (old, new)]
        paths = sorted(path for path in {*old, *new} if old.get(path) != new.get(path))
        changes = [FileChange(path, states[0].get(path), states[1].get(path)) for path in paths]
        patch = format_patch(changes).encode("utf-8", "surrogateescape")
        if patch:
            subprocess.run(["git", "apply", "-"], cwd=copy, input=patch, check=True, capture_output=True)
        assert apply_to_directory(here, changes).refused == ()
        for result in (here, copy):
            found = {str(p.relative_to(result)): p.read_bytes() for p in result.rglob("*") if p.is_file()}
            assert found == {path: text.encode() for path, text in new.items()}


def test_changes_that_are_too_large_or_too_many_are_named_in_the_error(tmp_path: Path, pods: Path) -> None:
    here = tmp_path / "w"
    write(here, {"a": "x"})
    with pytest.raises(EtudeError, match=r"over 512 MiB, with hole of 1,099,511,627,776 bytes"):
        changes_of(pods, here, "truncate -s 1T hole")
    with pytest.raises(EtudeError, match=r"5,001 files changed in the pod \(in many\); at most 5,000"):
        changes_of(pods, here, "mkdir many; cd many; seq 5001 | xargs touch")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../a", "a/../b", "a//b", "./a", ".git/x", "a/.GIT/x", "a\0b"])
def test_paths_outside_the_workspace(path: str) -> None:
    assert not is_workspace_path(path)


# ------------------------------------------------------------------------------------------------- applying


def file(text: str, executable: bool = False) -> FileState:
    return FileState.file(text.encode(), executable)


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, {"edited": "mine", "appeared": "mine", "kept": "old", "mode": "old"})
    (tmp_path / "dir").mkdir()
    (tmp_path / "mode").chmod(0o755)
    changes = [
        FileChange("edited", file("old"), file("new")),
        FileChange("appeared", None, file("new")),
        FileChange("vanished", file("old"), file("new")),
        FileChange("kept", file("old"), file("new")),
        FileChange("mode", file("old"), file("new")),
        FileChange("dir", None, file("new")),
        FileChange("edited", file("old"), None),
    ]
    applied = apply_to_directory(tmp_path, changes)
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
    changes = [FileChange("a", file("old"), file("new")), FileChange("gone/deep", file("x"), None)]
    assert apply_to_directory(tmp_path, changes).refused == ()


def test_nothing_is_written_through_a_link_or_outside(tmp_path: Path) -> None:
    here, outside = tmp_path / "here", tmp_path / "outside"
    for place in (here, outside):
        place.mkdir()
    (here / "way").symlink_to(outside)
    (here / "file").symlink_to(outside / "secret")
    changes = [
        FileChange("way/evil", None, file("x")),
        FileChange("../outside/evil", None, file("x")),
        FileChange(str(outside / "evil"), None, file("x")),
        FileChange(".git/hooks/pre-commit", None, file("x", True)),
        FileChange("file", file(""), file("x")),
        FileChange("up", None, FileState.symlink("../outside")),
        FileChange("abs", None, FileState.symlink("/etc")),
        FileChange("fine", None, FileState.symlink("dir/x")),
    ]
    applied = apply_to_directory(here, changes)
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
        FileChange("private", file("old"), file("new")),
        FileChange("script", file("old"), file("new", True)),
        FileChange("d/e/f", file("old"), None),
        FileChange("d/h/i", None, file("new", True)),
    ]
    assert apply_to_directory(tmp_path, changes).refused == ()
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "script").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "d/h/i").stat().st_mode & 0o111
    assert not (tmp_path / "d/e").exists()


def test_a_file_can_replace_a_directory(tmp_path: Path) -> None:
    write(tmp_path, {"d/f": "old"})
    changes = [FileChange("d", None, file("new")), FileChange("d/f", file("old"), None)]
    assert apply_to_directory(tmp_path, changes).refused == ()
    assert (tmp_path / "d").read_text() == "new"
