"""Web pages of a run: charts, rollouts turn by turn and token by token, tasks. The run is only read, never changed.

`etude view` serves the pages and `etude report` writes them as one self-contained file. Both get their data from RunApi
(`api.py`) and share one front end (`pages/`). Damaged or unfinished runs are shown as far as they can be read. Names
load on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.viewer.api import RunApi, list_runs
    from etude.viewer.report import ReportSummary, write_report
    from etude.viewer.serve import serve
    from etude.viewer.server import make_app

_MODULES = {  # imported when first used
    "ReportSummary": "etude.viewer.report",
    "RunApi": "etude.viewer.api",
    "list_runs": "etude.viewer.api",
    "make_app": "etude.viewer.server",
    "serve": "etude.viewer.serve",
    "write_report": "etude.viewer.report",
}
__all__ = ["ReportSummary", "RunApi", "list_runs", "make_app", "serve", "write_report"]
__getattr__ = lazy_exports(__name__, _MODULES)
