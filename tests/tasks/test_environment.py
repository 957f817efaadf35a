"""A task's environment in a pod: how it is made, and the changes it reports."""

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from etude.errors import InputError
from etude.pods import Fleet, open_fleet
from etude.pods.pod import Egress, Pod, PodFileError, PodGone, Unsupported
from etude.pods.workspace import FileChange, FileState, apply_to_pod
from etude.tasks import base_images
from etude.tasks.base_images import HostSettings, mapped_image, short_image_name
from etude.tasks.environment import (
    EnvironmentCheckpoint,
    EnvironmentCheckpointLost,
    PreparedEnvironments,
    TaskEnvironment,
    open_environment,
)
from etude.tasks.harbor import write_task
from etude.tasks.image import BuildFailed, pod_limits
from etude.tasks.task import MachineSpec, Task
from tests.pods.serving import server, settings_of

CONFIG = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'


def make_task(directory: Path, dockerfile: str, config: str = CONFIG, **context: str | bytes) -> Task:
    files: dict[str, str | bytes] = {
        "task.toml": config,
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": "#!/bin/sh\n",
        **{f"environment/{name}": data for name, data in context.items()},
    }
    return write_task(directory, files)


def in_environment(task: Task, act: Callable[[TaskEnvironment], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def go() -> None:
        async with open_fleet() as fleet, open_environment(fleet, task, **options) as environment:
            await act(environment)

    asyncio.run(go())


def test_storage_above_the_memory_of_a_task_is_limited(tmp_path: Path) -> None:
    config = CONFIG + "memory_mb = 64\nstorage_mb = 96\n"
    task = make_task(tmp_path, "FROM host\nWORKDIR /work\nCOPY a a\n", config, a="x")

    async def act(environment: TaskEnvironment) -> None:
        assert environment.pod.limits.disk == 96 << 20
        fill = "dd if=/dev/zero of=big bs=1M count=288; stat -c %s big; rm big; sleep 1"
        assert environment.fleet.local is not None
        if environment.fleet.local.backend.capabilities.disk_limits == "soft":
            with pytest.raises(PodGone, match="its limits are"):
                await environment.pod.exec(fill, cwd="/work", timeout=60)
            return
        result = await environment.pod.exec(fill, cwd="/work", timeout=60)
        assert "No space left" in result.stderr
        assert 80 << 20 < int(result.stdout) <= 96 << 20
        await environment.pod.write("/work/a", "y")
        assert [change.path for change in await environment.changes()] == ["a"]

    in_environment(task, act)


def test_storage_that_fits_into_memory_is_in_memory(tmp_path: Path) -> None:
    sizes = [(None, None), (None, 512), (None, 4096), (64, 64), (64, 65)]
    found = [pod_limits(MachineSpec(memory_mb=memory, storage_mb=storage)) for memory, storage in sizes]
    assert [storage for _, storage in found] == ["memory", "memory", "disk", "memory", "disk"]
    assert [limits.disk for limits, _ in found] == [None, 512 << 20, 4096 << 20, 64 << 20, 65 << 20]


DELETIONS = {
    "contents": "rm -rf /srv/a/w/* /srv/a/w/.hidden",
    "workspace": "rm -rf /srv/a/w",
    "made again": "rm -rf /srv/a/w && mkdir /srv/a/w",
    "parent": "cd / && rm -rf /srv/a",
    "parent made again": "cd / && rm -rf /srv/a && mkdir -p /srv/a/w",
    "a file instead": "rm -rf /srv/a/w && echo x > /srv/a/w",
    "a link to nothing": "rm -rf /srv/a/w && mkdir /empty && ln -s /empty /srv/a/w",
    "parent is a link": "cd / && rm -rf /srv/a && mkdir -p /empty/w && ln -s /empty /srv/a",
}


@pytest.mark.parametrize("way", DELETIONS)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_deleted_workspace_is_a_change_that_the_verifier_sees(tmp_path: Path, way: str, prepared: bool) -> None:
    dockerfile = "FROM host\nWORKDIR /srv/a/w\nRUN echo x > built\nCOPY repo/ ./\n"
    files = {"repo/a": "x", "repo/sub/b": "y", "repo/.hidden": "z"}
    task = make_task(tmp_path / "task", dockerfile, **files)

    async def go() -> None:
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(open_fleet())
            options: dict[str, Any] = {}
            if prepared:
                options["prepared"] = await stack.enter_async_context(PreparedEnvironments(fleet))
            environment = await stack.enter_async_context(open_environment(fleet, task, **options))
            done = await environment.pod.exec(DELETIONS[way], cwd="/")
            assert done.ok, done
            changes = await environment.changes()
            assert {change.path: change.after for change in changes} == dict.fromkeys(
                [".hidden", "a", "built", "sub/b"]
            )
            async with environment.open_clean() as clean:
                await apply_to_pod(clean.pod, clean.workspace, changes)
                assert (await clean.pod.exec("find . -type f", cwd=clean.workspace)).stdout == ""

    asyncio.run(go())


def test_files_deleted_before_a_checkpoint_stay_deleted_when_their_directory_is_made_again(tmp_path: Path) -> None:
    files = {"repo/sub/a": "x", "repo/sub/b": "y"}
    task = make_task(tmp_path / "task", "FROM host\nWORKDIR /srv/w\nRUN true\nCOPY repo/ ./\n", **files)

    async def go() -> None:
        async with open_fleet() as fleet, PreparedEnvironments(fleet) as prepared:
            for removed in ("/srv/w", "/srv/w/sub"):
                async with open_environment(fleet, task, prepared=prepared) as environment:
                    await environment.pod.exec(["rm", "-rf", removed], cwd="/")
                    checkpoint = await environment.checkpoint()
                async with open_environment(fleet, task, checkpoint=checkpoint) as environment:
                    await environment.pod.exec("mkdir -p /srv/w/sub; echo -n x > /srv/w/sub/a", cwd="/")
                    assert {change.path: change.after for change in await environment.changes()} == {"sub/b": None}
                await fleet.remove_snapshot(checkpoint.snapshot.id)

    asyncio.run(go())


PLAIN = """
ARG WHERE=/work
FROM host
ARG WHERE
ENV GREETING="hello there" \\
    OTHER=x
WORKDIR $WHERE
COPY repo/ ./
COPY --chmod=755 tool.sh extra.txt bin/
COPY notes.txt renamed.txt
USER root
"""


def test_a_dockerfile_without_run_is_copied_into_the_pod(tmp_path: Path) -> None:
    context = {
        "repo/a.py": "A = 1\n",
        "repo/sub/b.py": "B = 2\n",
        "repo/skip.me": "",
        "tool.sh": "#!/bin/sh\n",
        "extra.txt": "e",
        "notes.txt": "n",
        ".dockerignore": "**/skip.me\n",
    }
    task = make_task(tmp_path / "plain", PLAIN, **context)
    (task.directory / "environment/repo/link").symlink_to("sub/b.py")
    (task.directory / "environment/repo/empty").mkdir()

    async def act(environment: TaskEnvironment) -> None:
        assert (await environment.pod.stat("empty")).kind == "directory"
        done = await environment.pod.exec("pwd; echo $GREETING $OTHER; find . -type f -o -type l | sort; cat link")
        found = ["./a.py", "./bin/extra.txt", "./bin/tool.sh", "./link", "./renamed.txt", "./sub/b.py"]
        assert done.stdout.split("\n")[:-1] == ["/work", "hello there x", *found, "B = 2"], done.stderr
        assert (await environment.pod.stat("bin/tool.sh")).mode == 0o755
        assert sorted(environment.baseline) == [path[2:] for path in found]
        assert (await environment.pod.stat("/logs/artifacts")).kind == "directory"
        for absent in ("/tests", "/solution"):
            with pytest.raises(PodFileError):
                await environment.pod.stat(absent)
        assert await environment.changes() == ()

    in_environment(task, act)


CHANGE = """
echo new > new.py; echo 'A = 3' > a.py; rm gone.py; chmod +x plain.txt; chmod -x tool.sh
rm turned.py; ln -s a.py turned.py; rm -r directory; echo file > directory; ln -sfn b.py link
rm file; mkdir file; echo inside > file/inside; mkdir -p __pycache__ .pytest_cache .git; touch __pycache__/x.pyc .git/x
mkfifo pipe; truncate -s 20M large; echo '\x80' > $(printf 'bad\\377'); echo out > /srv/outside; mkdir empty
"""


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_every_kind_of_change_is_reported_and_can_be_applied_elsewhere(tmp_path: Path, from_snapshot: bool) -> None:
    context = {
        "repo/a.py": "A = 1\n",
        "repo/b.py": "",
        "repo/gone.py": "gone",
        "repo/plain.txt": "",
        "repo/tool.sh": "t",
        "repo/turned.py": "was a file",
        "repo/directory/x": "x",
        "repo/file": "file",
    }
    task = make_task(
        tmp_path / "t", "FROM host\nWORKDIR /work\nCOPY repo/ /work/\nCOPY --chmod=755 repo/tool.sh /work/\n", **context
    )
    (task.directory / "environment/repo/link").symlink_to("a.py")

    async def listing(pod: Pod) -> str:
        command = "find . -path ./.git -prune -o ! -name '*cache*' ! -name '*.pyc' ! -type d ! -type p -size -9M "
        return (
            await pod.exec(command + "-printf '%p %y %m %l\\n' | grep -av bad | LC_ALL=C sort; cat a.py new.py")
        ).stdout

    async def go() -> None:
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(open_fleet())
            prepared = await stack.enter_async_context(PreparedEnvironments(fleet)) if from_snapshot else None
            environment = await stack.enter_async_context(open_environment(fleet, task, prepared=prepared))
            await environment.pod.exec(["bash", "-c", CHANGE])
            changes = await environment.changes()
            file, link = FileState.file, FileState.symlink
            assert {change.path: (change.before, change.after) for change in changes} == {
                "a.py": (file(b"A = 1\n"), file(b"A = 3\n")),
                "directory": (None, file(b"file\n")),
                "directory/x": (file(b"x"), None),
                "file": (file(b"file"), None),
                "file/inside": (None, file(b"inside\n")),
                "gone.py": (file(b"gone"), None),
                "link": (link("a.py"), link("b.py")),
                "new.py": (None, file(b"new\n")),
                "plain.txt": (file(b""), file(b"", executable=True)),
                "tool.sh": (file(b"t", executable=True), file(b"t")),
                "turned.py": (file(b"was a file"), link("a.py")),
            }
            assert set(environment.left_out) >= {"large", "pipe"}
            async with open_environment(fleet, task, prepared=prepared) as other:
                await apply_to_pod(other.pod, other.workspace, changes)
                assert await listing(other.pod) == await listing(environment.pod)
                assert await other.changes() == changes
                with pytest.raises(PodFileError):
                    await other.pod.stat("/srv/outside")

    asyncio.run(go())


def test_files_made_by_run_are_built_once_and_belong_to_the_baseline(tmp_path: Path) -> None:
    dockerfile = """
FROM debian:bookworm-slim AS made
WORKDIR /work
RUN echo built > made.txt && head -c 8 /dev/urandom | od -An -tx1 > random.txt
COPY late.txt .
"""
    task = make_task(tmp_path / "built", dockerfile, **{"late.txt": "late"})

    async def go() -> None:
        async with open_fleet() as fleet:
            seen = []
            for _ in range(2):
                async with open_environment(fleet, task) as environment:
                    assert sorted(environment.baseline) == ["late.txt", "made.txt", "random.txt"]
                    seen.append(await environment.pod.read("random.txt"))
                    await environment.pod.write("made.txt", "changed\n")
                    (change,) = await environment.changes()
                    assert change == FileChange("made.txt", FileState.file(b"built\n"), FileState.file(b"changed\n"))
            assert seen[0] == seen[1], "the second environment built nothing"

    asyncio.run(go())


REMOTE = """
FROM python:3
RUN echo app:x:700:700::/:/bin/sh >> /etc/passwd && mkdir -p /srv/app/d
RUN cd /srv/app && echo built > made && ln -s d l
ENV A=b
USER app
WORKDIR /srv/app
COPY x y f/
COPY y f/x
COPY x l
"""


def test_environments_on_remote_hosts_are_those_of_this_machine(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", REMOTE, x="x", y="y")

    async def check(fleet: Fleet, **options: Any) -> tuple[str, list[str], str]:
        async with open_environment(fleet, task, **options) as environment:
            command = "pwd; cat f/* made d/x; echo $A; id -u; pytest --version"
            done = await environment.pod.exec(command, cwd=environment.workspace)
            await environment.pod.write("/srv/app/f/y", "changed")
            assert [change.path for change in await environment.changes()] == ["f/y"]
            checkpoint = await environment.checkpoint()
        async with open_environment(fleet, task, checkpoint=checkpoint) as again:
            assert [change.path for change in await again.changes()] == ["f/y"]
        await fleet.remove_snapshot(checkpoint.snapshot.id)
        return done.stdout, sorted(environment.baseline), environment.plan.image.id

    async def work(url: str) -> None:
        async with open_fleet() as fleet:
            here = await check(fleet)
        async with open_fleet(pods=settings_of(url), state=tmp_path / "state") as fleet:
            assert await check(fleet) == here
            async with PreparedEnvironments(fleet) as prepared:
                await prepared.keep_warm(task, 1)
                assert await check(fleet, prepared=prepared) == here
                assert len(prepared.snapshots) == 1
            assert fleet.pools == {}
        assert here[0].startswith("/srv/app\nyybuilt\nxb\n700\npytest"), here
        assert here[1] == ["d/x", "f/x", "f/y", "l", "made"]

    if os.geteuid():
        pytest.skip("without root a pod has one user")
    with server() as running:
        asyncio.run(work(running.url))


def test_what_an_agent_installed_elsewhere_does_not_hide_its_changes(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", "FROM host\nWORKDIR /work\nCOPY x a.py\n", x="1\n")

    async def act(environment: TaskEnvironment) -> None:
        await environment.pod.exec("echo 2 > a.py; d=/var; for i in $(seq 220); do d=$d/d; done; mkdir -p $d")
        assert [(change.path, change.text("after")) for change in await environment.changes()] == [("a.py", b"2\n")]
        assert environment.left_out == ()

    in_environment(task, act)


def test_an_agent_that_changed_too_much_to_list_has_changed_nothing(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", "FROM host\nWORKDIR /work\nCOPY x a.py\n", x="1\n")

    async def act(environment: TaskEnvironment) -> None:
        await environment.pod.exec("echo 2 > a.py; d=; for i in $(seq 220); do d=$d/d; done; mkdir -p ./$d")
        assert await environment.changes() == ()
        assert "nested directories" in environment.left_out[0]
        with pytest.raises(Unsupported):
            await environment.checkpoint()

    in_environment(task, act)


def test_changes_to_carried_paths_are_reported(tmp_path: Path) -> None:
    config = CONFIG + '[metadata]\ncarry = ["/srv/kept", ".git"]\n'
    task = make_task(
        tmp_path / "carrying", "FROM host\nWORKDIR /work\nCOPY x .git/config\nCOPY x /srv/kept/old\n", config, x="x"
    )

    async def act(environment: TaskEnvironment) -> None:
        assert set(environment.baseline) == {".git/config", "/srv/kept/old"}
        await environment.pod.exec(
            "echo y > .git/config; echo n > /srv/kept/new; rm /srv/kept/old; echo z > /srv/other"
        )
        assert {change.path for change in await environment.changes()} == {
            ".git/config",
            "/srv/kept/old",
            "/srv/kept/new",
        }

    in_environment(task, act)


def test_changes_are_found_in_a_workspace_behind_a_link(tmp_path: Path) -> None:
    dockerfile = "FROM host\nRUN mkdir -p /srv/app && ln -s /srv/app /app\nWORKDIR /app\nCOPY x a.py\n"
    task = make_task(tmp_path / "t", dockerfile, x="1\n")

    async def act(environment: TaskEnvironment) -> None:
        await environment.pod.exec("echo 2 > a.py; mkdir d; echo 3 > d/new", cwd="/app")
        assert [change.path for change in await environment.changes()] == ["a.py", "d/new"]

    in_environment(task, act)


def test_a_health_check_is_waited_for(tmp_path: Path) -> None:
    check = 'healthcheck = { command = "test -e /tmp/ready || { touch /tmp/ready; false; }", interval_sec = 0.01 }\n'
    task = make_task(tmp_path / "healthy", "FROM host\nWORKDIR /work\n", CONFIG + check)

    async def act(environment: TaskEnvironment) -> None:
        assert (await environment.pod.exec("test -e /tmp/ready")).ok

    in_environment(task, act)


@pytest.mark.parametrize(
    ("dockerfile", "says"),
    [
        ("FROM registry.example.org/some/image:1\n", "--map registry.example.org/some/image:1=NAME"),
        ("FROM python:2.7\n", "--map python:2.7=NAME"),
        ("FROM host\nWORKDIR /\n", "the whole machine"),
        ("FROM host\nWORKDIR /work\nCOPY missing .\n", "missing is not in the context"),
        ("FROM host\nFETCH x\n", "is not an instruction"),
    ],
)
def test_an_environment_that_cannot_be_made_says_what_to_do(tmp_path: Path, dockerfile: str, says: str) -> None:
    async def act(environment: TaskEnvironment) -> None:
        pytest.fail("there should be no environment")

    with pytest.raises(InputError) as error:
        in_environment(make_task(tmp_path / "x", dockerfile), act)
    assert says in str(error.value)


def test_a_run_that_fails_names_the_dockerfile(tmp_path: Path) -> None:
    async def act(environment: TaskEnvironment) -> None:
        pytest.fail("there should be no environment")

    task = make_task(tmp_path / "x", "FROM host\nWORKDIR /work\nRUN echo no luck >&2; exit 3\n")
    with pytest.raises(BuildFailed) as error:
        in_environment(task, act)
    assert f"{task.directory}/environment/Dockerfile:3" in str(error.value)
    assert "no luck" in str(error.value)


def test_a_name_is_mapped_to_an_image_of_the_store(tmp_path: Path) -> None:
    task = make_task(tmp_path / "x", "FROM registry.example.org/team/base:2\nWORKDIR /work\n")

    async def act(environment: TaskEnvironment) -> None:
        assert (await environment.pod.exec("true")).ok

    in_environment(task, act, host_settings=HostSettings(images={"registry.example.org/team/*": "host"}))
    assert short_image_name("registry.example.org/mirror/library/python:3.11@sha256:00") == "python:3.11"
    assert mapped_image("library/python:3.11", {"python:*": "mine"}) == "mine"
    assert mapped_image("debian", {}) is None


def test_variables_of_the_task_come_from_the_caller_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "a secret of ours")
    config = CONFIG + 'env = { A = "${TOKEN:-none}", B = "${NEEDED}" }\n'
    task = make_task(tmp_path / "x", "FROM host\nWORKDIR /work\n", config)

    async def act(environment: TaskEnvironment) -> None:
        assert (await environment.pod.exec("echo $A $B")).stdout == "none given\n"

    with pytest.raises(InputError, match="--env NEEDED=VALUE"):
        in_environment(task, act)
    in_environment(task, act, host_settings=HostSettings(variables={"NEEDED": "given"}))


def test_a_task_does_not_allow_itself_this_machine_or_a_private_network(tmp_path: Path) -> None:
    class Secret(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"secret of the host")

    def task_for(*hosts: str) -> Task:
        table = f'network_mode = "allowlist"\nallowed_hosts = {json.dumps(hosts)}\n'
        return make_task(
            tmp_path / "-".join(hosts), "FROM host\nWORKDIR /work\n", f'schema_version = "1.4"\n[environment]\n{table}'
        )

    with ThreadingHTTPServer(("0.0.0.0", 0), Secret) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        port, name, said = service.server_port, socket.gethostname(), ""

        async def act(environment: TaskEnvironment) -> None:
            nonlocal said
            code = f"import urllib.request as r; print(r.urlopen('http://{target}', timeout=20).read().decode())"
            said = (await environment.pod.exec(["python3", "-c", code])).stdout

        for address in ("127.0.0.1", "[::1]", "10.0.0.1", "192.168.7.7", "169.254.169.254", "[::ffff:127.0.0.1]"):
            with pytest.raises(InputError, match=r"allowed_hosts has .* address; allow it with --allow"):
                in_environment(task_for(f"{address}:{port}"), act)
        target = f"{name}:{port}"  # resolves to an address of this machine
        in_environment(task_for(target), act)
        assert "secret" not in said
        in_environment(task_for(target), act, host_settings=HostSettings(egress=Egress.to("x.example", private=True)))
        assert "secret" not in said
        target = f"127.0.0.1:{port}"
        in_environment(task_for(target), act, host_settings=HostSettings(egress=Egress.to(target)))
        assert "secret" in said
        service.shutdown()


def test_an_environment_opens_quickly(tmp_path: Path) -> None:
    task = make_task(
        tmp_path / "quick", "FROM host\nWORKDIR /work\nCOPY repo/ .\n", **{f"repo/{n}.py": "x" for n in range(3)}
    )

    async def go(fleet: Fleet) -> list[float]:
        spent = []
        for _ in range(10):
            async with open_environment(fleet, task) as environment:
                spent.append(sum(environment.seconds.values()))
        return sorted(spent)

    async def run() -> list[float]:
        async with open_fleet() as fleet:
            return await go(fleet)

    spent = asyncio.run(run())
    assert spent[2] < 0.1, (
        f"expected about 20 ms; the limit allows for a busy machine; took {[round(each * 1e3) for each in spent]} ms"
    )


BUILT = "FROM host\nWORKDIR /work\nCOPY repo/ .\nENV GREETING=hello\n"


def test_trials_of_a_task_start_from_one_prepared_snapshot(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", BUILT, **{"repo/a.py": "A = 1\n", "repo/b.py": "B = 1\n"})
    other = make_task(tmp_path / "other", BUILT, **{"repo/a.py": "A = 2\n"})

    async def trial(fleet: Fleet, task: Task, prepared: PreparedEnvironments, text: str) -> None:
        async with open_environment(fleet, task, prepared=prepared) as environment:
            assert (await environment.pod.exec("echo $GREETING; ls")).stdout == "hello\na.py\nb.py\n"
            await environment.pod.exec(f"echo {text} > a.py; rm b.py; touch new")
            changes = await environment.changes()
            assert [change.path for change in changes] == ["a.py", "b.py", "new"]
            async with environment.open_clean() as clean:
                assert await clean.pod.read("a.py") == b"A = 1\n"
                assert await clean.changes() == ()

    async def go() -> None:
        async with open_fleet() as fleet:
            assert fleet.local is not None
            async with PreparedEnvironments(fleet, max_snapshots=1) as prepared:
                await asyncio.gather(*(trial(fleet, task, prepared, text) for text in "xyz"))
                (first,) = prepared.snapshots
                await trial(fleet, task, prepared, "again")
                assert prepared.snapshots == {first}
                await fleet.remove_snapshot(first)  # lost: it is prepared again
                await trial(fleet, task, prepared, "lost")
                (second,) = prepared.snapshots
                assert second != first
                (task.directory / "environment/repo/c.py").write_text("")  # the task has changed
                async with open_environment(fleet, task, prepared=prepared) as environment:
                    assert (await environment.pod.stat("c.py")).kind == "file"
                async with open_environment(fleet, other, prepared=prepared) as environment:
                    assert await environment.pod.read("a.py") == b"A = 2\n"
                (left,) = prepared.snapshots  # only one is kept
                existing = {each.snapshot.id for each in fleet.local.store.snapshots()}
                assert left in existing
                assert not {first, second} & existing
            assert left not in {each.snapshot.id for each in fleet.local.store.snapshots()}

    asyncio.run(go())


def test_an_environment_is_restored_from_its_checkpoint(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", BUILT, **{"repo/a.py": "A = 1\n", "repo/b.py": "B = 1\n"})

    async def go() -> None:
        async with open_fleet() as fleet, PreparedEnvironments(fleet) as prepared:
            async with open_environment(fleet, task, prepared=prepared) as environment:
                await environment.pod.exec("echo 1 > early; rm b.py")
                checkpoint = await environment.checkpoint()
                await environment.pod.exec("echo 2 > late")
                assert [change.path for change in await environment.changes()] == ["b.py", "early", "late"]
            checkpoint = EnvironmentCheckpoint.from_json(json.loads(json.dumps(checkpoint.to_json())))
            async with open_environment(fleet, task, prepared=prepared, checkpoint=checkpoint) as environment:
                await environment.pod.exec("echo x > a.py")
                changes = await environment.changes()
                assert [change.path for change in changes] == ["a.py", "b.py", "early"]
            await fleet.remove_snapshot(checkpoint.snapshot.id)
            with pytest.raises(EnvironmentCheckpointLost):
                async with open_environment(fleet, task, checkpoint=checkpoint):
                    pass

    asyncio.run(go())


def test_the_python_image_does_not_depend_on_where_its_packages_are_installed(tmp_path: Path) -> None:
    (pygments,) = base_images._with_dependencies(("pygments",)).values()
    base_images._write_build_context(tmp_path, [pygments], "3.11")
    copied = tmp_path / "python/lib/python3.11/site-packages"
    for file in (each for each in copied.rglob("*") if each.is_file()):
        assert os.fsencode(sys.prefix) not in file.read_bytes(), file
        if file.name == "RECORD":
            recorded = file.read_text().splitlines()
            assert recorded
            assert not [line for line in recorded if line.startswith("../")], "digests of scripts with a prefix"
