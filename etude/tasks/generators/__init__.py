"""Generators of tasks from Python repositories with tests, without a language model.

A generator yields candidates; each is executed in pods, drafted, written as a Harbor task and validated.
The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.tasks.generators.candidate import CandidateRejected as CandidateRejected
    from etude.tasks.generators.candidate import Generator as Generator
    from etude.tasks.generators.candidate import TaskCandidate as TaskCandidate
    from etude.tasks.generators.candidate import TaskDraft as TaskDraft
    from etude.tasks.generators.candidate import VerifierCheck as VerifierCheck
    from etude.tasks.generators.candidate import WorkspaceState as WorkspaceState
    from etude.tasks.generators.candidate import generator as generator
    from etude.tasks.generators.generator_run import GenerationOptions as GenerationOptions
    from etude.tasks.generators.generator_run import generate as generate
    from etude.tasks.generators.journal import GeneratorYield as GeneratorYield
    from etude.tasks.generators.registry import GENERATORS as GENERATORS
    from etude.tasks.generators.repository import Repository as Repository
    from etude.tasks.generators.repository import prepare as prepare
    from etude.tasks.generators.source import RepositorySource as RepositorySource
    from etude.tasks.generators.source import read_source as read_source

__getattr__ = lazy_exports(__name__)
