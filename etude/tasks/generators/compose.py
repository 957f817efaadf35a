"""Several requests in one task: parts of different generators over one repository, in files that do not overlap."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import GENERATORS, Candidate, Check, Draft, Unfit, generator
from etude.tasks.generators.executor import Changes, Trial
from etude.tasks.generators.repository import Repository

PARTS = ("debugging", "docs", "migration", "refactor", "feature", "devops")
LOOKAHEAD = 400


@generator("compose", "debugging", weight=1.0, most=0.4)
def compose(repository: Repository, rng: random.Random) -> Iterator[Candidate]:
    streams = {
        name: islice(GENERATORS[name].generate(repository, random.Random(rng.getrandbits(64))), LOOKAHEAD)
        for name in PARTS
        if name in GENERATORS
    }
    while len(streams) >= 2:
        count = min(rng.choice((2, 2, 2, 3)), len(streams))
        names = rng.sample(sorted(streams), count)
        parts: list[Candidate] = []
        for name in names:
            part = next((each for each in streams[name] if len(each.states) <= 3), None)
            if part is None:
                del streams[name]
            else:
                parts.append(part)
        if len(parts) == count:
            yield combined(names, parts, rng.getrandbits(64))


def combined(names: Sequence[str], parts: Sequence[Candidate], seed: int) -> Candidate:
    """One candidate of several; each part is tried by itself."""
    states = {f"{number}/{name}": state for number, part in enumerate(parts) for name, state in part.states.items()}

    def finish(trials: Mapping[str, Trial]) -> Draft:
        drafts = [
            part.finish({name: trials[f"{number}/{name}"] for name in part.states}) for number, part in enumerate(parts)
        ]
        return merged(names, drafts, random.Random(seed))

    return Candidate(" & ".join(part.site for part in parts), "+".join(sorted(names)), states, finish)


def merged(names: Sequence[str], drafts: Sequence[Draft], rng: random.Random) -> Draft:
    if len({draft.category for draft in drafts}) < 2:
        raise Unfit("alike", "the parts are of one kind")
    workspace = _union(*(draft.workspace for draft in drafts))
    solved = _union(*(draft.solved for draft in drafts))
    for one in drafts:
        for other in drafts:
            if one is not other and set(one.solved) & set(other.workspace):
                raise Unfit("overlap", "one part's solution changes another's files")
    order = list(drafts)
    rng.shuffle(order)
    head = prompts.pick(rng, "", "", "Two things." if len(drafts) == 2 else "Three things.", "In one go, please:")
    texts = prompts.listed([draft.request for draft in order])
    hardest = max(drafts, key=lambda draft: draft.difficulty)
    return Draft(
        category=hardest.category,
        family="+".join(sorted(names)),
        register="several",
        request=f"{head}\n\n{texts}".strip(),
        difficulty=min(5, hardest.difficulty + 1),
        workspace=workspace,
        solved=solved,
        checks=_checks(drafts),
        suite=_suite(drafts),
        hidden=_only_bytes(_union(*(draft.hidden for draft in drafts))),
        protected=tuple(dict.fromkeys(_protected(drafts))),
        secret=tuple(dict.fromkeys(word for draft in drafts for word in draft.secret)),
        facts={"parts": list(names), "categories": sorted({draft.category for draft in drafts})},
    )


def _union(*layers: Changes) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for changes in layers:
        for path, data in changes.items():
            if found.setdefault(path, data) != data:
                raise Unfit("overlap", f"two parts change {path}")
    return found


def _only_bytes(changes: Changes) -> dict[str, bytes]:
    return {path: data for path, data in changes.items() if data is not None}


def _checks(drafts: Sequence[Draft]) -> tuple[Check, ...]:
    """All checks: tests in one run, and not those that forbid what another part asks for."""
    found: list[Check] = []
    runs: list[Check] = []
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
        placed = sorted({path for check in runs for path in check.run["placed"]})
        run = {**runs[0].run, "run": list(tests), "timeout": timeout, "placed": placed}
        found.insert(0, Check("pytest", run, {"statuses": statuses}))
    return tuple(found)


def _suite(drafts: Sequence[Draft]) -> dict[str, bytes]:
    """The tests as they should be when all is done: those that one part rewrote count over those it left alone."""
    suites = [draft.suite for draft in drafts if draft.suite]
    found: dict[str, bytes] = {}
    for path in sorted({path for suite in suites for path in suite}):
        versions = {suite[path] for suite in suites if path in suite}
        rewritten = [draft.solved.get(path) for draft in drafts if draft.solved.get(path) is not None]
        if len(versions) > 2 or (len(versions) == 2 and len(rewritten) != 1):
            raise Unfit("overlap", f"two parts rewrite {path}")
        found[path] = next((data for data in rewritten if data in versions and data is not None), next(iter(versions)))
    return found


def _protected(drafts: Sequence[Draft]) -> Iterator[str]:
    """Tests are protected only if no part asks to change them."""
    if all(draft.protected for draft in drafts if draft.suite):
        for draft in drafts:
            yield from draft.protected
