"""Phrases of requests and final messages: one is drawn at random and its fields are filled in.

Those with many wordings are in `data/phrases.toml`; in them `{name}` and `{case.call}` are fields.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from random import Random


def choose(rng: Random, *texts: str) -> str:
    return rng.choice(texts)


def draw_phrase(rng: Random, phrase: str, /, **values: object) -> str:
    """Draw a phrase of `data/phrases.toml` by its table and key, and fill in the values."""
    table, _, key = phrase.partition(".")
    return rng.choice(_read_phrases()[table][key]).format(**values)


@cache
def _read_phrases() -> Mapping[str, Mapping[str, Sequence[str]]]:
    return tomllib.loads(files("etude_nano").joinpath("data/phrases.toml").read_text(encoding="utf-8"))
