"""Run directories: metrics, state, artefacts and their lineage, and the status of a run's processes.

`Run` has one writer and any number of readers; whatever has its final name is complete. `RunLayout` names the
files of a run directory. `etude.runs.run_status` describes the progress in two lines.
"""

from etude.runs.layout import RunLayout
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
    "sampler_token",
    "write_status",
]
