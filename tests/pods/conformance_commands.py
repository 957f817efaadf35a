"""Conformance: commands run by `exec`."""

import asyncio
import hashlib
import os

from etude.pods.pod import PodError, PodFileError, Unsupported
from tests.pods.conformance import CheckContext, Skip, check, eventually, raises


@check
async def a_list_is_an_argv_and_a_string_runs_in_a_shell(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert (await pod.exec(["printf", "%s|", "a b", "$HOME", "*"])).stdout == "a b|$HOME|*|"
        assert (await pod.exec("echo $((1 + 1)) && echo err >&2")).stdout == "2\n"
        for wrong in ([], [1, 2]):
            with raises(PodError):
                await pod.exec(wrong)  # type: ignore[arg-type]


@check
async def stdout_stderr_and_exit_code_are_returned_separately(context: CheckContext) -> None:
    async with context.pod() as pod:
        result = await pod.exec("echo out; echo err >&2; exit 7")
        assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
        assert not result.ok
        assert not result.timed_out
        assert not result.truncated
        assert (await pod.exec("true")).ok


@check
async def a_command_killed_by_a_signal_has_128_plus_its_number(context: CheckContext) -> None:
    async with context.pod() as pod:
        for number in (9, 11, 15):
            assert (await pod.exec(f"kill -{number} $$")).exit_code == 128 + number


@check
async def a_missing_program_exits_127_and_a_non_executable_one_126(context: CheckContext) -> None:
    async with context.pod() as pod:
        missing = await pod.exec(["no-such-program"])
        assert missing.exit_code == 127
        assert "no-such-program" in missing.stderr
        assert (await pod.exec(["./no-such-file"])).exit_code == 127
        assert (await pod.exec(["no-such-program"], stdin=b"x" * (1 << 20))).exit_code == 127
        await pod.write("plain", "not a program")
        assert (await pod.exec(["./plain"])).exit_code == 126
        await pod.write("broken", b"\x7fELF nothing", mode=0o755)
        assert (await pod.exec(["./broken"])).exit_code == 126
        assert (await pod.exec(["."])).exit_code == 126
        assert (await pod.exec("nothing-of-this-name")).exit_code == 127


@check
async def a_command_runs_in_its_cwd_and_a_missing_cwd_is_an_error(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert (await pod.exec("pwd")).stdout.strip() == pod.workdir
        await pod.make_directory("below/this one")
        assert (await pod.exec("pwd", cwd="below/this one")).stdout == f"{pod.workdir}/below/this one\n"
        assert (await pod.exec("pwd", cwd="/")).stdout == "/\n"
        for missing in ("nowhere", "/no/where"):
            with raises(PodFileError) as caught:
                await pod.exec("pwd", cwd=missing)
            assert missing in str(caught["error"])
        assert (await pod.exec("echo > mark")).ok  # the working directory is writable


@check
async def variables_are_added_to_those_of_the_image(context: CheckContext) -> None:
    async with context.pod() as pod:
        result = await pod.exec('printf "%s|" "$A" "$B" "${PATH:+path}"', env={"A": "1 2", "B": "x=y\nz"})
        assert result.stdout == "1 2|x=y\nz|path|"
        assert (await pod.exec('echo "$PATH"', env={"PATH": "/bin:/usr/bin:/mine"})).stdout == "/bin:/usr/bin:/mine\n"
        with raises(PodError):
            await pod.exec("true", env={"A": "a\0b"})


@check
async def a_command_inherits_no_variable_of_the_service(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert "ETUDE_CONFORMANCE_SECRET" in os.environ
        names = {line.split("=")[0] for line in (await pod.exec(["env"])).stdout.splitlines()}
        expected = {"PATH", "LANG", "HOME", "PWD", "SHLVL", "_", "TMPDIR", "USER", "LOGNAME", "GIT_CONFIG_NOSYSTEM"}
        assert names <= expected, names


@check
async def stdin_is_passed_whole_and_then_closed(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert (await pod.exec(["cat"])).stdout == ""
        assert (await pod.exec(["cat"], stdin=b"one\ntwo\x00\xff")).stdout_bytes == b"one\ntwo\x00\xff"
        large = bytes(range(256)) * (5 << 12)  # 5 MB
        result = await pod.exec(["sha256sum"], stdin=large)
        assert result.stdout.split()[0] == hashlib.sha256(large).hexdigest()
        echoed = await pod.exec(["cat"], stdin=large, max_output=len(large))
        assert echoed.stdout_bytes == large
        assert (await pod.exec(["head", "-c", "3"], stdin=large)).stdout_bytes == large[:3]  # the rest is discarded
        assert (await pod.exec("exec <&-; sleep 0.05; echo fine", stdin=large)).stdout == "fine\n"


@check
async def a_timeout_kills_the_whole_process_group_at_once(context: CheckContext) -> None:
    async with context.pod() as pod:
        result = await pod.exec("echo before; echo $$ > pids; sleep 600 & echo $! >> pids; sleep 600", timeout=1.0)
        assert result.timed_out
        assert not result.ok
        assert result.exit_code == 137
        assert result.stdout == "before\n"
        look = "for pid in $(cat pids); do kill -0 $pid 2>&- && echo $pid; done; wc -l < pids"

        async def all_killed() -> bool:  # they may not yet have been waited for
            return (await pod.exec(look)).stdout == "2\n"

        await eventually(all_killed)
        assert not (await pod.exec("sleep 0.05", timeout=30)).timed_out
        ignoring = await pod.exec("trap '' TERM INT HUP; while :; do sleep 0.1; done", timeout=0.2)
        assert ignoring.timed_out
        assert (await pod.exec("cat > got; wc -c < got", stdin=b"x" * (1 << 20), timeout=20)).stdout == "1048576\n"
        slow = await pod.exec("sleep 600", stdin=b"x" * (1 << 20), timeout=0.2)
        assert slow.timed_out


@check
async def a_timeout_of_years_is_accepted(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert (await pod.exec("echo a", timeout=10 * 365 * 86400)).stdout == "a\n"
        job = await pod.spawn("sleep 0.2; echo b", timeout=10 * 365 * 86400)
        assert (await job.wait(10)).ok
        assert (await pod.exec("echo c")).stdout == "c\n"


@check
async def each_stream_is_truncated_at_its_limit(context: CheckContext) -> None:
    async with context.pod() as pod:
        result = await pod.exec("printf 0123456789; printf abc >&2", max_output=4)
        assert (result.stdout, result.stderr, result.truncated) == ("0123", "abc", True)
        exact = await pod.exec("printf 0123", max_output=4)
        assert (exact.stdout, exact.truncated) == ("0123", False)
        flood = await pod.exec("head -c 30000000 /dev/zero; head -c 30000000 /dev/zero >&2; exit 3")
        assert (len(flood.stdout_bytes), len(flood.stderr_bytes)) == (1 << 20, 1 << 20)
        assert flood.truncated
        assert flood.exit_code == 3
        both = await pod.exec("head -c 3000000 /dev/zero", max_output=3_000_000)
        assert len(both.stdout_bytes) == 3_000_000
        assert not both.truncated
        large = await pod.exec("cat; printf rest", stdin=b"x" * (1 << 20), max_output=10)
        assert (large.stdout, large.truncated) == ("x" * 10, True)


@check
async def bytes_that_are_not_utf8_are_returned_unchanged(context: CheckContext) -> None:
    async with context.pod() as pod:
        result = await pod.exec(r"printf '\377\376a\000b'")
        assert result.stdout_bytes == b"\xff\xfea\x00b"
        assert result.stdout == "\ufffd\ufffda\x00b"
        odd = "caf\udce9 \u00e9\u4e2d"  # an argument with a byte that is no UTF-8
        assert (await pod.exec(["printf", "%s", odd])).stdout_bytes == odd.encode("utf-8", "surrogateescape")


@check
async def a_command_does_not_wait_for_its_background_processes(context: CheckContext) -> None:
    async with context.pod() as pod:
        result = await pod.exec("(until [ -e go ]; do sleep 0.05; done; echo late > late; sleep 600) & echo now")
        assert result.stdout == "now\n"
        await pod.exec("touch go")
        noisy = await pod.exec("(while :; do echo noise; done) & echo $! > noise; sleep 0.05; exit 4")
        assert noisy.exit_code == 4

        async def late() -> bool:
            return (await pod.exec("cat late")).stdout == "late\n"

        await eventually(late)  # and it runs on
        await pod.exec("kill -9 $(cat noise)")


@check
async def a_command_may_run_as_another_user_of_the_pod(context: CheckContext) -> None:
    async with context.pod() as pod:
        if not context.can.users:
            with raises(Unsupported) as refused:
                await pod.exec("id -u", user="daemon")
            assert "'daemon'" in str(refused["error"])
            if context.can.isolation == "namespace":  # its only user is root
                assert (await pod.exec("id -u; id -g", user="root")).stdout == "0\n0\n"
            return
        assert (await pod.exec("id -u; id -g", user="daemon")).stdout == "1\n1\n"
        assert (await pod.exec("id -u; id -g", user="1234")).stdout == "1234\n1234\n"
        assert (await pod.exec("id -u; id -g", user="1234:56")).stdout == "1234\n56\n"
        assert (await pod.exec("id -un", user="nobody", stdin=b"x" * (1 << 20))).stdout == "nobody\n"
        assert not (await pod.exec("echo > /root/x", user="nobody")).ok
        with raises(PodFileError) as caught:
            await pod.exec("id", user="no-such-user")
        assert "no-such-user" in str(caught["error"])


@check
async def fifty_concurrent_commands_each_get_their_own_result(context: CheckContext) -> None:
    async with context.pod() as pod:
        commands = (pod.exec(f"sleep 0.0{n % 10}; echo out-{n}; echo err-{n} >&2; exit {n}") for n in range(50))
        for n, result in enumerate(await asyncio.gather(*commands)):
            assert (result.exit_code, result.stdout, result.stderr) == (n, f"out-{n}\n", f"err-{n}\n")


@check
async def a_cancelled_command_is_killed(context: CheckContext) -> None:
    async with context.pod() as pod:
        for size in (0, 1 << 20):
            task = asyncio.create_task(pod.exec("echo $$ > pid; exec sleep 611", stdin=b"x" * size))

            async def started() -> bool:
                return (await pod.exec("test -s pid")).ok

            await eventually(started)
            task.cancel()
            with raises(asyncio.CancelledError):
                await task

            async def gone() -> bool:
                return (await pod.exec("kill -0 $(cat pid)")).exit_code != 0

            await eventually(gone)
            await pod.remove("pid")


@check
async def a_command_reports_its_resource_usage(context: CheckContext) -> None:
    async with context.pod() as pod:
        usage = (await pod.exec("i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; sleep 0.1")).usage
        assert usage.wall_s >= 0.1
        assert usage.user_s > 0.005
        assert 100_000 < usage.max_rss < 1 << 30


@check
async def a_command_has_no_terminal_and_a_session_of_its_own(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert (await pod.exec("test -t 0 || test -t 1 || test -t 2")).exit_code == 1
        assert not (await pod.exec("echo x > /dev/tty")).ok
        result = await pod.exec(["python3", "-c", "import os; print(os.getsid(0) == os.getpid())"])
        if result.exit_code == 127:
            raise Skip("no python3 in the pod")
        assert result.stdout == "True\n"


@check
async def a_command_inherits_only_the_standard_descriptors(context: CheckContext) -> None:
    async with context.pod() as pod:
        listed = await pod.exec(["ls", "/proc/self/fd"])
        assert set(listed.stdout.split()) <= {"0", "1", "2", "3"}, listed.stdout  # 3 is ls reading the directory


@check
async def arguments_up_to_the_kernel_limit_arrive_and_larger_ones_are_refused(context: CheckContext) -> None:
    async with context.pod() as pod:
        assert (await pod.exec(["printf", "%s", "x" * 100_000])).stdout == "x" * 100_000
        many = ["printf", "%.0s", *(["y" * 1000] * 500)]
        assert (await pod.exec(many)).ok
        assert (await pod.exec(["printf", "%s", "x" * 200_000])).exit_code == 126
        with raises(PodError):
            await pod.exec(["printf", "%s", "x" * (2 << 20)])
        assert (await pod.exec("echo still here")).ok
