"""The verifier of repositories whose tests are not pytest's: a test.sh that runs their command and reads its report.

It runs in the pod, unlike the checks of `etude.tasks.checks`; false tests are its defence (docs/tasks.md).
"""

import json
import shlex
from collections.abc import Mapping, Sequence

from etude.pods.payload import source_files
from etude.tasks.generators.executor import WORKSPACE
from etude.tasks.generators.task_writer import TaskFiles
from etude.tasks.installation.result import Installation

MODULES = ("etude.tasks.installation.reports", "etude.tasks.checks.inside.swe_log")
_JUDGE = """import json, pathlib, sys
sys.path.insert(0, "/tests/program")
from etude.tasks.installation.reports import read_statuses
spec = json.loads(pathlib.Path("/tests/expected_tests.json").read_text())
found = read_statuses(spec["framework"], pathlib.Path("/logs/verifier/tests.log").read_text(errors="replace"))
missing = [test for test in spec["tests"] if found.get(test) != "passed"]
for test in missing:
    print(f"not passed: {test}: {found.get(test, 'missing')}")
print(f"{len(spec['tests']) - len(missing)} of {len(spec['tests'])} tests passed")
pathlib.Path("/logs/verifier/reward.txt").write_text("0" if missing else "1")
"""


def command_verifier_files(
    installation: Installation, line: str, tests: Sequence[str], suite: Mapping[str, bytes]
) -> TaskFiles:
    """Return a `tests/` directory whose test.sh restores the suite, runs a command line and compares its report."""
    env = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted({**installation.env, "CI": "true"}.items()))
    script = (
        "#!/bin/bash\n"
        "mkdir -p /logs/verifier\n"
        f"cp -R /tests/suite/. {WORKSPACE}/\n"
        f"cd {WORKSPACE}\n"
        f"export {env}\n"
        f"( {line} ) > /logs/verifier/tests.log 2>&1\n"
        "tail -n 200 /logs/verifier/tests.log\n"
        "python3 -I -S -B /tests/judge.py\n"
    )
    expected = {"framework": installation.framework, "tests": list(tests)}
    return {
        "tests/test.sh": script,
        "tests/judge.py": _JUDGE,
        "tests/expected_tests.json": json.dumps(expected) + "\n",
        **{
            f"tests/program/{path}": text for path, text in source_files(MODULES[0] + ":tap_statuses", *MODULES).items()
        },
        **{f"tests/suite/{path}": data for path, data in suite.items()},
    }
