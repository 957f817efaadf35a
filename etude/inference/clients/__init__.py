"""Clients of a model in this process, or behind an Etude server, vLLM, SGLang or any OpenAI-compatible chat API."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.inference.clients.http import HttpPolicy
    from etude.inference.clients.inprocess import InProcessPolicy
    from etude.inference.clients.openai import OpenAIChat
    from etude.inference.clients.sglang import SglangPolicy
    from etude.inference.clients.transport import RetryPolicy, ServerError, ServerUnreachable
    from etude.inference.clients.vllm import VllmPolicy

_MODULES = {  # imported when first used
    "HttpPolicy": "http",
    "InProcessPolicy": "inprocess",
    "OpenAIChat": "openai",
    "RetryPolicy": "transport",
    "ServerError": "transport",
    "ServerUnreachable": "transport",
    "SglangPolicy": "sglang",
    "VllmPolicy": "vllm",
}
__all__ = [
    "HttpPolicy",
    "InProcessPolicy",
    "OpenAIChat",
    "RetryPolicy",
    "ServerError",
    "ServerUnreachable",
    "SglangPolicy",
    "VllmPolicy",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'etude.inference.clients' has no attribute {name!r}")
    return getattr(import_module(f"etude.inference.clients.{_MODULES[name]}"), name)
