"""What `etude bench stats` reads from tasks: the size of reference changes in all their forms, requests, and dates."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from etude.bench.cli import app
from etude.bench.stats import ReferenceChange, quartiles, read_date, reference_change
from etude.errors import EtudeError, InputError
from etude_nano.source import generate_nano

DIFF = """\
diff --git a/pkg/a.py b/pkg/a.py
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,3 @@
 one
--- two
+++ three
 four
diff --git a/pkg/old.py b/pkg/old.py
--- a/pkg/old.py
+++ /dev/null
@@ -1 +0,0 @@
-gone
diff --git a/pkg/new.py b/pkg/new.py
--- /dev/null
+++ b/pkg/new.py
@@ -0,0 +1,2 @@
+first
+second
"""


def write(top: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


def task(top: Path, solution: dict[str, str], metadata: str = "", request: str = "Do it.") -> Path:
    return write(
        top,
        {
            "task.toml": f'schema_version = "1.4"\n[metadata]\ncategory = "feature"\n{metadata}',
            "instruction.md": request,
            "environment/Dockerfile": "FROM host\nCOPY repo /work\n",
            "environment/repo/pkg/a.py": "one\ntwo\nfour\n",
            "environment/repo/pkg/old.py": "gone\n",
            "tests/test.sh": "#!/bin/sh\n",
            **solution,
        },
    )


def stats(*arguments: object) -> Any:
    done = CliRunner().invoke(app, ["stats", *map(str, arguments), "--json"])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (
            {
                "solution/solve.sh": "cd /work\nrm -f -- 'pkg/old.py'\ncp -R /solution/repo/. .\n",
                "solution/repo/pkg/a.py": "one\nthree\nfour\n",
                "solution/repo/pkg/new.py": "first\nsecond\n",
            },
            ReferenceChange(5, 3),
        ),
        ({"solution/solve.sh": "git apply /solution/fix.patch\n", "solution/fix.patch": DIFF}, ReferenceChange(5, 3)),
        ({"solution/solve.sh": f"cd /work\npatch -p1 <<'END'\n{DIFF}END\n"}, ReferenceChange(5, 3)),
        ({"solution/solve.sh": "rm -f -- pkg/old.py\n"}, ReferenceChange(1, 1)),
        (
            {"solution/solve.sh": "cp /solution/final.txt /logs/agent/\n", "solution/final.txt": "It is 4."},
            ReferenceChange(0, 0),
        ),
        ({"solution/solve.sh": "sed -i s/one/two/ pkg/a.py\n"}, None),
    ],
    ids=["copies", "patch", "diff-in-script", "removal", "answer", "program"],
)
def test_the_size_of_a_reference_is_read_from_its_files(
    solution: dict[str, str], expected: ReferenceChange | None, tmp_path: Path
) -> None:
    assert reference_change(task(tmp_path, solution)) == expected


def test_benchmarks_are_described_side_by_side(tmp_path: Path) -> None:
    solution = {"solution/solve.sh": "rm -f -- pkg/old.py\n"}
    dates = ("2026-01-31T23:30:00-02:00", "2025-06-01", "2026-03-01")
    for number, day in enumerate(dates):
        task(tmp_path / f"v1/t{number}", solution, f'commit_date = "{day}"\nrepository = "r"\n', "x" * (100 + number))
    task(tmp_path / "v2/t0", solution, f'commit_date = "{dates[0]}"\nrepository = "r"\n', "x" * 100)  # the same task
    generate_nano(tmp_path / "v2/nano", 3, "new", 0, (1,))
    found = stats(tmp_path / "v1", tmp_path / "v2", "--cutoff", "2026-01-31")
    first, second = found["benchmarks"]
    assert (first["tasks"], first["repositories"], first["categories"]) == (3, 1, {"feature": 3})
    assert first["request"] == {"median": 101, "q1": 100.5, "q3": 101.5, "least": 100, "most": 102, "tasks": 3}
    assert first["lines"]["median"] == first["files"]["median"] == 1
    # The first commit was made on 1 February in UTC.
    assert (first["age"]["oldest"], first["age"]["median"], first["age"]["newest"]) == (
        "2025-06-01",
        "2026-02-01",
        "2026-03-01",
    )
    assert first["age"]["before_cutoff"] == {"tasks": 1, "solve_rate": None}
    assert first["age"]["after_cutoff"] == {"tasks": 2, "solve_rate": None}
    assert (second["tasks"], second["age"]["dated"], found["common"]) == (4, 1, 1)
    text = CliRunner().invoke(app, ["stats", str(tmp_path / "v1"), str(tmp_path / "v2")]).stdout
    assert "1 tasks are the same in all of them" in text


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no task found"):
        stats(tmp_path)
    top = task(tmp_path / "t", {"solution/solve.sh": "true\n"}, 'commit_date = "soon"\n')
    with pytest.raises(InputError, match=r"metadata\.commit_date: 'soon' is not a date; expected one such as"):
        stats(top)
    with pytest.raises(InputError, match="--cutoff: 'x' is not a date"):
        stats(top, "--cutoff", "x")
    with pytest.raises(EtudeError, match="no comparison there"):
        stats(task(tmp_path / "u", {"solution/solve.sh": "true\n"}), "--results", tmp_path)
    assert quartiles([]) is None
    assert read_date("2026-01-31", "here").isoformat() == "2026-01-31"
