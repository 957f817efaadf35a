"""Dockerfiles: parsing, variables, the sources and targets of COPY, and the build cache.

RUN uses a fake pod here; `test_dockerfile_build.py` uses real ones.
"""

import asyncio
import io
import os
import secrets
import stat
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.errors import InputError
from etude.pods.images import builder as builder_module
from etude.pods.images import trees
from etude.pods.images.builder import CopyStep, StoreBuilder, pack_sources, unpack_sources
from etude.pods.images.context import CopySource, DockerIgnore, archive_source, from_context
from etude.pods.images.dockerfile import build
from etude.pods.images.instructions import Heredoc, expand, pairs, parse, substitute, words
from etude.pods.images.layers import LayerStack
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.pod import Egress, ExecResult, PodError, Snapshot

# -- parsing


def test_instructions_comments_and_continuations() -> None:
    parsed = parse(
        "# a comment\n\nARG V=1\nfrom base AS first\n  run a && \\\n# not this\n\n    b   \\\n  c\n"
        'CMD ["x", "y"]\nFROM first\nRUN <<EOF\n# kept\n  $x \\\nEOF\nCOPY --chown=1:2 --from=0 a b /c/\n'
    )
    assert [line.text for line in parsed.arguments] == ["V=1"]
    first, second = parsed.stages
    assert (first.name, second.name) == ("first", "1")
    assert [(step.name, step.text, step.where) for step in first.steps] == [
        ("RUN", "a &&     b     c", "Dockerfile:5"),
        ("CMD", '["x", "y"]', "Dockerfile:10"),
    ]
    assert first.steps[1].json == ("x", "y")
    run, copied = second.steps
    assert run.heredocs == (Heredoc("EOF", "# kept\n  $x \\\n", True),)
    assert (copied.flag("chown"), copied.flag("from"), copied.text) == ("1:2", "0", "a b /c/")


def test_heredocs_with_tabs_and_quotes_in_sequence() -> None:
    (step,) = parse("FROM x\nCOPY <<-'one' <<two /d/\n\tA $x\n\tone\nB\ntwo\n").stages[0].steps
    assert step.heredocs == (Heredoc("one", "A $x\n", False), Heredoc("two", "B\n", True))


def test_the_escape_directive_counts_only_at_the_top() -> None:
    assert parse("# escape=`\nFROM a `\n AS b\n").stages[0].name == "b"
    assert parse("# escape=`\r\nFROM a\r\nRUN a `\r\n b\r\n").stages[0].steps[0].text == "a  b"
    (step,) = parse("# comment\n# escape=`\nFROM a\nRUN a `\n").stages[0].steps
    assert step.text == "a `"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FROM a\nFETCH b\n", r"f:2: FETCH is not an instruction"),
        ("RUN a\n", r"f:1: RUN: only ARG may come before"),
        ("# nothing\n", r"f: there is no FROM"),
        ("FROM\n", r"f:1: FROM has no arguments"),
        ("FROM a b\n", r"f:1: FROM: expected"),
        ("FROM a AS x\nFROM b AS X\n", r"f:2: .*taken"),
        ("FROM a\nRUN <<E\nb\n", r"f:2: the heredoc <<E is not terminated"),
        ("# escape=x\nFROM a\n", r"f:1: escape=x"),
    ],
)
def test_syntax_errors_name_their_line(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse(text, "f")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A-${A}x$Ab", "1-1x"),
        ("${N:-d} ${E:-d} ${E-d} ${N-d}", "d d  d"),
        ("${A:+y} ${N:+y} ${E:+y} ${E+y}", "y   y"),
        ("${N:-${A}${N:-z}}", "1z"),
        (r"\$A \\$A", r"$A \\1"),
        ("'$A' \"$A\"", "'1' \"1\""),
        ("5$ $", "5$ $"),
    ],
)
def test_substitution(text: str, value: str) -> None:
    assert substitute(text, {"A": "1", "E": ""}) == value


def test_words_and_quotes() -> None:
    variables = {"S": "a b", "Q": "it's"}
    assert words("x $S 'y $S' \"z $S\" w\\ w $Q ''", variables) == ["x", "a b", "y $S", "z a b", "w w", "it's", ""]
    assert expand("/a b/'c'$S", variables) == "/a b/ca b"
    with pytest.raises(InputError, match="is not closed"):
        words("'a", {})
    with pytest.raises(InputError, match="N is not set: why"):
        words("${N:?why}", {})
    with pytest.raises(InputError, match="not a variable"):
        words("${A", {})


def test_pairs_in_both_forms() -> None:
    (new, old) = parse('FROM a\nENV A=b C="d e" E=f\\ g H=$X$A\nENV K the rest  $X\n').stages[0].steps
    assert pairs(new, {"X": "1", "A": "0"}) == {"A": "b", "C": "d e", "E": "f g", "H": "10"}
    assert pairs(old, {"X": "1"}) == {"K": "the rest  1"}
    with pytest.raises(InputError, match="expected name=value"):
        pairs(parse("FROM a\nENV A=b c\n").stages[0].steps[0], {})


def test_ignore_rules() -> None:
    ignore = DockerIgnore.parse("# no\n*.log\n**/cache\nbuild\n!build/keep.txt\nsrc/*/x?\n/top/\n\n!deep.log\n**.tmp\n")
    ignored = ["a.log", "cache", "a/b/cache", "a/cache/f", "build/x", "src/a/x1", "top", "top/f", "a.tmp", "a/b.tmp"]
    kept = ["sub/a.log", "build/keep.txt", "src/x1", "src/a/b/x1", "deep.log", "cached", "other/top"]
    assert [path for path in ignored if not ignore.ignores(path)] == []
    assert [path for path in kept if ignore.ignores(path)] == []


# -- building, with fake pods


class FakePod:
    """Records the commands it runs, and adds a file with each snapshot."""

    def __init__(self, fleet: "FakeFleet", image: Image) -> None:
        self.fleet, self.image, self.commands = fleet, image, []  # type: ignore[var-annotated]

    async def exec(self, command: list[str], **options: Any) -> ExecResult:
        self.commands.append(command)
        self.fleet.runs.append((command, options))
        return ExecResult(1, b"out", b"bad") if command[-1] == "false" else ExecResult(0)

    async def snapshot(self, kind: str) -> Snapshot:
        store = self.fleet.store
        layer = store.add_layer(lambda path: (path / f"ran-{secrets.token_hex(4)}").write_text("x") and None)
        made = Snapshot(secrets.token_hex(8), self.image.id)
        store.save_snapshot(made, self.image.with_(layers=(*self.image.layers, layer)))
        return made

    async def close(self) -> None:
        self.fleet.open -= 1


class FakeFleet:
    def __init__(self, store: Store) -> None:
        self.store, self.open = store, 0
        self.runs: list[tuple[list[str], dict[str, Any]]] = []
        self.egress: list[Egress] = []

    async def create(self, image: Image, *, storage: str, egress: Egress) -> Any:
        assert storage == "disk"
        self.open += 1
        self.egress.append(egress)
        return FakePod(self, image)


class Builder:
    """A store, a context and a base image."""

    def __init__(self, directory: Path) -> None:
        self.store = Store(directory / "store")
        self.fleet = FakeFleet(self.store)
        self.context = directory / "context"
        self.context.mkdir()
        self.file = directory / "Dockerfile"
        self.base = self.store.add_image(
            Image.of((self.store.add_layer(self._fill),), "base", env={"PATH": "/bin"}, workdir="/")
        )

    @staticmethod
    def _fill(target: Path) -> None:
        (target / "usr/bin").mkdir(parents=True)
        (target / "bin").symlink_to("usr/bin")
        (target / "etc").mkdir()
        (target / "etc/passwd").write_text("app:x:33:44::/:/x\n")
        (target / "etc/group").write_text("staff:x:55:\n")
        (target / "tmp").mkdir()
        os.chmod(target / "tmp", 0o1777)

    def build(self, text: str, **options: Any) -> Image:
        self.file.write_text(text)
        made = asyncio.run(
            build(
                StoreBuilder(self.store, self.fleet),
                self.file,
                self.context,
                options.pop("base_images", {"base": self.base}),
                **options,
            )
        )
        assert self.fleet.open == 0
        assert self.store.snapshots() == []
        return made

    def look(self, image: Image) -> LayerStack:
        return LayerStack.of(self.store.layer_dirs(image.layers))


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


def test_run_sees_variables_user_shell_and_directory(builder: Builder) -> None:
    image = builder.build(
        "ARG G=glob\nFROM base\nARG G\nARG A=1\nARG B=2\nENV B=env C=$A$B\nWORKDIR /src\nWORKDIR sub\nUSER app\n"
        'RUN echo $A\nRUN ["x", "$A"]\nSHELL ["/bin/bash", "-c"]\nRUN <<EOF\nlines\nEOF\n'
        "RUN cat <<'E' > f\n$x\nE\nLABEL k=$A\nENTRYPOINT go $A\nCMD [\"c\"]\nEXPOSE 80\nVOLUME /v\n"
        "HEALTHCHECK --interval=1s CMD x\nSTOPSIGNAL 9\nMAINTAINER me\n",
        args={"A": "9"},
        egress=Egress.to("example.org"),
        name="built",
    )
    commands = [command for command, _ in builder.fleet.runs]
    assert commands == [
        ["/bin/sh", "-c", "echo $A"],
        ["x", "$A"],
        ["/bin/bash", "-c", "lines\n"],
        ["/bin/bash", "-c", "cat <<'E' > f\n$x\nE\n"],
    ]
    options = builder.fleet.runs[0][1]
    assert options["env"] == {"G": "glob", "A": "9", "B": "env", "C": "92", "PATH": "/bin"}
    assert (options["cwd"], options["user"]) == ("/src/sub", "app")
    assert set(builder.fleet.egress) == {Egress.to("example.org")}
    assert dict(image.env) == {"PATH": "/bin", "B": "env", "C": "92"}, "ARG is for the build only"
    assert (image.workdir, image.user, image.labels) == ("/src/sub", "app", {"k": "9"})
    assert (image.entrypoint, image.command) == (("/bin/bash", "-c", "go $A"), ("c",))
    assert builder.store.image("built") == image
    assert builder.look(image).locate("/src/sub")[1].is_directory


def test_steps_run_again_only_when_their_inputs_change(builder: Builder) -> None:
    (builder.context / "f").write_text("1")
    text = "FROM base\nARG V=1\nRUN one\nCOPY f /f\nRUN two\nENV X=1\nRUN three\n"

    def done(**options: Any) -> list[str]:
        builder.fleet.runs.clear()
        builder.build(options.pop("text", text), **options)
        return [command[-1] for command, _ in builder.fleet.runs]

    assert done() == ["one", "two", "three"]
    first = builder.build(text)
    assert done() == []
    os.utime(builder.context / "f", (1, 1))
    assert done() == [], "a changed time does not count"
    (builder.context / "f").write_text("2")
    assert done() == ["two", "three"]
    (builder.context / "f").write_text("1")
    assert done() == []
    assert done(text=text.replace("X=1", "X=2")) == ["three"]
    assert done(args={"V": "2"}) == ["one", "two", "three"]
    assert done(egress=Egress.to("example.org")) == ["one", "two", "three"]
    assert builder.build(text) == first
    os.chmod(builder.context / "f", 0o700)
    assert done() == ["two", "three"]
    builder.store.remove_image(first.id)
    for image in builder.store.images():
        if image.name != "base":
            builder.store.remove_image(image.id)
    builder.store.collect_garbage(grace=0)
    assert done() == ["one", "two", "three"], "a cache keeps no layer alive"


def test_a_failing_run_reports_line_and_output(builder: Builder) -> None:
    with pytest.raises(PodError, match=r"Dockerfile:2: RUN failed with exit code 1:\noutbad"):
        builder.build("FROM base\nRUN false\n")
    assert builder.fleet.open == 0
    assert os.listdir(builder.store.root / "pins") == []


def test_copy_resolves_its_target_as_a_pod_would(builder: Builder) -> None:
    (builder.context / "d/sub").mkdir(parents=True)
    (builder.context / "d/sub/x").write_text("x")
    (builder.context / "d/link").symlink_to("/etc/passwd")
    (builder.context / "tool").write_text("#!")
    os.chmod(builder.context / "tool", 0o755)
    image = builder.build(
        "FROM base\nWORKDIR /src\nCOPY tool /bin/\nCOPY tool d /tmp/new/\nCOPY d .\nCOPY tool rel\n"
        'COPY ["tool", "/with space"]\nCOPY <<EOF <<"RAW" /etc/\n$PATH\nEOF\n$PATH\nRAW\nCOPY too? /glob/\n'
    )
    look = builder.look(image)
    assert look.locate("/bin/tool")[0] == "/usr/bin/tool"
    assert look.read("/usr/bin/tool") == b"#!"
    found = look.locate("/tmp")[1]
    assert found.info is not None
    assert stat.S_IMODE(found.info.st_mode) == 0o1777, "parent directories keep their mode"
    assert look.names(look.locate("/tmp/new")[1]) == ["link", "sub", "tool"]
    assert look.names(look.locate("/src")[1]) == ["link", "rel", "sub"]
    assert look.read("/src/sub/x") == b"x"
    assert look.read("/with space") == look.read("/glob/tool") == b"#!"
    assert (look.read("/etc/EOF"), look.read("/etc/RAW")) == (b"/bin\n", b"$PATH\n")
    assert look.names(look.locate("/etc")[1]) == ["EOF", "RAW", "group", "passwd"]


def test_owners_and_modes(builder: Builder) -> None:
    (builder.context / "f").write_text("x")
    image = builder.build(
        "FROM base\nCOPY f /a\nCOPY --chown=app f /b\nCOPY --chown=7:staff --chmod=640 f /n/c\nADD --chown=8 f /d\n"
    )
    look = builder.look(image)
    modes = [stat.S_IMODE(found.info.st_mode) for found in [look.locate("/n/c")[1]] if found.info]
    assert modes == [0o640]
    if trees.can_chown():
        found = [look.locate(path)[1].info for path in ("/a", "/b", "/n/c", "/n", "/d")]
        owners = [(info.st_uid, info.st_gid) for info in found if info]
        assert owners == [(0, 0), (33, 44), (7, 55), (7, 55), (8, 8)]
    for flags, why in (
        ("--chown=nobody", "no user 'nobody'"),
        ("--chmod=u+x", "octal"),
        ("--parents", "not supported"),
    ):
        with pytest.raises(InputError, match=why):
            builder.build(f"FROM base\nCOPY {flags} f /x\n")


def test_add_unpacks_archives_and_copy_does_not(builder: Builder) -> None:
    with tarfile.open(builder.context / "a.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("in/file")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    look = builder.look(builder.build("FROM base\nADD a.tar.gz /out\nCOPY a.tar.gz /raw/\n"))
    assert look.read("/out/in/file") == b"x"
    assert look.names(look.locate("/raw")[1]) == ["a.tar.gz"]
    for address in ("https://example.org/x", "git@example.org:x"):
        with pytest.raises(InputError, match="is a URL"):
            builder.build(f"FROM base\nADD {address} /x\n")


def test_an_archive_is_unpacked_for_a_new_layer_only(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[str] = []

    def unpack(source: CopySource, staging: Path) -> CopySource:
        unpacked.append(source.name)
        return archive_source(source, staging)

    monkeypatch.setattr(builder_module, "archive_source", unpack)
    for text in (b"x", b"y", b"y"):
        with tarfile.open(builder.context / "a.tar", "w") as tar:
            member = tarfile.TarInfo("file")
            member.size = 1
            tar.addfile(member, io.BytesIO(text))
        image = builder.build("FROM base\nADD a.tar /out/\n")
        assert builder.look(image).read("/out/file") == text
    assert unpacked == ["a.tar", "a.tar"]


def test_sources_never_leave_the_context(builder: Builder, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (builder.context / "out").symlink_to(tmp_path)
    (builder.context / "file").symlink_to(tmp_path / "secret")
    (builder.context / "d").mkdir()
    (builder.context / "d/in").symlink_to("../real")
    (builder.context / "real").write_text("r")
    (builder.context / "alias").symlink_to("real")
    for source in ("out/secret", "out", "file", "out/*", "fil?"):
        with pytest.raises(InputError, match="leads outside the context"):
            builder.build(f"FROM base\nCOPY {source} /x/\n")
    for source in ("../secret", "/../secret", "d/../../secret", "nothing", "*.none"):
        with pytest.raises(InputError, match="is not in the context"):
            builder.build(f"FROM base\nCOPY {source} /x/\n")
    look = builder.look(builder.build("FROM base\nCOPY . /all/\nCOPY alias /one\n"))
    assert look.read("/one") == b"r", "a link that is named is followed"
    _, found = look.locate("/all/d/in", follow=False)
    assert found.info is not None
    assert stat.S_ISLNK(found.info.st_mode)
    _, found = look.locate("/all/out", follow=False)
    assert found.info is not None
    assert stat.S_ISLNK(found.info.st_mode), "a link in a tree is copied as a link, wherever it leads"


def test_a_link_from_one_source_is_not_written_through_by_the_next(builder: Builder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("one", "two", "three"):
        (builder.context / name).mkdir()
    (builder.context / "one/a").mkdir()
    (builder.context / "one/a/f").write_text("1")
    (builder.context / "two/a").symlink_to(victim)
    (builder.context / "three/a").mkdir()
    (builder.context / "three/a/evil").write_text("3")
    look = builder.look(builder.build("FROM base\nCOPY one two three /x/\n"))
    assert os.listdir(victim) == []
    assert look.read("/x/a/evil") == b"3"


def test_a_hostile_source_pattern_ends(builder: Builder) -> None:
    (builder.context / ("a" * 255)).touch()
    with pytest.raises(InputError, match="is not in the context"):  # hours, translated to a regular expression
        builder.build(f"FROM base\nCOPY {'a*' * 30}b /x\n")


def test_sources_that_travel_as_a_layer_make_the_same_layer(builder: Builder, tmp_path: Path) -> None:
    tree = builder.context / "d"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/x").write_text("x")
    (tree / "link").symlink_to("sub")
    (tree / "drop.log").write_text("")
    (builder.context / "f").write_text("f")
    (builder.context / ".dockerignore").write_text("**/*.log\n")
    os.chmod(tree / "sub/x", 0o4750)
    os.chmod(tree / "sub", 0o2755)
    ignore = DockerIgnore.read(builder.context)
    sources = [each for name in ("d", "f") for each in from_context(builder.context, name, ignore, "")]
    other = Store(tmp_path / "other")
    layer = pack_sources(other, sources)
    assert layer == pack_sources(builder.store, sources)
    arrived = unpack_sources(other, layer, [(each.name, False) for each in sources])
    step = CopyStep(builder.base, "key", "/t/", into=True)
    made = asyncio.run(StoreBuilder(builder.store, builder.fleet).copy(step, sources))
    again = asyncio.run(StoreBuilder(builder.store, builder.fleet).copy(replace(step, key="other"), arrived))
    assert made == again
    found = builder.look(made).locate("/t/sub/x")[1].info
    assert found is not None
    assert stat.S_IMODE(found.st_mode) == 0o4750


def test_dockerignore_excludes_files(builder: Builder) -> None:
    (builder.context / ".dockerignore").write_text("*.log\nsub\n!sub/keep\n")
    (builder.context / "sub").mkdir()
    for name in ("a.log", "b", "sub/drop", "sub/keep"):
        (builder.context / name).write_text(name)
    image = builder.build("FROM base\nCOPY . /all/\n")
    look = builder.look(image)
    assert look.names(look.locate("/all")[1]) == [".dockerignore", "b", "sub"]
    assert look.names(look.locate("/all/sub")[1]) == ["keep"]
    (builder.context / "a.log").write_text("changed")
    assert builder.build("FROM base\nCOPY . /all/\n") == image, "an ignored file does not change the image"
    with pytest.raises(InputError, match=r"\.dockerignore excludes it"):
        builder.build("FROM base\nCOPY a.log /x\n")


def test_stages_copy_from_each_other(builder: Builder) -> None:
    (builder.context / "f").write_text("x")
    (builder.context / "g").write_text("y")
    text = (
        "ARG BASE=base\nFROM $BASE AS one\nCOPY f g /out/\nFROM scratch AS two\nCOPY --from=one /out /got\n"
        "COPY --from=0 /out/? /single/\nCOPY --from=base /etc/passwd /p\nCOPY --from=one /bin/../out/f /f\nFROM two\n"
    )
    look = builder.look(builder.build(text))
    assert look.names(look.locate("/")[1]) == ["f", "got", "p", "single"]
    assert look.names(look.locate("/single")[1]) == ["f", "g"]
    assert look.read("/p").startswith(b"app")
    for wrong, why in (("--from=none /x", "not among the base images"), ("--from=one /none", "not in that stage")):
        with pytest.raises(InputError, match=why):
            builder.build(f"{text}COPY {wrong} /y\n")


def test_bind_mounts_of_the_host_are_neither_written_nor_copied(builder: Builder) -> None:
    (builder.context / "f").write_text("x")
    host = builder.base.with_(binds=("/usr",), name="host")
    for line in ("COPY f /usr/local/bin/", "COPY f /bin/f", "FROM host AS b\nCOPY --from=0 /bin/sh /sh"):
        with pytest.raises(InputError, match="bind mount of the host"):
            builder.build(f"FROM host\n{line}\n", base_images={"host": host})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FROM other\n", "'other' is not among the base images; there are: base, scratch"),
        ("FROM base\nCOPY f\n", "at least one source"),
        ("FROM base\nCOPY f g /x\n", "2 sources need a directory"),
        ("FROM base\nCOPY f /etc/passwd/x\n", "is a file in the image"),
        ("FROM base\nSHELL bash\n", "expected the JSON form"),
        ("FROM base\nRUN --mount=type=cache x\n", "--mount is not supported"),
        ("FROM base\nARG 1x\n", "not the name of a variable"),
    ],
)
def test_build_errors_name_their_line(builder: Builder, text: str, why: str) -> None:
    (builder.context / "f").write_text("x")
    (builder.context / "g").write_text("x")
    with pytest.raises(InputError, match=rf"Dockerfile:\d: .*{why}"):
        builder.build(text)


def test_an_undeclared_build_argument_is_refused(builder: Builder) -> None:
    with pytest.raises(InputError, match="no ARG declares TYPO"):
        builder.build("FROM base\nARG A\n", args={"TYPO": "1"})
