"""Tasks in the Harbor format: reading and writing, environments, trials, verifiers, validation, importers, generators.

`read_task` gives a Task; `open_environment` a prepared pod for its agent; `run_trial` runs an agent there and verifies
its changes in a clean pod, returning a VerifierResult or raising VerifierFailed (infrastructure, never the agent).
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.tasks.environment import open_environment as open_environment
    from etude.tasks.harbor import read_task as read_task
    from etude.tasks.settings import TaskSetSettings as TaskSetSettings
    from etude.tasks.sources import TaskSource as TaskSource
    from etude.tasks.sources import task_source as task_source
    from etude.tasks.verifier import verify as verify

__getattr__ = lazy_exports(__name__)
