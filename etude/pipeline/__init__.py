"""Run a recipe's stages in order in one run directory, summarize their results, or plan them without running.

    stage                                       the contract: checks, plan, work and summary of a stage in one class
    model_stages, data_stages, training_stages, rl_stage
    stages                                      all of them in order; `run_recipe`
    plan, render                                the dry run: `make_plan`, and its result as text or JSON
    survey, measure, memory                     what plans are made from: samples, measured rates, computed sizes

A dry run writes no run directory and no file next to the recipe: test pods, sampled texts and generated tasks are in
temporary directories, which are removed. Names are imported when first used, because the stages load torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pipeline.plan import RunPlan as RunPlan
    from etude.pipeline.plan import make_plan as make_plan
    from etude.pipeline.stage import Stage as Stage
    from etude.pipeline.stage import StagePlan as StagePlan
    from etude.pipeline.stages import STAGES as STAGES
    from etude.pipeline.stages import run_recipe as run_recipe
    from etude.pipeline.stages import summarize_stage as summarize_stage

__getattr__ = lazy_exports(__name__)
