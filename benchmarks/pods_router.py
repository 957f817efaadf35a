"""Compare the pod router with least-loaded and random placement on a simulated cluster, in one run on one core.

    python benchmarks/pods_router.py                               # 1,000 hosts, 40,000 pods
    python benchmarks/pods_router.py --hosts 200 --pods 8000 --seed 7

Prints one table. The same world (hosts, bursts of groups, forks, host deaths, late reports) is run against each placer;
`benchmarks/router_simulation.py` describes what is simulated. Both baselines know which hosts are alive and how many
pods each has, and count their own placements at once; they ignore pressure and forks. The two bounds on hosts consider
memory alone, largest hosts first, pods free to move: the cores and memory of start-up make every placer need more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.router_simulation import Scenario, SimulationResult, compare, make_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if args.hosts < 1 or args.pods < 1:
        parser.error("--hosts and --pods must be at least 1")
    start = time.perf_counter()
    scenario = Scenario(hosts=args.hosts, pods=args.pods, seed=args.seed)
    results = compare(make_world(scenario))
    report(results, scenario, time.perf_counter() - start)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2))


def report(results: list[SimulationResult], scenario: Scenario, seconds: float) -> None:
    rows: list[tuple[str, list[str]]] = [
        ("placements/s (router alone)", [f"{o.per_second:,.0f}" for o in results]),
        ("hosts in use, busiest", [f"{o.hosts_used:,}" for o in results]),
        ("  x volume bound", [f"{o.hosts_used / max(1, o.hosts_bound):.2f}" for o in results]),
        ("  x first-fit-decreasing", [f"{o.hosts_used / max(1, o.hosts_first_fit):.2f}" for o in results]),
        ("  fraction of their memory", [f"{o.utilisation:.1%}" for o in results]),
        ("forks on their parent's host", [f"{o.fork_local:.1%}" for o in results]),
        ("host-s over memory ceiling", [f"{o.memory_over_s:,.0f}" for o in results]),
        ("host-s over cpu ceiling", [f"{o.cpu_over_s:,.0f}" for o in results]),
        ("lost with hosts / restarted", [f"{o.lost} / {o.replaced}" for o in results]),
        ("wait for a host, p99 s", [f"{o.wait_p99_s:.2f}" for o in results]),
        ("arrival to started, p50 s", [f"{o.ready_p50_s:.1f}" for o in results]),
        ("arrival to started, p99 s", [f"{o.ready_p99_s:.1f}" for o in results]),
    ]
    print(f"\n{'':30}" + "".join(f"{o.name:>16}" for o in results))
    for title, cells in rows:
        print(f"{title:30}" + "".join(f"{cell:>16}" for cell in cells))
    ours = results[0]
    print(
        f"\n{scenario.hosts:,} simulated hosts, {ours.placed:,} placements of {scenario.pods:,} pods and their forks, "
        f"groups of {scenario.group}, seed {scenario.seed}; placement alone timed on one core; {seconds:.0f} s in all."
    )


if __name__ == "__main__":
    main()
