"""Run directories: metrics, state, artefacts and their lineage, and the status of a run's processes.

`Run` has one writer and any number of readers; whatever has its final name is complete. `RunLayout` names the
files of a run directory. `etude.runs.run_status` describes the progress in two lines.
"""
