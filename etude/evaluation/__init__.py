"""Evaluation: held-out tasks and their statistics, codebase NLL, state tracking, plots.

    held_out.start(queue, step, tasks); record = summarise(held_out.results(queue, step))

Every mean over tasks comes with a bootstrap interval over tasks. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.evaluation.codebase_nll import CodebaseNll
    from etude.evaluation.held_out import Evaluation, EvaluationProgress
    from etude.evaluation.settings import NllSettings
    from etude.evaluation.state_tracking import StateScore, StateTask, track_state
    from etude.evaluation.statistics import best_of, bootstrap_interval, compare, summarise

_MODULES = {
    "CodebaseNll": "etude.evaluation.codebase_nll",
    "Evaluation": "etude.evaluation.held_out",
    "EvaluationProgress": "etude.evaluation.held_out",
    "NllSettings": "etude.evaluation.settings",
    "StateScore": "etude.evaluation.state_tracking",
    "StateTask": "etude.evaluation.state_tracking",
    "best_of": "etude.evaluation.statistics",
    "bootstrap_interval": "etude.evaluation.statistics",
    "compare": "etude.evaluation.statistics",
    "summarise": "etude.evaluation.statistics",
    "track_state": "etude.evaluation.state_tracking",
}
__all__ = [
    "CodebaseNll",
    "Evaluation",
    "EvaluationProgress",
    "NllSettings",
    "StateScore",
    "StateTask",
    "best_of",
    "bootstrap_interval",
    "compare",
    "summarise",
    "track_state",
]
__getattr__ = lazy_exports(__name__, _MODULES)
