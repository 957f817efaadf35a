"""Compare policies (checkpoints and chat endpoints) on given tasks: success rates, intervals, tokens, time and cost.

`etude bench run` runs every policy on every task several times, each trial a session in a pod scored by the task's
verifier, and writes trials.jsonl, summary.json and report.html to a BenchDirectory. Infrastructure failures are retried
and never count as failures of a policy. Names load on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.bench.directory import BenchDirectory as BenchDirectory
    from etude.bench.directory import BenchSpec as BenchSpec
    from etude.bench.policies import BenchPolicy as BenchPolicy
    from etude.bench.policies import PolicyProfile as PolicyProfile
    from etude.bench.policies import TokenPrice as TokenPrice
    from etude.bench.results import PolicyResults as PolicyResults
    from etude.bench.results import read_results as read_results
    from etude.bench.results import summarize as summarize
    from etude.bench.run import run_trials as run_trials
    from etude.bench.run import write_outputs as write_outputs

__getattr__ = lazy_exports(__name__)
