"""Programs that run in the pods of an installation; standard library only."""
