"""Commands that run tasks, on pod hosts instead of this machine: two real hosts, one of which is killed."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_index import serving_index, small_wheel
from solving_endpoint import SolvingEndpoint
from stub_endpoint import serving

from etude.pods.fleet import open_fleet
from etude.tasks.installation.installer import install
from etude.tasks.installation.setup_pod import InstallOptions
from etude.tasks.installation.workspace import commit_image
from etude.tasks.mining.options import MiningOptions
from etude_nano.source import generate_nano
from tests.pods.serving import ENVIRONMENT, Server, server, settings_of, wait_until_empty
from tests.tasks.installation.test_install import repository, tools_index
from tests.tasks.mined_history import shop_history
from tests.tasks.test_mining import LIMITS, build

LIMIT_S = 600


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Server, Server]]:
    with server() as first, server() as second:
        yield first, second


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks") / "tasks"
    generate_nano(directory, 4, "new", 0, (1,))
    return directory


def command(hosts: tuple[Server, ...], state: Path, *words: object) -> list[str]:
    """Return a command of `etude` that uses hosts; the state of pods on this machine is in `state`."""
    named = [word for host in hosts for word in ("--pod-host", host.url)]
    return [sys.executable, "-m", "etude.cli", *map(str, words), "--state", str(state), *named]


def finish(process: "subprocess.Popen[str]") -> tuple[Any, str]:
    """Return what a command has printed as JSON, and its messages."""
    out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors + out
    return json.loads(out), errors


def start(words: list[str]) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, env={**ENVIRONMENT, "ETUDE_API_KEY": "sk-0123456789abcdef"}, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.slow
def test_tasks_are_validated_and_run_on_hosts(hosts: tuple[Server, Server], tasks: Path, tmp_path: Path) -> None:
    words = ("tasks", "validate", tasks, "--again", "--reruns", 1, "--json")
    reports, _ = finish(start(command(hosts, tmp_path / "state", *words)))
    assert [report["admitted"] for report in reports] == [True] * 4
    rows, _ = finish(start(command(hosts, tmp_path / "state", "tasks", "run", tasks, "--json")))
    assert [row["reward"] for row in rows] == [1.0] * 4
    assert not (tmp_path / "state/pods").exists(), "no pod ran on this machine"
    wrong = start(command(hosts, tmp_path / "state", "tasks", "run", tasks, "--pod-host", "host-a"))
    _, errors = wrong.communicate(timeout=LIMIT_S)
    assert wrong.returncode == 2
    assert "--pod-host: hosts 'host-a' is not the address of" in errors


@pytest.mark.slow
def test_a_comparison_goes_on_when_a_host_is_killed(tasks: Path, tmp_path: Path) -> None:
    stub = SolvingEndpoint([], key="sk-0123456789abcdef")
    stub.tasks, stub.first_command = tasks, "sleep 2"
    out = tmp_path / "out"
    with serving(stub), server("--max-pods", "4") as first, server("--max-pods", "4") as second:
        policy = ("--policy", f"{stub.url}#stub", "--tasks", tasks, "-k", 4, "-j", 6, "--out", out, "--json")
        tools = ("--tools", "read_file,search_replace,run_terminal_cmd", "--brief", "--summaries", "off")
        running = start(command((first, second), tmp_path / "state", "bench", "run", *policy, *tools))
        deadline = time.monotonic() + LIMIT_S
        while not list(out.rglob("*.trace")):
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first.end(9)
        summary, errors = finish(running)
        assert f"host {first.url} does not answer" in errors
        first.start()
        asyncio.run(wait_until_empty(first))
    assert summary["finished"]
    (policy_summary,) = summary["policies"]
    assert policy_summary["accuracy"]["mean"] == 1.0
    assert len(list(out.rglob("*.trace"))) == 16


@pytest.mark.slow
def test_a_repository_is_installed_on_hosts(hosts: tuple[Server, Server], tmp_path: Path) -> None:
    index = tools_index()
    index.add(small_wheel("thing", "1.0", "VALUE = 1\n"), "2021-01-01T00:00:00Z")

    async def work(options: InstallOptions) -> None:
        async with open_fleet(pods=settings_of(hosts[0].url), state=tmp_path / "state") as fleet:
            made = await install(fleet, repository(), options)
            assert "thing==1.0" in made.script
            assert int(str(made.facts["egress_bytes"])) > 100_000
            assert fleet.store.image(made.image).name == made.image, "the image is kept on this machine"
        async with open_fleet(pods=settings_of(hosts[1].url), state=tmp_path / "state") as fleet:
            image = commit_image(fleet, made, repository(), repository(README="new"))
            async with await fleet.create(image) as pod:
                assert (await pod.exec("python -m mini; cat README")).stdout == "mini 1\nnew"
            async with await fleet.create(made.image) as pod:
                assert (await pod.exec("python -m mini")).stdout == "mini 1\n"

    with serving_index(index):
        asyncio.run(work(InstallOptions(index_url=index.url, cache=tmp_path / "cache", reruns=2)))


@pytest.mark.slow
def test_a_benchmark_is_built_on_hosts(hosts: tuple[Server, Server], tmp_path: Path) -> None:
    shop_history(tmp_path / "shop")

    async def work() -> None:
        settings = settings_of(*(host.url for host in hosts))
        async with open_fleet(pods=settings, state=tmp_path / "state") as fleet:
            report = await build(fleet, tmp_path / "shop", MiningOptions(tmp_path / "tasks", limits=LIMITS, count=1))
            assert len(report.tasks) == 1, report.reasons

    asyncio.run(work())
