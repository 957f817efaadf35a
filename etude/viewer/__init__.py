"""Web pages of a run: its curves, its rollouts turn by turn, its tasks. `etude view` serves them, `etude report` writes
them as one file; both show what `answers.py` says, with the same front end (`pages/`)."""
