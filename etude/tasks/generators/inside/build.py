"""Builds the wheel of a workspace as the verifier does it, and prints what is in it as the last line, in JSON."""

from __future__ import annotations

import json
import sys

from etude.tasks.generators.inside.executed_checks import wheel

if __name__ == "__main__":
    print("\n" + json.dumps(wheel({}, sys.argv[1])))
