"""Questions and false bug reports: no file may be edited, and the final message is the answer."""

import ast
import random
from collections.abc import Iterator, Mapping

from etude.syntax import literal_value
from etude.tasks.checks import VerifierCheck
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import CandidateRejected, TaskCandidate, TaskDraft, generator
from etude.tasks.generators.code import FunctionNode, definitions
from etude.tasks.generators.executor import ExecutionResult
from etude.tasks.generators.failure_report import call_of, is_self_contained, one_line
from etude.tasks.generators.identifiers import is_unique
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import scope_check

CLAIMS_CORRECT = (
    r"\b(correct|right|no bug|not a bug|no change|nothing to|as it should|as expected|fine|passes|already|works)\b"
)
CLAIMS_DEFECT = r"\b(i (have )?(fixed|changed|edited|corrected)|is wrong|incorrect|is broken|is a bug)\b"


@generator("question", "question", weight=0.6, max_family_share=0.5)
def question(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    """Yield questions about a default, the value of a call, a raised exception, or the file of a definition."""
    found = [
        *_defaults(repository, rng),
        *_values(repository, rng),
        *_raises(repository, rng),
        *_locations(repository, rng),
    ]
    by_family: dict[str, list[TaskCandidate]] = {}
    for candidate in found:
        by_family.setdefault(candidate.family, []).append(candidate)
    for group in by_family.values():
        rng.shuffle(group)
    while any(by_family.values()):
        for family in sorted(by_family):
            if by_family[family]:
                yield by_family[family].pop()


@generator("all-well", "question", weight=0.5, max_family_share=1.0)
def all_well(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    """Yield bug reports about code that is correct."""
    found = _assertions(repository)
    rng.shuffle(found)
    for site, call, wanted in found:
        request = prompts.choose(
            rng,
            f"I believe {prompts.quoted(call)} does not give {prompts.quoted(wanted)}. Check, and repair it if so.",
            f"Shouldn't {prompts.quoted(call)} be {prompts.quoted(wanted)}? Have a look and fix it if it isn't.",
            f"A user reports that {prompts.quoted(call)} is not {prompts.quoted(wanted)}. Fix that, if it is true.",
        )
        answer = f"{prompts.quoted(call)} already gives {prompts.quoted(wanted)}. No change needed."
        criteria = {"says": CLAIMS_CORRECT, "not": CLAIMS_DEFECT}
        yield candidate_for(repository, "all-well", site, request, answer, criteria, 2)


def candidate_for(
    repository: Repository,
    family: str,
    site: str,
    request: str,
    answer: str,
    wanted: Mapping[str, object],
    difficulty: int,
) -> TaskCandidate:
    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        if len(request) > 600:
            raise CandidateRejected("too-long", "the question is too long")
        return TaskDraft(
            category="question",
            family=family,
            register="question" if family != "all-well" else "symptom",
            request=request,
            difficulty=difficulty,
            workspace={},
            solution={},
            checks=(VerifierCheck("answer", {}, wanted), scope_check(repository.files, ())),
            may_edit=False,
            answer=answer,
        )

    return TaskCandidate(f"{family}:{site}", family, {}, finish)


def _ask_for_value(rng: random.Random, question: str) -> str:
    return question + prompts.choose(
        rng, " The value only, please.", " Answer with the value alone.", " Just the value."
    )


def _defaults(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    for function in repository.functions:
        if function.owner or function.name.startswith("_") or not is_unique(repository, function.name):
            continue
        given = function.node.args
        pairs = list(zip(given.args[len(given.args) - len(given.defaults) :], given.defaults, strict=True))
        pairs += [(each, value) for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value]
        plain = [
            (each.arg, value)
            for each, value in pairs
            if isinstance(value, ast.Constant) and value.value not in (None, True, False)
        ]
        for name, value in plain:
            text = f"What is the default of {prompts.quoted(name)} in {prompts.quoted(function.name)}?"
            shown = ast.unparse(value)
            wanted = {"accepted": [shown, str(ast.literal_eval(value))]}
            if shown.strip("'\""):
                site = f"{function.file}:{function.qualname}:{name}"
                yield candidate_for(repository, "default", site, _ask_for_value(rng, text), shown, wanted, 1)


def _assertions(repository: Repository) -> list[tuple[str, str, str]]:
    """Return the self-contained comparisons in stable tests: (site, call, literal)."""
    stable = {test.partition("[")[0] for test in repository.durations}
    found = []
    for module in repository.test_modules:
        for node, owner in definitions(module.tree):
            if not isinstance(node, FunctionNode) or "::".join([module.path, *owner, node.name]) not in stable:
                continue
            for each in node.body:
                if isinstance(each, ast.Assert):
                    call, wanted = call_of(module, each)
                    if (
                        _is_answer(wanted)
                        and "(" in call
                        and len(call) < 100
                        and is_self_contained(module, node, f"({call})")
                    ):
                        found.append((f"{module.path}:{each.lineno}", call, wanted))
    return found


def _is_answer(text: str) -> bool:
    """Return whether a text is a literal that fits as a one-line answer."""
    try:
        value = literal_value(text) if text else None
    except (ValueError, SyntaxError):
        return False
    return (
        value is not None and value not in (True, False, "", [], {}, ()) and len(text) < 60 and "\n" not in str(value)
    )


def _values(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    for site, call, wanted in _assertions(repository):
        text = prompts.choose(rng, f"What does {prompts.quoted(call)} return?", f"What is {prompts.quoted(call)}?")
        value = literal_value(wanted)
        accepted = {"accepted": [wanted, repr(value), str(value)]}
        yield candidate_for(repository, "value", site, _ask_for_value(rng, text), wanted, accepted, 2)


def _raises(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    for module in repository.test_modules:
        for test, _ in definitions(module.tree):
            for node in test.body if isinstance(test, FunctionNode) else ():
                kind = _expected_exception(node)
                if not (kind and isinstance(node, ast.With) and len(node.body) == 1 and isinstance(test, FunctionNode)):
                    continue
                call = one_line(module.text(node.body[0]))
                if len(call) < 100 and "(" in call and is_self_contained(module, test, f"({call})"):
                    text = prompts.choose(
                        rng,
                        f"Which exception does {prompts.quoted(call)} raise? Its name only.",
                        f"What does {prompts.quoted(call)} raise? Name the exception, nothing else.",
                    )
                    accepted = {"accepted": [kind, kind.rpartition(".")[2]]}
                    yield candidate_for(repository, "raises", f"{module.path}:{node.lineno}", text, kind, accepted, 2)


def _expected_exception(node: ast.AST) -> str:
    """Return the exception of a `with pytest.raises(...)`, or ""."""
    call = node.items[0].context_expr if isinstance(node, ast.With) and len(node.items) == 1 else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("pytest.raises", "raises") or not call.args:
        return ""
    return ast.unparse(call.args[0]) if isinstance(call.args[0], ast.Name | ast.Attribute) else ""


def _locations(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    for module in repository.modules:
        for node in module.tree.body:
            if isinstance(node, FunctionNode | ast.ClassDef) and is_unique(repository, node.name):
                text = f"In which file is {prompts.quoted(node.name)} defined?"
                text += prompts.choose(rng, " The path only.", " Answer with its path from the top of the repository.")
                dotted = repository.source.module_name(module.path)
                accepted = {"accepted": [module.path, f"/work/{module.path}", f"./{module.path}", dotted]}
                yield candidate_for(repository, "place", f"{module.path}:{node.name}", text, module.path, accepted, 1)
