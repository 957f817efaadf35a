"""Programs that run in pods: standard library only, imported here by nobody but type checkers and tests."""
