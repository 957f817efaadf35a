"""Build the wheel of a workspace as the verifier does, and print its contents as JSON on the last line."""

from __future__ import annotations

import json
import sys

from etude.tasks.generators.inside.executed_checks import wheel


def main() -> None:
    print("\n" + json.dumps(wheel({}, sys.argv[1])))
