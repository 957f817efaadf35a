"""Metrics for other tools, when asked for: every line of metrics.jsonl also goes to Weights & Biases or TensorBoard.

metrics.jsonl stays the truth; these are copies. A tool that is asked for and not installed is an error at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from etude.errors import InputError
from etude.runs.run import Run

Listener = Callable[[str, int, dict[str, Any]], None]


@contextmanager
def tracking(run: Run, tools: Sequence[str]) -> Iterator[None]:
    """While this is open, what the run logs is passed on to the tools."""
    opened = [_OPEN[tool](run) for tool in tools]
    run.listeners += [listen for listen, _ in opened]
    try:
        yield
    finally:
        run.listeners.clear()
        for _, close in opened:
            close()


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        key: value for key, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _wandb(run: Run) -> tuple[Listener, Callable[[], object]]:
    wandb = _tool("wandb")
    session = wandb.init(project="etude", name=run.recipe.name, dir=str(run.path), resume="allow")

    def listen(stage: str, step: int, values: dict[str, Any]) -> None:
        # stages count their steps each from 0, so each has an axis of its own
        session.log({f"{stage}/{key}": value for key, value in {**_numbers(values), "step": step}.items()})

    return listen, session.finish


def _tensorboard(run: Run) -> tuple[Listener, Callable[[], object]]:
    _tool("tensorboard")
    writer = _tool("torch.utils.tensorboard").SummaryWriter(str(run.path / "tensorboard"))

    def listen(stage: str, step: int, values: dict[str, Any]) -> None:
        for key, value in _numbers(values).items():
            writer.add_scalar(f"{stage}/{key}", value, step)

    return listen, writer.close


_OPEN = {"wandb": _wandb, "tensorboard": _tensorboard}


def _tool(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        name = module.rpartition(".")[2]
        raise InputError(f"track names {name}, which is not installed; pip install {name}, or leave it out") from None
