"""Sources expand to the same files everywhere, or to an error that names the source."""

import sysconfig
from pathlib import Path

import pytest

from etude.data.sources import source_files
from etude.errors import InputError


def plant(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    return root


def test_a_directory_is_walked_in_the_order_of_its_paths(tmp_path: Path) -> None:
    root = plant(tmp_path, "b.py", "a/z.py", "a.py", "a/b/c.py", "notes.md", "tests/test_a.py")
    found = [path.relative_to(root).as_posix() for path in source_files([str(root)])]
    assert found == ["a.py", "a/b/c.py", "a/z.py", "b.py", "tests/test_a.py"]


def test_hidden_generated_and_installed_folders_are_left_out(tmp_path: Path) -> None:
    root = plant(tmp_path, "a.py", ".git/b.py", "__pycache__/c.py", "lib/site-packages/d.py")
    assert source_files([str(root)]) == [root / "a.py"]


def test_sources_keep_their_order_and_share_no_file(tmp_path: Path) -> None:
    root = plant(tmp_path, "z/a.py", "y/b.py")
    assert source_files([str(root / "z"), str(root)]) == [root / "z/a.py", root / "y/b.py"]


def test_a_file_is_a_source_whatever_its_name(tmp_path: Path) -> None:
    root = plant(tmp_path, "notes.md")
    assert source_files([str(root / "notes.md")]) == [root / "notes.md"]


def test_suffixes_choose_the_files(tmp_path: Path) -> None:
    root = plant(tmp_path, "a.py", "b.md", "c.txt")
    assert [path.name for path in source_files([str(root)], (".md", ".txt"))] == ["b.md", "c.txt"]


def test_stdlib_is_the_standard_library_alone() -> None:
    found = source_files(["stdlib"])
    root = Path(sysconfig.get_path("stdlib"))
    assert {root / "heapq.py", root / "json/decoder.py"} <= set(found)
    assert not [path for path in found if "site-packages" in path.parts]


def test_text_that_is_not_utf8_is_left_out_of_a_walk_and_refused_by_name(tmp_path: Path) -> None:
    root = plant(tmp_path, "a.py")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    assert source_files([str(root)]) == [root / "a.py"]
    with pytest.raises(InputError, match=r"latin\.py is not UTF-8"):
        source_files([str(root / "latin.py")])


def test_a_broken_link_is_not_a_file(tmp_path: Path) -> None:
    root = plant(tmp_path, "a.py")
    (root / "gone.py").symlink_to(root / "nowhere.py")
    assert source_files([str(root)]) == [root / "a.py"]


def test_a_source_that_gives_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        source_files([str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match=r"holds no UTF-8 file ending in \.py"):
        source_files([str(plant(tmp_path / "empty", "a.md"))])
