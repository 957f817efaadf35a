"""The router over a simulated cluster, beside least-loaded and random placement, in one run on one core.

    python benchmarks/pods_router.py                               # 1,000 hosts, 40,000 pods
    python benchmarks/pods_router.py --hosts 200 --pods 8000 --seed 7

Prints one table. The same world (hosts, bursts of groups, forks, deaths, late reports) is played against each placer;
`etude/pods/scheduling/simulate.py` says what is simulated. Both baselines know who lives and how many pods each host
has, and count their own placements at once; they do not look at images or pressure. The two bounds on hosts are of
memory alone, largest hosts first, pods free to move: what start-up takes of cores and of memory makes every placer
need more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from etude.pods.scheduling.simulate import Scenario, SimulationResult, compare, make_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    args = parser.parse_args()
    if args.hosts < 1 or args.pods < 1:
        parser.error("--hosts and --pods must be at least 1")
    start = time.perf_counter()
    scene = Scenario(hosts=args.hosts, pods=args.pods, seed=args.seed)
    outcomes = compare(make_world(scene))
    report(outcomes, scene, time.perf_counter() - start)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))


def report(outcomes: list[SimulationResult], scene: Scenario, seconds: float) -> None:
    rows: list[tuple[str, list[str]]] = [
        ("placements/s (router alone)", [f"{o.per_second:,.0f}" for o in outcomes]),
        ("hosts in use, busiest", [f"{o.hosts_used:,}" for o in outcomes]),
        ("  x volume bound", [f"{o.hosts_used / max(1, o.hosts_bound):.2f}" for o in outcomes]),
        ("  x first-fit-decreasing", [f"{o.hosts_used / max(1, o.hosts_first_fit):.2f}" for o in outcomes]),
        ("  memory used of theirs", [f"{o.utilisation:.1%}" for o in outcomes]),
        ("image already there", [f"{o.image_local:.1%}" for o in outcomes]),
        ("forks beside their parent", [f"{o.fork_local:.1%}" for o in outcomes]),
        ("host-s over memory ceiling", [f"{o.memory_over_s:,.0f}" for o in outcomes]),
        ("host-s over cpu ceiling", [f"{o.cpu_over_s:,.0f}" for o in outcomes]),
        ("lost with hosts / run again", [f"{o.lost} / {o.replaced}" for o in outcomes]),
        ("wait for a host, p99 s", [f"{o.wait_p99_s:.2f}" for o in outcomes]),
        ("arrival to started, p50 s", [f"{o.ready_p50_s:.1f}" for o in outcomes]),
        ("arrival to started, p99 s", [f"{o.ready_p99_s:.1f}" for o in outcomes]),
    ]
    print(f"\n{'':30}" + "".join(f"{o.name:>16}" for o in outcomes))
    for title, cells in rows:
        print(f"{title:30}" + "".join(f"{cell:>16}" for cell in cells))
    ours = outcomes[0]
    print(
        f"\n{scene.hosts:,} simulated hosts, {ours.placed:,} placements of {scene.pods:,} pods and their forks in "
        f"groups of {scene.group}, seed {scene.seed}; placement alone timed on one core; {seconds:.0f} s in all."
    )


if __name__ == "__main__":
    main()
