"""The server as trainers and operators use it: token-exact requests, weights, disconnects, and the command."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import patient_http
import pytest
import torch
from asking import USER, client_of
from safetensors.torch import save as pack
from samplers import NAME, follow, parrot, served, serving, tiny_engine, tiny_model, tiny_tokenizer, token_of, until

from etude.chat import template
from etude.chat.tokenizer import CHAT_TEMPLATE
from etude.errors import InputError
from etude.inference.cli import serve
from etude.inference.engine import Engine
from etude.inference.server import ServedModel
from etude.inference.service import EngineService
from etude.inference.settings import EngineOptions
from etude.model import save
from etude.model.checkpoint import checkpoint_views
from etude.model.generate import generate
from etude.model.mtp import initialize_mtp, save_mtp

# --------------------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "stream": True, "n": 3}),
        ("/v1/chat/completions", {"messages": USER, "n": 3}),
        ("/generate", {"tokens": [1, 2], "sampling": {"max_tokens": 2000, "samples": 3}, "stream": True}),
        ("/generate", {"tokens": [1, 2], "sampling": {"max_tokens": 2000, "samples": 3}}),
    ],
    ids=["chat-stream", "chat", "generate-stream", "generate"],
)
def test_a_disconnect_cancels_and_frees_the_pages(path: str, body: dict[str, Any]) -> None:
    engine = parrot("la", " la-la", end=False)  # output without an end

    async def work() -> None:
        async with EngineService(engine) as service, serving(service) as url:
            async with patient_http.open_client() as web:
                if body.get("stream"):
                    async with web.stream("POST", f"{url}{path}", json=body) as response:
                        async for _ in response.aiter_lines():
                            break
                else:
                    asking = asyncio.create_task(web.post(f"{url}{path}", json=body))
                    await until(lambda: service.stats().output_tokens > 10)
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: service.open_sequences == 0, 5)
            assert engine.pool.held == 0
            assert service.stats().endings == {"cancelled": 3}

    asyncio.run(work())


JSON_TYPE = {"content-type": "application/json"}


def test_no_web_page_replaces_the_weights_or_reads_an_answer() -> None:
    weights = pack({name: torch.zeros_like(tensor) for name, tensor in checkpoint_views(tiny_model()).items()})
    with served(tiny_engine()) as (url, service):
        evil = {"origin": "http://evil.example", "content-type": "text/plain"}
        for headers in (evil, {"content-type": "text/plain"}, {"host": "rebind.example", **JSON_TYPE}):
            assert patient_http.post(f"{url}/weights?version=7", content=weights, headers=headers).is_client_error
        for path in ("/pause", "/resume", "/drain"):
            assert patient_http.post(f"{url}{path}", headers={"origin": "http://evil.example"}).status_code == 403
        for headers in ({"origin": "http://evil.example"}, {"host": "rebind.example"}):
            assert patient_http.get(f"{url}/v1/models", headers=headers).is_client_error
            body = {"model": NAME, "prompt": "x", "max_tokens": 1}
            assert patient_http.post(f"{url}/v1/completions", json=body, headers=headers).is_client_error
        assert (service.version, service.state) == (0, "running")


def test_weights_change_during_a_stream_and_nothing_is_lost() -> None:
    engine = parrot("la", " la-la", end=False)
    assert engine.tokenizer is not None
    la = token_of(engine.tokenizer, "la")
    other = follow([la, la + 1, 40, 41, la])
    weights = pack({name: tensor.detach().contiguous() for name, tensor in checkpoint_views(other).items()})

    async def work() -> None:
        async with EngineService(engine) as service, serving(service) as url, patient_http.open_client() as web:
            body = {"tokens": [la], "sampling": {"max_tokens": 300, "samples": 2}, "stream": True}
            lines: list[dict[str, Any]] = []
            response = {}
            async with web.stream("POST", f"{url}/generate", json=body) as stream:
                async for line in stream.aiter_lines():
                    lines.append(json.loads(line))
                    if len(lines) == 10:
                        raw = {"content-type": "application/octet-stream"}
                        swap = await web.post(f"{url}/weights?version=7", content=weights, headers=raw)
                        response = swap.json()
            assert (response["version"], response["on_swap"]) == (7, "keep")
            for index in range(2):
                mine = [line for line in lines if line["index"] == index]
                versions = [version for line in mine for version in line["versions"]]
                assert len(versions) == 300
                assert versions == sorted(versions)
                assert set(versions) == {0, 7}
                assert [line["ending"] for line in mine if "ending" in line] == ["length"]
            new = {t for line in lines for t, v in zip(line["tokens"], line["versions"], strict=True) if v == 7}
            assert new == {la, la + 1, 40, 41}
            assert (await web.get(f"{url}/weights")).json() == {"version": 7, "on_swap": "keep"}

    asyncio.run(work())


def test_a_chat_template_without_end_does_not_hang_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_S", 0.5)
    tokenizer = copy.copy(tiny_tokenizer())  # other tests share it
    loop = "{% for i in range(99999) %}"
    tokenizer.chat_template = f"{CHAT_TEMPLATE}{loop * 3}{'{% endfor %}' * 3}"
    model = ServedModel.of("tiny", tokenizer)
    assert model.dialect is None
    with pytest.raises(InputError):
        model.chat_dialect()


def test_weights_by_path_and_invalid_weights(tmp_path: Path) -> None:
    save(tiny_model(seed=5), tmp_path / "new")
    size = len(tiny_model().norm.weight)
    broken, whole = {"norm.weight": torch.full((size,), torch.nan)}, {"norm.weight": torch.ones(size).long()}
    with served(tiny_engine()) as (url, service):
        loaded = patient_http.post(f"{url}/weights", json={"path": str(tmp_path / "new"), "version": 3})
        assert loaded.status_code == 200
        assert loaded.json()["version"] == 3
        raw = {"content-type": "application/octet-stream"}
        bad: list[tuple[httpx.Response, str]] = [
            (patient_http.post(f"{url}/weights", json={"path": str(tmp_path / "none"), "version": 4}), "not found"),
            (patient_http.post(f"{url}/weights", json={"path": "x"}), "version"),
            (patient_http.post(f"{url}/weights", content=b"junk", headers=raw), "version is ''"),
            (patient_http.post(f"{url}/weights?version=4", content=b"junk", headers=raw), "not a safetensors file"),
            (patient_http.post(f"{url}/weights?version={'9' * 5000}", content=b"junk", headers=raw), "version is '999"),
            (
                patient_http.post(f"{url}/weights", json={"path": "a\0b", "version": 4}),
                "path: String should match pattern",
            ),
            (patient_http.post(f"{url}/weights", json={"path": "x" * 5000, "version": 4}), "name too long"),
            (patient_http.post(f"{url}/weights", json={"path": "x", "version": 10**40}), "version: "),
            (
                patient_http.post(f"{url}/weights?version=4", content=pack(broken), headers=raw),
                "norm.weight has values that",
            ),
            (
                patient_http.post(f"{url}/weights?version=4", content=pack(whole), headers=raw),
                "expected float32 or bfloat16",
            ),
        ]
        for response, complaint in bad:
            assert response.status_code == 400, response.text
            assert complaint in response.json()["error"]["message"]
        assert service.version == 3


def test_weights_sent_at_the_same_time_are_each_loaded_completely(tmp_path: Path) -> None:
    models = [tiny_model(seed=seed) for seed in (5, 6)]
    for seed, model in enumerate(models):
        save(model, tmp_path / str(seed))

    async def work() -> None:
        async with (
            EngineService(tiny_engine()) as service,
            serving(service) as url,
            patient_http.open_client() as web,
        ):
            body = {"tokens": [1, 2], "sampling": {"max_tokens": 400, "samples": 3}}
            sampling = asyncio.create_task(web.post(f"{url}/generate", json=body))
            await until(lambda: service.stats().output_tokens > 10)
            asks = [{"path": str(tmp_path / str(n % 2)), "version": n} for n in range(1, 9)]
            responses = await asyncio.gather(*(web.post(f"{url}/weights", json=ask) for ask in asks))
            assert sorted(response.json()["version"] for response in responses) == list(range(1, 9))
            for sample in (await sampling).json()["samples"]:
                assert len(sample["versions"]) == 400
            last = models[service.version % 2].state_dict()
            assert all(torch.equal(tensor, last[name]) for name, tensor in service.engine.model.state_dict().items())

    asyncio.run(work())


def test_generate_is_token_exact_with_routing() -> None:
    engine = tiny_engine("qwen3_moe")
    moe = engine.model.config.moe
    assert moe is not None
    with served(engine) as (url, _):
        body = {"tokens": [3, 4, 5], "sampling": {"max_tokens": 6, "samples": 2, "seed": 4}, "routing": True}
        samples = patient_http.post(f"{url}/generate", json=body).json()["samples"]
        for sample in samples:
            assert len(sample["tokens"]) == len(sample["logprobs"]) == len(sample["raw_logprobs"]) == 6
            assert sample["versions"] == [0] * 6
            routing = sample["routing"]
            assert routing["dtype"] == "uint8"
            assert routing["shape"] == [8, len(moe.layers), moe.per_token]
            array = np.frombuffer(base64.b64decode(routing["data"]), np.uint8)
            assert array.max() < moe.experts
        assert (
            patient_http.post(f"{url}/generate", json={**body, "routing": False}).json()["samples"][0]["routing"]
            is None
        )
        lines = [
            json.loads(line)
            for line in patient_http.post(f"{url}/generate", json={**body, "stream": True}).iter_lines()
        ]
        for index, sample in enumerate(samples):
            mine = [line for line in lines if line["index"] == index]
            assert [token for line in mine for token in line["tokens"]] == sample["tokens"]
            assert mine[-1]["routing"] == sample["routing"]


def test_drain_refuses_new_requests_and_health_reports_it() -> None:
    with served(parrot("Hi")) as (url, _):
        assert patient_http.get(f"{url}/health").json() == {"status": "running", "version": 0, "open": 0}
        assert patient_http.post(f"{url}/drain").status_code == 202
        health = patient_http.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        with pytest.raises(openai.InternalServerError) as caught:
            client_of(url).chat.completions.create(model=NAME, messages=USER)
        assert caught.value.code == "draining"
        patient_http.post(f"{url}/resume")
        assert client_of(url).chat.completions.create(model=NAME, messages=USER).choices


def test_a_broken_engine_is_reported_in_the_stream_and_by_health(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = parrot("la", " la-la", end=False)
    with served(engine) as (url, _):
        client = client_of(url)
        stream = client.chat.completions.create(model=NAME, messages=USER, stream=True)
        next(iter(stream))

        def fail() -> bool:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine, "step", fail)
        with pytest.raises(openai.APIError, match="out of memory"):
            list(stream)
        assert patient_http.get(f"{url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            client.chat.completions.create(model=NAME, messages=USER)


def test_metrics_are_in_prometheus_format(random_server: tuple[str, EngineService]) -> None:
    url, _ = random_server
    patient_http.post(f"{url}/generate", json={"tokens": [1, 2], "sampling": {"max_tokens": 3}})
    text = patient_http.get(f"{url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["etude_inference_tokens_made_total"]) >= 3
    assert float(values['etude_inference_samples_total{ending="length"}']) >= 1
    assert values['etude_inference_state{state="running"}'] == "1"
    assert all(name.startswith("etude_inference_") for name in values)


def test_metrics_have_latency_histograms_and_drafts_with_speculation() -> None:
    model = tiny_model()
    options = EngineOptions(kv_cache_tokens=8192, page_size=8, max_sequences=4, drafts=2)
    engine = Engine(model, options, mtp=initialize_mtp(model.config, 1, 1, torch.float32))
    with served(engine) as (url, _):
        patient_http.post(f"{url}/generate", json={"tokens": [1, 2], "sampling": {"max_tokens": 12, "samples": 3}})
        text = patient_http.get(f"{url}/metrics").text
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in pairs}
    assert engine.speculator is not None
    acceptance = engine.speculator.acceptance
    assert values["etude_inference_draft_rounds_total"] == acceptance.rounds > 0
    for depth in (1, 2):
        name = f'etude_inference_drafts_accepted_total{{depth="{depth}"}}'
        assert values[name] == acceptance.accepted[depth - 1]
    for name in ("time_to_first_token_seconds", "time_per_output_token_seconds"):
        full = f"etude_inference_{name}"
        assert f"# TYPE {full} histogram\n" in text
        buckets = [value for key, value in values.items() if key.startswith(f"{full}_bucket")]
        assert buckets == sorted(buckets)
        assert values[f'{full}_bucket{{le="+Inf"}}'] == buckets[-1] == values[f"{full}_count"] == 3
        assert values[f"{full}_sum"] > 0


# --------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    place = tmp_path / "tiny"
    save(tiny_model(), place)
    tiny_tokenizer().save(place)
    return place


@contextlib.contextmanager
def command(checkpoint: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the real command for a checkpoint and yield its URL, once it is ready, and the process."""
    arguments = [
        sys.executable,
        "-m",
        "etude.cli",
        "serve",
        str(checkpoint),
        "--port",
        "0",
        "--device",
        "cpu",
        *options,
    ]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:"), process.stderr and process.stderr.read()
            assert checkpoint.name in line
            yield line.split()[0].removesuffix("/v1"), process
        finally:
            process.kill()


def test_the_command_serves_and_finishes_running_requests_at_sigterm(checkpoint: Path) -> None:
    with command(checkpoint) as (url, process):
        client = client_of(url)
        stream = client.completions.create(model="tiny", prompt="def", max_tokens=300, stream=True, seed=1)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
        assert process.wait(120) == 0


def test_the_command_makes_a_token_for_what_changes_the_server(checkpoint: Path) -> None:
    with command(checkpoint) as (url, process):
        assert process.stderr is not None
        token = next(line for line in process.stderr if "token for" in line).split()[-1]
        completion = client_of(url).completions.create(model="tiny", prompt="def", max_tokens=3)  # any key will do
        assert completion.usage is not None
        tensors = {name: tensor.detach().contiguous() for name, tensor in checkpoint_views(tiny_model()).items()}
        weights = {"content": pack(tensors), "headers": {"content-type": "application/octet-stream"}}
        changes = [("/pause", {}), ("/resume", {}), ("/weights?version=7", weights), ("/drain", {})]
        for path, options in changes:
            assert patient_http.post(f"{url}{path}", **options).status_code == 401, path
        assert patient_http.get(f"{url}/health").json()["version"] == 0
        for path, options in changes:
            headers = options.get("headers", {}) | {"authorization": f"Bearer {token}"}
            assert patient_http.post(f"{url}{path}", **{**options, "headers": headers}).is_success, path
        assert patient_http.get(f"{url}/health").json()["version"] == 7


def test_the_command_fails_unfinished_requests_when_the_grace_period_is_over(checkpoint: Path) -> None:
    body = {"tokens": [1, 2], "sampling": {"max_tokens": 2000, "samples": 8}, "stream": True}
    with command(checkpoint, "--grace", "0.1") as (url, process):
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=patient_http.PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert json.loads(last)["error"]["message"] == "the service was closed before this finished"
        assert process.wait(120) == 0


def test_the_command_drafts_with_mtp_layers_and_refuses_without(checkpoint: Path) -> None:
    with pytest.raises(InputError, match=r"drafts = 2: .* has no MTP layers to draft with"):
        serve(checkpoint, port=0, drafts=2)
    model = tiny_model()
    mtp = initialize_mtp(model.config, 1, 1, torch.float32)
    save_mtp(mtp.state_dict(), len(mtp.layers), checkpoint)
    with command(checkpoint, "--drafts", "2") as (url, _):
        body = {"tokens": [5, 6, 7], "sampling": {"max_tokens": 20, "temperature": 0}}
        (sample,) = patient_http.post(f"{url}/generate", json=body).json()["samples"]
        assert sample["tokens"] == list(generate(model, [5, 6, 7], max_tokens=20))
        assert 'etude_inference_drafts_accepted_total{depth="2"}' in patient_http.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"host": "0.0.0.0", "no_token": True}, "needs a token"),
        ({"token_file": Path("nowhere")}, "--token-file nowhere"),
        ({"dtype": "float7"}, "expected float32 or bfloat16"),
        ({"token_file": Path(os.devnull)}, "16 ASCII characters"),
    ],
    ids=str,
)
def test_the_command_refuses_unsafe_or_invalid_options(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        serve(Path("nowhere"), port=0, **options)
