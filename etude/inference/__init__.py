"""The sampler of reinforcement learning: an engine, the service around it, and clients for it and its peers.

    engine = etude.inference.Engine(etude.model.load(path), tokenizer=tokenizer)
    async with etude.inference.EngineService(engine) as service:
        policy = etude.inference.InProcess(service)
        sample = await policy.sample(tokens, etude.inference.Sampling(max_tokens=64))

The names below are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.inference.clients.http import Http
    from etude.inference.clients.inprocess import InProcess
    from etude.inference.clients.openai import OpenAIChat
    from etude.inference.clients.sglang import Sglang
    from etude.inference.clients.vllm import Vllm
    from etude.inference.engine import Engine, EngineOptions
    from etude.inference.policy import Policy
    from etude.inference.request import Sample
    from etude.inference.sampling import Sampling
    from etude.inference.service import EngineService

_HOMES = {
    "Engine": "etude.inference.engine",
    "EngineOptions": "etude.inference.engine",
    "EngineService": "etude.inference.service",
    "Http": "etude.inference.clients.http",
    "InProcess": "etude.inference.clients.inprocess",
    "OpenAIChat": "etude.inference.clients.openai",
    "Policy": "etude.inference.policy",
    "Sample": "etude.inference.request",
    "Sampling": "etude.inference.sampling",
    "Sglang": "etude.inference.clients.sglang",
    "Vllm": "etude.inference.clients.vllm",
}
__all__ = [
    "Engine",
    "EngineOptions",
    "EngineService",
    "Http",
    "InProcess",
    "OpenAIChat",
    "Policy",
    "Sample",
    "Sampling",
    "Sglang",
    "Vllm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.inference' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
