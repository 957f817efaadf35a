"""Who is compared: what a person may write, and what is found out before anything is run."""

import asyncio
from pathlib import Path

import pytest
from rl_runs import make_model
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stub_endpoint import StubEndpoint, says, serving

from etude.bench.candidates import KEY, Candidate, Known, Price, look_at, read_candidates, read_prices
from etude.bench.chat_rollout import HIDDEN, DiscreetChat
from etude.errors import EtudeError, InputError
from etude.inference.clients.transport import RetryPolicy, ServerError

SECRET = "sk-0123456789abcdef"


class Guarded(StubEndpoint):
    """Does not even say what it serves without the key."""

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return await super().models(request)


class Talkative(StubEndpoint):
    """Repeats the key that it was sent."""

    async def chat(self, request: Request) -> Response:
        return JSONResponse({"error": {"message": f"{request.headers['authorization']} is not known here"}}, 400)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)


# ------------------------------------------------------------------------------------------- as they are named


def test_a_policy_is_a_directory_or_a_model_at_an_endpoint(tmp_path: Path) -> None:
    (tmp_path / "sft-100").mkdir()
    mine, hosted, named = read_candidates(
        [str(tmp_path / "sft-100"), "https://host:8000/v1/#org/model:tag", "big=http://host/v1#m"]
    )
    assert mine == Candidate("sft-100", directory=tmp_path / "sft-100")
    assert hosted == Candidate("org-model-tag", url="https://host:8000/v1", model="org/model:tag")
    assert (named.name, named.kind, named.where) == ("big", "endpoint", "http://host/v1#m")


def test_a_directory_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    (plain,) = read_candidates([str(tmp_path / "lr=0.1")])
    assert plain.directory == tmp_path / "lr=0.1"
    (named,) = read_candidates([f"best={tmp_path / 'lr=0.1'}"])
    assert (named.name, named.directory) == ("best", tmp_path / "lr=0.1")


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (
            ["nowhere"],
            "--policy nowhere: no such directory; expected a checkpoint's directory, or http://HOST/v1#MODEL",
        ),
        (["a b=http://host/v1#m"], "the name 'a b' may hold"),
        (["http://host/v1"], "which model? Name it after a #, as in http://host/v1#MODEL"),
        (["http://#m"], "expected a URL such as"),
        (["http://me:word@host/v1#m"], "a URL with a password or a query"),
        (["http://host/v1?key=word#m"], "a URL with a password or a query"),
        (["http://host/v1#m", "http://other/v1#m"], "two are called m; name them"),
    ],
)
def test_what_is_no_policy_is_said_in_a_line_and_no_password_is_repeated(policies: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        read_candidates(policies)
    assert said in str(error.value)
    assert "word@" not in str(error.value)
    assert "key=word" not in str(error.value)


def test_keys_come_from_variables_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = ["a=http://host/v1#m", "b=http://host/v1#n"]
    a, b = read_candidates(texts, ["a=MY_KEY"])
    monkeypatch.setenv(KEY, "common")
    assert b.key() == "common"
    with pytest.raises(InputError, match="--key-env a=MY_KEY: there is no such variable"):
        a.key()
    monkeypatch.setenv("MY_KEY", "mine")
    assert a.key() == "mine"
    for wrong, said in (("c=X", "there is no policy c; there are a, b"), ("X", "expected NAME=VARIABLE")):
        with pytest.raises(InputError, match=said):
            read_candidates(texts, [wrong])
    with pytest.raises(InputError, match="is a checkpoint, which needs no key"):
        read_candidates([f"here={tmp_path}"], ["here=MY_KEY"])


def test_a_price_counts_what_is_read_cached_and_made() -> None:
    prices = read_prices(["a=1,10", "b=1,10,0.25"], ["a", "b"])
    cost = {"prompt": 3_000_000, "cached": 1_000_000}
    assert prices["a"].of(cost, 500_000) == pytest.approx(3 + 5)
    assert prices["b"].of(cost, 500_000) == pytest.approx(2 + 0.25 + 5)
    assert prices["a"] == Price(1.0, 10.0, 1.0)
    for wrong in ("a=1", "a=1,2,3,4", "a=x,2", "a=-1,2", "a=nan,1", "a=inf,1", "c=1,2", "1,2"):
        with pytest.raises(InputError, match="--price"):
            read_prices([wrong], ["a", "b"])


# ------------------------------------------------------------------------------------------- a first look


def looks(candidate: Candidate, window: int = 0, dialect: str = "") -> Known:
    return asyncio.run(look_at(candidate, dialect, window))


def test_a_checkpoint_tells_its_window_its_dialect_and_which_one_it_is(tmp_path: Path) -> None:
    here, there = (Candidate(name, make_model(tmp_path / name, seed)) for name, seed in (("here", 0), ("there", 1)))
    first, other = looks(here), looks(there)
    assert (first.window, first.dialect) == (2048, "chatml")
    assert first == looks(here)
    assert first.digest != other.digest
    assert looks(here, window=512).window == 512
    with pytest.raises(InputError, match="policy here: --window 4,096: this model can read 2,048 tokens"):
        looks(here, window=4096)
    with pytest.raises(InputError, match=r"policy here: .*is not a dialect"):
        looks(here, dialect="latin")
    with pytest.raises(InputError, match=r"policy x: .*config\.json: not found"):
        looks(Candidate("x", tmp_path))


def test_an_endpoint_that_is_not_there_or_wants_another_key_is_found_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EtudeError, match=r"^policy gone: GET http://127.0.0.1:9/v1/models: no connection: C"):
        looks(Candidate("gone", url="http://127.0.0.1:9/v1", model="m"))
    with serving(Guarded([], key=SECRET)) as stub:
        known = Candidate("stub", url=stub.url, model="stub")
        monkeypatch.setenv(KEY, "sk-another-secret-key")
        with pytest.raises(EtudeError, match=r"^policy stub: GET .*/models: 401: wrong key$"):
            looks(known)
        monkeypatch.setenv(KEY, SECRET)
        assert looks(known) == Known(128_000, "chat")
        with pytest.raises(InputError, match=r"policy x: .* serves no other; it serves stub"):
            looks(Candidate("x", url=stub.url, model="other"))


# ------------------------------------------------------------------------------------------- keys


def test_a_key_that_an_endpoint_repeats_is_hidden() -> None:
    async def ask(stub: StubEndpoint, key: str) -> str:
        client = DiscreetChat(stub.url, key, model="stub", retry=RetryPolicy(attempts=1))
        try:
            reply = await client.chat([{"role": "user", "content": "hello"}])
            return f"{reply.text} {reply.message} {reply.tool_calls}"
        except ServerError as error:
            return str(error)
        finally:
            await client.close()

    with serving(StubEndpoint([says(f"Your key is {SECRET}.", ("run", {"with": [SECRET]}))])) as stub:
        answer = asyncio.run(ask(stub, SECRET))
        assert SECRET not in answer
        assert answer.count(HIDDEN) == 4
    with serving(Talkative([])) as stub:
        assert asyncio.run(ask(stub, SECRET)).endswith(f"400: Bearer {HIDDEN} is not known here")


def test_a_key_that_is_a_word_is_left_alone_in_answers() -> None:
    async def ask(url: str) -> str:
        client = DiscreetChat(url, "EMPTY", model="stub")
        try:
            return (await client.chat([{"role": "user", "content": "hello"}])).text
        finally:
            await client.close()

    with serving(StubEndpoint([says("The list is EMPTY.")])) as stub:
        assert asyncio.run(ask(stub.url)) == "The list is EMPTY."
