"""Every generator on a small repository, in real pods: tasks are validated, hide the site, and resist shortcuts."""

import asyncio
import json
import random
import re
import textwrap
import tomllib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from installed_wheels import wheels_of

from etude.pods import open_fleet
from etude.tasks.generators.candidate import CandidateRejected, apply_changes
from etude.tasks.generators.code import mentions
from etude.tasks.generators.debugging import HIDDEN_TEST_REGISTERS
from etude.tasks.generators.executor import open_executor
from etude.tasks.generators.generator_run import GenerationOptions, generate
from etude.tasks.generators.image import prepare_base_image
from etude.tasks.generators.registry import GENERATORS
from etude.tasks.generators.repository import Repository, prepare
from etude.tasks.generators.source import read_source
from etude.tasks.generators.task_writer import task_files
from etude.tasks.harbor import find_tasks, read_task, task_digest
from etude.tasks.lint import lint_task
from etude.tasks.task import Task
from etude.tasks.trial import commands_agent, run_trial

CATEGORIES = {"debugging", "feature", "refactor", "docs", "testing", "review", "devops", "migration", "question"}
FILES = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "ledger"
        version = "1.2"
        requires-python = ">=3.9"
        readme = "README.md"
        dependencies = []

        [tool.setuptools.packages.find]
        where = ["src"]

        [tool.pytest.ini_options]
        testpaths = ["tests"]
        filterwarnings = [
            "error",
        ]
        """,
    "README.md": """
        # ledger

        Amounts and books of them.

        `summary_of(book)` gives the total of every tag.
        """,
    "src/ledger/__init__.py": """
        from .amounts import format_amount, parse_amount
        from .book import Book, Entry, LedgerError
        from .report import longest_tag, render_report, summary_of

        __all__ = [
            "Book",
            "Entry",
            "LedgerError",
            "format_amount",
            "longest_tag",
            "parse_amount",
            "render_report",
            "summary_of",
        ]
        """,
    "src/ledger/amounts.py": '''
        """Amounts of money as text and as cents."""

        _UNITS = {"k": 1000, "m": 1000000}


        def _split_sign(text):
            if text.startswith("-"):
                return -1, text[1:]
            return 1, text


        def _scale_of(text):
            suffix = text[-1:].lower()
            if suffix in _UNITS:
                return _UNITS[suffix], text[:-1]
            return 1, text


        def parse_amount(text, default=0):
            """Cents of an amount as people write it.

            :param text: something like `-1.50` or `2k`.
            :param default: what an empty text means.
            :raises ValueError: when there is no number in it.
            """
            text = text.strip()
            if not text:
                return default
            sign, rest = _split_sign(text)
            scale, rest = _scale_of(rest)
            whole, _, part = rest.partition(".")
            if not whole.isdigit() or len(part) > 2:
                raise ValueError(f"not an amount: {text!r}")
            cents = int(whole) * 100 + int(part.ljust(2, "0") or 0)
            return sign * cents * scale


        def format_amount(cents, width=8):
            """An amount as text.

            :param cents: the amount.
            :param width: how many characters it has at least.
            """
            sign = "-" if cents < 0 else ""
            whole, part = divmod(abs(cents), 100)
            text = f"{sign}{whole}.{part:02d}"
            return text.rjust(width)
        ''',
    "src/ledger/book.py": '''
        """Entries and books of them."""

        from .amounts import parse_amount


        class LedgerError(Exception):
            """Something about a book is wrong."""


        class Entry:
            """One line of a book."""

            def __init__(self, amount, tag):
                self.amount = amount
                self.tag = tag

            def __repr__(self):
                return f"Entry({self.amount!r}, {self.tag!r})"


        class Book:
            """Entries in order."""

            def __init__(self, limit=100):
                super().__init__()
                self.entries = []
                self.limit = limit

            def _has_room(self):
                return len(self.entries) < self.limit

            def add_line(self, line):
                """Add an entry as it is written.

                :param line: an amount, a blank and a tag.
                :raises LedgerError: when the book is full, or there is no tag.
                """
                if not self._has_room():
                    raise LedgerError(f"the book is full: {self.limit}")
                amount, _, tag = line.strip().partition(" ")
                if not tag:
                    raise LedgerError(f"no tag: {line!r}")
                entry = Entry(parse_amount(amount), tag)
                self.entries.append(entry)
                return entry

            def total_of(self, tag=None):
                """The sum of all entries, or of those with a tag.

                :param tag: the tag that counts; all of them if it is not given.
                """
                chosen = [entry for entry in self.entries if tag is None or entry.tag == tag]
                return sum([entry.amount for entry in chosen])

            def tag_list(self):
                """The tags in the order in which they came."""
                found = []
                for entry in self.entries:
                    if entry.tag not in found:
                        found.append(entry.tag)
                return found
        ''',
    "src/ledger/report.py": '''
        """Books as text."""

        from .amounts import format_amount


        def summary_of(book):
            """The total of every tag.

            :param book: the book that is summed up.
            """
            result = {}
            for tag in book.tag_list():
                result[tag] = book.total_of(tag)
            return result


        def longest_tag(book, least=0):
            """How many characters the longest tag has.

            :param book: whose tags count.
            :param least: what it is at least.
            """
            size = least
            for tag in book.tag_list():
                if len(tag) > size:
                    size = len(tag)
            return size


        def render_report(book, title="Report"):
            """A book as lines of text.

            :param book: what is shown.
            :param title: the first line.
            """
            lines = [title]
            size = longest_tag(book)
            for tag, cents in summary_of(book).items():
                lines.append(f"{tag.ljust(size)} {format_amount(cents)}")
            lines.append(f"{'all'.ljust(size)} {format_amount(book.total_of())}")
            return "\\n".join(lines)
        ''',
    "tests/test_amounts.py": """
        import pytest

        from ledger import format_amount, parse_amount


        def test_whole_numbers():
            assert parse_amount("12") == 1200


        def test_cents():
            assert parse_amount("1.50") == 150


        def test_one_digit_after_the_point():
            assert parse_amount("1.5") == 150


        def test_negative_numbers():
            assert parse_amount("-3") == -300


        def test_thousands():
            assert parse_amount("2k") == 200000


        def test_empty_text():
            assert parse_amount(" ") == 0
            assert parse_amount("", default=7) == 7


        @pytest.mark.parametrize("text", ["x", "1.234", "--1"])
        def test_no_amount(text):
            with pytest.raises(ValueError):
                parse_amount(text)


        def test_format():
            assert format_amount(150) == "    1.50"


        def test_format_negative():
            assert format_amount(-5, width=1) == "-0.05"


        def test_format_wide():
            assert format_amount(123456, width=10) == "   1234.56"
        """,
    "tests/test_book.py": """
        import pytest

        from ledger import Book, Entry, LedgerError


        def filled():
            book = Book()
            for line in ("12 food", "-2.50 food", "1k rent"):
                book.add_line(line)
            return book


        def test_total():
            assert filled().total_of() == 100950


        def test_total_of_a_tag():
            assert filled().total_of("food") == 950


        def test_nothing_in_it():
            assert Book().total_of() == 0


        def test_tags():
            assert filled().tag_list() == ["food", "rent"]


        def test_entry():
            entry = Book().add_line("3 tea")
            assert (entry.amount, entry.tag) == (300, "tea")


        def test_shown():
            assert repr(Entry(1, "x")) == "Entry(1, 'x')"


        def test_a_full_book():
            book = Book(limit=1)
            book.add_line("1 a")
            with pytest.raises(LedgerError):
                book.add_line("1 b")


        def test_no_tag():
            with pytest.raises(LedgerError):
                Book().add_line("12")
        """,
    "tests/test_report.py": """
        from ledger import Book, longest_tag, render_report, summary_of


        def some():
            book = Book()
            book.add_line("1 tea")
            book.add_line("2 bread")
            book.add_line("1 tea")
            return book


        def test_summary():
            assert summary_of(some()) == {"tea": 200, "bread": 200}


        def test_summary_of_nothing():
            assert summary_of(Book()) == {}


        def test_longest():
            assert longest_tag(some()) == 5


        def test_longest_at_least():
            assert longest_tag(some(), least=9) == 9
            assert longest_tag(Book()) == 0


        def test_longest_of_equals():
            book = Book()
            book.add_line("1 ab")
            book.add_line("1 cd")
            assert longest_tag(book, 1) == 2


        def test_report():
            assert render_report(some()).splitlines()[1] == "tea       2.00"


        def test_report_title():
            assert render_report(Book(), title="Mine").splitlines() == ["Mine", "all     0.00"]
        """,
}


@dataclass(frozen=True)
class GeneratedSet:
    """A repository and the tasks generated from it."""

    source: Path
    wheels: Path
    cache: Path
    out: Path
    repository: Repository
    tasks: dict[str, Task]

    def of(self, generator: str) -> Task:
        return next(task for task in self.tasks.values() if task.metadata["source"] == generator)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> GeneratedSet:
    top = tmp_path_factory.mktemp("generate")
    source, wheels = top / "ledger", top / "wheels"
    for name, text in FILES.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    wheels.mkdir()
    wheels_of(("pytest", "pluggy", "iniconfig", "packaging", "pygments", "setuptools"), wheels)

    async def work() -> Repository:
        async with open_fleet() as fleet:
            options = GenerationOptions(top / "out", count=len(GENERATORS), seed=3, reruns=1, cache=top / "cache")
            await generate(fleet, [source], options, wheels=wheels)
            host_settings = await prepare_base_image(fleet)
            return await prepare(fleet, read_source(source), top / "cache", wheels=wheels, host_settings=host_settings)

    repository = asyncio.run(work())
    tasks = {path.name: read_task(path) for path in find_tasks(top / "out")}
    return GeneratedSet(source, wheels, top / "cache", top / "out", repository, tasks)


def test_every_generator_yields_a_validated_task(generated: GeneratedSet) -> None:
    assert {task.metadata["source"] for task in generated.tasks.values()} == set(GENERATORS)
    assert {task.category for task in generated.tasks.values()} >= CATEGORIES - {"question"}


def test_tasks_have_all_metadata_and_pass_lint(generated: GeneratedSet) -> None:
    for task in generated.tasks.values():
        assert {"category", "may_edit", "protected", "source", "seed", "difficulty", "family", "register"} <= set(
            task.metadata
        )
        assert 1 <= task.metadata["difficulty"] <= 5
        errors = [doubt for doubt in lint_task(task.directory) if doubt.level == "error"]
        assert not errors, errors


def test_survey_records_which_test_executes_which_line(generated: GeneratedSet) -> None:
    repository = generated.repository
    line = next(
        number
        for number, text in enumerate(repository.module("src/ledger/report.py").lines, 1)
        if "size = len(tag)" in text
    )
    ran = repository.tests_covering("src/ledger/report.py", [line])
    assert ran is not None
    assert "tests/test_report.py::test_longest" in ran
    assert "tests/test_amounts.py::test_cents" not in ran
    assert len(repository.durations) == 27


def test_workspace_has_one_commit_and_no_leaking_files(generated: GeneratedSet) -> None:
    for task in generated.tasks.values():
        top = task.directory / "environment/repo"
        names = [path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()]
        assert not [name for name in names if re.search(r"\.pyc$|__pycache__|egg-info|PKG-INFO", name)]
        assert len([name for name in names if name.startswith(".git/objects/pack/") and name.endswith(".pack")]) == 1
        assert not any(name.startswith(".git/logs") for name in names)


def test_solution_restores_the_original_code(generated: GeneratedSet) -> None:
    for generator in ("debugging", "feature", "migration", "devops"):
        task = generated.of(generator)
        workspace = {
            name: data for name, data in tree(task.directory / "environment/repo").items() if ".git/" not in name
        }
        solution = apply_changes(workspace, tree(task.directory / "solution/repo"))
        for name, data in generated.repository.files.items():
            if not generated.repository.source.is_test_path(name):
                assert solution.get(name) == data, (generator, name)


def tree(top: Path) -> dict[str, bytes]:
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_hidden_tests_are_not_in_the_workspace(generated: GeneratedSet) -> None:
    task = generated.of("feature")
    checks = json.loads((task.directory / "tests/checks.json").read_text())["checks"]
    there = {name: data.decode() for name, data in tree(task.directory / "environment/repo/tests").items()}
    names = {test.split("::")[-1].partition("[")[0] for test in checks[0]["run"]}
    assert any(not any(f"def {name}(" in text for text in there.values()) for name in names)


def test_debugging_requests_never_mention_the_site(generated: GeneratedSet) -> None:
    """Execute candidates: no request mentions the function or its file."""

    async def work() -> list[tuple[str, str, str]]:
        found = []
        async with open_fleet() as fleet:
            host_settings = await prepare_base_image(fleet)
            async with open_executor(
                fleet, generated.repository.source, generated.repository.wheels, host_settings
            ) as executor:
                stream = GENERATORS["debugging"].generate(generated.repository, random.Random(5))
                for candidate in islice(stream, 7):
                    try:
                        results = {
                            name: await executor.run_tests(state.changes, state.tests)
                            for name, state in candidate.states.items()
                        }
                        draft = candidate.finish(results)
                        task_files(generated.repository, draft, "x", "debugging", 0)
                    except CandidateRejected:
                        continue
                    found += [(site, draft.register, draft.request) for site in candidate.site.split(" ")]
        return found

    found = asyncio.run(work())
    assert len(found) >= 3
    for site, register, request in found:
        file, qualname = site.split(":")[:2]
        assert not mentions(request, qualname.rpartition(".")[2]), (site, register, request)
        assert not mentions(request, file), (site, request)
        assert not mentions(request, file.rpartition("/")[2]), (site, request)
        assert register in (*HIDDEN_TEST_REGISTERS, "log", "tests")


def test_same_seed_gives_same_tasks_for_any_number_of_jobs(generated: GeneratedSet, tmp_path: Path) -> None:
    async def work(out: Path, jobs: int) -> dict[str, str]:
        async with open_fleet() as fleet:
            options = GenerationOptions(
                out, count=2, seed=9, jobs=jobs, only=("docs", "question"), reruns=1, cache=generated.cache
            )
            await generate(fleet, [generated.source], options, wheels=generated.wheels)
        return {path.name: task_digest(path) for path in find_tasks(out)}

    one = asyncio.run(work(tmp_path / "one", 1))
    assert len(one) == 2
    assert asyncio.run(work(tmp_path / "two", 3)) == one


def test_candidates_are_a_function_of_the_seed(generated: GeneratedSet) -> None:
    for name, generator in GENERATORS.items():
        one, two, other = (
            [
                (each.site, dict(each.states))
                for each in islice(generator.generate(generated.repository, random.Random(seed)), 4)
            ]
            for seed in (1, 1, 2)
        )
        assert one == two, name
        assert one, name
        if name not in ("devops",):
            assert one != other or len(one) < 3, name


def test_repeated_run_evaluates_nothing_again(generated: GeneratedSet) -> None:
    before = {path.name: task_digest(path) for path in find_tasks(generated.out)}
    journals = {path.name: path.read_text() for path in (generated.out / ".generate/journals").iterdir()}

    async def work() -> int:
        async with open_fleet() as fleet:
            options = GenerationOptions(generated.out, count=len(GENERATORS), seed=3, reruns=1, cache=generated.cache)
            return sum(row.made for row in await generate(fleet, [generated.source], options, wheels=generated.wheels))

    assert asyncio.run(work()) == len(GENERATORS)
    assert {path.name: task_digest(path) for path in find_tasks(generated.out)} == before
    assert {path.name: path.read_text() for path in (generated.out / ".generate/journals").iterdir()} == journals


# ------------------------------------------------------------------------------------------------- rewards


def scores_of(generated: GeneratedSet, tries: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Return the score of running commands in the task of each generator."""

    async def work() -> dict[str, float]:
        found = {}
        async with open_fleet() as fleet:
            host_settings = await prepare_base_image(fleet)
            for generator, lines in tries.items():
                graded = await run_trial(
                    fleet, generated.of(generator), commands_agent(*lines), host_settings=host_settings
                )
                found[generator] = graded.result.score
        return found

    return asyncio.run(work())


COMPARE_SOURCE_DIGEST = """
cat > tests/test_more.py <<'END'
import hashlib, pathlib
import ledger

def test_source():
    top = pathlib.Path(ledger.__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(top.glob("*.py")))).hexdigest()
    assert digest == "DIGEST"
END
sed -i "s/DIGEST/$(cat $(ls src/ledger/*.py | sort) | sha256sum | cut -d' ' -f1)/" tests/test_more.py
python3 -m pytest -q tests/test_more.py
"""


def test_shortcuts_are_not_rewarded(generated: GeneratedSet) -> None:
    found = scores_of(
        generated,
        {
            "testing": (COMPARE_SOURCE_DIGEST,),  # fails on mutants, and on the equivalent version
            "review": (
                "python3 - <<'END'\n"
                "import json, pathlib\n"
                "files = {str(path): path.read_text().splitlines() for path in pathlib.Path('src').rglob('*.py')}\n"
                "found = [{'file': name, 'line': n + 1} for name, lines in files.items() for n in range(len(lines))]\n"
                "open('review.json', 'w').write(json.dumps(found))\n"
                "END",
            ),
            "docs": ("sed -i 's/return/return  0 or/' src/ledger/*.py",),
            "question": ("mkdir -p /logs/agent; echo 42 > /logs/agent/final.txt; echo >> README.md",),
            "all-well": ("mkdir -p /logs/agent; echo 'Correct as it is.' > /logs/agent/final.txt; echo >> README.md",),
        },
    )
    assert {name: score for name, score in found.items() if name != "review"} == dict.fromkeys(
        ("testing", "docs", "question", "all-well"), 0.0
    )
    assert found["review"] < 0.2


def test_final_message_answers_a_question(generated: GeneratedSet) -> None:
    task = generated.of("all-well")
    said = "mkdir -p /logs/agent; echo 'I ran it: it already gives that, nothing to change.' > /logs/agent/final.txt"
    assert scores_of(generated, {"all-well": (said,)}) == {"all-well": 1.0}
    assert not task.may_edit
    assert tomllib.loads((task.directory / "task.toml").read_text())["metadata"]["carry"] == ["/logs/agent/final.txt"]
