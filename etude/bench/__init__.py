"""Compare policies (checkpoints and chat endpoints) on given tasks: success rates, intervals, tokens, time and cost.

`etude bench run` runs every policy on every task several times, each trial a session in a pod scored by the task's
verifier, and writes trials.jsonl, summary.json and report.html to a BenchDirectory. Infrastructure failures are retried
and never count as failures of a policy. Names load on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.bench.directory import BenchDirectory, BenchSpec
    from etude.bench.policies import BenchPolicy, PolicyProfile, TokenPrice
    from etude.bench.results import PolicyResults, read_results, summarize
    from etude.bench.run import run_trials, write_outputs

_MODULES = {  # imported when first used
    "BenchDirectory": "etude.bench.directory",
    "BenchPolicy": "etude.bench.policies",
    "BenchSpec": "etude.bench.directory",
    "PolicyProfile": "etude.bench.policies",
    "PolicyResults": "etude.bench.results",
    "TokenPrice": "etude.bench.policies",
    "read_results": "etude.bench.results",
    "run_trials": "etude.bench.run",
    "summarize": "etude.bench.results",
    "write_outputs": "etude.bench.run",
}
__all__ = [
    "BenchDirectory",
    "BenchPolicy",
    "BenchSpec",
    "PolicyProfile",
    "PolicyResults",
    "TokenPrice",
    "read_results",
    "run_trials",
    "summarize",
    "write_outputs",
]
__getattr__ = lazy_exports(__name__, _MODULES)
