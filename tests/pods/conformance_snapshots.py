"""Conformance: snapshots, forks and their lifetimes."""

import asyncio
import contextlib

from etude.errors import InputError
from etude.pods.host import FLATTEN_AT
from etude.pods.pod import PodError, Unsupported
from etude.pods.runtime.backend import LocalPod
from tests.pods.conformance import CheckContext, Skip, check, eventually, raises

KINDS = ("fs", "fs-live")


def need(context: CheckContext, kind: str) -> None:
    if kind not in context.can.snapshots:
        raise Skip(f"this backend keeps no snapshots of kind {kind}: {'; '.join(context.can.notes)}")


@check
async def variables_given_at_creation_are_those_of_every_command_and_of_forks(context: CheckContext) -> None:
    async with context.pod(env={"GIVEN": "x y"}) as pod:
        assert (await pod.exec('echo "$GIVEN"; echo ${PATH:+path}')).stdout == "x y\npath\n"
        (child,) = await pod.fork()
        async with child:
            assert (await child.exec('echo "$GIVEN"')).stdout == "x y\n"


@check
async def a_snapshot_preserves_the_files(context: CheckContext) -> None:
    for kind in sorted(context.can.snapshots - {"full"}):
        async with context.pod() as pod:
            await pod.write("file", "before")
            snapshot = await pod.snapshot(kind)  # type: ignore[arg-type]
            await pod.write("file", "after")
            await pod.write("new", "after")
            assert snapshot.kind == kind
            async with context.pod(snapshot) as later, context.pod(snapshot.id) as by_name:
                assert await later.read("file") == b"before"
                assert {info.name for info in await by_name.list()} == {"file"}
                await later.write("file", "of the other")
            assert await pod.read("file") == b"after"
        await context.host.remove_snapshot(snapshot.id)
        with raises(InputError, PodError):
            await context.host.create(snapshot)


@check
async def unsupported_snapshot_kinds_are_refused(context: CheckContext) -> None:
    async with context.pod() as pod:
        for kind in {"fs", "fs-live", "full"} - context.can.snapshots:
            with raises(Unsupported):
                await pod.snapshot(kind)  # type: ignore[arg-type]
        assert (await pod.exec("echo fine")).ok


@check
async def deletions_survive_a_snapshot(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.exec("mkdir -p d/sub; touch d/sub/old d/gone; ln -s gone d/link")
        first = await pod.snapshot()
        # A directory that was removed and created again hides its old contents; a link becomes a directory.
        await pod.exec("rm d/gone d/link; rm -r d/sub; mkdir d/sub d/link; touch d/sub/new d/link/in")
        for kind in sorted(context.can.snapshots - {"full"}):
            second = await pod.snapshot(kind)  # type: ignore[arg-type]
            async with context.pod(second) as later:
                seen = await later.exec("ls d d/sub d/link")
                assert seen.stdout == "d:\nlink\nsub\n\nd/link:\nin\n\nd/sub:\nnew\n", seen
            await context.host.remove_snapshot(second.id)
        async with context.pod(first) as earlier:
            seen = await earlier.exec("ls d d/sub; readlink d/link")
            assert seen.stdout == "d:\ngone\nlink\nsub\n\nd/sub:\nold\ngone\n", seen
        await context.host.remove_snapshot(first.id)


@check
async def deletions_of_image_files_survive_a_snapshot(context: CheckContext) -> None:
    if not context.own_root:
        raise Skip(f"pods have no root of their own here: {'; '.join(context.can.notes)}")
    async with context.pod() as pod:
        assert not (await pod.exec("test -e /etc/shadow")).ok  # not the machine's own, which must not be deleted
        await pod.exec("mkdir /etc/mine; touch /etc/mine/x")
        first = await pod.snapshot()
        await pod.exec("cd /etc; rm services hosts; rm -r mine ssl; ln -s /nowhere ssl; mkdir hosts")
        for kind in sorted(context.can.snapshots - {"full"}):
            second = await pod.snapshot(kind)  # type: ignore[arg-type]
            async with context.pod(second) as later:
                seen = await later.exec("readlink /etc/ssl; ls -d /etc/hosts /etc/services /etc/mine")
                assert seen.stdout == "/nowhere\n/etc/hosts\n", seen
            await context.host.remove_snapshot(second.id)
        async with context.pod(first) as earlier:
            seen = await earlier.exec("ls /etc/mine /etc/services")
            assert seen.ok, seen
        await context.host.remove_snapshot(first.id)


@check
async def owners_modes_and_times_survive_a_snapshot(context: CheckContext) -> None:
    async with context.pod() as pod:
        mode = (
            4751 if context.own_root else 751
        )  # without its own root file system a pod's files change owners and lose that bit
        await pod.exec(f"touch -d '2001-02-03 04:05:06 UTC' f; chmod {mode} f; mkdir -m 1733 d; ln f hard")
        if context.can.users:
            await pod.exec("chown 7:8 f d")
        owner = "%u:%g" if context.can.users else ""  # elsewhere each pod may have a different user
        look = f"stat -c '%n %a %h {owner}' f d hard; stat -c %Y f"
        before = (await pod.exec(look)).stdout
        for kind in sorted(context.can.snapshots - {"full"}):
            snapshot = await pod.snapshot(kind)  # type: ignore[arg-type]
            async with context.pod(snapshot) as later:
                seen = await later.exec(look)
                assert seen.stdout == before, (kind, seen, before)
            await context.host.remove_snapshot(snapshot.id)


@check
async def a_live_snapshot_keeps_processes_running_and_an_fs_one_ends_them(context: CheckContext) -> None:
    need(context, "fs-live")
    async with context.pod() as pod:
        job = await pod.spawn("while :; do echo x >> log; sleep 0.01; done")
        await eventually(lambda: _size(pod, "log"))
        snapshot = await pod.snapshot()
        assert snapshot.kind == "fs-live"  # a running process must not be ended implicitly
        size = await _size(pod, "log")

        async def grown() -> bool:
            return await _size(pod, "log") > size

        await eventually(grown)
        async with context.pod(snapshot) as later:
            assert await _size(later, "log")
        sealed = await pod.snapshot("fs")
        with contextlib.suppress(PodError):  # the pod's own connection may have ended
            assert (await job.wait(10)).exit_code == 137
        assert (await pod.exec("echo on")).stdout == "on\n"
        assert (await pod.snapshot()).kind == "fs"
        for id in (snapshot.id, sealed.id):
            await context.host.remove_snapshot(id)


async def _size(pod: object, name: str) -> int:
    with contextlib.suppress(PodError):
        return (await pod.stat(name)).size  # type: ignore[attr-defined]
    return 0


@check
async def forks_share_the_state_but_not_later_changes(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.exec("mkdir d; echo shared > d/file; dd if=/dev/zero of=big bs=1M count=8 2>&-")
        children = await pod.fork(3)
        try:
            assert len({pod.id, *(child.id for child in children)}) == 4
            for n, child in enumerate(children):
                assert await child.read("d/file") == b"shared\n"
                assert (child.limits, child.egress) == (pod.limits, pod.egress)
                await child.write("d/file", f"child {n}")
                await child.write(f"d/only-{n}", "x")
                await child.remove("big")
            await pod.write("d/file", "parent")
            for n, child in enumerate(children):
                assert await child.read("d/file") == f"child {n}".encode()
                assert {info.name for info in await child.list("d")} == {"file", f"only-{n}"}
            assert await pod.read("d/file") == b"parent"
            assert (await pod.stat("big")).size == 8 << 20
            assert {info.name for info in await pod.list("d")} == {"file"}
            (grandchild,) = await children[0].fork()
            assert await grandchild.read("d/file") == b"child 0"
            await children[0].close()
            await pod.close()
            assert await grandchild.read("d/only-0") == b"x"  # it does not need its ancestors
            await grandchild.close()
        finally:
            await asyncio.gather(*(child.close() for child in children))
        with raises(InputError):
            await children[1].fork(0)


@check
async def a_fork_does_not_end_the_parents_processes(context: CheckContext) -> None:
    need(context, "fs-live")
    async with context.pod() as pod:
        job = await pod.spawn("echo $$ > pid; while :; do sleep 0.02; done")
        await eventually(lambda: _size(pod, "pid"))
        (child,) = await pod.fork()
        assert (await pod.exec("kill -0 $(cat pid)")).ok
        assert await child.read("pid") == await pod.read("pid")
        await child.close()
        await job.signal(9)
        await job.wait(10)


@check
async def a_chain_of_seventy_forks_keeps_all_files(context: CheckContext) -> None:
    pod = await context.host.create()
    try:
        await pod.exec("mkdir chain; touch chain/removed")
        for n in range(70):
            await pod.write(f"chain/{n}", str(n))
            if n == 35:
                await pod.remove("chain/removed")
            (child,) = await pod.fork()
            await pod.close()
            pod = child
        names = {info.name for info in await pod.list("chain")}
        assert names == {str(n) for n in range(70)}, sorted(names)
        assert await pod.read("chain/0") == b"0"
        assert await pod.read("chain/69") == b"69"
    finally:
        await pod.close()


@check
async def snapshots_can_be_taken_repeatedly(context: CheckContext) -> None:
    async with context.pod() as pod:
        made = []
        for n in range(5):
            await pod.write("count", str(n))
            made.append(await pod.snapshot())
        for n, snapshot in enumerate(made):
            async with context.pod(snapshot) as later:
                assert await later.read("count") == str(n).encode()
        for snapshot in made[::-1]:
            await context.host.remove_snapshot(snapshot.id)


@check
async def a_persisted_snapshot_can_be_exported_and_imported(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.exec("mkdir -p a/b; echo deep > a/b/c; ln -s a/b/c link; chmod 600 a/b/c")
        snapshot = await pod.snapshot()
        lasting = await context.host.persist(snapshot.id)
        assert lasting.durable
        file = context.new_directory() / "snapshot.tar"
        store = context.host.store
        await asyncio.to_thread(store.export, snapshot.id, file)
        await context.host.remove_snapshot(snapshot.id)
        imported = await asyncio.to_thread(store.import_, file)
        async with context.pod(imported) as later:
            seen = await later.exec("cat link; stat -c %a a/b/c")
            assert seen.stdout == "deep\n600\n", seen
        await context.host.remove_snapshot(imported)


@check
async def a_pod_with_disk_storage_behaves_like_any_other(context: CheckContext) -> None:
    async with context.pod(storage="disk") as pod:
        await pod.write("file", "on disk")
        await pod.exec("mkdir d; dd if=/dev/zero of=d/big bs=1M count=20 2>&-")
        (child,) = await pod.fork()
        assert await child.read("file") == b"on disk"
        await child.write("file", "of the child")
        assert await pod.read("file") == b"on disk"
        assert (await child.stat("d/big")).size == 20 << 20
        snapshot = await child.snapshot()
        assert snapshot.durable
        async with context.pod(snapshot) as later:
            assert await later.read("file") == b"of the child"
        await child.close()
        await context.host.remove_snapshot(snapshot.id)


@check
async def concurrent_forks_of_a_pod_work(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.write("file", "x")
        made = await asyncio.gather(*(pod.fork(2) for _ in range(4)), return_exceptions=True)
        children = [child for family in made if not isinstance(family, BaseException) for child in family]
        try:
            assert not [family for family in made if isinstance(family, BaseException)], made
            for child in children:
                assert await child.read("file") == b"x"
            assert await pod.read("file") == b"x"
        finally:
            await asyncio.gather(*(child.close() for child in children))


@check
async def a_pod_that_forks_often_keeps_few_layers_and_its_diff(context: CheckContext) -> None:
    need(context, "fs")
    async with context.pod() as pod:
        assert isinstance(pod, LocalPod)
        for n in range(60):
            await pod.write(f"file-{n}", str(n))
            if n:
                await pod.remove(f"file-{n - 1}")
            (child,) = await pod.fork()
            await child.close()
        await pod.ready()
        assert len(pod.spec.image.layers) <= FLATTEN_AT + 1
        assert [info.name for info in await pod.list()] == ["file-59"]
        assert await pod.read("file-59") == b"59"
        assert [path for path, info in (await pod.diff()).items() if info] == [f"{pod.workdir}/file-59"]
