"""Composed tasks: two or three candidates of different generators in one repository, in disjoint files."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from etude.tasks.checks import VerifierCheck
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    GENERATORS,
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    generator,
)
from etude.tasks.generators.executor import Changes, ExecutionResult
from etude.tasks.generators.repository import Repository

PARTS = ("debugging", "docs", "migration", "refactor", "feature", "devops")
MAX_PARTS_PER_GENERATOR = 400


@generator("compose", "debugging", weight=1.0, max_family_share=0.4)
def compose(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    streams = {
        name: islice(GENERATORS[name].generate(repository, random.Random(rng.getrandbits(64))), MAX_PARTS_PER_GENERATOR)
        for name in PARTS
        if name in GENERATORS
    }
    while len(streams) >= 2:
        count = min(rng.choice((2, 2, 2, 3)), len(streams))
        names = rng.sample(sorted(streams), count)
        parts: list[TaskCandidate] = []
        for name in names:
            part = next((each for each in streams[name] if len(each.states) <= 3), None)
            if part is None:
                del streams[name]
            else:
                parts.append(part)
        if len(parts) == count:
            yield combined_candidate(names, parts, rng.getrandbits(64))


def combined_candidate(names: Sequence[str], parts: Sequence[TaskCandidate], seed: int) -> TaskCandidate:
    """Combine candidates into one; the states of each part are executed separately."""
    states = {f"{number}/{name}": state for number, part in enumerate(parts) for name, state in part.states.items()}

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        drafts = [
            part.finish({name: results[f"{number}/{name}"] for name in part.states})
            for number, part in enumerate(parts)
        ]
        return merge_drafts(names, drafts, random.Random(seed))

    return TaskCandidate(" & ".join(part.site for part in parts), "+".join(sorted(names)), states, finish)


def merge_drafts(names: Sequence[str], drafts: Sequence[TaskDraft], rng: random.Random) -> TaskDraft:
    if len({draft.category for draft in drafts}) < 2:
        raise CandidateRejected("alike", "all parts have one category")
    workspace = _merge_changes(*(draft.workspace for draft in drafts))
    solution = _merge_changes(*(draft.solution for draft in drafts))
    for one in drafts:
        for other in drafts:
            if one is not other and set(one.solution) & set(other.workspace):
                raise CandidateRejected("overlap", "one part's solution changes another's files")
    order = list(drafts)
    rng.shuffle(order)
    head = prompts.choose(rng, "", "", "Two things." if len(drafts) == 2 else "Three things.", "In one go, please:")
    texts = prompts.numbered_list([draft.request for draft in order])
    hardest = max(drafts, key=lambda draft: draft.difficulty)
    return TaskDraft(
        category=hardest.category,
        family="+".join(sorted(names)),
        register="several",
        request=f"{head}\n\n{texts}".strip(),
        difficulty=min(5, hardest.difficulty + 1),
        workspace=workspace,
        solution=solution,
        checks=_merge_checks(drafts),
        suite=_merge_suites(drafts),
        protected=tuple(dict.fromkeys(_merge_protected(drafts))),
        forbidden_words=tuple(dict.fromkeys(word for draft in drafts for word in draft.forbidden_words)),
        metadata={"parts": list(names), "categories": sorted({draft.category for draft in drafts})},
    )


def _merge_changes(*layers: Changes) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for changes in layers:
        for path, data in changes.items():
            if found.setdefault(path, data) != data:
                raise CandidateRejected("overlap", f"two parts change {path}")
    return found


def _merge_checks(drafts: Sequence[TaskDraft]) -> tuple[VerifierCheck, ...]:
    """Merge the checks: all tests in one run; scope checks are dropped, as they forbid the changes of other parts."""
    found: list[VerifierCheck] = []
    runs: list[VerifierCheck] = []
    for draft in drafts:
        for check in draft.checks:
            if check.kind == "pytest" and "-c" not in check.run["arguments"]:
                runs.append(check)
            elif check.kind != "scope":
                found.append(check)
    if runs:
        tests = {test: None for check in runs for test in check.run["run"]}
        statuses: dict[str, Any] = {}
        for check in runs:
            statuses |= check.expected["statuses"]
        timeout = max(check.run["timeout"] for check in runs) + 30
        suite_paths = sorted({path for check in runs for path in check.run["placed"]})
        run = {**runs[0].run, "run": list(tests), "timeout": timeout, "placed": suite_paths}
        found.insert(0, VerifierCheck("pytest", run, {"statuses": statuses}))
    return tuple(found)


def _merge_suites(drafts: Sequence[TaskDraft]) -> dict[str, bytes]:
    """Merge the test files; a file that one part rewrites takes precedence over its original."""
    suites = [draft.suite for draft in drafts if draft.suite]
    found: dict[str, bytes] = {}
    for path in sorted({path for suite in suites for path in suite}):
        versions = {suite[path] for suite in suites if path in suite}
        rewritten = [draft.solution.get(path) for draft in drafts if draft.solution.get(path) is not None]
        if len(versions) > 2 or (len(versions) == 2 and len(rewritten) != 1):
            raise CandidateRejected("overlap", f"two parts rewrite {path}")
        found[path] = next((data for data in rewritten if data in versions and data is not None), next(iter(versions)))
    return found


def _merge_protected(drafts: Sequence[TaskDraft]) -> Iterator[str]:
    """Yield the protected globs, or none if a part asks to change tests."""
    if all(draft.protected for draft in drafts if draft.suite):
        for draft in drafts:
            yield from draft.protected
