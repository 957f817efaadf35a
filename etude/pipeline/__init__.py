"""Run a recipe's stages in order in one run directory, summarize their results, or plan them without running.

`run_recipe` runs it, `summarize_stage` renders a finished stage, `make_plan` is the dry run. A stage imports its
package when it starts: importing this package does not load torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports
from etude.pipeline.stage_summary import summarize_stage as summarize_stage
from etude.pipeline.stages import STAGES as STAGES
from etude.pipeline.stages import StageFunction as StageFunction
from etude.pipeline.stages import run_recipe as run_recipe

if TYPE_CHECKING:
    from etude.pipeline.dry_run.plan import RunPlan as RunPlan
    from etude.pipeline.dry_run.plan import make_plan as make_plan

__getattr__ = lazy_exports(__name__)
