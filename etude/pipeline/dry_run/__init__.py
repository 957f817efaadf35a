"""Dry run: check a recipe and estimate what it would do, need and take, without running it.

    check, texts          find every problem with the inputs; survey and sample the text
    measure, memory       time short samples of the real work here; compute memory and disk
    stages, rl_estimate   plan each stage from these
    plan, render          `make_plan` is the entry point; its result as text or JSON

A dry run writes no run directory and no file next to the recipe. Only test pods and demonstrations use a temporary
directory, which is removed.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pipeline.dry_run.plan import RunPlan as RunPlan
    from etude.pipeline.dry_run.plan import make_plan as make_plan
    from etude.pipeline.dry_run.render import plan_data as plan_data
    from etude.pipeline.dry_run.render import plan_text as plan_text
    from etude.pipeline.dry_run.stages import StagePlan as StagePlan

__getattr__ = lazy_exports(__name__)
