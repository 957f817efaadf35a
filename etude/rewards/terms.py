"""The terms of outcome and effort."""

from etude.rewards.effort import EffortSettings, effort, effort_units
from etude.rewards.reward import TermResult, VerifiedTrial, term


@term
def correctness(trial: VerifiedTrial) -> TermResult:
    """Return the verifier's score of the final state."""
    result = trial.verifier_result
    stopped = {key: result.facts[key] for key in ("verifier_failed", "control") if key in result.facts}
    return TermResult(result.score, {"rewards": dict(result.rewards), **stopped})


@term
def effort_spent(trial: VerifiedTrial) -> TermResult:
    """Penalise effort, with the `rl.effort` settings recorded in the trace."""
    settings = EffortSettings(**trial.trace.facts.get("effort", {}))
    units = effort_units(trial.trace.cost, settings)
    return TermResult(-effort(units, settings.k, settings.q), {"units": units})
