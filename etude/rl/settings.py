"""The recipe's words in the terms of the rooms: one function for each thing that is made from a section."""

from etude.evaluation import held_out
from etude.harness.session import Budget
from etude.harness.summary import Summaries
from etude.harness.tool_set import ALL_TOOLS, ToolSet
from etude.recipe.sections import RlStage
from etude.rewards.effort import EffortWeights
from etude.rl.advantages import Estimator
from etude.rollouts.queue import Plan
from etude.train.optim import AdamSettings


def plan_of(section: RlStage) -> Plan:
    """Of the table of training groups."""
    return Plan(
        group_size=section.group_size,
        groups_per_step=section.groups_per_step,
        max_staleness=section.max_staleness,
        ahead=section.ahead,
        in_flight=section.in_flight,
        lease_s=section.lease_s,
        attempts=section.attempts,
    )


def evaluation_plan(section: RlStage) -> Plan:
    """Of the table of measurements: groups of K."""
    return held_out.evaluation_plan(plan_of(section), section.evaluation.samples if section.evaluation else 1)


def estimator_of(section: RlStage) -> Estimator:
    table = section.estimator
    return Estimator(
        table.divide_by_std,
        table.divide_by_length,
        table.mask_overlong,
        table.kl,
        table.kl_weight,
        table.correction,
    )


def adam_of(section: RlStage) -> AdamSettings:
    """A float32 trainer whose weights travel as bfloat16 computes with rounded ones: what it trains is what samples."""
    rounded = section.precision == "float32" and section.weights.dtype == "bfloat16"
    return AdamSettings(section.learning_rate, section.betas, 1e-8, section.weight_decay, section.clip, rounded)


def environment_of(section: RlStage) -> ToolSet:
    table = section.environment
    return ToolSet(
        tools=ALL_TOOLS if table.tools is None else table.tools,
        naming=table.naming,
        brief=table.brief,
        strict=table.strict,
        command_timeout_s=table.command_timeout_s,
    )


def budget_of(section: RlStage) -> Budget:
    table = section.budget
    return Budget(table.turns, table.tokens, table.seconds, table.answer)


def summaries_of(section: RlStage) -> Summaries:
    table = section.summaries
    return Summaries(table.mode, table.trigger, table.reserve, table.attempts, table.most)


def effort_of(section: RlStage) -> EffortWeights:
    return EffortWeights(**section.effort.model_dump())
