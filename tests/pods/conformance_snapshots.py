"""Conformance: snapshots, forks, and what outlives what."""

import asyncio
import contextlib

from etude.errors import InputError
from etude.pods.pod import PodError, Unsupported
from tests.pods.conformance import Home, Skip, check, eventually, raises

KINDS = ("fs", "fs-live")


def need(home: Home, kind: str) -> None:
    if kind not in home.can.snapshots:
        raise Skip(f"this backend keeps no snapshots of kind {kind}: {'; '.join(home.can.notes)}")


@check
async def a_snapshot_keeps_the_files_as_they_were(home: Home) -> None:
    for kind in sorted(home.can.snapshots - {"full"}):
        async with home.pod() as pod:
            await pod.write("file", "before")
            snapshot = await pod.snapshot(kind)  # type: ignore[arg-type]
            await pod.write("file", "after")
            await pod.write("new", "after")
            assert snapshot.kind == kind
            async with home.pod(snapshot) as later, home.pod(snapshot.id) as by_name:
                assert await later.read("file") == b"before"
                assert {info.name for info in await by_name.list()} == {"file"}
                await later.write("file", "of the other")
            assert await pod.read("file") == b"after"
        await home.host.remove_snapshot(snapshot.id)
        with raises(InputError, PodError):
            await home.host.create(snapshot)


@check
async def kinds_that_are_not_possible_are_refused(home: Home) -> None:
    async with home.pod() as pod:
        for kind in {"fs", "fs-live", "full"} - home.can.snapshots:
            with raises(Unsupported):
                await pod.snapshot(kind)  # type: ignore[arg-type]
        assert (await pod.exec("echo fine")).ok


@check
async def deletions_survive_a_snapshot(home: Home) -> None:
    async with home.pod() as pod:
        await pod.exec("mkdir -p d/sub; touch d/sub/old d/gone; ln -s gone d/link")
        first = await pod.snapshot()
        # A directory that was removed and made again hides all that was below; a link becomes a directory.
        await pod.exec("rm d/gone d/link; rm -r d/sub; mkdir d/sub d/link; touch d/sub/new d/link/in")
        for kind in sorted(home.can.snapshots - {"full"}):
            second = await pod.snapshot(kind)  # type: ignore[arg-type]
            async with home.pod(second) as later:
                seen = await later.exec("ls d d/sub d/link")
                assert seen.stdout == "d:\nlink\nsub\n\nd/link:\nin\n\nd/sub:\nnew\n", seen
            await home.host.remove_snapshot(second.id)
        async with home.pod(first) as earlier:
            seen = await earlier.exec("ls d d/sub; readlink d/link")
            assert seen.stdout == "d:\ngone\nlink\nsub\n\nd/sub:\nold\ngone\n", seen
        await home.host.remove_snapshot(first.id)


@check
async def deletions_of_what_the_image_holds_survive_a_snapshot(home: Home) -> None:
    if not home.own_root:
        raise Skip(f"pods have no root of their own here: {'; '.join(home.can.notes)}")
    async with home.pod() as pod:
        assert not (
            await pod.exec("test -e /etc/shadow")
        ).ok  # really not the machine's own, of which none must be lost
        await pod.exec("mkdir /etc/mine; touch /etc/mine/x")
        first = await pod.snapshot()
        await pod.exec("cd /etc; rm services hosts; rm -r mine ssl; ln -s /nowhere ssl; mkdir hosts")
        for kind in sorted(home.can.snapshots - {"full"}):
            second = await pod.snapshot(kind)  # type: ignore[arg-type]
            async with home.pod(second) as later:
                seen = await later.exec("readlink /etc/ssl; ls -d /etc/hosts /etc/services /etc/mine")
                assert seen.stdout == "/nowhere\n/etc/hosts\n", seen
            await home.host.remove_snapshot(second.id)
        async with home.pod(first) as earlier:
            seen = await earlier.exec("ls /etc/mine /etc/services")
            assert seen.ok, seen
        await home.host.remove_snapshot(first.id)


@check
async def owners_modes_and_times_survive_a_snapshot(home: Home) -> None:
    async with home.pod() as pod:
        mode = (
            4751 if home.own_root else 751
        )  # without a root of its own a pod's files change owners, and lose that bit
        await pod.exec(f"touch -d '2001-02-03 04:05:06 UTC' f; chmod {mode} f; mkdir -m 1733 d; ln f hard")
        if home.can.users:
            await pod.exec("chown 7:8 f d")
        owner = "%u:%g" if home.can.users else ""  # elsewhere a pod's one user may be another in each
        look = f"stat -c '%n %a %h {owner}' f d hard; stat -c %Y f"
        before = (await pod.exec(look)).stdout
        for kind in sorted(home.can.snapshots - {"full"}):
            snapshot = await pod.snapshot(kind)  # type: ignore[arg-type]
            async with home.pod(snapshot) as later:
                seen = await later.exec(look)
                assert seen.stdout == before, (kind, seen, before)
            await home.host.remove_snapshot(snapshot.id)


@check
async def a_live_snapshot_lets_processes_go_on_and_a_sealing_one_ends_them(home: Home) -> None:
    need(home, "fs-live")
    async with home.pod() as pod:
        job = await pod.spawn("while :; do echo x >> log; sleep 0.01; done")
        await eventually(lambda: _size(pod, "log"))
        snapshot = await pod.snapshot()
        assert snapshot.kind == "fs-live"  # something runs: it must not be ended unasked
        size = await _size(pod, "log")

        async def grown() -> bool:
            return await _size(pod, "log") > size

        await eventually(grown)
        async with home.pod(snapshot) as later:
            assert await _size(later, "log")
        sealed = await pod.snapshot("fs")
        with contextlib.suppress(PodError):  # the pod's own connection may be what ended
            assert (await job.wait(10)).exit_code == 137
        assert (await pod.exec("echo on")).stdout == "on\n"
        assert (await pod.snapshot()).kind == "fs"
        for id in (snapshot.id, sealed.id):
            await home.host.remove_snapshot(id)


async def _size(pod: object, name: str) -> int:
    with contextlib.suppress(PodError):
        return (await pod.stat(name)).size  # type: ignore[attr-defined]
    return 0


@check
async def forks_share_the_past_and_nothing_of_the_future(home: Home) -> None:
    async with home.pod() as pod:
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
            assert await grandchild.read("d/only-0") == b"x"  # it needs none of those it came from
            await grandchild.close()
        finally:
            await asyncio.gather(*(child.close() for child in children))
        with raises(InputError):
            await children[1].fork(0)


@check
async def a_parent_with_a_process_forks_without_ending_it(home: Home) -> None:
    need(home, "fs-live")
    async with home.pod() as pod:
        job = await pod.spawn("echo $$ > pid; while :; do sleep 0.02; done")
        await eventually(lambda: _size(pod, "pid"))
        (child,) = await pod.fork()
        assert (await pod.exec("kill -0 $(cat pid)")).ok
        assert await child.read("pid") == await pod.read("pid")
        await child.close()
        await job.signal(9)
        await job.wait(10)


@check
async def a_chain_of_seventy_forks_keeps_everything(home: Home) -> None:
    pod = await home.host.create()
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
async def a_snapshot_can_be_taken_again_and_again(home: Home) -> None:
    async with home.pod() as pod:
        made = []
        for n in range(5):
            await pod.write("count", str(n))
            made.append(await pod.snapshot())
        for n, snapshot in enumerate(made):
            async with home.pod(snapshot) as later:
                assert await later.read("count") == str(n).encode()
        for snapshot in made[::-1]:
            await home.host.remove_snapshot(snapshot.id)


@check
async def a_persisted_snapshot_travels_as_a_file(home: Home) -> None:
    async with home.pod() as pod:
        await pod.exec("mkdir -p a/b; echo deep > a/b/c; ln -s a/b/c link; chmod 600 a/b/c")
        snapshot = await pod.snapshot()
        lasting = await home.host.persist(snapshot.id)
        assert lasting.durable
        file = home.place() / "snapshot.tar"
        store = home.host.store
        await asyncio.to_thread(store.export, snapshot.id, file)
        await home.host.remove_snapshot(snapshot.id)
        imported = await asyncio.to_thread(store.import_, file)
        async with home.pod(imported) as later:
            seen = await later.exec("cat link; stat -c %a a/b/c")
            assert seen.stdout == "deep\n600\n", seen
        await home.host.remove_snapshot(imported)


@check
async def a_pod_that_writes_to_disk_is_like_any_other(home: Home) -> None:
    async with home.pod(storage="disk") as pod:
        await pod.write("file", "on disk")
        await pod.exec("mkdir d; dd if=/dev/zero of=d/big bs=1M count=20 2>&-")
        (child,) = await pod.fork()
        assert await child.read("file") == b"on disk"
        await child.write("file", "of the child")
        assert await pod.read("file") == b"on disk"
        assert (await child.stat("d/big")).size == 20 << 20
        snapshot = await child.snapshot()
        assert snapshot.durable
        async with home.pod(snapshot) as later:
            assert await later.read("file") == b"of the child"
        await child.close()
        await home.host.remove_snapshot(snapshot.id)


@check
async def forking_a_pod_while_others_fork_it_too_works(home: Home) -> None:
    async with home.pod() as pod:
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
