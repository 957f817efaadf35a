"""Review: an uncommitted change that rewrites several functions, most of it harmless, with one to three defects in it.

Findings are written to a file and compared with where the defects are. The commit holds the code before; both sides of
the change are there to see, as in any review, but not which part of it is wrong.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import Candidate, Check, Draft, State, Unfit, generator, overlaid
from etude.tasks.generators.code import Edit, Function, parses, spliced
from etude.tasks.generators.debugging import covered_mutations, failures, tests_of
from etude.tasks.generators.executor import Trial
from etude.tasks.generators.neutral_edits import Rewording, rewordings
from etude.tasks.generators.operators import Mutation
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import scope_check

FILE = "review.json"
APART = 8  # lines between a defect and anything else of the change
FORMAT = '`[{"file": "path/from/the/top.py", "line": 12, "severity": "high", "claim": "what goes wrong"}]`'


@generator("review", "review", weight=1.0, most=0.5)
def review(repository: Repository, rng: random.Random) -> Iterator[Candidate]:
    stream = covered_mutations(repository, rng)
    while True:
        count = rng.choice((1, 1, 2, 2, 3))
        chosen: list[Mutation] = []
        for mutation in stream:
            if all(
                abs(mutation.function.lines[0] - other.function.lines[0]) > 20
                or mutation.function.file != other.function.file
                for other in chosen
            ):
                chosen.append(mutation)
            if len(chosen) == count:
                break
        if not chosen:
            return
        made = distractors(repository, chosen, rng)
        if len(made) >= 2:
            made += [found for mutation in chosen if (found := companion(mutation, rng)) is not None]
            yield candidate_for(repository, chosen, made, rng.getrandbits(64))


def distractors(repository: Repository, chosen: Sequence[Mutation], rng: random.Random) -> list[Rewording]:
    """Harmless changes in the files of the defects, each in a function of its own."""
    files = {mutation.function.file for mutation in chosen}
    functions = [
        function for function in repository.functions if function.file in files and _is_covered(repository, function)
    ]
    rng.shuffle(functions)
    found: list[Rewording] = []
    for function in functions:
        taken = [*(each.function for each in chosen), *(each.function for each in found)]
        if any(_close(function, other, APART) for other in taken):
            continue
        ways = rewordings(function, rng)
        if ways:
            found.append(rng.choice(ways))
        if len(found) >= len(chosen) + 2:
            break
    return found


def companion(mutation: Mutation, rng: random.Random) -> Rewording | None:
    """A harmless change in the very function of a defect, now and then: no hunk is all good or all bad."""
    ways = [
        each
        for each in rewordings(mutation.function, rng)
        if all(edit.end < mutation.edit.start or edit.start > mutation.edit.end for edit in each.edits)
    ]
    return rng.choice(ways) if ways and rng.random() < 0.6 else None


def _is_covered(repository: Repository, function: Function) -> bool:
    return any(repository.running(function.file, [line]) != set() for line in function.body_lines)


def _close(one: Function, two: Function, least: int) -> bool:
    if one.file != two.file:
        return False
    return one.lines[0] - least <= two.lines[-1] and two.lines[0] - least <= one.lines[-1]


def changed_files(
    repository: Repository, chosen: Sequence[Mutation], made: Sequence[Rewording]
) -> dict[str, bytes | None]:
    edits: dict[str, list[Edit]] = {}
    for mutation in chosen:
        edits.setdefault(mutation.function.file, []).append(mutation.edit)
    for rewording in made:
        edits.setdefault(rewording.function.file, []).extend(rewording.edits)
    return {file: spliced(repository.files[file], found) for file, found in sorted(edits.items())}


def planted_at(repository: Repository, mutation: Mutation, all_edits: Sequence[Edit]) -> tuple[int, int]:
    """The lines of a defect in the changed file."""
    data = repository.files[mutation.function.file]
    earlier = [edit for edit in all_edits if edit.end <= mutation.edit.start and edit is not mutation.edit]
    moved = sum(edit.text.count("\n") - data[edit.start : edit.end].count(b"\n") for edit in earlier)
    first = data[: mutation.edit.start].count(b"\n") + 1 + moved
    return first, first + mutation.edit.text.rstrip("\n").count("\n")


def candidate_for(
    repository: Repository, chosen: Sequence[Mutation], made: Sequence[Rewording], seed: int
) -> Candidate:
    states = {}
    for number, mutation in enumerate(chosen):
        tests = tuple(sorted(tests_of(repository, [mutation])))
        states[str(number)] = State(changed_files(repository, [mutation], []), tests, breaks=True)
    near = {
        test
        for each in made
        for line in each.function.body_lines
        for test in repository.running(each.function.file, [line]) or ()
    }
    rng = random.Random(seed)
    states["harmless"] = State(changed_files(repository, [], made), tuple(repository.graded_tests((), near, rng)))

    def finish(trials: Mapping[str, Trial]) -> Draft:
        return make_draft(repository, chosen, made, trials, rng)

    site = " ".join(sorted(mutation.site for mutation in chosen))
    return Candidate(site, f"{len(chosen)}-defects", states, finish)


def make_draft(
    repository: Repository,
    chosen: Sequence[Mutation],
    made: Sequence[Rewording],
    trials: Mapping[str, Trial],
    rng: random.Random,
) -> Draft:
    for number, mutation in enumerate(chosen):
        failures(repository, trials[str(number)], tests_of(repository, [mutation]))
    calm = trials["harmless"]
    bad = [test for test, outcome in calm.tests.items() if outcome.status != "passed"]
    if bad or not calm.tests or not calm.complete:
        raise Unfit("not-harmless", f"what should mean nothing fails {bad[:2]}")
    workspace = changed_files(repository, chosen, made)
    if not all(data is not None and parses(data) for data in workspace.values()):
        raise Unfit("no-python", "the change does not parse")
    planted, answer = [], []
    for mutation in chosen:
        file = mutation.function.file
        edits = [each.edit for each in chosen if each.function.file == file]
        edits += [edit for each in made if each.function.file == file for edit in each.edits]
        first, last = planted_at(repository, mutation, edits)
        planted.append({"file": file, "first": first, "last": last})
        claim = f"{mutation.function.qualname} does something else than before ({mutation.operator})"
        answer.append(f'  {{"file": "{file}", "line": {first}, "severity": "high", "claim": "{claim}"}}')
    whole = overlaid(repository.files, workspace)
    request = prompts.pick(
        rng,
        f"Review the uncommitted change. It is meant to change nothing but how the code reads. Findings go to {FILE}: "
        f"{FORMAT}; only real defects, and no edits to anything else.",
        f"`git diff` is a clean-up by a colleague. Does it break anything? Write what you find to {FILE} as {FORMAT}. "
        "Line numbers are those of the new files. Do not fix it.",
        f"Please review the working tree against HEAD. Behaviour must stay as it was. List each defect in {FILE}, as "
        f"{FORMAT}. Style is not a finding. Change no code.",
    )
    return Draft(
        category="review",
        family=f"{len(chosen)}-defects",
        register="imperative",
        request=request,
        difficulty=min(5, 2 + len(chosen)),
        workspace=workspace,
        solved={FILE: ("[\n" + ",\n".join(answer) + "\n]\n").encode()},
        checks=(Check("findings", {}, {"file": FILE, "planted": planted}), scope_check(whole, (FILE,))),
        head={},
        facts={"operators": [mutation.operator for mutation in chosen], "harmless": [each.kind for each in made]},
    )
