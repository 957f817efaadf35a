"""The stage `rl`: checks of its inputs, a rehearsal of one rollout and one policy step, its plan and its summary."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from etude.chat.dialects import Dialect, dialect_for
from etude.cluster.cluster import ClusterSize
from etude.cluster.settings import ClusterSettings
from etude.errors import InputError
from etude.harness.prompt import SessionRequest
from etude.harness.session import SessionSpec
from etude.harness.session_factory import check_prompt_fits
from etude.harness.tools.executor import exposed_tools
from etude.inference.backends.launch import PROGRAMS
from etude.inference.clients.inprocess import InProcessPolicy
from etude.inference.engine import Engine
from etude.inference.service import EngineService
from etude.inference.settings import EngineOptions, SamplerRunSettings, SamplerSettings
from etude.kernels import usable_device
from etude.model.adapters import check_lora, fit_adapters
from etude.model.checkpoint import load
from etude.model.config import ModelConfig
from etude.model.describe import count_parameters
from etude.model.trainer_parts import check_expert_ranks
from etude.pipeline.cluster_plan import (
    describe_workers,
    find_cluster,
    is_elsewhere,
    missing_resources,
    session_cores,
)
from etude.pipeline.data_stages import fix_task_sets, task_count, task_directories
from etude.pipeline.measure import TimeEstimate
from etude.pipeline.memory import (
    POD_BYTES,
    WORKER_BYTES,
    ProcessMemory,
    checkpoint_bytes,
    describe_lora,
    max_checkpoints,
    sampler_memory,
    server_memory,
    store_bytes,
    training_memory,
    weights_bytes,
)
from etude.pipeline.pod_check import usable_pods, weaker_pods
from etude.pipeline.ranks import check_one_host
from etude.pipeline.stage import (
    Facts,
    PlanContext,
    RecipeInputs,
    Stage,
    StageModel,
    StagePlan,
    inspect_model,
    planned_device,
    planned_gpus,
)
from etude.pipeline.validation_plan import ValidationPlan, validation_plan
from etude.pods import open_fleet
from etude.recipe.recipe import Recipe
from etude.rl.orchestrator import run_rl
from etude.rl.packing import TrainingSequence, pack
from etude.rl.settings import RlSettings
from etude.rl.trainer_process import adam_settings, checkpoints, open_objective
from etude.rollouts.rollout import PolicyBinding, Rollout, RolloutFailed, run_rollout
from etude.rollouts.settings import EvaluationSessions
from etude.rollouts.worker import rollout_options
from etude.runs.layout import RunLayout
from etude.runs.run import Run, check_resumable
from etude.system.progress import ProgressCallback
from etude.tasks.harbor import read_task
from etude.tasks.sources import TASK_SOURCES
from etude.tasks.task import Task
from etude.train.balance import check_balance
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore

TRACE_BYTES = 5_000  # on disk, of a rollout of about 500 tokens
POD_STORE_BYTES = 40 << 20  # images and records of the pods
STARTUP_S = 10.0  # until the processes have loaded the model
CHECKED_PROMPTS = 20  # tasks whose prompts are checked against the window
REHEARSED_PARAMETERS = 200e6  # of a model that a dry run samples from on a CPU
REHEARSAL_S = 60.0  # of the session of a rehearsal
PAGE = 16


class RlStage(Stage[RlSettings]):
    """Start the processes of reinforcement learning and orchestrate them from here."""

    def check(self, inputs: RecipeInputs) -> None:
        settings = self.settings(inputs.recipe)
        for key, device in (("rl.device", settings.device), ("rl.sampler.device", settings.sampler.device)):
            with inputs.problems_of(key):
                planned_device(device)
        check_sampler_program(inputs, "rl.sampler", settings.sampler)
        if inputs.recipe.evaluation is not None and (own := inputs.recipe.evaluation.sampler) is not None:
            with inputs.problems_of("evaluation.sampler.device"):
                planned_device(own.device)
            check_sampler_program(inputs, "evaluation.sampler", own)
        if not is_elsewhere(inputs.recipe):
            with inputs.problems_of("rl.parallel"):
                check_one_host(settings.parallel)
        self._check_tasks(inputs)
        if settings.weights.store:
            with inputs.problems_of("rl.weights.store"):
                ObjectStore(settings.weights.store)
        if settings.estimator.reference != "start":
            with inputs.problems_of("rl.estimator.reference"):
                inspect_model(Path(settings.estimator.reference))
        inputs.check_length("rl.window", settings.window or 0, "rl")
        if (network := inputs.models.get("rl")) is not None:
            with inputs.problems_of("rl"):
                check_balance(settings.balance, network.config, "rl")
                check_lora(settings.lora, network.config, "rl")
            with inputs.problems_of("rl.parallel"):
                check_expert_ranks(settings.parallel, network.config)
        if (model := inputs.models.get("rl")) is not None and model.tokenizer is not None:
            with inputs.problems_of("rl.dialect"):
                dialect = dialect_for(model.tokenizer, settings.dialect)
                with inputs.problems_of("rl.window"):
                    self._check_prompts(inputs, dialect, settings.window or model.config.max_length)
        find_cluster(inputs)
        if settings.workers and not is_elsewhere(inputs.recipe):
            with inputs.problems_of("rl"):
                inputs.pods = usable_pods(settings.pods)

    def _check_tasks(self, inputs: RecipeInputs) -> None:
        settings = self.settings(inputs.recipe)
        for key, name in self._task_sets(inputs.recipe):
            check_task_set(inputs, key, name)
        needed = settings.steps * settings.groups_per_step
        if (available := inputs.tasks.get(settings.tasks)) is not None and available < needed:
            inputs.problems.append(
                f"rl.tasks has {available:,} prompts, but {settings.steps} steps of {settings.groups_per_step} groups "
                f"take {needed:,}, and a prompt is trained on once: give more tasks or fewer steps"
            )

    def _check_prompts(self, inputs: RecipeInputs, dialect: Dialect, window: int) -> None:
        """Raise InputError if the prompt of a task leaves no room to work in the window."""
        settings = self.settings(inputs.recipe)
        spec = SessionSpec.of(settings)
        schemas = [shown.schema for shown in exposed_tools(settings.tool_set).values()]
        with first_tasks(inputs, settings.tasks, CHECKED_PROMPTS) as tasks:
            for task in tasks:
                try:
                    check_prompt_fits(SessionRequest(task.instruction), spec, dialect, window, "/work", schemas)
                except InputError as error:
                    raise InputError(f"{task.name}: {error}") from None

    def _task_sets(self, recipe: Recipe) -> list[tuple[str, str]]:
        measured = recipe.evaluation.measured() if recipe.evaluation else []
        during = [(key, name) for key, name in measured if key != "evaluation.test"]
        return [("rl.tasks", self.settings(recipe).tasks), *during]

    def needed_artefacts(self, recipe: Recipe) -> list[tuple[str, str]]:
        return [("tasks", name) for _, name in self._task_sets(recipe)]

    def plan(self, context: PlanContext) -> StagePlan:
        settings, model, run = self.settings(context.recipe), context.inputs.models["rl"], context.inputs.run
        sizes, validation = context.inputs.tasks, validation_plan(context.recipe, context.inputs.tasks)
        saved = checkpoints(RunLayout(run.path)) if run is not None else []
        step = saved[-1][0] if saved else 0
        lines = list(_lines(settings, sizes[settings.tasks], validation))
        if settings.lora is not None:
            lines.append(describe_lora(settings.lora, model.config))
        lines += [f"continues after step {step:,}"] if step else []
        records = run.metrics("rl") if run is not None else []
        if (estimate := seconds_from_records(settings, records, step)) is None:
            rehearsal = self._rehearse(context, model)
            lines.append(rehearsal if isinstance(rehearsal, str) else rehearsal.line())
            if settings.sampler.backend != "etude" and not isinstance(rehearsal, str):
                lines[-1] += f", sampled by Etude's engine: a dry run starts no {sampler_program(settings.sampler)}"
            if not isinstance(rehearsal, str):
                context.session_s = rehearsal.session_s
                estimate = rehearsal.seconds(settings, session_cores(context), validation)
        cluster, disk = context.inputs.cluster, rl_disk(settings, model.config, validation)
        launches = tuple(_launches(settings, context.inputs))
        gpus, own = planned_gpus(context.recipe), evaluation_sampling(context.recipe)
        memory = tuple(rl_memory(settings, model.config, gpus, cluster, own))
        lacking = tuple(missing_resources(context.recipe, settings, cluster))
        return StagePlan("rl", tuple(lines), estimate, memory, disk, launches, cluster, lacking)

    def _rehearse(self, context: PlanContext, model: StageModel) -> Rehearsal | str:
        """Run one rollout and one step; return why not if that is not possible here."""
        settings = self.settings(context.recipe)
        if model.directory is None or model.tokenizer is None:
            return "predicted only: the model's weights do not exist yet, so no rollout was run"
        if problem := too_large(context, model, settings):
            return problem
        with first_tasks(context.inputs, settings.tasks, 1) as tasks:
            if not tasks:
                return "predicted only: the tasks do not exist yet, so no rollout was run"
            try:
                return asyncio.run(rehearse(settings, model, tasks[0]))
            except RolloutFailed as error:
                raise InputError(f"rl: a rollout of {tasks[0].name} fails here: {error}") from None

    def notices(self, recipe: Recipe) -> list[str]:
        settings = self.settings(recipe)
        if is_elsewhere(recipe) or not settings.workers:
            return []
        weaker = weaker_pods(settings.pods)
        return [weaker] if weaker else []

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        fix_task_sets(run, recipe.evaluation)
        control = RunLayout(run.layout.control)
        if control.recipe.exists():  # a control with other settings would be none
            check_resumable(control, control_recipe(recipe), resume=True, allow_changes=False)
        cluster = recipe.cluster or ClusterSettings()
        return run_rl(run, self.settings(recipe), recipe.evaluation, recipe.seed, report, cluster)

    def summarize(self, facts: Facts) -> str:
        first = f"{facts['steps']:,} steps"
        first += f" in {format_minutes(facts['seconds'])}" if "seconds" in facts else ""
        if "reward_first" in facts:
            first += f"; mean reward {facts['reward_first']:.2f} -> {facts['reward_last']:.2f}"
        problems = [f"{facts[name]} {name}" for name in ("retried", "stale", "dropped", "deaths") if facts.get(name)]
        lines = [first + (f" ({', '.join(problems)})" if problems else "")]
        if facts.get("control", "none") != "none":
            lines.append(f"a control, not reinforcement learning: {CONTROLS[facts['control']]}")
        if "collapsed" in facts:
            lines.append(f"COLLAPSED: {facts['collapsed']}; the result is the model of step {facts['result_step']}")
        elif facts.get("result_step", facts["steps"]) != facts["steps"]:
            lines.append(f"the result is the model of step {facts['result_step']}, the best on validation")
        if "ended_early" in facts:
            lines.append(f"ended early: {facts['ended_early']}")
        if "rise" in facts:
            before, after, rise = facts["before"], facts["after"], facts["rise"]
            solved = f"{before['solved']:.0%} -> {after['solved']:.0%}"
            lines.append(f"validation tasks solved, from its own start: {solved}, {_points(rise)}")
            best = next((name for name in after if name.startswith("best/") and name in before), None)
            if best:
                lines[-1] += f"; best of {best.removeprefix('best/')}: {before[best]:.0%} -> {after[best]:.0%}"
        return "\n  ".join(lines)


CONTROLS = {
    "placebo": "placebo, with the rewards of each group shuffled among its rollouts",
    "rejection": "rejection sampling, fine-tuning on its own solved rollouts",
    "imitation": "more imitation, further epochs on the demonstrations of sft",
}


def control_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the control's own run: the same up to RL, whose signal and learning rate differ."""
    assert recipe.rl is not None
    assert recipe.control is not None
    weights = recipe.rl.weights.model_copy(update={"store": ""})  # a store holds the weights of one run
    rate = recipe.control.learning_rate or recipe.rl.learning_rate
    changes = {"control": recipe.control.kind, "learning_rate": rate, "weights": weights}
    stages = tuple(stage for stage in recipe.stages if stage != "control")
    name = f"{recipe.name}-{recipe.control.kind}"
    return recipe.model_copy(
        update={"name": name, "stages": stages, "control": None, "rl": recipe.rl.model_copy(update=changes)}
    )


def _points(rise: Facts) -> str:
    low, high = (round(100 * rise[f"solved_{end}"]) for end in ("low", "high"))
    return f"{100 * rise['solved']:+.0f} points (95 % interval {low:+d} to {high:+d}, {rise['tasks']} tasks)"


def format_minutes(seconds: float) -> str:
    """Return whole seconds, from sixty on as minutes and seconds."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


def _task_set(name: str, recipe: Recipe) -> Any:
    """Return the settings of a task set of this run; the recipe checks that it builds what it names."""
    assert recipe.tasks is not None
    return next(each for each in recipe.tasks.for_run_seed(recipe.seed).build if each.name == name)


def check_task_set(inputs: RecipeInputs, key: str, name: str) -> None:
    """Find the size of a task set that a stage uses, or the problem with it."""
    with inputs.problems_of(key):
        if os.path.isabs(name):
            inputs.tasks[name] = len(task_directories(Path(name)))
        elif name not in inputs.tasks:  # the stage that makes it does not run this time
            inputs.tasks[name] = task_count(_task_set(name, inputs.recipe))


@contextmanager
def first_tasks(inputs: RecipeInputs, name: str, count: int) -> Iterator[list[Task]]:
    """Give some tasks of a set: from their directory, their run, or generated in a temporary directory."""
    made = [each.path for each in inputs.run.artefacts("tasks") if each.name == f"tasks-{name}"] if inputs.run else []
    with tempfile.TemporaryDirectory(prefix="etude-dry-run-") as temporary:
        if os.path.isabs(name) or made:
            directory = made[0] if made else Path(name)
        else:
            task_set = _task_set(name, inputs.recipe)
            directory = task_set.path or Path(temporary) / "tasks"
            if task_set.source is not None:
                few = task_set.model_copy(update={"count": min(count, task_set.count), "demonstrations": 0})
                TASK_SOURCES[task_set.source]().write_task_set(directory, few)
        yield [read_task(task) for task in task_directories(directory)[:count]] if directory.is_dir() else []


# ------------------------------------------------------------------------------------------------ rehearsal


@dataclass(frozen=True)
class Rehearsal:
    """One rollout and one policy step on it, done here."""

    rollout: Rollout
    rollout_s: float
    step_s: float

    def line(self) -> str:
        trace = self.rollout.trace
        tokens, turns = sum(len(segment) for segment in trace.segments), trace.cost.turns
        session = f"{turns} turn{'s' if turns != 1 else ''}, {tokens:,} tokens, ended by {trace.ending}"
        reward = f"reward {self.rollout.reward.total:.2f}"
        return f"one rollout took {self.rollout_s:.1f} s here ({session}, {reward}), one step on it {self.step_s:.1f} s"

    @property
    def session_s(self) -> float:
        """Seconds of the session and its verifier, without the first set-up of a pod."""
        return self.rollout.seconds["session"] + self.rollout.seconds["grading"]

    def seconds(self, settings: RlSettings, cores: float, validation: ValidationPlan) -> TimeEstimate:
        """Return the predicted time of the stage, as if every rollout were like this one, without its first set-up."""
        rollouts = settings.groups_per_step * settings.group_size
        session_s = self.session_s / max(1.0, min(settings.in_flight, cores))
        sessions = validation.all_sessions
        seconds = STARTUP_S + settings.steps * rollouts * (session_s + self.step_s) + sessions * session_s
        return TimeEstimate(seconds, "predicted from one rollout and one step here")


async def rehearse(settings: RlSettings, model: StageModel, task: Task) -> Rehearsal:
    """Run one rollout of the task with the model in this process, then one policy step on its tokens."""
    rollout, rollout_s = await rehearse_rollout(settings, model, task)
    return Rehearsal(rollout, rollout_s, step_on(rollout, settings, model))


async def rehearse_rollout(
    settings: RlSettings | EvaluationSessions, model: StageModel, task: Task
) -> tuple[Rollout, float]:
    """Run one rollout of the task with the model in this process; return it and its seconds."""
    assert model.directory is not None
    assert model.tokenizer is not None
    device = usable_device(settings.sampler.device)
    network = load(model.directory, device=device)
    window = min(settings.window or network.config.max_length, network.config.max_length)
    dialect = dialect_for(model.tokenizer, settings.dialect)
    limit = min(settings.budget.seconds or REHEARSAL_S, REHEARSAL_S)
    budget = settings.budget.model_copy(update={"seconds": limit})
    options = rollout_options(settings.model_copy(update={"budget": budget}))
    rewards = settings.rewards if isinstance(settings, RlSettings) else {"correctness": 1.0}
    cache = EngineOptions(kv_cache_tokens=-(-window // PAGE) * PAGE + 2 * PAGE, page_size=PAGE, max_sequences=1)
    with tempfile.TemporaryDirectory(prefix="etude-dry-run-") as state:
        async with (
            EngineService(Engine(network, cache, tokenizer=model.tokenizer)) as service,
            open_fleet(pods=settings.pods, state=state) as fleet,
        ):
            binding = PolicyBinding(InProcessPolicy(service), dialect, window)
            started = time.perf_counter()
            rollout = await run_rollout(fleet, task, binding, options, weights=lambda version: rewards)
            return rollout, time.perf_counter() - started


def too_large(context: PlanContext, model: StageModel, settings: RlSettings | EvaluationSessions) -> str:
    """Return why no rollout of this model is run in a dry run; "" if it can be."""
    size = count_parameters(model.config).total
    device = settings.device if isinstance(settings, RlSettings) else settings.sampler.device
    for each in (planned_device(device), planned_device(settings.sampler.device)):
        if not context.has_device(each):
            return f"predicted only: this machine has no {each}, so no rollout was run"
    on_cpu = planned_device(settings.sampler.device) == "cpu"
    if (on_cpu and size > REHEARSED_PARAMETERS) or 20 * size > context.machine.available(device, 20 * size):
        return f"predicted only: a model of {size / 1e6:,.0f}M parameters is too large to run a rollout here"
    return ""


def session_seconds(
    context: PlanContext, model: StageModel, settings: RlSettings | EvaluationSessions, tasks: str
) -> float | str:
    """Return the seconds of one session alone, from the rehearsal of RL or one more; or why they are not known."""
    if context.session_s is not None:
        return context.session_s
    if model.directory is None or model.tokenizer is None:
        return "time unknown: the models' weights do not exist yet, so no rollout was run"
    if problem := too_large(context, model, settings):
        return problem
    with first_tasks(context.inputs, tasks, 1) as found:
        if not found:
            return "time unknown: the tasks do not exist yet, so no rollout was run"
        try:
            rollout, _ = asyncio.run(rehearse_rollout(settings, model, found[0]))
        except RolloutFailed as error:
            raise InputError(f"evaluation: a rollout of {found[0].name} fails here: {error}") from None
    return float(rollout.seconds["session"] + rollout.seconds["grading"])


def step_on(rollout: Rollout, settings: RlSettings, model: StageModel) -> float:
    """Take one policy step on a rollout, all of whose advantages are 1; return its seconds."""
    assert model.directory is not None
    assert model.tokenizer is not None
    device = usable_device(settings.device)
    network = load(model.directory, dtype=getattr(torch, settings.precision), device=device)
    trainer = Trainer(fit_adapters(network, settings.lora, 0), adam_settings(settings))
    segments = [segment for segment in rollout.trace.segments if segment.sampled.any()]
    ones = [np.ones(int(segment.sampled.sum()), np.float32) for segment in segments]
    temperature = settings.temperature
    sequences = [TrainingSequence(segment, part, temperature) for segment, part in zip(segments, ones, strict=True)]
    padding = model.tokenizer.end_of_text
    batches = pack(sequences, trainer.model.config, length=settings.length, rows=settings.rows, padding=padding)
    started = time.perf_counter()
    trainer.step(batches, open_objective(settings), 1.0, divisor=settings.length)
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------ estimates


def seconds_from_records(settings: RlSettings, records: Sequence[Mapping[str, Any]], step: int) -> TimeEstimate | None:
    """Return the time from `step` to the end, from the metrics of earlier steps; None if there are too few.

    Evaluations run beside the steps, all but the last one.
    """
    steps = [record for record in records if not record.get("evaluation")]
    if len(steps) < 2:
        return None
    seconds = STARTUP_S + (settings.steps - step) * median(record["wall_s"] for record in steps)
    return TimeEstimate(seconds, f"from the {len(steps)} earlier steps of this run")


def _lines(settings: RlSettings, prompts: int, validation: ValidationPlan) -> Iterator[str]:
    """Yield lines that describe the work of the stage."""
    groups = settings.steps * settings.groups_per_step
    if settings.control != "none":
        yield f"a control: {CONTROLS[settings.control]}"
    yield (
        f"{settings.steps:,} steps of {settings.groups_per_step} groups of {settings.group_size}: "
        f"{groups * settings.group_size:,} rollouts, at most {settings.in_flight} at once, tokens at most "
        f"{settings.max_staleness} steps old"
    )
    if settings.informative_groups:
        most = min(prompts, settings.steps * settings.groups_limit)
        yield f"{groups:,} groups whose rewards differ, from at most {most:,} of {prompts:,} prompts, each used once"
    else:
        yield f"{groups:,} of {prompts:,} prompts, each trained on once"
    if validation.count:
        sessions = f"{validation.samples} sessions on each of {validation.tasks:,} tasks"
        yield f"{validation.count} validations, each {sessions}"
    for name, each in validation.benchmarks.items():
        yield f"{each.count} evaluations on {name}, each {each.samples} sessions on each of {each.tasks:,} tasks"


def _launches(settings: RlSettings, inputs: RecipeInputs) -> Iterator[str]:
    """Yield the processes that the stage starts."""
    ranks, device = settings.parallel.processes, planned_device(settings.device, inputs.cluster)
    yield f"1 trainer on {device}" + (f" in {ranks} processes" if ranks > 1 else "")
    yield from launched_samplers_and_workers(settings, inputs)
    if inputs.recipe.evaluation is not None and inputs.recipe.evaluation.sampler is not None:
        yield f"for evaluation only: {_launched_samplers(inputs.recipe.evaluation.sampler, inputs)}"


def launched_samplers_and_workers(settings: RlSettings | EvaluationSessions, inputs: RecipeInputs) -> Iterator[str]:
    """Yield the processes that run sessions."""
    yield _launched_samplers(settings.sampler, inputs)
    yield describe_workers(settings, inputs)


def _launched_samplers(sampler: SamplerSettings, inputs: RecipeInputs) -> str:
    count = f"{sampler.count} sampler{'s' if sampler.count > 1 else ''}"
    if sampler.urls:
        return f"{count} in front of {sampler_program(sampler)} at {', '.join(sampler.urls)}"
    device = planned_device(sampler.device, inputs.cluster)
    if sampler.backend == "etude":
        return f"{count} on {device}"
    where = device if device == "cpu" else f"{sampler.tensor_parallel} GPU{'s' if sampler.tensor_parallel > 1 else ''}"
    share = "its default share" if sampler.memory_fraction is None else f"{sampler.memory_fraction:.0%}"
    server = f"a {sampler_program(sampler)} server on {where}, of whose memory it takes {share}"
    return f"{count}, each with {server}"


def sampler_program(sampler: SamplerSettings) -> str:
    """Return the name of the program that samplers use, which is not Etude's engine."""
    return PROGRAMS[sampler.backend].name


def check_sampler_program(inputs: RecipeInputs, key: str, sampler: SamplerSettings) -> None:
    """Record a problem if the server that samplers start is not installed."""
    if sampler.backend != "etude" and not sampler.urls and not is_elsewhere(inputs.recipe):
        with inputs.problems_of(f"{key}.server_python"):
            PROGRAMS[sampler.backend].check_installed(sampler.server_python or sys.executable)


def rl_memory(
    settings: RlSettings,
    config: ModelConfig,
    gpus: int = 1,
    cluster: ClusterSize | None = None,
    evaluation: SamplerRunSettings | None = None,
) -> list[ProcessMemory]:
    """Return the memory of every process on a host with so many GPUs; `evaluation` has samplers that only evaluate."""
    trainer = training_memory(config, settings, planned_device(settings.device, cluster))
    ranks = settings.parallel.processes
    before = ranks + settings.sampler.count * settings.sampler.tensor_parallel
    further = sampling_memory(evaluation, config, gpus, before, cluster) if evaluation is not None else []
    return [*trainer, *sessions_memory(settings, config, gpus, ranks, cluster), *further]


def evaluation_sampling(recipe: Recipe) -> SamplerRunSettings | None:
    """Return the settings of the samplers that only evaluate while RL runs; None if there are none."""
    if recipe.rl is None or recipe.evaluation is None or recipe.evaluation.sampler is None:
        return None
    return recipe.rl.model_copy(update={"sampler": recipe.evaluation.sampler})


def sessions_memory(
    settings: RlSettings | EvaluationSessions,
    config: ModelConfig,
    gpus: int,
    trainers: int = 0,
    cluster: ClusterSize | None = None,
) -> list[ProcessMemory]:
    """Return the memory of the processes that run sessions; of the GPUs the first ones are those of `trainers`."""
    sessions = {"workers": settings.workers * WORKER_BYTES, "pods": settings.in_flight * POD_BYTES}
    samplers = sampling_memory(settings, config, gpus, trainers, cluster)
    return [*samplers, ProcessMemory("sessions", "cpu", sessions)]


def sampling_memory(
    settings: SamplerRunSettings, config: ModelConfig, gpus: int, before: int, cluster: ClusterSize | None
) -> list[ProcessMemory]:
    """Return the memory of samplers; on one machine the first GPUs are those of the processes `before` them."""
    device, sampler = planned_device(settings.sampler.device, cluster), settings.sampler
    devices = [device] * sampler.count * (sampler.tensor_parallel if device == "cuda" else 1)
    if device == "cuda" and gpus > 1 and cluster is None:
        devices = [f"cuda:{(before + number) % gpus}" for number in range(len(devices))]
    if sampler.backend == "etude":
        return [sampler_memory(config, settings, each) for each in devices]
    return server_memory(config, settings, [] if sampler.urls else devices)


def rl_disk(settings: RlSettings, config: ModelConfig, validation: ValidationPlan) -> int:
    """Return the bytes of checkpoints, weight versions, traces and pods."""
    checkpoint = checkpoint_bytes(config, settings, mtp_layers=0, frozen=False)
    sessions = settings.steps * settings.groups_per_step * settings.group_size
    sessions += validation.all_sessions
    weights = store_bytes(config, settings) if not settings.weights.store else 0
    kept = max_checkpoints(settings, settings.steps, halfway=False)
    kept += 2 if settings.keep_best and validation.count > 2 else 0  # the best, and one being evaluated
    if settings.sampler.backend != "etude":  # files for the servers: the version that they have, and the next
        size = weights_bytes(config, settings.weights.dtype) if settings.lora is None else 0
        weights += 2 * settings.sampler.count * size
    return kept * checkpoint + weights + sessions * TRACE_BYTES + POD_STORE_BYTES


RL = RlStage("rl")
