"""The services of the stages `rl` and `evaluation`: their programs, their resources, and where they may run."""

from etude.cluster.cluster import Cluster, Node, ServiceSpec
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceSupervisor
from etude.inference.backends.launch import sampler_arguments
from etude.inference.settings import SamplerSettings
from etude.rl.settings import RlSettings
from etude.rollouts.settings import EvaluationSessions, EvaluationSettings
from etude.runs.address import service_environment
from etude.runs.layout import RunLayout

TRAINER, SAMPLER, WORKER, SIBLINGS = "trainer", "sampler", "worker", "siblings"
EVALUATION_SAMPLER = "evaluation-sampler"


def add_rl_services(
    supervisor: ServiceSupervisor,
    layout: RunLayout,
    settings: RlSettings,
    options: ClusterSettings,
    url: str,
    evaluation: EvaluationSettings | None = None,
) -> None:
    """Add the trainer, the samplers, the workers and, if the curriculum makes siblings, the process that makes them.

    `url` is that of the run service. With `evaluation` there may be samplers that only evaluate.
    """
    gpus = gpus_of(settings.device, supervisor.cluster)
    trainer = ServiceSpec(
        TRAINER,
        "etude.rl.trainer_process",
        (str(layout.run),),
        finishes=True,
        where="run",
        resources=options.trainer.resources(gpus),
        ranks=settings.parallel.processes,
    )
    supervisor.add(trainer)
    replays = settings.estimator.replay
    add_session_services(supervisor, layout, settings, options, url, first_gpu=trainer.ranks, routing=replays)
    if evaluation is not None and evaluation.sampler is not None:
        first = trainer.ranks + settings.sampler.count * settings.sampler.tensor_parallel
        add_samplers(supervisor, layout, evaluation.sampler, options, url, EVALUATION_SAMPLER, first, "--evaluation")
    if settings.curriculum.siblings:
        supervisor.add(ServiceSpec(SIBLINGS, "etude.rl.sibling_process", (str(layout.run),)))


def add_session_services(
    supervisor: ServiceSupervisor,
    layout: RunLayout,
    settings: RlSettings | EvaluationSessions,
    options: ClusterSettings,
    url: str,
    first_gpu: int = 0,
    routing: bool = False,
) -> None:
    """Add samplers, and workers on every node. On one machine the samplers take its GPUs from `first_gpu` on.

    `routing` is whether the trainer replays the experts that the samplers chose.
    """
    routed = ("--routing",) if routing else ()
    add_samplers(supervisor, layout, settings.sampler, options, url, SAMPLER, first_gpu, *routed)
    environment = service_environment(layout)
    needed = options.worker.resources(having=options.worker_resource)

    def worker(name: str, node: Node) -> ServiceSpec:
        known = ("--service", url, "--name", name)
        return ServiceSpec(
            name, "etude.rollouts.worker", known, environment, where="anywhere", node=node.id, resources=needed
        )

    supervisor.add_on_nodes(WORKER, options.workers_per_node or settings.workers, needed, worker)


def add_samplers(
    supervisor: ServiceSupervisor,
    layout: RunLayout,
    sampler: SamplerSettings,
    options: ClusterSettings,
    url: str,
    kind: str,
    first_gpu: int,
    *arguments: str,
) -> None:
    """Add the samplers `KIND-NUMBER`."""
    environment = service_environment(layout)
    gpus = 0 if sampler.urls else sampler.tensor_parallel * gpus_of(sampler.device, supervisor.cluster)
    resources = options.sampler.resources(gpus)
    for number in range(sampler.count):
        name, own = f"{kind}-{number}", sampler_arguments(sampler, number, first_gpu)
        known = ("--service", url, "--name", name, *own, *arguments)
        module = "etude.inference.sampler_process"
        supervisor.add(ServiceSpec(name, module, known, environment, where="anywhere", resources=resources))


def gpus_of(device: str, cluster: Cluster) -> int:
    """Return how many GPUs a process on this device is given; "auto" is one if the cluster has any."""
    return int(device == "cuda" or (device == "auto" and cluster.assigns_gpus))
