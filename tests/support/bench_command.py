"""The command `etude bench` in the process of a test."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from etude.bench.cli import app
from etude.errors import EtudeError


def bench(*arguments: object, code: int = 0) -> Result:
    """Run `etude bench` with these arguments; it must end with this exit code."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    found = done.exception.exit_code if isinstance(done.exception, EtudeError) else done.exit_code
    if done.exception is not None and not isinstance(done.exception, EtudeError | SystemExit):
        raise done.exception
    assert found == code, (done.output, done.exception)
    return done


def answer(*arguments: object) -> Any:
    """Return what `etude bench` prints as JSON."""
    return json.loads(bench(*arguments, "--json").stdout)
