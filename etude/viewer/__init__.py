"""Web pages of a run: charts, rollouts turn by turn and token by token, tasks. The run is only read, never changed.

`etude view` serves the pages and `etude report` writes them as one self-contained file. Both get their data from RunApi
(`api.py`) and share one front end (`pages/`). Damaged or unfinished runs are shown as far as they can be read. Names
load on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.viewer.api import RunApi as RunApi
    from etude.viewer.api import list_runs as list_runs
    from etude.viewer.report import ReportSummary as ReportSummary
    from etude.viewer.report import write_report as write_report
    from etude.viewer.serve import serve as serve
    from etude.viewer.server import make_app as make_app

__getattr__ = lazy_exports(__name__)
