"""The control `imitation`: policy steps on the demonstrations of the stage sft instead of rollouts.

Each step learns from as many demonstrations as a step of RL has rollouts. They continue where the stage sft ended, in
further epochs; the position is a function of the step, so that a restarted trainer continues with the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from etude.chat.tokenizer import Tokenizer
from etude.config import load_table, read_toml
from etude.data.dealing import deal, sequence_cost
from etude.data.mixture import DocumentSpan, Mixture
from etude.data.packing import Batch, pack_rows
from etude.errors import InputError
from etude.model.config import ModelConfig
from etude.rl.settings import RlSettings
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.train.phase import STATE_FILE, list_checkpoints
from etude.train.settings import SftSettings
from etude.train.stages import build_mixture


def check_demonstrations(layout: RunLayout) -> SftSettings:
    """Return the settings of the stage sft; InputError if the recipe has none to take demonstrations from."""
    if "sft" not in read_toml(layout.recipe):
        raise InputError('rl.control = "imitation" needs the demonstrations of the stage sft: the recipe has no [sft]')
    return load_table(layout.recipe, "sft", SftSettings)


def open_mixture(layout: RunLayout, seed: int) -> Mixture:
    """Return the mixture of the stage sft, at the position where that stage ended."""
    run = Run.read(layout.run)
    mixture = build_mixture(run, "sft", check_demonstrations(layout), seed, Tokenizer.load(layout.model))
    if saved := list_checkpoints(run, "sft"):
        mixture.load_state_dict(json.loads((saved[-1][1].path / STATE_FILE).read_text(encoding="utf-8"))["mixture"])
    return mixture


def demonstration_steps(
    mixture: Mixture,
    settings: RlSettings,
    config: ModelConfig,
    step: int,
    padding: int,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[list[Batch]]:
    """Yield a rank's micro-batches of the steps after `step`, for all ranks equally many."""
    for number, rows in enumerate(_rows_of_steps(mixture, settings.groups_per_step * settings.group_size)):
        if number < step:
            continue
        own, most = rows, len(rows)
        if ranks > 1:
            costs = [sum(sequence_cost(config, span.stop - span.start) for span in row) for row in rows]
            dealt = deal(costs, ranks)
            own, most = [rows[index] for index in dealt[rank]], max(map(len, dealt))
        parts = [own[at : at + settings.rows] for at in range(0, most, settings.rows)]
        yield [pack_rows(mixture, part or [[]], padding) for part in parts]


def _rows_of_steps(mixture: Mixture, sessions: int) -> Iterator[list[list[DocumentSpan]]]:
    """Yield the rows of each step: whole rows, with at least `sessions` demonstrations."""
    while True:
        rows: list[list[DocumentSpan]] = []
        while sum(map(len, rows)) < sessions:
            rows.append(mixture.next_row())
        yield rows
