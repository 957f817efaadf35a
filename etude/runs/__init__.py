"""Run directories: metrics, state, artefacts and their lineage, and the status of a run's processes.

`Run` has one writer and any number of readers; whatever has its final name is complete. `RunLayout` has the paths that
the processes of reinforcement learning share. `etude.runs.run_status` describes the progress in two lines.
"""

from etude.runs.layout import RunLayout, read_task_lists, run_directory
from etude.runs.loggers import attach_loggers
from etude.runs.run import Artefact, Parent, Run, RunSettings
from etude.runs.service_status import read_status, read_statuses, sampler_token, write_status

__all__ = [
    "Artefact",
    "Parent",
    "Run",
    "RunLayout",
    "RunSettings",
    "attach_loggers",
    "read_status",
    "read_statuses",
    "read_task_lists",
    "run_directory",
    "sampler_token",
    "write_status",
]
