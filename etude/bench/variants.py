"""Variants of an endpoint: the same model at several levels of effort or with several thinking budgets.

Each is a policy of its own, with one row in the results: NAME@high, NAME@4096 or, with both, NAME@high+4096.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from etude.bench.policies import BenchPolicy, TokenPrice
from etude.bench.spending import EndpointRates
from etude.errors import InputError
from etude.inference.clients.openai import THINKING_FORMATS

UNCHANGED = "default"  # the level at which nothing is sent
T = TypeVar("T")


def expand_variants(
    policies: Sequence[BenchPolicy], efforts: Sequence[str], budgets: Sequence[str], thinking_format: str = ""
) -> tuple[BenchPolicy, ...]:
    """Return the policies with the variants that `[NAME=]low,high` and `[NAME=]4096,16384` ask for, in their place."""
    if thinking_format and thinking_format not in THINKING_FORMATS:
        raise InputError(f"--thinking-format {thinking_format}: expected one of {', '.join(THINKING_FORMATS)}")
    if thinking_format and not budgets:
        raise InputError("--thinking-format would not be used: give --thinking-budget too")
    levels = _by_endpoint(policies, efforts, "--effort", "low,high", _parse_efforts)
    tokens = _by_endpoint(policies, budgets, "--thinking-budget", "4096,16384", _parse_budgets)
    found = []
    for policy in policies:
        for level in levels.get(policy.name, [""]):
            for budget in tokens.get(policy.name, [None]):
                label = "+".join(part for part in (level, str(budget or "")) if part)
                name = f"{policy.name}@{label}" if label else policy.name
                form = thinking_format if budget else ""
                found.append(replace(policy, name=name, effort=level, thinking_budget=budget, thinking_format=form))
    return tuple(found)


def check_thinking_budgets(policies: Sequence[BenchPolicy], max_turn_tokens: Mapping[str, int]) -> None:
    """Raise InputError for a thinking budget that leaves no room in a turn."""
    for policy in policies:
        limit = max_turn_tokens[policy.name]
        if policy.thinking_budget is not None and policy.thinking_budget >= limit:
            raise InputError(
                f"--thinking-budget {policy.thinking_budget:,}: a turn of {policy.name} has at most {limit:,} tokens, "
                f"thinking included; give --budget-answer {2 * policy.thinking_budget}, for example"
            )


def with_base_names(policies: Sequence[str]) -> list[str]:
    """Return the names of policies, and those without their variant."""
    return [*dict.fromkeys([*policies, *(name.partition("@")[0] for name in policies)])]


def prices_of(policies: Sequence[str], prices: Mapping[str, TokenPrice]) -> dict[str, TokenPrice]:
    """Return the price of every policy that has one: its own, or that of all variants."""
    found = {name: prices.get(name) or prices.get(name.partition("@")[0]) for name in policies}
    return {name: price for name, price in found.items() if price is not None}


def parse_rates(
    policies: Sequence[BenchPolicy], requests: Sequence[str], tokens: Sequence[str]
) -> dict[str, EndpointRates]:
    """Parse rates from `[NAME=]N`; return those of every endpoint by its name without a variant."""
    names = {policy.base_name: replace(policy, name=policy.base_name) for policy in policies}
    endpoints = list(names.values())
    by_requests = _by_endpoint(endpoints, requests, "--requests-per-minute", "60", _parse_rate)
    by_tokens = _by_endpoint(endpoints, tokens, "--tokens-per-minute", "200000", _parse_rate)
    return {name: EndpointRates(by_requests.get(name), by_tokens.get(name)) for name in names}


def _by_endpoint(
    policies: Sequence[BenchPolicy], texts: Sequence[str], option: str, example: str, parse: Callable[[str], T | None]
) -> dict[str, T]:
    """Parse `[NAME=]VALUE` for the endpoint NAME, or for all endpoints; the value of one replaces that of all."""
    endpoints = [policy.name for policy in policies if policy.kind == "endpoint"]
    if texts and not endpoints:
        raise InputError(f"{option}: applies to endpoints, and no policy is one")
    of_all: dict[str, T] = {}
    of_one: dict[str, T] = {}
    for text in texts:
        name, equals, given = text.rpartition("=")
        if equals and name not in endpoints:
            raise InputError(f"{option} {text}: no endpoint {name}; the endpoints are {', '.join(endpoints)}")
        value = parse(given)
        if value is None:
            raise InputError(f"{option} {text}: expected [NAME=]VALUE, as in {option} {example}")
        for each in [name] if equals else endpoints:
            (of_one if equals else of_all)[each] = value
    return of_all | of_one


def _parse_efforts(text: str) -> list[str] | None:
    levels = [*dict.fromkeys(text.split(","))]
    if not all(re.fullmatch(r"[a-z]+", level) for level in levels):
        return None
    return ["" if level == UNCHANGED else level for level in levels]


def _parse_budgets(text: str) -> list[int | None] | None:
    budgets: list[Any] = [*dict.fromkeys(text.split(","))]
    if not all(re.fullmatch(rf"[1-9]\d*|{UNCHANGED}", budget) for budget in budgets):
        return None
    return [None if budget == UNCHANGED else int(budget) for budget in budgets]


def _parse_rate(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
