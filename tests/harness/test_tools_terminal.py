"""The terminal in a real pod: shell state, jobs, large output, time limits and background processes."""

import asyncio

import pytest
from harness_pods import PodFixture, PodTools, shared_pod_fixture

from etude.harness.tool_set import ToolSet
from etude.harness.toolserver.inside import output


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> PodFixture:
    return shared_pod_fixture(request.config)


async def run(tools: PodTools, command: str, **options: object) -> str:
    return await tools.text("run_terminal_cmd", command=command, **options)


def test_output_comes_as_on_a_terminal_with_the_exit_code(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await run(tools, "echo one; echo two >&2; echo three") == "one\ntwo\nthree\n[exit code 0]"
        assert await run(tools, "true") == "[exit code 0, no output]"
        assert await run(tools, "printf x; exit 7") == "x\n[exit code 7]"
        assert await run(tools, "kill -SEGV $$") == "[exit code 139, SIGSEGV, no output]"
        assert "nosuch: command not found\n[exit code 127]" in await run(tools, "\nnosuch")
        assert "line 2" in await run(tools, "true\nnosuch")
        assert "syntax error" in await run(tools, "if true; then")
        assert await run(tools, "cat; read x; echo done") == "done\n[exit code 0]"  # there is no input
        outcome = await tools.call("run_terminal_cmd", command="exit 3")
        assert outcome.facts["exit_code"] == 3
        assert outcome.error is None
        assert await run(tools, 'echo \'a  b\' "$HOME" | cat; echo "it\'s"') == await run(
            tools, 'echo \'a  b\' "$HOME" | cat; echo "it\'s"'
        )

    pods.run(check)


def test_the_shell_keeps_its_state_between_commands(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await run(tools, "mkdir -p 'a b/c'")
        assert await run(tools, "cd 'a b/c'") == "[exit code 0, no output]\n[the shell is now in a b/c]"
        assert (
            await run(tools, "pwd; cd -") == f"{tools.root}/a b/c\n{tools.root}\n[exit code 0]\n[the shell is now in .]"
        )
        await run(tools, "export X='1 2' && y=3 && arr=(p 'q r') && declare -A map=([k]=v) && declare -ri n=4")
        await run(tools, "f() { echo \"f: $1\"; }; export -f f; alias hi='echo hello'; umask 027; shopt -s globstar")
        assert await run(tools, 'echo "$X|$y|${arr[1]}|${map[k]}|$n"; f z; hi; umask; shopt globstar | cut -f2') == (
            "1 2|3|q r|v|4\nf: z\nhello\n0027\non\n[exit code 0]"
        )
        assert await run(tools, "bash -c 'echo $X$y; f w'") == "1 2\nf: w\n[exit code 0]"
        await run(tools, "unset X y TZ; unalias hi; nl=$'a\\nb\"$`'; set -f")
        assert await run(tools, 'echo "${X-none}${y-none}${TZ-none} *"; echo "$nl"; echo *') == (
            'nonenonenone *\na\nb"$`\n*\n[exit code 0]'
        )
        assert "readonly" in await run(tools, "n=5")

    pods.run(check)


def test_exit_ends_only_its_command(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await run(tools, "set -euo pipefail; v=1; false; echo never") == "[exit code 1, no output]"
        assert await run(tools, 'echo "$v ${undefined}"; false; echo after') == "1 \nafter\n[exit code 0]"
        await run(tools, "v=2; exit 5")
        await run(tools, "v=3; kill -9 $$")
        assert await run(tools, "echo $v") == "2\n[exit code 0]"  # what was killed left nothing
        await run(tools, "exec sleep 0")
        await run(tools, "trap 'echo bye' EXIT; w=1")
        assert await run(tools, "echo $w") == "1\n[exit code 0]"
        await run(tools, "set -x; w=2")
        assert await run(tools, "echo $w") == "2\n[exit code 0]"
        await run(tools, "mkdir gone && cd gone")
        await run(tools, f"rmdir {tools.root}/gone")
        assert await run(tools, "pwd") == f"{tools.root}\n[exit code 0]"
        await run(tools, "alias eval=false exit=false set=false declare=false; declare() { false; }; set -o noglob")
        assert await run(tools, "q=5; echo ok") == "ok\n[exit code 0]"
        assert await run(tools, "unalias -a; unset -f declare; echo $q") == "5\n[exit code 0]"
        await run(tools, "IFS=x; BASH_ENV=/nonexistent; export BASH_ENV PATH=$PATH:/x")
        assert await run(tools, "echo ok") == "ok\n[exit code 0]"

    pods.run(check)


def test_commands_run_without_pager_and_colour_in_a_fixed_locale_and_time_zone(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        names = "PAGER GIT_PAGER PIP_PROGRESS_BAR TQDM_DISABLE TERM TZ"
        said = await run(tools, f"for n in {names}; do echo $n=${{!n}}; done")
        assert said.split("\n")[:-1] == [
            *("PAGER=cat", "GIT_PAGER=cat", "PIP_PROGRESS_BAR=off", "TQDM_DISABLE=1", "TERM=dumb", "TZ=UTC"),
        ]
        assert (await run(tools, "python3 -c \"print('é€文')\"")).startswith("é€文")
        assert await run(tools, "export TZ=Asia/Tokyo; date -d @0 +%H") == "09\n[exit code 0]"
        assert await run(tools, "date -d @0 +%H") == "09\n[exit code 0]"
        signals = "import signal; print(signal.getsignal(2), signal.pthread_sigmask(0, []))"
        assert "default_int_handler" in await run(tools, f"python3 -c '{signals}' | grep 'set()'")
        assert "__etude" not in await run(tools, "env")
        program = "import sys; print(1); print(2, file=sys.stderr); print(3)"
        assert await run(tools, f"python3 -c '{program}'") == "1\n2\n3\n[exit code 0]"

    pods.run(check)


def test_long_output_keeps_its_ends_and_the_log_has_all_of_it(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        outcome = await tools.call("run_terminal_cmd", command="seq 1 100000")
        text = outcome.text
        assert text.startswith("1\n2\n3\n")
        assert text.endswith("99999\n100000\n[exit code 0]")
        assert f"left out; the whole output is in {outcome.facts['log']} ...]" in text
        assert 15_000 < len(text) < 15_300
        assert (await tools.sh(f"wc -l < {outcome.facts['log']}")).strip() == "100000"
        assert "1|1\n2|2" in await tools.text("read_file", target_file=outcome.facts["log"], limit=2)
        text = await run(tools, "python3 -c \"print('€' * 200_000)\"")
        assert "\ufffd" not in text
        assert 15_000 < len(text) < 15_300
        assert await run(tools, "seq 1 2000 | tr '\\n' ' '") == " ".join(map(str, range(1, 2001))) + " \n[exit code 0]"

    pods.run(check)


def test_control_sequences_and_progress_bars_are_not_shown(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await run(tools, r"printf '\033[31mred\033[0m \033]0;title\007ok\n'") == "red ok\n[exit code 0]"
        assert await run(tools, r"for i in 1 2 3; do printf '\r%s%%' $i; done; printf '\ndone\r\n'") == (
            "3%\ndone\n[exit code 0]"
        )
        assert await run(tools, r"printf 'a\x00\x07b\xff\n'") == "ab\ufffd\n[exit code 0]"

    pods.run(check)


def test_a_flood_is_bounded_and_the_next_command_is_served(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        outcome = await tools.call(
            "run_terminal_cmd",
            command="echo first; timeout 0.5 yes; head -c 70000000 /dev/zero | tr '\\0' x; echo; echo last",
        )
        assert outcome.text.startswith("first\ny\ny\n")
        assert outcome.text.endswith("last\n[exit code 0]")
        assert len(outcome.text) < 16_000
        assert int(await tools.sh(f"stat -c %s {outcome.facts['log']}")) < 65 << 20
        assert await run(tools, "echo fine") == "fine\n[exit code 0]"

    pods.run(check)


def test_a_long_command_continues_as_a_job(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        text = await run(tools, "echo begun; sleep 0.6; echo ready; sleep 0.6; echo over; exit 4", block_until_ms=200)
        log = "1.log"
        assert text.startswith("begun\n[running in the background as job 1; its output goes to ")
        assert f"{log}. Wait with await, end it with kill.]" in text
        assert await run(tools, "echo the shell is free") == "the shell is free\n[exit code 0]"
        assert await tools.text("await", job_id="1", pattern="^rea.y$") == (
            "ready\n[the pattern was found; job 1 is still running]"
        )
        assert await tools.text("await", job_id="1", block_until_ms=0) == "[job 1 is still running]"
        assert await tools.text("await", job_id="1") == "over\n[exit code 4]"
        assert await tools.text("await", job_id="1") == "[exit code 4, no new output]"
        assert "there is no job '9'; jobs 1 to 2 have been started" in await tools.error(
            "environment", "await", job_id="9"
        )
        text = await run(tools, "cd /; v=changed; sleep 0.3", is_background=True)
        assert text.startswith("[running in the background as job 3;")
        await tools.text("await", job_id="3")
        assert await run(tools, "pwd; echo ${v-unchanged}") == f"{tools.root}\nunchanged\n[exit code 0]"

    pods.run(check)


def test_a_job_is_killed_with_all_its_processes(pods: PodFixture) -> None:
    if pods.backend == "landlock":
        pytest.skip("processes cannot be seen there")

    async def check(tools: PodTools) -> None:
        stubborn = "trap '' TERM; (trap '' TERM; sleep 321 & wait) & set -m; sleep 321 & echo ready; wait"
        await run(tools, stubborn, is_background=True)
        await tools.text("await", job_id="1", pattern="ready")
        assert await tools.text("kill", job_id="1") == "[ended on request; exit code 137, SIGKILL]"
        assert await processes(tools, "sleep 321") == 0
        assert "exit code 137" in await tools.text("kill", job_id="1")
        await run(tools, "sleep 322 & echo started")
        assert await processes(tools, "sleep 322") == 1
        assert "exit code 0" in await tools.text("kill", job_id="2")  # what it left running
        assert await processes(tools, "sleep 322") == 0

    pods.run(check)


async def processes(tools: PodTools, command: str) -> int:
    """Return how many processes have this command line."""
    program = (
        "import glob; print(sum(open(p, 'rb').read().replace(b'\\0', b' ').strip() == b'" + command + "' "
        "for p in glob.glob('/proc/[0-9]*/cmdline')))"
    )
    return int(await tools.sh(f'python3 -c "{program}" 2>/dev/null || echo 0'))


def test_a_command_is_killed_at_its_time_limit_in_foreground_and_background(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        outcome = await tools.call("run_terminal_cmd", command="echo begun; sleep 123 & sleep 124")
        assert outcome.error == "timeout"
        assert outcome.text.startswith("begun\n[killed: it ran longer than 2.5 seconds; exit code")
        assert await processes(tools, "sleep 123") == 0
        await run(tools, "sleep 125", block_until_ms=0)
        outcome = await tools.call("await", job_id="2")
        assert outcome.error == "timeout"
        assert await run(tools, "echo fine") == "fine\n[exit code 0]"

    pods.run(check, tool_set=ToolSet(command_timeout_s=2.5))


def test_background_processes_do_not_delay_the_result_and_keep_running(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        command = "(until [ -e go ]; do sleep 0.05; done; echo tick; echo lived > proof) & echo started"
        assert await run(tools, command) == "started\n[exit code 0]"
        await run(tools, "nohup sleep 77 >/dev/null 2>&1 & disown; setsid sleep 78 & true")
        assert not (await tools.pod.exec(f"test -e {tools.root}/go")).ok, "it would have waited for this"
        await tools.executor.stop_server()  # nor does the end of the session end them
        await tools.pod.exec(f"touch {tools.root}/go")
        for _ in range(1000):
            if (await tools.pod.exec(f"test -s {tools.root}/proof")).ok:
                break
            await asyncio.sleep(0.05)
        assert await tools.read("proof") == b"lived\n"
        assert "tick" in await tools.text("await", job_id="1")

    pods.run(check)


def test_a_runaway_await_pattern_uses_only_its_own_time(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await run(tools, "printf '%s!\\n' $(printf 'a%.0s' {1..60}); sleep 600", block_until_ms=200)
        slow = tools.make_call("await", job_id="1", pattern="(a+)+$", block_until_ms=600_000)
        waiting = asyncio.create_task(tools.executor.run([slow]))
        await run(tools, "echo again", is_background=True)
        assert (await tools.text("await", job_id="2", pattern="again")).startswith("again\n")
        assert not waiting.done()
        waiting.cancel()
        pattern = {"pattern": "(a+)+$", "block_until_ms": 500}
        assert await tools.text("await", job_id="1", **pattern) == "[job 1 is still running]"
        assert "regular expression" in await tools.error("bad_arguments", "await", job_id="1", pattern="(")
        await tools.text("kill", job_id="1")

    pods.run(check)


def test_a_long_command_and_odd_characters_arrive_as_they_are(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await run(tools, "cat <<'END' | wc -c\n" + "x" * 300_000 + "\nEND\n") == "300001\n[exit code 0]"
        assert await run(tools, '# a comment\necho "tab\there" \'q"uote\' \\\n  joined # end') == (
            'tab\there q"uote joined\n[exit code 0]'
        )
        assert await run(tools, "cat <<EOF\né $((1+1)) 文\nEOF") == "é 2 文\n[exit code 0]"
        assert "NUL" in await tools.error("bad_arguments", "run_terminal_cmd", command="echo a\0b")

    pods.run(check)


def test_an_interrupted_command_ends_and_the_shell_keeps_working(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        calls = [
            tools.make_call("run_terminal_cmd", command="sleep 99"),
            tools.make_call("run_terminal_cmd", command="touch no"),
        ]
        running = asyncio.create_task(tools.executor.run(calls))
        await asyncio.sleep(0.3)
        tools.executor.interrupt()
        outcomes = await running
        assert [outcome.error for outcome in outcomes] == ["aborted", "aborted"]
        for _ in range(1000):
            if not await processes(tools, "sleep 99"):
                break
            await asyncio.sleep(0.05)
        assert await processes(tools, "sleep 99") == 0
        assert await run(tools, "ls") == "[exit code 0, no output]"
        running = asyncio.create_task(tools.executor.run(calls[:1]))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await run(tools, "echo on") == "on\n[exit code 0]"

    pods.run(check)


@pytest.mark.slow
def test_a_fork_bomb_and_memory_hog_leave_a_usable_terminal(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        outcome = await tools.call("run_terminal_cmd", command="python3 -c 'x = bytearray(8 << 30)'; echo code $?")
        assert "code" in outcome.text
        await tools.call(
            "run_terminal_cmd", command="for i in $(seq 700); do sleep 2 & done 2>/dev/null", block_until_ms=4000
        )
        for _ in range(100):
            outcome = await tools.call("run_terminal_cmd", command="echo alive")
            if outcome.error is None and "alive" in outcome.text:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(outcome.text)

    if pods.backend != "namespace":
        pytest.skip("only there are processes surely limited")
    pods.run(check)


def test_a_window_of_bytes_never_shows_half_a_character() -> None:
    data = "aé€𝄞文".encode()
    for start in range(len(data)):
        for end in range(start, len(data) + 1):
            assert "\ufffd" not in output._decode(data[start:end])
    assert output._decode(b"a\xffb") == "a\ufffdb"
