"""Generators of tasks from Python repositories with tests, without a language model.

A generator yields candidates; each is executed in pods, drafted, written as a Harbor task and validated.
The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.tasks.generators.candidate import (
        CandidateRejected,
        Generator,
        TaskCandidate,
        TaskDraft,
        VerifierCheck,
        WorkspaceState,
        generator,
    )
    from etude.tasks.generators.generator_run import GenerationOptions, generate
    from etude.tasks.generators.journal import GeneratorYield
    from etude.tasks.generators.registry import GENERATORS
    from etude.tasks.generators.repository import Repository, prepare
    from etude.tasks.generators.source import RepositorySource, read_source

_MODULES = {
    "GENERATORS": "etude.tasks.generators.registry",
    "CandidateRejected": "etude.tasks.generators.candidate",
    "GenerationOptions": "etude.tasks.generators.generator_run",
    "Generator": "etude.tasks.generators.candidate",
    "GeneratorYield": "etude.tasks.generators.journal",
    "Repository": "etude.tasks.generators.repository",
    "RepositorySource": "etude.tasks.generators.source",
    "TaskCandidate": "etude.tasks.generators.candidate",
    "TaskDraft": "etude.tasks.generators.candidate",
    "VerifierCheck": "etude.tasks.generators.candidate",
    "WorkspaceState": "etude.tasks.generators.candidate",
    "generate": "etude.tasks.generators.generator_run",
    "generator": "etude.tasks.generators.candidate",
    "prepare": "etude.tasks.generators.repository",
    "read_source": "etude.tasks.generators.source",
}
__all__ = [
    "GENERATORS",
    "CandidateRejected",
    "GenerationOptions",
    "Generator",
    "GeneratorYield",
    "Repository",
    "RepositorySource",
    "TaskCandidate",
    "TaskDraft",
    "VerifierCheck",
    "WorkspaceState",
    "generate",
    "generator",
    "prepare",
    "read_source",
]
__getattr__ = lazy_exports(__name__, _MODULES)
