"""Clients of a model in this process, or behind an Etude server, vLLM, SGLang or any OpenAI-compatible chat API."""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.inference.clients.http import HttpPolicy as HttpPolicy
    from etude.inference.clients.inprocess import InProcessPolicy as InProcessPolicy
    from etude.inference.clients.openai import OpenAIChat as OpenAIChat
    from etude.inference.clients.sglang import SglangPolicy as SglangPolicy
    from etude.inference.clients.transport import RetryPolicy as RetryPolicy
    from etude.inference.clients.transport import ServerError as ServerError
    from etude.inference.clients.transport import ServerUnreachable as ServerUnreachable
    from etude.inference.clients.vllm import VllmPolicy as VllmPolicy

__getattr__ = lazy_exports(__name__)
