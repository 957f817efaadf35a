"""What the replies of endpoints have cost, and what may still be spent.

One line of `usage.jsonl` is one reply, also of a trial that failed. With a limit no request is sent whose price, with
those under way, could exceed it: a request reserves the price of its estimated prompt and of all tokens it may sample.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from etude.bench.policies import BenchPolicy, CostLimitReached, EndpointLimits, TokenPrice
from etude.errors import InputError
from etude.inference.clients.limiter import RequestLimiter
from etude.inference.clients.openai import TOKENS_PER_BYTE, ChatUsage, RequestMeter
from etude.rollouts.queue import RolloutQueue


@dataclass
class PolicyUsage:
    """The tokens of a policy's replies."""

    replies: int = 0
    prompt: int = 0
    cached: int = 0
    sampled: int = 0
    tokens_per_byte: float = 0.0  # most prompt tokens for a byte of a request so far; 0: not known

    def add(self, prompt: int, cached: int, sampled: int, bytes: int = 0) -> None:
        self.replies += 1
        self.prompt, self.cached, self.sampled = self.prompt + prompt, self.cached + cached, self.sampled + sampled
        if bytes:
            self.tokens_per_byte = max(self.tokens_per_byte, prompt / bytes)


class UsageLedger:
    """The tokens of all replies so far by policy, their price, and whether more may be spent."""

    def __init__(self, path: Path, prices: Mapping[str, TokenPrice], max_cost: float | None = None) -> None:
        self.path, self.prices, self.max_cost = path, prices, max_cost
        self.policies: dict[str, PolicyUsage] = {}
        self.scored: dict[str, int] = {}  # trials by policy
        self.reserved = 0.0  # dollars, of requests under way
        self.declined = False  # whether the limit has kept a trial from being started or finished
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError, TypeError):  # a line that a kill has torn
                counts = json.loads(line)
                self.of(str(counts.pop("policy"))).add(**counts)

    def of(self, policy: str) -> PolicyUsage:
        return self.policies.setdefault(policy, PolicyUsage())

    def record(self, policy: str, size: int, usage: ChatUsage) -> None:
        """Count a reply to a request of `size` bytes; its line is written before the session goes on."""
        counts = {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "sampled": usage.completion_tokens}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"policy": policy, **counts, "bytes": size}) + "\n")
        self.of(policy).add(**counts, bytes=size)

    def dollars_of(self, policy: str) -> float | None:
        """Return the price of a policy's replies; None if no price is known."""
        price, usage = self.prices.get(policy), self.of(policy)
        if price is None:
            return None
        return price.dollars({"prompt": usage.prompt, "cached": usage.cached}, usage.sampled)

    @property
    def dollars(self) -> float | None:
        """The price of all replies; None if no price is known."""
        return sum(self.dollars_of(name) or 0.0 for name in self.prices) if self.prices else None

    def may_start(self, policy: str, scored: int, running: Mapping[str, int]) -> bool:
        """Return whether another trial may start: all that run, and it, each at the mean price of its policy's trials.

        The first trial of a policy runs alone, to learn the price of one.
        """
        self.scored[policy] = scored
        if self.max_cost is None or policy not in self.prices:
            return True
        if self.declined:
            return False
        if not scored:
            return not running.get(policy)
        started = {**running, policy: running.get(policy, 0) + 1}
        coming = sum(count * self._mean_price(name) for name, count in started.items())
        if not any(running.values()) and (self.dollars or 0.0) + coming > self.max_cost:
            self.declined = True
        return (self.dollars or 0.0) + coming <= self.max_cost

    def start_rule(self, policy: str, slots: RolloutQueue, running: Mapping[str, int]) -> bool:
        """Return whether another trial of a policy may start, given its queue."""
        return self.may_start(policy, slots.counts().get("ready", 0), running)

    def _mean_price(self, policy: str) -> float:
        """Return the mean price of a policy's scored trials, with all replies of failed ones; 0 if none is scored."""
        return (self.dollars_of(policy) or 0.0) / max(1, self.scored.get(policy, 0))

    def stop_reason(self) -> str:
        """Return why no more trials were started; "" if the limit was not met."""
        if not self.declined:
            return ""
        return f"stopped at {self.dollars or 0.0:.2f} of at most {self.max_cost or 0.0:.2f} dollars"


class PolicyMeter(RequestMeter):
    """Counts the replies of one policy in the ledger, and refuses requests that could exceed the limit."""

    def __init__(self, ledger: UsageLedger, policy: str) -> None:
        self.ledger, self.policy = ledger, policy

    def begin(self, size: int, max_tokens: int) -> float:
        ledger, price = self.ledger, self.ledger.prices.get(self.policy)
        if ledger.max_cost is None or price is None:
            return 0.0
        prompt = round(size * (ledger.of(self.policy).tokens_per_byte or TOKENS_PER_BYTE))
        most = price.dollars({"prompt": prompt, "cached": 0}, max_tokens)
        spent = ledger.dollars or 0.0
        if spent + ledger.reserved + most > ledger.max_cost:
            ledger.declined = True
            raise CostLimitReached(
                f"the endpoints have cost {spent:.2f} of at most {ledger.max_cost:.2f} dollars, and the next request "
                f"may cost {most:.2f}"
            )
        ledger.reserved += most
        return most

    def end(self, reserved: float, size: int, usage: ChatUsage | None) -> None:
        self.ledger.reserved -= reserved
        if usage is not None:
            self.ledger.record(self.policy, size, usage)


# ------------------------------------------------------------------------------------------- limits of endpoints


@dataclass(frozen=True)
class EndpointRates:
    """Most requests and tokens a minute of every endpoint; None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


@dataclass(frozen=True)
class BenchLimits:
    """The rates of endpoints by their names without a variant, and the most dollars that all together may cost."""

    rates: Mapping[str, EndpointRates]
    max_cost: float | None = None

    def check_prices(self, policies: Sequence[BenchPolicy], prices: Mapping[str, TokenPrice]) -> None:
        """Raise InputError if the cost is limited and the price of an endpoint is not known."""
        free = [each.name for each in policies if each.kind == "endpoint" and each.name not in prices]
        if self.max_cost is not None and free:
            raise InputError(f"--max-cost: give the price of {free[0]} too, as in --price {free[0]}=0.5,1.5")


def endpoint_limits(
    policies: Sequence[BenchPolicy], rates: Mapping[str, EndpointRates], ledger: UsageLedger
) -> dict[str, EndpointLimits]:
    """Return the limits of every endpoint by policy; `rates` are by the name without a variant.

    Policies with the same URL and model share one limiter, at the lowest of their rates.
    """
    limits, limiters = dict[str, EndpointLimits](), dict[tuple[str, str], RequestLimiter]()
    for policy in (each for each in policies if each.kind == "endpoint"):
        if policy.endpoint not in limiters:
            shared = [rates[each.base_name] for each in policies if each.endpoint == policy.endpoint]
            requests, tokens = (
                min((getattr(rate, name) for rate in shared if getattr(rate, name)), default=None)
                for name in ("requests_per_minute", "tokens_per_minute")
            )
            limiters[policy.endpoint] = RequestLimiter(requests, tokens)
        limits[policy.name] = EndpointLimits(limiters[policy.endpoint], PolicyMeter(ledger, policy.name))
    return limits
