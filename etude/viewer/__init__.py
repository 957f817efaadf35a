"""Web pages of a run: charts, rollouts turn by turn and token by token, tasks. The run is only read, never changed.

`etude view` serves the pages and `etude report` writes them as one self-contained file. Both get their data from RunApi
(`api.py`) and share one front end (`pages/`). Damaged or unfinished runs are shown as far as they can be read.
"""
