"""Programs that run in pods. They use only the standard library; `executor.program_for_pod` ships their text."""
