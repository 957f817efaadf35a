"""Every kind of source gives the same files in the same order, and a hostile one gives an error, not its payload."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from etude.data.documents import File, ReadLimits, read_source, source_digest
from etude.errors import InputError

FILES = {"README.md": "read\n", "pkg/__init__.py": "", "pkg/a.py": "a = 1\n", "pkg/deep/b.py": "b = 2\n"}

EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def plant(root: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def git(root: Path, *arguments: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *author, "-C", str(root), *arguments], check=True, capture_output=True)


def texts(source: object, limits: ReadLimits = ReadLimits()) -> dict[tuple[str, str], str]:  # noqa: B008
    return {(file.repository, file.path): file.read().decode() for file in read_source(str(source), limits)}


def paths(source: object) -> list[str]:
    return [f"{file.repository}:{file.path}" for file in read_source(str(source))]


def test_a_project_is_one_repository(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {**FILES, "setup.py": "s\n", ".hidden/x.py": "", "__pycache__/y.py": ""})
    assert paths(root) == [f"proj:{path}" for path in sorted([*FILES, "setup.py"])]


def test_any_other_directory_is_one_repository_per_entry(tmp_path: Path) -> None:
    root = plant(tmp_path, {"b/x.py": "x", "a/y.py": "y", "loose.py": "z", "LICENSE": "MIT"})
    expected = ["a:y.py", "a:../LICENSE", "b:x.py", "b:../LICENSE", "loose.py:loose.py", "loose.py:../LICENSE"]
    assert paths(root) == expected


def test_git_leaves_out_what_is_ignored_and_keeps_what_is_new(tmp_path: Path) -> None:
    root = plant(tmp_path / "repo", {**FILES, ".gitignore": "*.log\n", "x.log": "", "new.py": "n"})
    git(root, "init")
    git(root, "add", "pkg")
    assert paths(root) == [f"repo:{path}" for path in sorted([*FILES, ".gitignore", "new.py"])]


def test_a_revision_and_a_bare_repository_are_read_from_the_objects(tmp_path: Path) -> None:
    root = plant(tmp_path / "repo")
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "one")
    git(root, "tag", "v1")
    (root / "pkg/a.py").write_text("changed\n")
    (root / "link.py").symlink_to("pkg/a.py")
    git(root, "add", ".")
    git(root, "commit", "-m", "two")
    git(tmp_path, "clone", "--bare", str(root), "bare.git")
    assert texts(f"{root}@v1") == {("repo", path): text for path, text in FILES.items()}
    assert texts(tmp_path / "bare.git")[("bare", "pkg/a.py")] == "changed\n"
    assert ("repo", "link.py") not in texts(f"{root}@main")
    with pytest.raises(InputError, match="git rev-parse failed"):
        texts(f"{root}@nonsense")


def test_a_forged_index_names_no_file_outside(tmp_path: Path) -> None:
    root = plant(tmp_path / "repo")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/key.py").write_text("secret")
    (root / "link").symlink_to("../etc")
    git(root, "init")
    git(root, "add", "pkg/__init__.py")
    index = root / ".git/index"
    for name in ("link/key.py", "../etc/key.py", f"{tmp_path}/etc/key.py"):
        stand_in = "x" * len(name)  # of the same length: git refuses to add such a name itself
        git(root, "read-tree", "--empty")
        git(root, "update-index", "--add", "--cacheinfo", f"100644,{EMPTY_BLOB},{stand_in}")
        data = index.read_bytes()[:-20].replace(stand_in.encode(), name.encode())
        index.write_bytes(data + hashlib.sha1(data).digest())
        assert name in subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True).stdout
        assert texts(root) == {("repo", path): text for path, text in FILES.items()}


@pytest.mark.parametrize("suffix", ["zip", "whl", "tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"])
def test_archives_hold_the_same_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"thing-1.0.{suffix}"
    if suffix in ("zip", "whl"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in FILES.items():
                archive.writestr(name, text)
    else:
        with tarfile.open(path, f"w:{suffix.removeprefix('tar').removeprefix('.').replace('tgz', 'gz')}") as tar:
            tar.add(plant(tmp_path / "in"), arcname=".")
    assert texts(path) == {("thing-1.0", name): text for name, text in FILES.items()}


def test_members_outside_the_archive_are_skipped(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for name in ("ok.py", "../evil.py", "/abs.py", "a/../../up.py", "..\\windows.py"):
            archive.writestr(name, "x")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name in ("ok.py", "../evil.py", "/abs.py"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        link = tarfile.TarInfo("link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert list(texts(tmp_path / "z.zip")) == [("z", "ok.py")]
    assert list(texts(tmp_path / "t.tar")) == [("t", "ok.py")]


def test_a_bomb_is_refused_while_it_unpacks(tmp_path: Path) -> None:
    limits = ReadLimits(max_item_bytes=1 << 20, max_archive_bytes=4 << 20)
    with zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.py", b"\0" * (8 << 20))
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("zeros.py")
        member.size = 8 << 20
        tar.addfile(member, io.BytesIO(b"\0" * member.size))
    for name in ("z.zip", "t.tar.gz"):
        with pytest.raises(InputError, match=f"{name} unpacks to more than"):
            list(read_source(str(tmp_path / name), limits))
    (only,) = read_source(str(tmp_path / "z.zip"), ReadLimits(max_item_bytes=1 << 20))
    with pytest.raises(InputError, match=r"zeros\.py unpacks to 8,388,608 bytes"):
        only.read()


def test_a_header_that_announces_megabytes_of_name_is_not_read(tmp_path: Path) -> None:
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, 512 << 20
    with gzip.open(tmp_path / "t.tar.gz", "wb") as file:
        file.write(member.tobuf(tarfile.USTAR_FORMAT))
        file.write(b"\0" * (1 << 20))
    with pytest.raises(InputError, match=r"t\.tar\.gz cannot be read: a header of"):
        list(read_source(str(tmp_path / "t.tar.gz")))


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz", "x.tar.xz", "x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=name):
        list(read_source(str(tmp_path / name)))


def rows_file(path: Path, rows: list[dict[str, object]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = zstandard.compress(data)
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_rows_name_their_repository_and_path_or_get_one(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, object]] = [
        {"text": "one", "repository": "r", "path": "a.py"},
        {"text": "zwei 東京", "repository": None, "path": None},
    ]
    found = texts(rows_file(tmp_path / f"data.{suffix}", rows))
    assert found == {("r", "a.py"): "one", ("data", "row-00000002"): "zwei 東京"}


def test_rows_with_the_alternative_keys(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "d.jsonl", [{"content": "c", "repo_name": "o/r", "path": "x.py"}])
    assert texts(path) == {("o/r", "x.py"): "c"}


def test_a_row_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"row 1 has no string under text or content; this looks like chat"):
        texts(rows_file(tmp_path / "a.jsonl", [{"messages": []}]))
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\nnot json\n')
    with pytest.raises(InputError, match=r"b\.jsonl: row 2 is not JSON"):
        texts(tmp_path / "b.jsonl")


def test_a_row_too_large_to_hold_is_reported_by_its_size(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "a.jsonl", [{"text": "x" * 5000}, {"text": "small"}])
    large, small = read_source(str(path), ReadLimits(max_item_bytes=1000))
    assert (large.size, large.read()) == (5000 + len('{"text": ""}\n'), b"")
    assert small.read() == b"small"


def test_links_on_disk_are_not_followed(tmp_path: Path) -> None:
    root = plant(tmp_path / "p", {"pyproject.toml": "", "a.py": "a"})
    (root / "b.py").symlink_to("/etc/passwd")
    (root / "up").symlink_to(tmp_path)
    assert paths(root) == ["p:a.py", "p:pyproject.toml"]


def test_names_that_are_not_utf8_can_be_reported(tmp_path: Path) -> None:
    root = plant(tmp_path / "p", {"pyproject.toml": ""})
    with open(os.fsencode(root) + b"/caf\xe9.py", "wb") as file:
        file.write(b"x")
    found: list[File] = [file for file in read_source(str(root)) if file.path.endswith(".py")]
    assert [file.path.encode() for file in found] == [b"caf?.py"]
    assert found[0].read() == b"x"


def test_the_digest_of_a_source_follows_its_content(tmp_path: Path) -> None:
    root = plant(tmp_path / "p")
    before = source_digest(str(root))
    assert source_digest(str(root)) == before
    (root / "pkg/a.py").write_text("a = 11\n")
    assert source_digest(str(root)) != before


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        list(read_source(str(tmp_path / "nowhere")))
