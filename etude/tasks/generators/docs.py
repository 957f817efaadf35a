"""Documentation tasks: docstrings that are missing, or that name parameters that do not exist. Code must not change."""

import ast
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.checks import VerifierCheck
from etude.tasks.checks.inside.file_judges import docstring_words
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    apply_changes,
    generator,
    revert_changes,
)
from etude.tasks.generators.code import (
    PythonFunction,
    SourceEdit,
    apply_edits,
    docstring_node,
    is_parsable,
    mentions,
    parameters,
    source_text,
)
from etude.tasks.generators.executor import ExecutionResult
from etude.tasks.generators.identifiers import NOUNS
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import scope_check


@generator("docs", "docs", weight=1.0, max_family_share=0.6)
def docs(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    pool: dict[str, list[PythonFunction]] = {}
    for function in repository.functions:
        if _is_documented(function):
            pool.setdefault(function.file, []).append(function)
    files = sorted(pool)
    makers = (missing_docstrings, outdated_docstrings)
    used: set[str] = set()
    for turn in range(12):
        rng.shuffle(files)
        for file in files:
            left = [function for function in pool[file] if f"{turn % 2}{file}{function.qualname}" not in used]
            rng.shuffle(left)
            chosen = left[: rng.choice((1, 2, 2, 3, 4))]
            if not chosen:
                continue
            used |= {f"{turn % 2}{file}{function.qualname}" for function in chosen}
            candidate = makers[turn % 2](repository, chosen, random.Random(rng.getrandbits(64)))
            if candidate is not None:
                yield candidate


def _is_documented(function: PythonFunction) -> bool:
    """Return whether a function is public and its docstring describes a parameter or exception."""
    path = [*function.owner, function.name]
    if any(part.startswith("_") for part in path) or len(function.owner) > 1 or not function.body:
        return False
    doc = docstring_node(function.node)
    text = ast.get_docstring(function.node) or ""
    single = [each for each in function.module.functions if each.qualname == function.qualname]
    return doc is not None and len(text.split()) >= 8 and bool(described(function)) and len(single) == 1


def described(function: PythonFunction) -> list[str]:
    """Return the parameters and raised exceptions that a docstring mentions."""
    text = ast.get_docstring(function.node) or ""
    raised = [
        node.exc.func.id
        for node in ast.walk(function.node)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    ]
    names = [name for name in parameters(function.node) if len(name) > 2]
    return [name for name in dict.fromkeys([*names, *raised]) if mentions(text, name)]


def _docstring_spec(function: PythonFunction, lacks: Sequence[str] = ()) -> dict[str, object]:
    text = ast.get_docstring(function.node) or ""
    item = {"file": function.file, "name": function.qualname, "has": described(function), "lacks": list(lacks)}
    return {**item, "words": min(6, len(docstring_words(text, described(function))))}


def missing_docstrings(
    repository: Repository, chosen: Sequence[PythonFunction], rng: random.Random
) -> TaskCandidate | None:
    """Return a candidate with the docstrings removed."""
    file = chosen[0].file
    module = chosen[0].module
    edits = []
    for function in chosen:
        node = docstring_node(function.node)
        assert node is not None
        edits.append(SourceEdit(*module.line_span(node.lineno, node.end_lineno or node.lineno), ""))
    data = apply_edits(module.data, edits)
    names = [prompts.quoted(function.qualname) for function in chosen]
    joined = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    request = prompts.choose(
        rng,
        f"Write docstrings for {joined} in {file}: every parameter, and what is raised.",
        f"{joined} ({file}) {'have' if len(names) > 1 else 'has'} no docstring. Describe parameters and exceptions, in "
        "the style of the rest of the file; touch no code.",
        f"Document {joined} ({file}). Read the code first; all parameters and exceptions must be in there.",
        f"The API docs have empty entries for {joined}. Docstrings, please.",
    )
    return _candidate(
        repository, file, data, [_docstring_spec(function) for function in chosen], "missing", request, len(chosen)
    )


def outdated_docstrings(
    repository: Repository, chosen: Sequence[PythonFunction], rng: random.Random
) -> TaskCandidate | None:
    """Return a candidate whose docstrings name a parameter wrongly, or None."""
    file, module = chosen[0].file, chosen[0].module
    edits, docstring_specs = [], []
    for function in chosen:
        names = [name for name in described(function) if name in parameters(function.node)]
        rng.shuffle(names)
        for name in names:
            wrong = _wrong_name(name, function)
            if wrong is not None:
                node = docstring_node(function.node)
                assert node is not None
                start, end = module.span(node)
                text = module.data[start:end].decode()
                edits.append(
                    SourceEdit(start, end, re.sub(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", wrong, text))
                )
                docstring_specs.append(_docstring_spec(function, [wrong]))
                break
    if not edits:
        return None
    data = apply_edits(module.data, edits)
    if not is_parsable(data):
        return None
    request = prompts.choose(
        rng,
        f"Some docstrings in {file} do not fit the signatures any more. Bring them up to date; the code is right.",
        f"Parameters were renamed in {file} and the docstrings were forgotten. Fix these, and nothing else.",
        f"Our docs checker says: {file}: {len(edits)} documented parameter(s) not in signature. Fix.",
    )
    return _candidate(repository, file, data, docstring_specs, "drift", request, len(edits))


def _wrong_name(name: str, function: PythonFunction) -> str | None:
    text = (ast.get_docstring(function.node) or "") + " " + " ".join(parameters(function.node))
    parts = name.split("_")
    for number, part in enumerate(parts):
        for wrong in (NOUNS.get(part), f"{part}s" if not part.endswith("s") else part[:-1]):
            made = "_".join([*parts[:number], wrong or part, *parts[number + 1 :]])
            if wrong and made != name and not mentions(text, made):
                return made
    return None


def _candidate(
    repository: Repository,
    file: str,
    data: bytes,
    docstring_specs: Sequence[Mapping[str, object]],
    family: str,
    request: str,
    count: int,
) -> TaskCandidate:
    workspace: dict[str, bytes | None] = {file: data}
    files = apply_changes(repository.files, workspace)

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        if not any(item["has"] for item in docstring_specs):
            raise CandidateRejected("nothing-to-say", "no parameter is described")
        return TaskDraft(
            category="docs",
            family=family,
            register="imperative" if family == "missing" else "symptom",
            request=request,
            difficulty=min(4, 1 + (count > 1) + (count > 2) + (family == "drift")),
            workspace=workspace,
            solution=revert_changes(repository, workspace),
            checks=(
                VerifierCheck("code", {}, {"files": {file: source_text(repository.files[file])}}),
                VerifierCheck("docstrings", {}, {"items": list(docstring_specs)}),
                scope_check(files, (f"/{file}", "docs/*", "*.md", "*.rst")),
            ),
            protected=(),
        )

    site = f"{family}:{file}:" + ",".join(str(item["name"]) for item in docstring_specs)
    return TaskCandidate(site, family, {}, finish)
