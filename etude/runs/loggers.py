"""Loggers: copies of every line of metrics.jsonl to Weights & Biases or TensorBoard.

A logger that the recipe names and that is not installed is an error when the run starts.
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
def attach_loggers(run: Run, tools: Sequence[str]) -> Iterator[None]:
    """Copy everything the run logs inside the block to the tools."""
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


def _series(stage: str, values: dict[str, Any]) -> str:
    """Return what the names of these metrics begin with: those of a benchmark during RL are apart from validation."""
    return f"{stage}/{values['benchmark']}" if "benchmark" in values else stage


def _wandb(run: Run) -> tuple[Listener, Callable[[], object]]:
    wandb = _tool("wandb")
    session = wandb.init(project="etude", name=run.settings.name, dir=str(run.path), resume="allow")

    def listen(stage: str, step: int, values: dict[str, Any]) -> None:
        # every stage counts its steps from 0, so each has its own axis
        series, numbers = _series(stage, values), {**_numbers(values), "step": step}
        session.log({f"{series}/{key}": value for key, value in numbers.items()})

    return listen, session.finish


def _tensorboard(run: Run) -> tuple[Listener, Callable[[], object]]:
    _tool("tensorboard")
    writer = _tool("torch.utils.tensorboard").SummaryWriter(str(run.path / "tensorboard"))

    def listen(stage: str, step: int, values: dict[str, Any]) -> None:
        for key, value in _numbers(values).items():
            writer.add_scalar(f"{_series(stage, values)}/{key}", value, step)

    return listen, writer.close


_OPEN = {"wandb": _wandb, "tensorboard": _tensorboard}


def _tool(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        name = module.rpartition(".")[2]
        raise InputError(f"loggers names {name}, which is not installed; pip install {name}, or leave it out") from None
