"""Conformance: streaming jobs, terminals, and the persistent shell."""

import asyncio
import re
import resource
import signal
import time

from etude.pods.pod import Job, PodError
from tests.pods.conformance import CheckContext, check, raises


async def gather_output(job: Job) -> dict[str, bytes]:
    """Return all output of a job, by stream."""
    found = {"stdout": b"", "stderr": b""}
    async for stream, data in job.output():
        found[stream] += data
    return found


async def read_until(job: Job, pattern: bytes, seconds: float = 60.0) -> bytes:
    """Return a terminal's output up to and including `pattern`. One iterator, kept on the job, reads the output."""
    stream = job.__dict__.setdefault("_conformance_stream", job.output())
    seen = job.__dict__.setdefault("_conformance_seen", bytearray())
    deadline = time.monotonic() + seconds
    while not (found := re.search(pattern, seen)):
        left = deadline - time.monotonic()
        try:
            _, data = await asyncio.wait_for(anext(stream), left)
        except (TimeoutError, StopAsyncIteration) as error:
            raise AssertionError(
                f"{pattern!r} did not come ({type(error).__name__}); so far: {bytes(seen)!r}"
            ) from None
        seen += data
    text = bytes(seen[: found.end()])
    del seen[: found.end()]
    return text


@check
async def a_job_streams_its_output_in_order(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn("echo 1; until [ -e go ]; do sleep 0.02; done; echo 2; echo 3; echo e >&2; exit 5")
        found = {"stdout": b"", "stderr": b""}
        async for stream, data in job.output():
            found[stream] += data
            if found["stdout"] == b"1\n":  # it comes while the job waits for this file
                await pod.exec("touch go")
        assert found == {"stdout": b"1\n2\n3\n", "stderr": b"e\n"}
        assert (await job.wait()).exit_code == 5
        counted = await pod.spawn("i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done")
        lines = (await gather_output(counted))["stdout"].split()
        assert [int(line) for line in lines] == list(range(20000))


@check
async def a_slow_reader_slows_its_job_and_memory_stays_bounded(context: CheckContext) -> None:
    async with context.pod() as pod:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        job = await pod.spawn("head -c 300000000 /dev/zero; echo done > done")
        total = 0
        async for _, data in job.output():
            if total == 0:
                await asyncio.sleep(0.7)
                assert not (await pod.exec("test -e done")).ok  # 300 MB were not buffered
            total += len(data)
        assert total == 300_000_000
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 150_000, f"{grown} KiB"
        assert (await job.wait()).ok
        assert (await pod.exec("echo fine")).stdout == "fine\n"


@check
async def a_job_without_a_reader_runs_to_its_end(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn("head -c 50000000 /dev/zero; exit 6")
        assert (await job.wait(30)).exit_code == 6
        half_read = await pod.spawn("head -c 50000000 /dev/zero; exit 7")
        stream = half_read.output()
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await half_read.wait(30)).exit_code == 7


@check
async def a_wait_timeout_does_not_affect_the_job(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn("sleep 0.5; echo finished")
        with raises(TimeoutError):
            await job.wait(0.05)
        assert (await gather_output(job))["stdout"] == b"finished\n"
        assert (await job.wait()).ok


@check
async def signals_reach_the_jobs_process_group(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn("trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.05; done")
        await read_until(job, b"ready")
        await job.signal(signal.SIGTERM)
        await read_until(job, b"caught")
        assert (await job.wait(10)).exit_code == 9
        hard = await pod.spawn("sleep 600 & sleep 600")
        await hard.signal(signal.SIGKILL)
        assert (await hard.wait(10)).exit_code == 137
        for job_, number in ((hard, 9), (await pod.spawn("sleep 600"), 2**40), (await pod.spawn("sleep 600"), -5)):
            with raises(PodError):
                await job_.signal(number)
        assert (await pod.exec("echo well")).stdout == "well\n"


@check
async def a_job_takes_input_until_stdin_is_closed(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn("while read -r line; do echo got $line; done; echo end")
        await job.write(b"one\n")
        await read_until(job, b"got one\n")
        await job.write(b"two\nthr")
        await read_until(job, b"got two\n")
        await job.write(b"ee\n")
        await read_until(job, b"got three\n")
        await job.close_stdin()
        await read_until(job, b"end\n")
        assert (await job.wait(10)).ok
        with raises(PodError):
            await job.write(b"too late")
        many = await pod.spawn("wc -c")
        await many.write(b"z" * 3_000_000)
        await many.close_stdin()
        assert (await gather_output(many))["stdout"] == b"3000000\n"


@check
async def unread_input_is_not_buffered_without_limit(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn("sleep 600")
        with raises(TimeoutError):
            await asyncio.wait_for(job.write(b"x" * 200_000_000), 1.0)
        if "memory" in context.can.limits:
            assert (await pod.stats())["memory"] < 60 << 20
        assert (await pod.exec("echo fine")).stdout == "fine\n"
        await job.signal(9)
        await job.wait(10)


@check
async def a_jobs_timeout_ends_it(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn("echo begun; sleep 600", timeout=1.0)
        result = await job.wait(10)
        assert result.timed_out
        assert result.exit_code == 137


@check
async def a_job_that_cannot_start_raises(context: CheckContext) -> None:
    async with context.pod() as pod:
        with raises(PodError) as caught:
            await pod.spawn(["no-such-program"])
        assert "no-such-program" in str(caught["error"])
        with raises(PodError):
            await pod.spawn("true", cwd="/no/where")
        with raises(PodError):
            await (await pod.spawn("sleep 600")).resize(10, 10)  # it has no terminal


@check
async def a_terminal_echoes_and_knows_its_size(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn(["sh"], terminal=(33, 101), env={"PS1": "ready> ", "TERM": "dumb"})
        await read_until(job, rb"ready> ")
        await job.write(b"test -t 0 && stty size\n")
        await read_until(job, rb"stty size\r\n.*33 101\r\n")
        await job.resize(12, 47)
        await job.write(b"stty size\n")
        await read_until(job, rb"12 47\r\n")
        await job.write(b"tty; echo x > /dev/tty\n")
        await read_until(job, rb"/dev/pts/\d+\r\nx\r\n")
        await job.write(b"exit 3\n")
        assert (await job.wait(10)).exit_code == 3


@check
async def a_terminal_handles_the_interrupt_and_end_of_input_keys(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn(["sh"], terminal=(24, 80), env={"PS1": "ready> ", "TERM": "dumb"})
        await read_until(job, rb"ready> ")
        await job.write(b"sleep 600; echo interrupted=$?\n")
        await asyncio.sleep(0.2)
        await job.write(b"\x03")
        await job.write(b"\necho alive\n")
        await read_until(job, rb"alive\r\n")
        await job.write(b"cat\n")
        await asyncio.sleep(0.1)
        await job.write(b"line\n")
        await read_until(job, rb"line\r\nline\r\n")
        await job.write(b"\x04")
        await read_until(job, rb"ready> ")
        await job.close_stdin()
        assert (await job.wait(10)).exit_code in (0, 130)


@check
async def a_terminal_handles_large_input_and_output(context: CheckContext) -> None:
    async with context.pod() as pod:
        job = await pod.spawn(["sh", "-c", "stty raw -echo; echo go; head -c 300000 | wc -c"], terminal=(24, 80))
        await read_until(job, rb"go")
        await job.write(b"q" * 300_000)
        await read_until(job, rb"300000")
        flood = await pod.spawn(["head", "-c", "5000000", "/dev/zero"], terminal=(24, 80))
        assert len((await gather_output(flood))["stdout"]) == 5_000_000
        assert (await flood.wait(10)).ok
