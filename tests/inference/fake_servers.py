"""Servers that speak the interfaces of vLLM and SGLang in front of our engine, with faults that tests switch on.

They stand for those programs as their documentation describes them: they load weights from directories, sample from
them, and label tokens with versions. The real vLLM is in `test_real_vllm.py`; SGLang has no build for a CPU. Started as
`vllm.entrypoints.openai.api_server` or `sglang.launch_server` through stub packages (`stub_python_path`), they take
the options that Etude gives these programs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from samplers import running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from etude.inference.engine import Engine
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService
from etude.inference.settings import EngineOptions
from etude.model.checkpoint import checkpoint_views, load
from etude.model.config import ADAPTER_CONFIG, ModelConfig
from etude.model.peft import ADAPTER_FILE, read_adapter

OPTIONS = EngineOptions(kv_cache_tokens=8192, page_size=8, max_sequences=16)
FAULT_VARIABLE = "FAKE_SERVER_FAULT"  # a file that names the present fault


class FakeServer:
    """A model behind the endpoints of both programs."""

    def __init__(self, directory: Path, fault: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.directory, self.fault_file = directory, fault
        self.settings = {"dtype": "float32", "logprobs_mode": "processed_logprobs", "device": "cpu", **(settings or {})}
        self.service = EngineService(Engine(load(directory, dtype=torch.float32), OPTIONS))
        self.adapters: dict[str, EngineService] = {}
        self.asked: list[tuple[str, Any]] = []
        self.label = "default"
        self.labels = {0: "default"}  # of the versions of our engine
        self.paused = asyncio.Event()
        self.paused.set()

    @property
    def fault(self) -> str:
        return self.fault_file.read_text() if self.fault_file is not None and self.fault_file.exists() else ""

    def application(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        path, fault = request.url.path, self.fault
        body = json.loads(await request.body() or b"null")
        self.asked.append((path + (f"?{request.url.query}" if request.url.query else ""), body))
        if fault == "dies":
            os._exit(1)
        if fault == "hangs":
            await asyncio.sleep(3600)
        if path == "/health":
            return Response()
        if path == "/metrics":
            stats = self.service.stats()
            names = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
            return PlainTextResponse("".join(f'{name}{{engine="0"}} {stats.output_tokens}\n' for name in names))
        handler = getattr(self, path.strip("/").replace("/", "_"), None)
        if handler is None or (fault == "no_dev_mode" and path == "/server_info"):
            return JSONResponse({"detail": "Not Found"}, 404)
        found = await handler(body, request)
        return found if isinstance(found, Response) else JSONResponse(found)

    # ------------------------------------------------------------------------------------------- weights

    async def _load(self, directory: str, label: str) -> None:
        """Load a directory as these programs do: the shapes must fit."""
        if self.fault == "refuses" or not (Path(directory) / "config.json").is_file():
            raise ValueError(f"{directory} cannot be loaded")
        own, new = self.service.engine.model.config, ModelConfig.load(directory)
        if (own.vocab_size, own.layers) != (new.vocab_size, new.layers):
            raise ValueError("shapes differ")
        tensors = dict(checkpoint_views(load(directory, dtype=torch.float32)))
        if self.fault == "stale_head":  # vLLM's fault with tied models
            del tensors["lm_head.weight"]
        if self.fault != "takes_nothing":
            version = self.service.version + 1
            self.labels[version] = label
            await self.service.load(tensors, version)
        self.label = label

    async def _add_adapter(self, name: str, directory: str) -> None:
        base = load(self.directory, dtype=torch.float32)
        assert (Path(directory) / ADAPTER_CONFIG).is_file()
        assert (Path(directory) / ADAPTER_FILE).is_file()
        service = EngineService(Engine(read_adapter(base, Path(directory)), OPTIONS))
        self.adapters[name] = await service.__aenter__()

    async def _sample(self, adapter: str | None, tokens: list[int], sampling: Sampling) -> list[Completion]:
        await self.paused.wait()
        if adapter is not None:
            return await self.adapters[adapter].complete_many(tokens, sampling)
        return await self.service.complete_many(tokens, sampling)

    def _reported(self, completion: Completion) -> list[float]:
        assert completion.raw_logprobs is not None
        raw = self.settings["logprobs_mode"] == "raw_logprobs" or self.fault == "raw_logprobs"
        return completion.raw_logprobs if raw else completion.logprobs

    def _npy(self, completion: Completion) -> str | None:
        if completion.routing is None:
            return None
        file = io.BytesIO()
        np.save(file, completion.routing.astype(np.int16))
        return base64.b64encode(file.getvalue()).decode()

    # ------------------------------------------------------------------------------------------- vLLM

    async def server_info(self, _: Any, request: Request) -> Any:
        if request.query_params.get("config_format") != "json":  # SGLang's
            return {"dtype": self.settings["dtype"], "enable_metrics": True}
        model = {"model": str(self.directory), "max_model_len": 2048, **self.settings}
        return {"vllm_config": {"model_config": model, "device_config": {"device": self.settings["device"]}}}

    async def pause(self, _: Any, request: Request) -> Any:
        assert request.query_params["mode"] == "keep"
        await self.service.pause()
        return {"status": "paused"}

    async def resume(self, _: Any, request: Request) -> Any:
        await self.service.resume()
        return {"status": "resumed"}

    async def collective_rpc(self, body: Any, _: Request) -> Any:
        assert body["method"] == "reload_weights"
        try:
            await self._load(body["kwargs"]["weights_path"], self.label)
        except ValueError as error:
            return JSONResponse({"error": {"message": f"Worker failed with error '{error}'"}}, 500)
        return {"results": [None]}

    async def update_weight_version(self, body: Any, _: Request) -> Any:
        self.label = self.labels[self.service.version] = body["new_version"]
        return {"success": True, "new_version": self.label}

    async def v1_load_lora_adapter(self, body: Any, _: Request) -> Any:
        await self._add_adapter(body["lora_name"], body["lora_path"])
        return PlainTextResponse(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def v1_unload_lora_adapter(self, body: Any, _: Request) -> Any:
        del self.adapters[body["lora_name"]]
        return PlainTextResponse("Success")

    async def inference_v1_generate(self, body: Any, _: Request) -> Any:
        if self.fault == "nonsense":
            return {"choices": [{"index": 0, "token_ids": "many"}]}
        given = body["sampling_params"]
        if len(body["token_ids"]) + given["max_tokens"] > self.service.max_sequence_tokens:
            return JSONResponse({"error": {"message": "This model's maximum context length is shorter"}}, 400)
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
        sampling = Sampling(
            **{name: given[name] for name in names},
            samples=given["n"],
            seed=random.getrandbits(60) if given["seed"] is None else given["seed"],
            stop=frozenset(given["stop_token_ids"]),
        )
        found = await self._sample(body.get("model"), body["token_ids"], sampling)
        choices = [self._choice(index, each) for index, each in enumerate(found)]
        details = {"cached_tokens": found[0].cached}
        return {"choices": choices[::-1], "usage": {"prompt_tokens_details": details}}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": logprob}
            for token, logprob in zip(completion.tokens, self._reported(completion), strict=True)
        ]
        spans: list[dict[str, Any]] = []
        for number, version in enumerate(completion.versions):
            label = "99" if self.fault == "too_new" else self.labels.get(version, "default")
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = number + 1
            else:
                spans.append({"version": label, "start": number, "end": number + 1})
        return {
            "index": index,
            "token_ids": completion.tokens,
            "logprobs": {"content": content},
            "finish_reason": completion.ending,
            "routed_experts": self._npy(completion),
            "weight_versions": spans,
        }

    # ------------------------------------------------------------------------------------------- SGLang

    async def model_info(self, _: Any, request: Request) -> Any:
        return {"model_path": str(self.directory), "model_type": self.service.engine.model.config.family}

    async def pause_generation(self, body: Any, _: Request) -> Any:
        assert body["mode"] in ("in_place", "retract")
        self.paused.clear()
        await self.service.pause()
        return {"status": "ok"}

    async def continue_generation(self, body: Any, _: Request) -> Any:
        await self.service.resume()
        self.paused.set()
        return {"status": "ok"}

    async def update_weights_from_disk(self, body: Any, _: Request) -> Any:
        try:
            await self._load(body["model_path"], body["weight_version"])
        except ValueError as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        return {"success": True, "message": "Succeeded."}

    async def load_lora_adapter(self, body: Any, _: Request) -> Any:
        await self._add_adapter(body["lora_name"], body["lora_path"])
        return {"success": True, "loaded_adapters": {}}

    async def unload_lora_adapter(self, body: Any, _: Request) -> Any:
        del self.adapters[body["lora_name"]]
        return {"success": True}

    async def generate(self, body: Any, _: Request) -> Any:
        if self.fault == "nonsense":
            return {"meta_info": {"output_token_logprobs": [[-1.0]]}}
        given = body["sampling_params"]
        sampling = Sampling(
            max_tokens=given["max_new_tokens"],
            temperature=given["temperature"],
            seed=given["sampling_seed"],
            stop=frozenset(given["stop_token_ids"]),
        )
        (found,) = await self._sample(body.get("lora_path"), body["input_ids"], sampling)
        pairs = zip(self._reported(found), found.tokens, strict=True)
        meta = {
            "finish_reason": {"type": found.ending},
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "cached_tokens": found.cached,
        }
        if found.routing is not None and body.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(found.routing.astype(np.int32).tobytes()).decode()
        return {"text": "", "output_ids": found.tokens, "meta_info": meta}


@contextlib.asynccontextmanager
async def fake_server(
    directory: Path, fault: Path | None = None, **settings: Any
) -> AsyncIterator[tuple[str, FakeServer]]:
    """Run a server in this event loop; yield its URL and itself."""
    server = FakeServer(directory, fault, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    async with server.service, running(server.application(), listener):
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            for service in server.adapters.values():
                await service.close()


# ------------------------------------------------------------------------------------------------- as a program


def stub_python_path(directory: Path) -> str:
    """Write packages called vllm and sglang whose servers are these fakes; return a PYTHONPATH that has them."""
    for module in ("vllm/entrypoints/openai/api_server.py", "sglang/launch_server.py"):
        path = directory / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from fake_servers import main\nmain()\n")
        for parent in path.relative_to(directory).parents[:-1]:
            (directory / parent / "__init__.py").touch()
    tests = Path(__file__).parents[1]
    found = [directory, *(tests / name for name in ("inference", "support", "model"))]
    return os.pathsep.join([*map(str, found), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", "--model-path", type=Path, required=True)
    parser.add_argument("--tokenizer", "--tokenizer-path", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--uds")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--logprobs-mode", default="processed_logprobs")
    for option in ("served-model-name", "tensor-parallel-size", "tp-size", "max-num-seqs", "generation-config"):
        parser.add_argument(f"--{option}")
    for option in ("max-running-requests", "sampling-defaults", "max-lora-rank", "max-loras", "max-cpu-loras"):
        parser.add_argument(f"--{option}")
    for option in ("enable-scale-out", "enable-prompt-tokens-details", "enable-metrics", "enable-lora"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    assert (given.tokenizer / "tokenizer.json").is_file()
    asyncio.run(_serve(given))


async def _serve(given: argparse.Namespace) -> None:
    fault = os.environ.get(FAULT_VARIABLE)
    settings = {"dtype": given.dtype, "logprobs_mode": given.logprobs_mode}
    server = FakeServer(given.model, Path(fault) if fault else None, settings)
    options = {"uds": given.uds} if given.uds else {"host": given.host, "port": given.port}
    async with server.service:
        config = uvicorn.Config(server.application(), log_level="error", access_log=False, lifespan="off", **options)
        await uvicorn.Server(config).serve()
