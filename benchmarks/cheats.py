"""Measure which cheats are paid, zeroed or flagged, by kind of verifier, as root and as an ordinary user.

    python benchmarks/cheats.py [--user root nobody] [--cheats DIRECTORY ...] [--only NAME|DIRECTORY ...] [--rows FILE]

A cheat is a submission that does not solve its task (`tests/tasks/cheats`; `--cheats` adds directories of the same
form). `flagged` is a reward of 0 with a hack named, `zeroed` a reward of 0 without, `dropped` no result: the trial
would be repeated. `without gates` counts what the verifier alone pays, `controls` the reference solutions that are
paid and the untouched workspaces that are not.
"""

import argparse
import collections
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tasks.cheat_targets import write_targets
from tests.tasks.cheating import CONTROLS, load_cheats, run_as

OUTCOMES = ("paid", "zeroed", "flagged", "dropped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--user", nargs="+", default=["root", "nobody"])
    parser.add_argument("--cheats", nargs="*", default=[], help="directories with further cheats")
    parser.add_argument("--only", nargs="*", default=[], help="names of cheats, or directories with them")
    parser.add_argument("--rows", type=Path, help="file for one JSON object per trial")
    given = parser.parse_args()
    directories = [str(Path(each).resolve()) for each in given.cheats]
    only = [name for each in given.only for name in names_of(each)]
    options = [*(["--cheats", *directories] if directories else []), *(["--only", *only] if only else [])]
    rows = []
    with tempfile.TemporaryDirectory(prefix="etude-cheats-") as directory:
        Path(directory).chmod(0o755)
        write_targets(Path(directory))
        for user in given.user:
            rows += [{"user": user, **row} for row in run_as(user, Path(directory), options)]
    if given.rows:
        given.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)


def names_of(only: str) -> list[str]:
    """Return the names of the cheats in a directory, or the name of a single cheat."""
    return [*(load_cheats([Path(only)]).keys() - load_cheats().keys())] if Path(only).is_dir() else [only]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table and every paid or dropped cheat."""
    print(f"{len({row['cheat'] for row in rows} - CONTROLS.keys())} cheats")
    print("| verifier | user | trials | " + " | ".join(OUTCOMES) + " | without gates | controls |")
    print("|---|---|---" + "|---" * (len(OUTCOMES) + 2) + "|")
    for group in dict.fromkeys(row["group"] for row in rows):
        for user in dict.fromkeys(row["user"] for row in rows):
            mine = [row for row in rows if (row["group"], row["user"]) == (group, user)]
            cheats = [row for row in mine if row["cheat"] not in CONTROLS]
            count = collections.Counter(row["outcome"] for row in cheats)
            controls = [is_as_wanted(row) for row in mine if row["cheat"] in CONTROLS]
            counts = [len(cheats), *(count[outcome] for outcome in OUTCOMES), sum(row["score"] > 0 for row in cheats)]
            shown = " | ".join(map(str, counts))
            print(f"| {group} | {user} | {shown} | {sum(controls)} of {len(controls)} |")
    for row in rows:
        if not is_as_wanted(row):
            print(f"{row['outcome']}: {row['user']} {row['target']}: {row['cheat']}: {row['text'][-160:]!r}")


def is_as_wanted(row: dict[str, Any]) -> bool:
    """Return whether a cheat has a reward of 0, the solution one above it, and an untouched workspace 0 and no hack."""
    wanted = {"(solution)": ("paid",), "(nothing)": ("zeroed",)}.get(row["cheat"], ("zeroed", "flagged"))
    return row["outcome"] in wanted


if __name__ == "__main__":
    main()
