"""The part of a plan that depends on the cluster: what it has, and what the services of a stage need of it."""

from __future__ import annotations

from collections.abc import Iterator

from etude.cluster.cluster import ClusterSize
from etude.cluster.launch import survey_cluster
from etude.cluster.settings import ClusterSettings
from etude.pipeline.stage import PlanContext, RecipeInputs, planned_device
from etude.recipe.recipe import Recipe
from etude.rl.settings import RlSettings
from etude.rollouts.settings import EvaluationSessions


def is_elsewhere(recipe: Recipe) -> bool:
    """Return whether services run on other machines too, of which this one may be the weakest."""
    return recipe.cluster is not None and not recipe.cluster.is_local


def find_cluster(inputs: RecipeInputs) -> None:
    """Join the cluster of a recipe, and record what it has or the problem with it."""
    if inputs.cluster is None and is_elsewhere(inputs.recipe):
        with inputs.problems_of("cluster"):
            inputs.cluster = survey_cluster(inputs.recipe.cluster or ClusterSettings())


def session_cores(context: PlanContext) -> float:
    """Return the cores that sessions run on."""
    cluster = context.inputs.cluster
    return context.machine.cores if cluster is None else cluster.cpus


def describe_workers(settings: RlSettings | EvaluationSessions, inputs: RecipeInputs) -> str:
    """Return how many workers there are, and where."""
    count, where = settings.workers, "" if settings.workers else ", only those started by hand"
    if inputs.cluster is not None and inputs.recipe.cluster is not None:
        count = inputs.recipe.cluster.workers_per_node or count
        where = " on each node" if count else where
    pods = f"at most {settings.in_flight} pods ({inputs.pods or 'not tried'})"
    return f"{count} worker{'s' if count != 1 else ''}{where}, with {pods}"


def missing_resources(
    recipe: Recipe, settings: RlSettings | EvaluationSessions, cluster: ClusterSize | None
) -> Iterator[str]:
    """Yield a line if the cluster has less than the services of a stage need."""
    if cluster is None or recipe.cluster is None:
        return
    kinds = [settings.sampler]
    if isinstance(settings, RlSettings) and recipe.evaluation is not None and recipe.evaluation.sampler is not None:
        kinds.append(recipe.evaluation.sampler)
    options, samplers = recipe.cluster, sum(each.count for each in kinds)
    workers = (options.workers_per_node or settings.workers) * cluster.nodes
    cpus = samplers * options.sampler.cpus + workers * options.worker.cpus
    gpus = sum(each.count * int(planned_device(each.device, cluster) == "cuda") for each in kinds)
    if isinstance(settings, RlSettings):
        ranks = settings.parallel.processes
        cpus += ranks * options.trainer.cpus
        gpus += ranks * int(planned_device(settings.device, cluster) == "cuda")
    if cpus > cluster.cpus or gpus > cluster.gpus:
        needed = f"needs {cpus:g} CPUs and {gpus} GPUs of the cluster, which has {cluster.cpus:g} and {cluster.gpus}"
        yield f"{'rl' if isinstance(settings, RlSettings) else 'evaluation'} {needed}: some services would wait"
