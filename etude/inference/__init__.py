"""Sampling from a model: an engine, the async service around it, an HTTP server, and clients behind one `Policy`.

engine = etude.inference.Engine(etude.model.load(path), tokenizer=tokenizer)
async with etude.inference.EngineService(engine) as service:
    policy = etude.inference.InProcessPolicy(service)
    completion = await policy.complete(tokens, etude.inference.Sampling(max_tokens=64))
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.inference.clients.http import HttpPolicy
    from etude.inference.clients.inprocess import InProcessPolicy
    from etude.inference.clients.openai import OpenAIChat
    from etude.inference.clients.sglang import SglangPolicy
    from etude.inference.clients.vllm import VllmPolicy
    from etude.inference.engine import Engine, EngineOptions
    from etude.inference.policy import Policy, PolicyBase
    from etude.inference.request import Completion
    from etude.inference.sampling import Sampling
    from etude.inference.service import EngineService

_MODULES = {  # imported when first used
    "Completion": "etude.inference.request",
    "Engine": "etude.inference.engine",
    "EngineOptions": "etude.inference.engine",
    "EngineService": "etude.inference.service",
    "HttpPolicy": "etude.inference.clients.http",
    "InProcessPolicy": "etude.inference.clients.inprocess",
    "OpenAIChat": "etude.inference.clients.openai",
    "Policy": "etude.inference.policy",
    "PolicyBase": "etude.inference.policy",
    "Sampling": "etude.inference.sampling",
    "SglangPolicy": "etude.inference.clients.sglang",
    "VllmPolicy": "etude.inference.clients.vllm",
}
__all__ = [
    "Completion",
    "Engine",
    "EngineOptions",
    "EngineService",
    "HttpPolicy",
    "InProcessPolicy",
    "OpenAIChat",
    "Policy",
    "PolicyBase",
    "Sampling",
    "SglangPolicy",
    "VllmPolicy",
]
__getattr__ = lazy_exports(__name__, _MODULES)
