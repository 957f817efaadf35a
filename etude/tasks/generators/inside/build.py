"""Build the wheel of a workspace as the verifier does, and print its contents as JSON on the last line."""

from __future__ import annotations

import json
import sys

from etude.tasks.checks.inside.wheels import observe_wheel


def main() -> None:
    print("\n" + json.dumps(observe_wheel({}, sys.argv[1])))
