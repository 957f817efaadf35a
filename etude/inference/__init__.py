"""Sampling from a model: an engine, the async service around it, an HTTP server, and clients behind one `Policy`.

engine = etude.inference.Engine(etude.model.load(path), tokenizer=tokenizer)
async with etude.inference.EngineService(engine) as service:
    policy = etude.inference.InProcessPolicy(service)
    completion = await policy.complete(tokens, etude.inference.Sampling(max_tokens=64))
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.inference.clients.http import HttpPolicy as HttpPolicy
    from etude.inference.clients.inprocess import InProcessPolicy as InProcessPolicy
    from etude.inference.engine import Engine as Engine
    from etude.inference.request import Completion as Completion
    from etude.inference.sampling import Sampling as Sampling
    from etude.inference.service import EngineService as EngineService

__getattr__ = lazy_exports(__name__)
