"""Tasks in the Harbor format: reading and writing, environments, trials, verifiers, validation, importers, generators.

`read_task` gives a Task; `open_environment` a prepared pod for its agent; `run_trial` runs an agent there and verifies
its changes in a clean pod, returning a VerifierResult or raising VerifierFailed (infrastructure, never the agent).
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.workspace import FileChange
    from etude.tasks.base_images import HostSettings
    from etude.tasks.environment import EnvironmentCheckpoint, PreparedEnvironments, TaskEnvironment, open_environment
    from etude.tasks.export import export_tasks
    from etude.tasks.harbor import find_tasks, read_task, task_digest, write_task
    from etude.tasks.importers import import_tasks
    from etude.tasks.lint import lint_task
    from etude.tasks.settings import TaskSetSettings
    from etude.tasks.sources import DemonstrationRow, TaskSource, task_source
    from etude.tasks.task import MachineSpec, Task, TaskPhase, TaskStep
    from etude.tasks.trial import TrialAgent, commands_agent, nop_agent, oracle_agent, run_trial
    from etude.tasks.validate import ValidationCache, ValidationReport, validate_all
    from etude.tasks.verifier import verify
    from etude.tasks.verifier_result import VerifierFailed, VerifierResult

_MODULES = {  # imported when first used
    "DemonstrationRow": "etude.tasks.sources",
    "EnvironmentCheckpoint": "etude.tasks.environment",
    "FileChange": "etude.pods.workspace",
    "HostSettings": "etude.tasks.base_images",
    "MachineSpec": "etude.tasks.task",
    "PreparedEnvironments": "etude.tasks.environment",
    "Task": "etude.tasks.task",
    "TaskEnvironment": "etude.tasks.environment",
    "TaskPhase": "etude.tasks.task",
    "TaskSetSettings": "etude.tasks.settings",
    "TaskSource": "etude.tasks.sources",
    "TaskStep": "etude.tasks.task",
    "TrialAgent": "etude.tasks.trial",
    "ValidationCache": "etude.tasks.validate",
    "ValidationReport": "etude.tasks.validate",
    "VerifierFailed": "etude.tasks.verifier_result",
    "VerifierResult": "etude.tasks.verifier_result",
    "commands_agent": "etude.tasks.trial",
    "export_tasks": "etude.tasks.export",
    "find_tasks": "etude.tasks.harbor",
    "import_tasks": "etude.tasks.importers",
    "lint_task": "etude.tasks.lint",
    "nop_agent": "etude.tasks.trial",
    "open_environment": "etude.tasks.environment",
    "oracle_agent": "etude.tasks.trial",
    "read_task": "etude.tasks.harbor",
    "run_trial": "etude.tasks.trial",
    "task_digest": "etude.tasks.harbor",
    "task_source": "etude.tasks.sources",
    "validate_all": "etude.tasks.validate",
    "verify": "etude.tasks.verifier",
    "write_task": "etude.tasks.harbor",
}
__all__ = [
    "DemonstrationRow",
    "EnvironmentCheckpoint",
    "FileChange",
    "HostSettings",
    "MachineSpec",
    "PreparedEnvironments",
    "Task",
    "TaskEnvironment",
    "TaskPhase",
    "TaskSetSettings",
    "TaskSource",
    "TaskStep",
    "TrialAgent",
    "ValidationCache",
    "ValidationReport",
    "VerifierFailed",
    "VerifierResult",
    "commands_agent",
    "export_tasks",
    "find_tasks",
    "import_tasks",
    "lint_task",
    "nop_agent",
    "open_environment",
    "oracle_agent",
    "read_task",
    "run_trial",
    "task_digest",
    "task_source",
    "validate_all",
    "verify",
    "write_task",
]
__getattr__ = lazy_exports(__name__, _MODULES)
