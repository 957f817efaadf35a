"""Policies of a comparison: parsing of the options, and the checks before anything is run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rl_runs import make_model
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stub_endpoint import StubEndpoint, says, serving

from etude.bench.policies import (
    DEFAULT_KEY_ENV,
    BenchPolicy,
    PolicyProfile,
    TokenPrice,
    parse_policies,
    parse_prices,
    probe_policy,
)
from etude.errors import EtudeError, InputError
from etude.inference.clients.openai import REDACTED, OpenAIChat
from etude.inference.clients.transport import RetryPolicy, ServerError

SECRET = "sk-0123456789abcdef"


class GuardedEndpoint(StubEndpoint):
    """Lists its models only with the right key."""

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return await super().models(request)


class KeyRepeatingEndpoint(StubEndpoint):
    """Repeats the API key that it was sent."""

    async def chat(self, request: Request) -> Response:
        return JSONResponse({"error": {"message": f"{request.headers['authorization']} is not known here"}}, 400)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEFAULT_KEY_ENV, raising=False)


# ------------------------------------------------------------------------------------------- options


def test_a_policy_is_a_directory_or_a_model_at_an_endpoint(tmp_path: Path) -> None:
    (tmp_path / "sft-100").mkdir()
    mine, hosted, named = parse_policies(
        [str(tmp_path / "sft-100"), "https://host:8000/v1/#org/model:tag", "big=http://host/v1#m"]
    )
    assert mine == BenchPolicy("sft-100", directory=tmp_path / "sft-100")
    assert hosted == BenchPolicy("org-model-tag", url="https://host:8000/v1", model="org/model:tag")
    assert (named.name, named.kind, named.where) == ("big", "endpoint", "http://host/v1#m")


def test_a_directory_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    (plain,) = parse_policies([str(tmp_path / "lr=0.1")])
    assert plain.directory == tmp_path / "lr=0.1"
    (named,) = parse_policies([f"best={tmp_path / 'lr=0.1'}"])
    assert (named.name, named.directory) == ("best", tmp_path / "lr=0.1")


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            ["nowhere"],
            "--policy nowhere: no such directory; expected a checkpoint's directory, or http://HOST/v1#MODEL",
        ),
        (["a b=http://host/v1#m"], "the name 'a b' may contain"),
        (["http://host/v1"], "no model; name it after a #, as in http://host/v1#MODEL"),
        (["http://#m"], "expected a URL such as"),
        (["http://me:word@host/v1#m"], "a URL with a password or a query"),
        (["http://host/v1?key=word#m"], "a URL with a password or a query"),
        (["http://host/v1#m", "http://other/v1#m"], "two policies are called m; name them"),
    ],
)
def test_bad_policies_are_refused_without_repeating_a_password(policies: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_policies(policies)
    assert message in str(error.value)
    assert "word@" not in str(error.value)
    assert "key=word" not in str(error.value)


def test_keys_come_from_variables_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = ["a=http://host/v1#m", "b=http://host/v1#n"]
    a, b = parse_policies(texts, ["a=MY_KEY"])
    monkeypatch.setenv(DEFAULT_KEY_ENV, "common")
    assert b.key() == "common"
    with pytest.raises(InputError, match="--key-env a=MY_KEY: there is no such variable"):
        a.key()
    monkeypatch.setenv("MY_KEY", "mine")
    assert a.key() == "mine"
    for wrong, message in (("c=X", "no policy c; the policies are a, b"), ("X", "expected NAME=VARIABLE")):
        with pytest.raises(InputError, match=message):
            parse_policies(texts, [wrong])
    with pytest.raises(InputError, match="is a checkpoint, which needs no key"):
        parse_policies([f"here={tmp_path}"], ["here=MY_KEY"])


def test_a_price_counts_prompt_cached_and_sampled_tokens() -> None:
    prices = parse_prices(["a=1,10", "b=1,10,0.25"], ["a", "b"])
    cost = {"prompt": 3_000_000, "cached": 1_000_000}
    assert prices["a"].dollars(cost, 500_000) == pytest.approx(3 + 5)
    assert prices["b"].dollars(cost, 500_000) == pytest.approx(2 + 0.25 + 5)
    assert prices["a"] == TokenPrice(1.0, 10.0, 1.0)
    for wrong in ("a=1", "a=1,2,3,4", "a=x,2", "a=-1,2", "a=nan,1", "a=inf,1", "c=1,2", "1,2"):
        with pytest.raises(InputError, match="--price"):
            parse_prices([wrong], ["a", "b"])


# ------------------------------------------------------------------------------------------- probing


def probe(candidate: BenchPolicy, **changes: Any) -> PolicyProfile:
    return asyncio.run(probe_policy(candidate, changes))


def test_probing_a_checkpoint_returns_its_window_dialect_and_digest(tmp_path: Path) -> None:
    here, there = (BenchPolicy(name, make_model(tmp_path / name, seed)) for name, seed in (("here", 0), ("there", 1)))
    first, other = probe(here), probe(there)
    assert (first.window, first.dialect) == (2048, "chatml")
    assert first == probe(here)
    assert first.digest != other.digest
    assert probe(here, window=512).window == 512
    with pytest.raises(InputError, match="policy here: --window 4,096: this model's window has 2,048 tokens"):
        probe(here, window=4096)
    with pytest.raises(InputError, match=r"policy here: .*latin"):
        probe(here, dialect="latin")
    with pytest.raises(InputError, match=r"policy x: .*config\.json: not found"):
        probe(BenchPolicy("x", tmp_path))


def test_a_missing_endpoint_or_a_wrong_key_is_reported_before_any_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EtudeError, match=r"^policy gone: GET http://127.0.0.1:9/v1/models: no connection: C"):
        probe(BenchPolicy("gone", url="http://127.0.0.1:9/v1", model="m"))
    with serving(GuardedEndpoint([], key=SECRET)) as stub:
        known = BenchPolicy("stub", url=stub.url, model="stub")
        monkeypatch.setenv(DEFAULT_KEY_ENV, "sk-another-secret-key")
        with pytest.raises(EtudeError, match=r"^policy stub: GET .*/models: 401: wrong key$"):
            probe(known)
        monkeypatch.setenv(DEFAULT_KEY_ENV, SECRET)
        assert (probe(known).window, probe(known).dialect) == (128_000, "chat")
        with pytest.raises(InputError, match=r"policy x: .* serves no other; it serves stub"):
            probe(BenchPolicy("x", url=stub.url, model="other"))


# ------------------------------------------------------------------------------------------- keys


def test_a_key_that_an_endpoint_repeats_is_redacted() -> None:
    async def ask(stub: StubEndpoint, key: str) -> str:
        client = OpenAIChat(stub.url, key, model="stub", retry=RetryPolicy(attempts=1))
        try:
            reply = await client.chat([{"role": "user", "content": "hello"}])
            return f"{reply.turn.text} {reply.message} {reply.turn.calls}"
        except ServerError as error:
            return str(error)
        finally:
            await client.close()

    with serving(StubEndpoint([says(f"Your key is {SECRET}.", ("run", {"with": [SECRET]}))])) as stub:
        answer = asyncio.run(ask(stub, SECRET))
        assert SECRET not in answer
        assert answer.count(REDACTED) == 5
    with serving(KeyRepeatingEndpoint([])) as stub:
        assert asyncio.run(ask(stub, SECRET)).endswith(f"400: Bearer {REDACTED} is not known here")


def test_a_short_key_is_not_redacted_in_answers() -> None:
    async def ask(url: str) -> str:
        client = OpenAIChat(url, "EMPTY", model="stub")
        try:
            return (await client.chat([{"role": "user", "content": "hello"}])).turn.text
        finally:
            await client.close()

    with serving(StubEndpoint([says("The list is EMPTY.")])) as stub:
        assert asyncio.run(ask(stub.url)) == "The list is EMPTY."
