"""Leaks between measured tasks and training data: training texts that contain the answer of a measured task.

The answer of a task is the definitions that its solution changes, as they are afterwards, compared by canonical syntax
tree (`etude.data.canonical`), so renamed copies with other numbers match. One of them in a training text is a leak.
Where only names, imports or words change, or nothing (a question), the answer is all definitions of the workspace, and
a text that contains all of them is a leak. `measured_answers` reads task directories; `find_leaks` looks for the
answers in training tasks, corpora, and files of conversations or code.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.chat.tokenizer import Tokenizer
from etude.data.canonical import definition_digests
from etude.data.corpus import TOKENIZER
from etude.data.shards import MANIFEST, Shards
from etude.errors import InputError
from etude.syntax import parse_tree
from etude.tasks.harbor import find_tasks

MIN_NODES = 10  # of a syntax tree: smaller definitions (a stub, a getter) occur everywhere and are no answers
TEXT_SUFFIXES = (".py", ".md", ".txt", ".json", ".jsonl", ".toml", ".patch")
AGENT_FILES = ("instruction.md", "environment/", "solution/")  # of a training task: what sessions show


@dataclass(frozen=True)
class TaskAnswer:
    """The definitions that give a task away, by digest: any of `changed`, or all of `shown`."""

    task: str
    changed: frozenset[str] = frozenset()
    shown: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Leak:
    """A training text that contains the answer of a measured task."""

    task: str
    source: str  # where the training text is
    definition: str


class Answers:
    """The answers of measured tasks, and which of them a text contains."""

    def __init__(self, answers: Iterable[TaskAnswer]) -> None:
        self.tasks = 0
        self._by_digest: defaultdict[str, list[TaskAnswer]] = defaultdict(list)
        for answer in answers:
            self.tasks += 1
            for digest in answer.changed or answer.shown:
                self._by_digest[digest].append(answer)

    @property
    def digests(self) -> tuple[tuple[str, ...], ...]:
        """The definitions that give a task away, each entry for itself, as `CorpusOptions.answers` takes them."""
        answers = {answer for found in self._by_digest.values() for answer in found}
        entries: set[tuple[str, ...]] = {(digest,) for answer in answers for digest in answer.changed}
        entries |= {tuple(sorted(answer.shown)) for answer in answers if not answer.changed}
        return tuple(sorted(entries))

    def leaks_in(self, text: str, source: str) -> list[Leak]:
        """Return the answers that a text contains, at most one for each task."""
        if "def " not in text:
            return []
        found = definition_digests(text)
        leaks = {
            answer.task: Leak(answer.task, source, code)
            for digest, code in found.items()
            for answer in self._by_digest.get(digest, ())
            if answer.changed or answer.shown <= found.keys()
        }
        return list(leaks.values())


def measured_answers(directories: Iterable[Path]) -> Answers:
    """Return the answers of all tasks at and below these directories."""
    tasks = (task for directory in directories for task in find_tasks(directory))
    return Answers(task_answer(task.name, dict(_texts_below(task))) for task in tasks)


def task_answer(name: str, files: Mapping[str, str]) -> TaskAnswer:
    """Return the answer of a task from its files: those of `solution/repo` or a patch against the environment's."""
    root = "environment/repo/" if any(path.startswith("environment/repo/") for path in files) else "environment/"
    before, after = _definitions(files, root), _definitions(files, "solution/repo/")
    for path, text in files.items():
        if path.startswith("solution/") and path.endswith(".patch"):
            after[path] = definition_digests("\n".join(line[1:] for line in text.splitlines() if line[:1] in "+ "))
    changed = {
        digest
        for path, found in after.items()
        for digest, code in found.items()
        if digest not in before.get(path, {}) and not _is_small(code)
    }
    if changed:
        return TaskAnswer(name, changed=frozenset(changed))
    shown = {digest for found in before.values() for digest, code in found.items() if not _is_small(code)}
    return TaskAnswer(name, shown=frozenset(shown))


def _definitions(files: Mapping[str, str], root: str) -> dict[str, dict[str, str]]:
    """Return the definitions of each Python file below a directory of a task, by digest."""
    code = {path.removeprefix(root): text for path, text in files.items() if path.startswith(root)}
    return {path: definition_digests(text) for path, text in code.items() if path.endswith(".py")}


def _is_small(code: str) -> bool:
    return sum(1 for _ in ast.walk(parse_tree(code))) < MIN_NODES


# ------------------------------------------------------------------------------------------------- training data


def find_leaks(answers: Answers, training: Iterable[Path]) -> Iterator[Leak]:
    """Yield the leaks in training data: task directories, corpora, or files and directories of text."""
    for source in training:
        for name, text in training_texts(source):
            yield from answers.leaks_in(text, name)


def training_texts(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the documents of training data with their names. A task directory is one document."""
    if not source.exists():
        raise InputError(f"{source} does not exist; name tasks, a corpus, or files of text")
    if (source / MANIFEST).is_file():
        tokenizer, shards = Tokenizer.load(source / TOKENIZER), Shards.open(source, "train")
        for number in range(len(shards)):
            yield f"{source}, document {number}", tokenizer.decode(shards.read(number).tolist())
        return
    tasks = list(find_tasks(source)) if source.is_dir() else []
    for task in tasks:
        shown = [text for path, text in _texts_below(task) if path.startswith(AGENT_FILES)]
        yield str(task), "\n\n".join(shown)
    for path, text in () if tasks else _texts_below(source):
        if not path.endswith(".jsonl"):
            yield f"{source}/{path}", text
            continue
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{source}/{path}, line {number}", "\n".join(strings_in(json.loads(line)))


def _texts_below(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of text at or below a path, with their relative paths."""
    root = source.parent if source.is_file() else source
    files = [source] if source.is_file() else sorted(path for path in root.rglob("*") if path.suffix in TEXT_SUFFIXES)
    for path in files:
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="replace")


def strings_in(value: object) -> Iterator[str]:
    """Yield all strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each)
