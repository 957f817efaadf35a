"""Deleting untrusted trees never touches anything outside them."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from etude.pods.images import trees


def test_deletion_handles_any_mode_and_depth(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "work/work").mkdir(parents=True)
    (top / "work/file").write_text("x")
    os.chmod(top / "work/work", 0)
    os.chmod(top / "work", 0o500)
    deep = os.open(top, os.O_RDONLY)
    for _ in range(1500):  # far beyond what a path or Python's stack can hold
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    trees.remove_tree(top)
    assert not os.path.lexists(top)
    trees.remove_tree(top)
    trees.remove_tree(tmp_path / "no/such")


def test_deletion_never_follows_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (tmp_path / "top").mkdir()
    (tmp_path / "top/link").symlink_to(kept)
    trees.remove_tree(tmp_path / "top")
    (tmp_path / "link").symlink_to(kept)
    trees.remove_tree(tmp_path / "link")
    assert (kept / "file").exists()
    assert not os.path.lexists(tmp_path / "link")


def test_deletion_never_leaves_a_tree_that_changes_under_it(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "d").mkdir(parents=True)
    (victim / "d/file").write_text("x")
    stop = threading.Event()

    def swap(place: Path) -> None:
        while not stop.is_set():
            with suppress(OSError):
                (place / "d").mkdir()
                (place / "d/file").write_text("x")
            with suppress(OSError):
                os.rename(place / "d", place / "away")
                (place / "d").symlink_to(victim)

    for number in range(5):
        top = tmp_path / f"top{number}"
        (top / "in").mkdir(parents=True)
        thread = threading.Thread(target=swap, args=(top / "in",))
        stop.clear()
        thread.start()
        for _ in range(200):
            with suppress(OSError):
                trees.remove_tree(top / "in/d")
        stop.set()
        thread.join()
        trees.remove_tree(top)
        assert not top.exists()
    assert (victim / "d/file").read_text() == "x"


def test_concurrent_deletions_of_one_tree_do_not_disturb_each_other(tmp_path: Path) -> None:
    for _ in range(20):
        for number in range(60):
            (tmp_path / f"top/{number % 6}/{number}/a/b").mkdir(parents=True)
            (tmp_path / f"top/{number % 6}/{number}/a/b/file").write_text("x")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(trees.remove_tree, [tmp_path / "top"] * 4))
        assert not (tmp_path / "top").exists()


def test_deletion_stops_where_something_is_mounted(tmp_path: Path) -> None:
    """A bind mount of the same file system, like the host directories of a pod."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    (tmp_path / "top/in").mkdir(parents=True)
    script = "import sys, pathlib; from etude.pods.images import trees; trees.remove_tree(pathlib.Path(sys.argv[1]))"
    inside = f'mount --bind "$1/kept" "$1/top/in" || exit 77; exec "{sys.executable}" -c "{script}" "$1/top"'
    command = ["unshare", "-Urm", "sh", "-c", inside, "sh", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    assert "something is mounted there" in done.stderr
    assert (tmp_path / "kept/file").read_text() == "x"
