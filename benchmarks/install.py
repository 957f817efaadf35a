"""Install popular Python packages from their source distributions by stage 0 alone, and print causes of failure.

    python benchmarks/install.py --out install.jsonl [--count 60] [--jobs 2] [--state DIR] [--time-limit 600]
    python benchmarks/install.py --out install.jsonl --again timeout    only those that ended with this reason, again
    python benchmarks/install.py --out more.jsonl --only rope,anyio     only these packages, in this order

Packages are those of install_packages.txt (a fixed list of names, written before the first run) in the order of
sha256(SEED + name). Of each the newest final release with a source distribution is taken; it is fetched and unpacked,
never built, on the host. Packages whose source distribution has no tests are skipped and counted, until `--count` with
tests were tried. A row is written for every package when it is done, so a stopped run goes on where it was. The rows of
earlier runs are printed without trying anything with `--count 0`. Times and time limits depend on what else runs.
"""

import argparse
import asyncio
import hashlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from etude.errors import EtudeError
from etude.pods import Fleet, open_fleet
from etude.pods.host_system import host_system
from etude.tasks.generators.source import requirement_name
from etude.tasks.installation.detect import propose
from etude.tasks.installation.installer import install
from etude.tasks.installation.package_index import (
    IndexFile,
    IndexSettings,
    PackageIndex,
    default_index_cache,
    parse_page,
)
from etude.tasks.installation.registries import index_url
from etude.tasks.installation.result import REASONS, InstallationFailed
from etude.tasks.installation.setup_pod import InstallLog, InstallOptions, available_pythons
from etude.tasks.installation.snapshot import RepositorySnapshot, checkout

SEED = "etude-install-1"
NAMES = Path(__file__).parent / "install_packages.txt"
FINAL = re.compile(r"-(\d+(?:\.\d+)*(?:\.?post\d+)?)\.(?:tar\.gz|zip|tgz|tar\.bz2)$")
RERUNS = 2


def names_in_order() -> list[str]:
    """Return the names of the list in the order of sha256(SEED + name)."""
    return sorted(NAMES.read_text().split(), key=lambda name: hashlib.sha256((SEED + name).encode()).hexdigest())


def newest_source(files: list[IndexFile]) -> IndexFile | None:
    """Return the source distribution with the highest version, without pre-releases and yanked files."""
    found = [(match[1], each) for each in files if (match := FINAL.search(each.name)) and not each.fields.get("yanked")]
    return max(found, key=lambda pair: [int(part) for part in re.findall(r"\d+", pair[0])])[1] if found else None


def fetch_source(index: PackageIndex, name: str, directory: Path) -> Path | None:
    """Fetch a package's source distribution; nothing of it is executed."""
    url = f"{index.settings.url.rstrip('/')}/{requirement_name(name)}/"
    with index.open(url, {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.1"}) as response:
        files = parse_page(response.read(), response.headers.get("content-type", ""), response.url)
    chosen = newest_source(files)
    if chosen is None:
        return None
    path = directory / chosen.name
    path.write_bytes(b"".join(index.contents(chosen, False)))
    return path


def has_tests(snapshot: RepositorySnapshot) -> bool:
    """Return whether a source distribution contains Python tests."""
    try:
        return propose(snapshot, available_pythons(host_system().python, {})).ecosystem == "python"
    except InstallationFailed as error:
        return error.reason != "no-tests"


async def try_package(fleet: Fleet, index: PackageIndex, name: str, limit: float, logs: Path) -> dict[str, Any]:
    """Install one package; return its row."""
    row: dict[str, Any] = {"name": name}
    with tempfile.TemporaryDirectory(prefix="etude-install-") as directory:
        try:
            path = await asyncio.to_thread(fetch_source, index, name, Path(directory))
        except (HTTPError, OSError) as error:
            return {**row, "reason": "no-source", "message": str(error)}
        if path is None:
            return {**row, "reason": "no-source"}
        row["source"] = path.name
        try:
            snapshot = await asyncio.to_thread(checkout, path)
        except EtudeError as error:
            return {**row, "reason": "no-source", "message": str(error)}
    if not await asyncio.to_thread(has_tests, snapshot):
        return {**row, "reason": "no-tests-in-source"}
    options = InstallOptions(as_of="none", reruns=RERUNS, timeout_s=limit, test_timeout_s=limit / 2)
    log, started = InstallLog(), time.monotonic()
    try:
        made = await asyncio.wait_for(install(fleet, snapshot, options, log=log), 2 * limit)
        row |= {
            "reason": "installed",
            "tests": len(made.tests),
            "passed": len(made.passing),
            "command": made.test_command,
        }
        row |= {"flaky": len(made.facts["flaky"])}  # type: ignore[arg-type]
    except InstallationFailed as error:
        row |= {"reason": error.reason, "message": str(error)}
    except TimeoutError:
        row |= {"reason": "timeout", "message": f"not finished after {2 * limit:g} s"}
    except EtudeError as error:
        row |= {"reason": "pod", "message": str(error)}
    row |= {"seconds": round(time.monotonic() - started, 1), "egress": log.egress_bytes}
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"{name}.log").write_text(log.text)
    return row


async def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Try packages until `count` of them with tests were tried; return the rows in the order of the list."""
    out = Path(arguments.out)
    rows = {row["name"]: row for row in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    rows = {name: row for name, row in rows.items() if row["reason"] != arguments.again}
    order = arguments.only.split(",") if arguments.only else names_in_order()
    pending = iter(enumerate(order))
    index = PackageIndex(IndexSettings(index_url(), cache=default_index_cache()))

    async with open_fleet(state=arguments.state) as fleet:

        async def work() -> None:
            for position, name in pending:
                if sum(tried(rows[each]) for each in order[:position] if each in rows) >= arguments.count:
                    return
                if name in rows:
                    continue
                row = await try_package(fleet, index, name, arguments.time_limit, out.with_suffix(".logs"))
                rows[name] = row
                with open(out, "a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), file=sys.stderr, flush=True)

        await asyncio.gather(*(work() for _ in range(arguments.jobs)))
    found = [rows[name] for name in order if name in rows]
    cut, kept = 0, []
    for row in found:  # jobs that ran ahead may have tried more
        cut += tried(row)
        kept.append(row)
        if cut >= arguments.count > 0:
            break
    return kept


def tried(row: dict[str, Any]) -> bool:
    return row["reason"] not in ("no-source", "no-tests-in-source")


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the table of causes and one sentence."""
    counted = [row for row in rows if tried(row)]
    installed = [row for row in counted if row["reason"] == "installed"]
    causes = Counter(row["reason"] for row in counted)
    print("| result | packages | names |\n|---|---|---|")
    for reason, count in causes.most_common():
        names = ", ".join(sorted(row["name"] for row in counted if row["reason"] == reason))
        print(f"| {reason} | {count} | {names if reason != 'installed' or count < 15 else ''} |")
    print()
    skipped = Counter(row["reason"] for row in rows if not tried(row))
    print(
        f"skipped: {skipped['no-tests-in-source']} without tests in the source, {skipped['no-source']} without a source"
    )
    for label, group in (("installed", installed), ("all", counted)):
        if group:
            seconds, sent = [row["seconds"] for row in group], [row["egress"] / 1e6 for row in group]
            print(
                f"{label}: median {statistics.median(seconds):.0f} s (max {max(seconds):.0f}), "
                f"egress median {statistics.median(sent):.1f} MB (max {max(sent):.0f})"
            )
    every = sum(row["passed"] == row["tests"] for row in installed)
    share = len(installed) / max(1, len(counted))
    how = f"in {every} of them every test passes and none is skipped"
    print(f"{len(installed)} of {len(counted)} installed ({share:.0%}); {how}")
    unknown = set(causes) - {"installed", *REASONS}
    assert not unknown, unknown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--again", default="", help="try packages again that ended with this reason")
    parser.add_argument("--only", default="", help="names of packages, separated by commas")
    parser.add_argument("--time-limit", type=float, default=600.0)
    print_rows(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
