"""Conformance: limits, pause, time to live, names, events, the end; and no network unless asked for."""

import asyncio
import time

from etude.errors import InputError
from etude.pods.pod import Egress, Limits, PodError, PodGone, Unsupported
from tests.pods.conformance import Home, Skip, check, eventually, raises

MIB = 1 << 20


@check
async def limits_that_cannot_be_kept_are_refused(home: Home) -> None:
    for name in sorted({"memory", "pids", "cpu", "disk", "inodes"} - home.can.limits):
        with raises(Unsupported) as caught:
            await home.host.create(limits=Limits(**{name: 1 << 28}))  # type: ignore[arg-type]
        assert name in str(caught["error"])
    for name in ("memory", "pids", "cpu", "disk", "inodes"):
        with raises(InputError):
            Limits(**{name: 0})  # type: ignore[arg-type]


@check
async def memory_beyond_the_limit_ends_the_program_and_not_the_pod(home: Home) -> None:
    if "memory" not in home.can.limits:
        raise Skip(f"no limit on memory here: {'; '.join(home.can.notes)}")
    async with home.pod(limits=Limits(memory=96 * MIB)) as pod:
        hog = await pod.exec(["python3", "-c", "x = b'y' * (300 << 20); print(len(x))"], timeout=30)
        assert hog.exit_code != 0
        assert hog.stdout == ""
        # Where the kernel kills it, we are told; where the allocation fails, the program is.
        assert hog.out_of_memory or "MemoryError" in hog.stderr, hog
        assert hog.out_of_memory == any(event.kind == "out-of-memory" for event in pod.events())
        after = await pod.exec("echo alive")
        assert after.stdout == "alive\n"
        assert not after.out_of_memory


@check
async def processes_beyond_the_limit_cannot_be_made(home: Home) -> None:
    if "pids" not in home.can.limits:
        raise Skip(f"no limit on processes here: {'; '.join(home.can.notes)}")
    async with home.pod(limits=Limits(pids=20)) as pod:
        made = await pod.exec("for i in $(seq 40); do sleep 5 & echo $! >> pids; done; echo started", timeout=10)
        assert "started" not in made.stdout or "fork" in made.stderr.lower(), made
        assert (await pod.stats()).get("pids", 0) <= 20

        async def room() -> bool:
            try:
                return (await pod.exec("while read pid; do kill -9 $pid; done < pids", timeout=5)).exit_code in (0, 1)
            except PodError:
                return False

        await eventually(room)
        assert (await pod.exec("echo alive")).stdout == "alive\n"


@check
async def a_share_of_a_core_is_all_a_pod_gets(home: Home) -> None:
    if "cpu" not in home.can.limits:
        raise Skip(f"no limit on processors here: {'; '.join(home.can.notes)}")
    async with home.pod(limits=Limits(cpu=0.2)) as pod:
        result = await pod.exec("while :; do :; done", timeout=1.5)
        used = result.usage.user_s + result.usage.system_s
        assert used < 0.75, used  # 0.3 by the rule, plus what a period allows


@check
async def space_and_files_beyond_the_limit_cannot_be_had(home: Home) -> None:
    if not {"disk", "inodes"} <= home.can.limits:
        raise Skip(f"no limit on space or files here: {'; '.join(home.can.notes)}")
    async with home.pod(limits=Limits(disk=16 * MIB, inodes=500)) as pod:
        full = await pod.exec("dd if=/dev/zero of=big bs=1M count=64; stat -c %s big; rm big")
        assert "No space left" in full.stderr
        assert int(full.stdout) <= 16 * MIB
        many = await pod.exec("mkdir m; for i in $(seq 1000); do touch m/$i || break; done; ls m | wc -l; rm -r m")
        assert int(many.stdout) < 500
        assert (await pod.exec("echo fine > file && cat file")).stdout == "fine\n"
        with raises(PodError):
            await pod.write("big", bytes(20 * MIB))
        await pod.remove("big")
        await pod.write("small", "x")


@check
async def a_paused_pod_answers_nothing_and_loses_nothing(home: Home) -> None:
    async with home.pod() as pod:
        if not home.can.pause:
            with raises(Unsupported):
                await pod.pause()
            return
        job = await pod.spawn("i=0; while [ $i -lt 40 ]; do echo $i; i=$((i+1)); sleep 0.01; done")
        await pod.pause()
        with raises(TimeoutError):
            await asyncio.wait_for(pod.read("/etc/hosts"), 0.3)
        waiting = asyncio.create_task(pod.exec("echo after"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await pod.pause()  # twice is fine
        await pod.resume()
        await pod.resume()
        assert (await waiting).stdout == "after\n"
        lines = b"".join([data async for _, data in job.output()]).split()
        assert [int(line) for line in lines] == list(range(40))
        assert {"paused", "resumed"} <= {event.kind for event in pod.events()}


@check
async def a_paused_pod_can_be_kept_and_closed(home: Home) -> None:
    if not home.can.pause or "fs-live" not in home.can.snapshots:
        raise Skip(f"no pause here: {'; '.join(home.can.notes)}")
    async with home.pod() as pod:
        await pod.exec("echo kept > file")
        await pod.spawn("while :; do date +%N > now; sleep 0.01; done")
        await pod.pause()
        snapshot = await asyncio.wait_for(pod.snapshot(), 10)
        assert snapshot.kind == "fs-live"
        with raises(TimeoutError):
            await asyncio.wait_for(pod.read("file"), 0.3)  # still paused
        async with home.pod(snapshot) as later:
            assert await later.read("file") == b"kept\n"
        await home.host.remove_snapshot(snapshot.id)
        started = time.monotonic()
        await pod.close()
        assert time.monotonic() - started < 3


@check
async def a_pod_ends_when_its_time_is_over(home: Home) -> None:
    pod = await home.host.create(ttl=0.6)
    job = await pod.spawn("sleep 600")
    assert (await pod.exec("echo alive")).ok
    with raises(PodError):
        await job.wait(10)

    async def gone() -> bool:
        return pod.id not in home.host.pods

    await eventually(gone)
    with raises(PodError):
        await pod.exec("true")
    assert any(event.kind == "died" for event in pod.events())
    await pod.close()
    async with home.pod(ttl=10 * 365 * 86400.0) as long:  # longer than a kernel's timer takes at once
        assert (await long.exec("sleep 0.1; echo alive")).ok
    for wrong in (0, -1):
        with raises(InputError):
            await home.host.create(ttl=wrong)


@check
async def time_to_live_counts_for_a_paused_pod_too(home: Home) -> None:
    if not home.can.pause:
        raise Skip(f"no pause here: {'; '.join(home.can.notes)}")
    pod = await home.host.create(ttl=0.5)
    await pod.pause()

    async def gone() -> bool:
        return pod.id not in home.host.pods

    await eventually(gone)


@check
async def a_key_asked_for_twice_gives_the_same_pod(home: Home) -> None:
    one, two = await asyncio.gather(home.host.create(key="k"), home.host.create(key="k"))
    three = await home.host.create(key="k")
    assert one is two is three
    async with home.pod(key="other") as other:
        assert other.id != one.id
    await one.close()
    again = await home.host.create(key="k")
    assert again.id != one.id
    await again.close()


@check
async def events_tell_the_pods_life_in_order(home: Home) -> None:
    pod = await home.host.create()
    await pod.exec("exit 3")
    await pod.exec("sleep 9", timeout=0.1)
    if home.can.snapshots:
        await home.host.remove_snapshot((await pod.snapshot("fs")).id)
    await pod.close()
    kinds = [event.kind for event in pod.events()]
    assert kinds[0] == "created"
    assert kinds[-1] == "closed"
    exits = [event.facts for event in pod.events() if event.kind == "exit"]
    assert [(one["exit_code"], one["timed_out"]) for one in exits[:2]] == [(3, False), (137, True)]
    times = [event.time for event in pod.events()]
    assert times == sorted(times)
    assert ("snapshot" in kinds) == bool(home.can.snapshots)


@check
async def closing_twice_is_fine_and_a_closed_pod_is_gone(home: Home) -> None:
    pod = await home.host.create()
    job = await pod.spawn("sleep 600")
    waiting = asyncio.create_task(pod.exec("sleep 600"))
    await asyncio.sleep(0.1)
    await asyncio.gather(pod.close(), pod.close())
    await pod.close()
    for late in (waiting, job.wait(5), pod.exec("true"), pod.read("x"), pod.spawn("true"), pod.shell(), pod.stats()):
        with raises(PodGone):
            await late
    for late in (pod.fork(), pod.snapshot()):
        with raises(PodGone):
            await late


@check
async def stats_say_what_is_in_use(home: Home) -> None:
    async with home.pod() as pod:
        await pod.exec("dd if=/dev/zero of=file bs=1M count=10 2>&-; sleep 30 &")
        stats = await pod.stats()
        if "memory" in home.can.limits:
            assert stats["memory"] > 10 * MIB
        if "pids" in home.can.limits:
            assert stats["pids"] >= 2


@check
async def a_pod_reaches_nothing_by_default(home: Home) -> None:
    if home.can.isolation == "none":
        raise Skip(f"nothing is isolated here: {'; '.join(home.can.notes)}")
    async with home.pod() as pod:
        script = (
            "import socket\n"
            "for kind, address in ((socket.AF_INET, ('127.0.0.1', PORT)), (socket.AF_INET, ('1.1.1.1', 443)),\n"
            "                      (socket.AF_INET6, ('::1', PORT))):\n"
            "    try:\n"
            "        with socket.socket(kind) as s: s.settimeout(1); s.connect(address); print('reached', address)\n"
            "    except OSError as error: print('refused')\n"
        )
        server = await asyncio.start_server(lambda _, writer: writer.close(), ["127.0.0.1", "::1"], 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            result = await pod.exec(["python3", "-c", script.replace("PORT", str(port))], timeout=20)
        if result.exit_code == 127:
            raise Skip("no python3 in the pod")
        assert result.stdout == "refused\n" * 3, result


@check
async def egress_that_cannot_be_had_is_refused(home: Home) -> None:
    for transparent, name in ((False, "proxy"), (True, "transparent")):
        if name not in home.can.egress:
            with raises(Unsupported):
                await home.host.create(egress=Egress.to("example.org", transparent=transparent))
        else:
            async with home.pod(egress=Egress.to("example.org", transparent=transparent)) as pod:
                assert (await pod.exec("echo fine")).ok
                (child,) = await pod.fork() if home.can.snapshots else (None,)
                if child is not None:
                    assert child.egress == pod.egress
                    await child.close()


@check
async def an_image_that_is_not_there_is_named(home: Home) -> None:
    with raises(InputError) as caught:
        await home.host.create("no-such-image")
    assert "no-such-image" in str(caught["error"])


@check
async def two_pods_do_not_see_each_other(home: Home) -> None:
    if home.can.isolation == "none":
        raise Skip(f"nothing is isolated here: {'; '.join(home.can.notes)}")
    async with home.pod() as one, home.pod() as other:
        await one.write("mine", "secret")
        job = await one.spawn("exec sleep 617")
        assert (await other.exec("ls .")).stdout == ""
        if home.own_root:
            await one.write("/tmp/mine", "secret")
            assert (await other.exec("ls /tmp")).stdout == ""
        else:
            with raises(PodError):
                await other.read(f"{one.workdir}/mine")
            assert not (await other.exec(["cat", f"{one.workdir}/mine"])).ok
        assert "617" not in (await other.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
        await job.signal(9)


@check
async def a_refused_pod_leaves_nothing(home: Home) -> None:
    before = {path.name for path in (home.host.state / "pods").iterdir()}
    if "disk" in home.can.limits:
        with raises(PodError, InputError):
            await home.host.create(storage="disk", limits=Limits(disk=MIB))
    cancelled = [asyncio.create_task(home.host.create()) for _ in range(4)]
    await asyncio.sleep(0.004)
    for task in cancelled:
        task.cancel()
    for made in await asyncio.gather(*cancelled, return_exceptions=True):
        if not isinstance(made, BaseException):
            await made.close()

    async def clean() -> bool:
        return {path.name for path in (home.host.state / "pods").iterdir()} == before

    await eventually(clean)
