"""Evaluation: held-out tasks and their statistics, codebase NLL, state tracking, plots.

    held_out.start(queue, step, tasks); record = summarise(held_out.results(queue, step))

Every mean over tasks comes with a bootstrap interval over tasks. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.evaluation.codebase_nll import CodebaseNll as CodebaseNll
    from etude.evaluation.held_out import Evaluation as Evaluation
    from etude.evaluation.held_out import EvaluationProgress as EvaluationProgress
    from etude.evaluation.settings import NllSettings as NllSettings
    from etude.evaluation.state_tracking import StateScore as StateScore
    from etude.evaluation.state_tracking import StateTask as StateTask
    from etude.evaluation.state_tracking import track_state as track_state
    from etude.evaluation.statistics import best_of as best_of
    from etude.evaluation.statistics import bootstrap_interval as bootstrap_interval
    from etude.evaluation.statistics import compare as compare
    from etude.evaluation.statistics import summarise as summarise

__getattr__ = lazy_exports(__name__)
