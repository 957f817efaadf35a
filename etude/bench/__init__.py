"""Compare policies (checkpoints and chat endpoints) on given tasks: success rates, intervals, tokens, time and cost.

`etude bench run` runs every policy on every task several times, each trial a session in a pod scored by the task's
verifier, and writes trials.jsonl, summary.json and report.html to a BenchDirectory. Infrastructure failures are retried
and never count as failures of a policy.
"""
