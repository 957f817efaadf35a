"""pytest plugin that writes the status of every test to $ETUDE_REPORT, one JSON object per line.

    {"id", "status", "seconds", "text"}   a test: passed, failed, error, skipped, xfailed or xpassed
    {"id", "status": "error", "text", "collection": true}   a file or class that could not be collected
    {"end": exit status}                  the end of the session

It works in every pytest since version 3 and with xdist, and removes its variables from the environment: sessions and
programs that the tests start are not reported. The file $ETUDE_PROBES is collected in addition.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import json
import os
import sys
import time

MAX_TEXT = 4000


def pytest_configure(config):
    path, probes = os.environ.pop("ETUDE_REPORT", ""), os.environ.pop("ETUDE_PROBES", "")
    here = os.path.dirname(os.path.abspath(__file__))
    os.environ.pop("PYTEST_PLUGINS", None)
    left = [each for each in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if each and each != here]
    if left:
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    sys.path[:] = [each for each in sys.path if each != here]
    if path and not hasattr(config, "workerinput") and not hasattr(config, "slaveinput"):
        files = [probes] if probes else []
        config.args = list(config.args) + files
        report = open(path, "a")  # noqa: SIM115  closed with the process
        config.pluginmanager.register(StatusWriter(report, files), "etude-status-writer")


class StatusWriter:
    """Writes a line for every test when it is over."""

    def __init__(self, file, probes):
        self.file, self.probes, self.found, self.started = file, probes, {}, {}
        self.items = []

    def write(self, **fields):
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def pytest_itemcollected(self, item):
        if str(getattr(item, "fspath", "")) in self.probes:
            self.items.append(item)

    def pytest_collection_finish(self, session):
        # -k and -m deselect probes, too
        session.items.extend(item for item in self.items if item not in session.items)

    def pytest_collectreport(self, report):
        if report.failed:
            text = str(report.longrepr)[-MAX_TEXT:]
            self.write(id=report.nodeid or ".", status="error", text=text, collection=True)

    def pytest_runtest_logstart(self, nodeid, location):
        self.started[nodeid] = time.time()

    def pytest_runtest_logreport(self, report):
        status = str(report.outcome)
        if hasattr(report, "wasxfail"):
            status = "xfailed" if report.skipped else "xpassed"
        elif report.when != "call" and status == "failed":
            status = "error"
        if self.found.get(report.nodeid, ("passed", ""))[0] == "passed":
            text = str(report.longrepr)[-MAX_TEXT:] if report.failed else ""
            self.found[report.nodeid] = (status, text)

    def pytest_runtest_logfinish(self, nodeid, location):
        status, text = self.found.pop(nodeid, ("missing", ""))
        seconds = round(time.time() - self.started.pop(nodeid, time.time()), 4)
        self.write(id=nodeid, status=status, seconds=seconds, text=text)

    def pytest_sessionfinish(self, session, exitstatus):
        self.write(end=int(exitstatus))
