"""Tasks in the Harbor format: reading and writing, environments, trials, verifiers, validation, importers, generators.

`read_task` gives a Task; `open_environment` a prepared pod for its agent; `run_trial` runs an agent there and verifies
its changes in a clean pod, returning a VerifierResult or raising VerifierFailed (infrastructure, never the agent).
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.workspace import FileChange as FileChange
    from etude.tasks.base_images import HostSettings as HostSettings
    from etude.tasks.environment import EnvironmentCheckpoint as EnvironmentCheckpoint
    from etude.tasks.environment import PreparedEnvironments as PreparedEnvironments
    from etude.tasks.environment import TaskEnvironment as TaskEnvironment
    from etude.tasks.environment import open_environment as open_environment
    from etude.tasks.export import export_tasks as export_tasks
    from etude.tasks.harbor import find_tasks as find_tasks
    from etude.tasks.harbor import read_task as read_task
    from etude.tasks.harbor import task_digest as task_digest
    from etude.tasks.harbor import write_task as write_task
    from etude.tasks.importers import import_tasks as import_tasks
    from etude.tasks.lint import lint_task as lint_task
    from etude.tasks.settings import TaskSetSettings as TaskSetSettings
    from etude.tasks.sources import DemonstrationRow as DemonstrationRow
    from etude.tasks.sources import TaskSource as TaskSource
    from etude.tasks.sources import task_source as task_source
    from etude.tasks.task import MachineSpec as MachineSpec
    from etude.tasks.task import Task as Task
    from etude.tasks.task import TaskPhase as TaskPhase
    from etude.tasks.task import TaskStep as TaskStep
    from etude.tasks.trial import TrialAgent as TrialAgent
    from etude.tasks.trial import commands_agent as commands_agent
    from etude.tasks.trial import nop_agent as nop_agent
    from etude.tasks.trial import oracle_agent as oracle_agent
    from etude.tasks.trial import run_trial as run_trial
    from etude.tasks.validate import ValidationCache as ValidationCache
    from etude.tasks.validate import ValidationReport as ValidationReport
    from etude.tasks.validate import validate_all as validate_all
    from etude.tasks.verifier import verify as verify
    from etude.tasks.verifier_result import VerifierFailed as VerifierFailed
    from etude.tasks.verifier_result import VerifierResult as VerifierResult

__getattr__ = lazy_exports(__name__)
