"""Review tasks: an uncommitted change of several functions, mostly neutral, with one to three defects.

The agent writes its findings to a file; the verifier compares them with the locations of the defects. The commit
contains the code before the change.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.checks import VerifierCheck
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    WorkspaceState,
    apply_changes,
    generator,
)
from etude.tasks.generators.code import PythonFunction, SourceEdit, apply_edits, is_parsable
from etude.tasks.generators.debugging import covered_mutations, failed_tests, tests_executing
from etude.tasks.generators.executor import ExecutionResult
from etude.tasks.generators.neutral_edits import NeutralEdit, neutral_edits
from etude.tasks.generators.operators import Mutation
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import scope_check

FINDINGS_FILE = "review.json"
MIN_LINE_DISTANCE = 8  # between a defect and any other part of the change
FINDINGS_FORMAT = '`[{"file": "path/from/the/top.py", "line": 12, "severity": "high", "claim": "what goes wrong"}]`'


@generator("review", "review", weight=1.0, max_family_share=0.5)
def review(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    mutations = covered_mutations(repository, rng)
    while True:
        count = rng.choice((1, 1, 2, 2, 3))
        chosen: list[Mutation] = []
        for mutation in mutations:
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
        neutral = distractors(repository, chosen, rng)
        if len(neutral) >= 2:
            neutral += [found for mutation in chosen if (found := companion(mutation, rng)) is not None]
            yield candidate_for(repository, chosen, neutral, rng.getrandbits(64))


def distractors(repository: Repository, chosen: Sequence[Mutation], rng: random.Random) -> list[NeutralEdit]:
    """Return neutral edits in the files of the defects, each in a function of its own."""
    files = {mutation.function.file for mutation in chosen}
    functions = [
        function for function in repository.functions if function.file in files and _is_covered(repository, function)
    ]
    rng.shuffle(functions)
    found: list[NeutralEdit] = []
    for function in functions:
        used = [*(each.function for each in chosen), *(each.function for each in found)]
        if any(_is_close(function, other, MIN_LINE_DISTANCE) for other in used):
            continue
        options = neutral_edits(function, rng)
        if options:
            found.append(rng.choice(options))
        if len(found) >= len(chosen) + 2:
            break
    return found


def companion(mutation: Mutation, rng: random.Random) -> NeutralEdit | None:
    """Return, with probability 0.6, a neutral edit in the function of a defect, so that hunks mix both kinds."""
    options = [
        each
        for each in neutral_edits(mutation.function, rng)
        if all(edit.end < mutation.edit.start or edit.start > mutation.edit.end for edit in each.edits)
    ]
    return rng.choice(options) if options and rng.random() < 0.6 else None


def _is_covered(repository: Repository, function: PythonFunction) -> bool:
    return any(repository.tests_covering(function.file, [line]) != set() for line in function.body_lines)


def _is_close(one: PythonFunction, two: PythonFunction, distance: int) -> bool:
    if one.file != two.file:
        return False
    return one.lines[0] - distance <= two.lines[-1] and two.lines[0] - distance <= one.lines[-1]


def changed_files(
    repository: Repository, chosen: Sequence[Mutation], neutral: Sequence[NeutralEdit]
) -> dict[str, bytes | None]:
    edits: dict[str, list[SourceEdit]] = {}
    for mutation in chosen:
        edits.setdefault(mutation.function.file, []).append(mutation.edit)
    for edit_group in neutral:
        edits.setdefault(edit_group.function.file, []).extend(edit_group.edits)
    return {file: apply_edits(repository.files[file], found) for file, found in sorted(edits.items())}


def mutated_lines(repository: Repository, mutation: Mutation, all_edits: Sequence[SourceEdit]) -> tuple[int, int]:
    """Return the first and last line of a defect in the changed file."""
    data = repository.files[mutation.function.file]
    earlier = [edit for edit in all_edits if edit.end <= mutation.edit.start and edit is not mutation.edit]
    line_shift = sum(edit.text.count("\n") - data[edit.start : edit.end].count(b"\n") for edit in earlier)
    first = data[: mutation.edit.start].count(b"\n") + 1 + line_shift
    return first, first + mutation.edit.text.rstrip("\n").count("\n")


def candidate_for(
    repository: Repository, chosen: Sequence[Mutation], neutral: Sequence[NeutralEdit], seed: int
) -> TaskCandidate:
    states = {}
    for number, mutation in enumerate(chosen):
        tests = tuple(sorted(tests_executing(repository, [mutation])))
        states[str(number)] = WorkspaceState(changed_files(repository, [mutation], []), tests, expect_failure=True)
    covering = {
        test
        for each in neutral
        for line in each.function.body_lines
        for test in repository.tests_covering(each.function.file, [line]) or ()
    }
    rng = random.Random(seed)
    states["harmless"] = WorkspaceState(
        changed_files(repository, [], neutral), tuple(repository.select_graded_tests((), covering, rng))
    )

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        return make_draft(repository, chosen, neutral, results, rng)

    site = " ".join(sorted(mutation.site for mutation in chosen))
    return TaskCandidate(site, f"{len(chosen)}-defects", states, finish)


def make_draft(
    repository: Repository,
    chosen: Sequence[Mutation],
    neutral: Sequence[NeutralEdit],
    results: Mapping[str, ExecutionResult],
    rng: random.Random,
) -> TaskDraft:
    for number, mutation in enumerate(chosen):
        failed_tests(repository, results[str(number)], tests_executing(repository, [mutation]))
    neutral_result = results["harmless"]
    bad = [test for test, outcome in neutral_result.tests.items() if outcome.status != "passed"]
    if bad or not neutral_result.tests or not neutral_result.complete:
        raise CandidateRejected("not-harmless", f"the neutral edits fail {bad[:2]}")
    workspace = changed_files(repository, chosen, neutral)
    if not all(data is not None and is_parsable(data) for data in workspace.values()):
        raise CandidateRejected("no-python", "the change does not parse")
    planted, answer = [], []
    for mutation in chosen:
        file = mutation.function.file
        edits = [each.edit for each in chosen if each.function.file == file]
        edits += [edit for each in neutral if each.function.file == file for edit in each.edits]
        first, last = mutated_lines(repository, mutation, edits)
        planted.append({"file": file, "first": first, "last": last})
        claim = f"{mutation.function.qualname} does something else than before ({mutation.operator})"
        answer.append(f'  {{"file": "{file}", "line": {first}, "severity": "high", "claim": "{claim}"}}')
    files = apply_changes(repository.files, workspace)
    request = prompts.choose(
        rng,
        "Review the uncommitted change. It is meant to change nothing but how the code reads. Findings go to "
        f"{FINDINGS_FILE}: {FINDINGS_FORMAT}; only real defects, and no edits to anything else.",
        "`git diff` is a clean-up by a colleague. Does it break anything? Write what you find to "
        f"{FINDINGS_FILE} as {FINDINGS_FORMAT}. "
        "Line numbers are those of the new files. Do not fix it.",
        "Please review the working tree against HEAD. Behaviour must stay as it was. List each defect in "
        f"{FINDINGS_FILE}, as {FINDINGS_FORMAT}. Style is not a finding. Change no code.",
    )
    return TaskDraft(
        category="review",
        family=f"{len(chosen)}-defects",
        register="imperative",
        request=request,
        difficulty=min(5, 2 + len(chosen)),
        workspace=workspace,
        solution={FINDINGS_FILE: ("[\n" + ",\n".join(answer) + "\n]\n").encode()},
        checks=(
            VerifierCheck("findings", {}, {"file": FINDINGS_FILE, "planted": planted}),
            scope_check(files, (f"/{FINDINGS_FILE}",)),
        ),
        committed={},
        metadata={"operators": [mutation.operator for mutation in chosen], "harmless": [each.kind for each in neutral]},
    )
