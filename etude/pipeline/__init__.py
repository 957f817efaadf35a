"""Run a recipe's stages in order in one run directory, summarize their results, or plan them without running.

`run_recipe` runs it, `summarize_stage` renders a finished stage, `make_plan` is the dry run. A stage imports its
package when it starts: importing this package does not load torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports
from etude.pipeline.stage_summary import summarize_stage
from etude.pipeline.stages import STAGES, StageFunction, run_recipe

if TYPE_CHECKING:
    from etude.pipeline.dry_run.plan import RunPlan, make_plan

_MODULES = {"RunPlan": "etude.pipeline.dry_run.plan", "make_plan": "etude.pipeline.dry_run.plan"}  # they load torch
__all__ = ["STAGES", "RunPlan", "StageFunction", "make_plan", "run_recipe", "summarize_stage"]
__getattr__ = lazy_exports(__name__, _MODULES)
