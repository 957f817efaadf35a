"""The embedding cache: shared, bounded, and never fatal."""

import multiprocessing
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from etude.harness.search.cache import Vector, VectorCache, default_directory


def key(number: int) -> bytes:
    return number.to_bytes(20, "big")


def vector(number: int) -> Vector:
    return np.full(384, number % 7, dtype=np.float16)


def fill(cache: VectorCache, numbers: range) -> None:
    cache.put({key(number): vector(number) for number in numbers})


def write_in_another_process(directory: Path, start: int) -> None:
    cache = VectorCache(directory)
    for number in range(start, start + 200, 20):
        fill(cache, range(number, number + 20))


def test_concurrent_writes_of_several_processes_are_all_readable(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_in_another_process, args=(tmp_path, 200 * n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = VectorCache(tmp_path).get([key(number) for number in range(700)])
    assert len(found) == 600
    assert all((found[key(number)] == vector(number)).all() for number in range(600))


def test_a_connection_is_reopened_after_a_fork(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path)
    fill(cache, range(10))
    child = os.fork()
    if child == 0:
        try:
            fill(cache, range(10, 20))
            found = cache.get([key(number) for number in range(20)])
        finally:
            os._exit(0 if len(found) == 20 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(cache.get([key(number) for number in range(20)])) == 20


@pytest.mark.parametrize("damage", ["garbage", "half", "another table", "a directory"])
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: str) -> None:
    cache = VectorCache(tmp_path)
    fill(cache, range(2000))
    cache.close()
    (file,) = tmp_path.glob("vectors-*.sqlite")
    data = file.read_bytes()
    if damage == "garbage":
        file.write_bytes(b"garbage" * 1000)
    elif damage == "half":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "another table":
        file.unlink()
        other = sqlite3.connect(file)
        other.execute("CREATE TABLE vectors (key TEXT)")
        other.commit()
        other.close()
    else:
        file.unlink()
        file.mkdir()
    keys = [key(number) for number in range(2000)]
    found = VectorCache(tmp_path).get(keys)  # nothing raised; what is returned is right
    assert all((found[key(number)] == vector(number)).all() for number in range(2000) if key(number) in found)
    if damage != "a directory":  # not damage but a user's doing: logged and left alone
        again = VectorCache(tmp_path)
        again.get(keys)
        fill(again, range(2000))
        assert len(VectorCache(tmp_path).get(keys)) == 2000


def test_a_process_with_a_replaced_file_open_continues(tmp_path: Path) -> None:
    holder, other = VectorCache(tmp_path), VectorCache(tmp_path)
    fill(holder, range(50))
    (file,) = tmp_path.glob("vectors-*.sqlite")
    os.truncate(file, 100)
    fill(other, range(50))  # finds the damage
    fill(other, range(50))
    fill(holder, range(50))
    fill(holder, range(50))
    assert len(VectorCache(tmp_path).get([key(number) for number in range(50)])) == 50


def test_a_vector_with_a_wrong_checksum_is_missing(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path)
    fill(cache, range(3))
    (file,) = tmp_path.glob("vectors-*.sqlite")
    other = sqlite3.connect(file)
    other.execute("UPDATE vectors SET vector = zeroblob(772) WHERE key = ?", (key(0),))
    other.execute("UPDATE vectors SET vector = 'text' WHERE key = ?", (key(1),))
    other.commit()
    assert list(cache.get([key(0), key(1), key(2)])) == [key(2)]


def test_the_cache_stays_within_its_size_and_keeps_what_was_used(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path, max_bytes=500_000)
    fill(cache, range(400))
    (file,) = tmp_path.glob("vectors-*.sqlite")
    with sqlite3.connect(file) as other:
        other.execute("UPDATE vectors SET used = 1")  # long ago
    kept = [key(number) for number in range(20)]
    assert len(cache.get(kept)) == 20
    fill(cache, range(400, 600))
    assert len(cache.get(kept)) == 20
    assert 0 < len(cache.get([key(number) for number in range(20, 400)])) < 300
    for start in range(600, 2000, 100):
        fill(cache, range(start, start + 100))
    assert file.stat().st_size < 700_000


def test_with_an_unusable_directory_nothing_is_cached(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = VectorCache(tmp_path / "file" / "below")
    fill(cache, range(3))
    assert cache.get([key(0)]) == {}


def test_the_cache_is_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "etude" / "embeddings"
