"""Conformance: the diff of a pod is that of a walk before and after, whatever was done in between."""

import asyncio
import errno
import random
import shlex
from collections.abc import Mapping

from etude.pods.pod import FileInfo, Pod, PodError, PodFileError
from etude.pods.runtime import diff
from tests.pods.conformance import CheckContext, check, raises

Tree = dict[str, tuple[str, int, str | bytes]]
NAMES = ("a", "b", "c")


async def walk(pod: Pod, path: str) -> Tree:
    """Return kind, mode and content of everything below a path."""
    found: Tree = {}
    for info in await pod.list(path):
        below = f"{path}/{info.name}"
        content = await pod.read(below) if info.kind == "file" else info.target
        found[below] = (info.kind, info.mode, content)
        if info.kind == "directory":
            found |= await walk(pod, below)
    return found


def compare(before: Tree, after: Tree) -> dict[str, str | None]:
    """Return the kinds of the changed paths, None for the topmost removed ones."""
    changes: dict[str, str | None] = {p: after[p][0] for p in after if before.get(p) != after[p]}
    for path in sorted(before.keys() - after.keys()):
        parent = path.rpartition("/")[0]
        if parent not in before or after.get(parent, ("",))[0] == "directory":
            changes[path] = None
    return changes


def kinds(changes: Mapping[str, FileInfo | None]) -> dict[str, str | None]:
    return {path: info.kind if info else None for path, info in changes.items()}


def random_path(chance: random.Random) -> str:
    return "/".join(chance.choices(NAMES, k=chance.randint(1, 3)))


def random_commands(chance: random.Random, count: int) -> str:
    """Return a shell script of random operations; many fail, which is fine."""
    lines = []
    for number in range(count):
        one, other = shlex.quote(random_path(chance)), shlex.quote(random_path(chance))
        lines.append(
            chance.choice(
                (
                    f"mkdir -p $(dirname {one}) && echo {chance.randint(0, 2)} > {one}",
                    f"mkdir -p {one}",
                    f"rm -rf {one}",
                    f"rm -rf {one}; mkdir {one}",
                    f"rm -rf {one}; mkdir {one}; echo {number} > {one}/a",
                    f"mv -T {one} {other}",
                    f"cp -a {one} {other}",
                    f"ln -sfn {chance.choice(NAMES)} {one}",
                    f"ln {one} {other}",
                    f"chmod {chance.choice(('700', '755', '750'))} {one}",
                    f"touch {one}",
                    f": >> {one}",
                    f"mkfifo {one}",
                )
            )
        )
    return "\n".join(lines)


@check
async def links_are_created_with_their_parents(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.symlink("../to where", "deep/er/link")
        info = await pod.stat("deep/er/link")
        assert (info.kind, info.target) == ("symlink", "../to where")
        with raises(PodError):
            await pod.symlink("elsewhere", "deep/er/link")


@check
async def the_diff_of_a_new_pod_is_empty(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert await pod.diff() == {}
        await pod.write("new/file", "text", mode=0o640)
        await pod.symlink("file", "new/bytes-\udcff")
        changes = await pod.diff()
        assert set(changes) == {f"{pod.workdir}/new{name}" for name in ("", "/file", "/bytes-\udcff")}
        info = changes[f"{pod.workdir}/new/file"]
        assert info == await pod.stat("new/file")
        assert info
        assert (info.kind, info.size, info.mode) == ("file", 4, 0o640)
        await pod.remove("new")
        assert await pod.diff() == {}
        await pod.exec("mkdir closed; touch closed/in; chmod 0 closed closed/in")
        assert {path.rpartition("/")[2] for path in await pod.diff()} == {"closed", "in"}


@check
async def a_diff_is_that_of_a_walk_before_and_after(context: CheckContext) -> None:
    for seed in range(4):
        chance = random.Random(seed)
        async with context.pod() as first:
            await first.exec(random_commands(chance, 25))
            base = await first.snapshot()
        async with context.pod(base) as pod:
            before = await walk(pod, pod.workdir)
            for step in range(6):
                script = random_commands(chance, 10)
                await pod.exec(script)
                expected = compare(before, await walk(pod, pod.workdir))
                found = kinds(await pod.diff())
                assert found == expected, (seed, step, script, found, expected)
                top = f"{pod.workdir}/{random_path(chance)}"
                above = {path for path in expected if top.startswith(f"{path}/") and expected[path] != "directory"}
                part = {p: kind for p, kind in expected.items() if p in above or f"{p}/".startswith(f"{top}/")}
                found = kinds(await pod.diff([top]))
                assert found == part, (seed, step, script, top, found, part)
                if step == 2:  # what was written before a snapshot counts as well
                    await context.host.remove_snapshot((await pod.snapshot("fs")).id)
        await context.host.remove_snapshot(base.id)


@check
async def a_diff_covers_forks_and_the_whole_file_system(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.write("of-the-parent", "x")
        (child,) = await pod.fork()
        async with child:
            assert await child.diff() == {}
            await child.write("of-the-child", "x")
            await child.remove("of-the-parent")
            expected = {f"{child.workdir}/of-the-child": "file", f"{child.workdir}/of-the-parent": None}
            assert kinds(await child.diff()) == expected
        assert set(await pod.diff()) == {f"{pod.workdir}/of-the-parent"}
    if context.own_root:
        async with context.pod(storage="disk") as pod:
            await pod.exec("rm /etc/hostname; mkdir -p /etc; echo new > /etc/new")
            found = kinds(await pod.diff())
            assert found.pop("/etc/hostname", None) is None
            assert found == {"/etc/new": "file"}


@check
async def a_directory_of_too_many_files_is_not_listed(context: CheckContext) -> None:
    async with context.pod() as pod:
        made = await pod.exec("mkdir many && cd many && seq 20000 | xargs touch", timeout=50)
        assert made.ok, made
        assert len(await pod.list("many")) == 20_000
        await pod.write("many/one-more", "")
        with raises(PodFileError) as caught:
            await pod.list("many")
        assert isinstance(caught["error"], PodFileError)
        assert caught["error"].errno == errno.EFBIG
        assert [info.name for info in await pod.list()] == ["many"]
        await pod.remove("many")
        assert await pod.list() == []


@check
async def a_diff_of_paths_neither_lists_nor_counts_the_rest(context: CheckContext) -> None:
    async with context.pod() as pod:
        beside = f"{pod.workdir.rpartition('/')[0]}/tmp/beside"
        await pod.exec(f"mkdir {beside} && cd {beside} && seq {diff.MAX_CHANGES + 1} | xargs touch", timeout=50)
        await pod.write("inside", "x")
        assert kinds(await pod.diff([pod.workdir])) == {f"{pod.workdir}/inside": "file"}
        assert kinds(await pod.diff([f"{pod.workdir}/in", f"{beside}/1"])) == {f"{beside}/1": "file"}
        assert await pod.diff([f"{pod.workdir.rpartition('/')[0]}/home", "/usr/bin"]) == {}


@check
async def a_diff_of_too_much_fails_and_does_not_stall_the_event_loop(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.exec("d=; for i in $(seq 220); do d=$d/d; done; mkdir -p ./$d")
        with raises(PodError) as caught:
            await pod.diff()
        assert "nested directories" in str(caught["error"])
        await pod.remove("d")
        many = diff.MAX_CHANGES + 1
        made = await pod.exec(f"mkdir many && cd many && seq {many} | xargs touch", timeout=50)
        if not made.ok:  # the pod cannot have so many files
            return
        ticks = 0
        asked = asyncio.create_task(pod.diff())
        while not asked.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert f"{diff.MAX_CHANGES:,} files" in str(asked.exception())
        assert ticks > 10, "the event loop stood still"
