"""Clients of a model in this process, or behind an Etude server, vLLM, SGLang or any OpenAI-compatible chat API."""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.inference.clients.http import HttpPolicy
    from etude.inference.clients.inprocess import InProcessPolicy
    from etude.inference.clients.openai import OpenAIChat
    from etude.inference.clients.sglang import SglangPolicy
    from etude.inference.clients.transport import RetryPolicy, ServerError, ServerUnreachable
    from etude.inference.clients.vllm import VllmPolicy

_MODULES = {  # imported when first used
    "HttpPolicy": "etude.inference.clients.http",
    "InProcessPolicy": "etude.inference.clients.inprocess",
    "OpenAIChat": "etude.inference.clients.openai",
    "RetryPolicy": "etude.inference.clients.transport",
    "ServerError": "etude.inference.clients.transport",
    "ServerUnreachable": "etude.inference.clients.transport",
    "SglangPolicy": "etude.inference.clients.sglang",
    "VllmPolicy": "etude.inference.clients.vllm",
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
__getattr__ = lazy_exports(__name__, _MODULES)
