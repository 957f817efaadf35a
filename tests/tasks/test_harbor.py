"""Reading, validating and writing the Harbor format, schema 1.4."""

import tomllib
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.tasks.harbor import (
    files_to_upload,
    find_tasks,
    read_task,
    strip_canary,
    task_digest,
    write_task,
)
from etude.tasks.schema import resolve_env, unknown_keys
from etude.tasks.task import NetworkAccess

BARE = {
    "task.toml": 'schema_version = "1.4"\n',
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM debian:bookworm\n",
    "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
}
FULL = """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out", { source = "/app/log", destination = "logs/app", exclude = ["*.tmp"] }]
multi_step_reward_strategy = "final"

[task]
name = "org/thing"
authors = [{ name = "A", email = "a@b" }]

[metadata]
category = "debugging"
anything = { at = "all" }

[agent]
timeout_sec = 30
user = "agent"
network_mode = "no-network"

[verifier]
timeout_sec = 20.5
env = { KEY = "${SECRET:-none}" }
user = 1000

[solution]
env = { HOW = "well" }

[environment]
cpus = 2
memory_mb = 512
storage_mb = 256
network_mode = "allowlist"
allowed_hosts = ["a.example.org"]
workdir = "/app"
env = { A = "1" }
healthcheck = { command = "true", retries = 1 }
"""


def task_with(directory: Path, config: str, **files: str) -> Path:
    write_task(directory, {**BARE, "task.toml": config, **files})
    return directory


def test_a_bare_task_has_the_defaults_of_the_format(tmp_path: Path) -> None:
    task = write_task(tmp_path / "bare", BARE)
    assert (task.name, task.instruction) == ("bare", "Do it.\n")
    assert task.verifier.timeout_s == 600.0
    assert task.agent.timeout_s is None
    assert task.machine.build_timeout_s == 600.0
    assert task.machine.network == NetworkAccess("public")
    assert task.verifier_machine is None
    assert task.may_edit
    assert (task.directory / "tests/test.sh").stat().st_mode & 0o111


def test_every_field_is_read(tmp_path: Path) -> None:
    task = read_task(task_with(tmp_path / "full", FULL))
    assert task.name == "org/thing"
    assert (task.agent.timeout_s, task.agent.user, task.agent.network) == (30.0, "agent", NetworkAccess("no-network"))
    assert (task.verifier.timeout_s, task.verifier.user) == (20.5, "1000")
    assert resolve_env(task.verifier.env, {}, "x") == {"KEY": "none"}
    assert resolve_env(task.verifier.env, {"SECRET": "s"}, "x") == {"KEY": "s"}
    assert task.solution.env == {"HOW": "well"}
    assert (task.machine.cpus, task.machine.memory_mb, task.machine.storage_mb) == (2.0, 512, 256)
    assert task.machine.network == NetworkAccess("allowlist", ("a.example.org",))
    assert (task.machine.workdir, task.machine.env) == ("/app", {"A": "1"})
    assert [entry.destination for entry in task.artifacts] == ["", "logs/app"]
    assert task.step_reward_strategy == "final"
    assert task.category == "debugging"
    assert unknown_keys(task.config) == []


def test_legacy_names_are_read(tmp_path: Path) -> None:
    config = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    machine = read_task(task_with(tmp_path / "old", config)).machine
    assert (machine.memory_mb, machine.storage_mb, machine.network.mode) == (2048, 512, "no-network")


def test_unknown_keys_are_accepted_and_listed(tmp_path: Path) -> None:
    config = "colour = 1\n[environment]\nshape = 2\n[verifier.environment]\nsize = 3\n[metadata]\nfree = 1\n"
    task = read_task(task_with(tmp_path / "new", config))
    assert sorted(unknown_keys(task.config)) == ["colour", "environment.shape", "verifier.environment.size"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("schema_version = 2", "schema_version"),
        ('[task]\nname = "thing"', "org/name"),
        ("[environment]\ncpus = -1", "environment.cpus"),
        ('[environment]\nos = "windows"', "linux"),
        ('[environment]\nallowed_hosts = ["x"]', "allowed_hosts"),
        ('[environment]\nworkdir = "app"', "workdir"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1', "shared"),
        ('artifacts = ["/a/../b"]', "artifacts[0].source"),
        ('artifacts = [{ source = "/a", destination = "/b" }]', "destination"),
        ("[agent]\ntimeout_sec = true", "timeout_sec"),
        ("a =", "cannot be read"),
        ('[[steps]]\nname = "../x"', "steps[0].name"),
    ],
)
def test_errors_name_the_key_and_the_task(tmp_path: Path, config: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        task_with(tmp_path / "wrong", config)
    assert says in str(error.value)
    assert str(tmp_path / "wrong") in str(error.value)
    assert not (tmp_path / "wrong").exists(), "nothing is left of a task that could not be written"


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_task_with_a_missing_file_is_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(InputError):
        write_task(tmp_path / "part", {name: text for name, text in BARE.items() if name != missing})


def test_a_link_out_of_the_task_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path / "linked", BARE)
    (task.directory / "tests/inside").symlink_to("test.sh")
    read_task(task.directory)
    (task.directory / "tests/out").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="leads out of the task"):
        read_task(task.directory)


def test_leading_canary_lines_are_removed() -> None:
    text = "<!-- BENCHMARK canary GUID 1 -->\n# another Canary line\n\n\nDo it.\n# canary stays here\n"
    assert strip_canary(text) == "Do it.\n# canary stays here\n"
    assert strip_canary("Plain.\n") == "Plain.\n"


def test_steps_are_read_in_order_with_the_shared_test(tmp_path: Path) -> None:
    config = """
[[steps]]
name = "one"
min_reward = 0.5
[steps.agent]
timeout_sec = 5
[[steps]]
name = "two"
min_reward = { reward = 1.0, other = 2 }
[steps.verifier]
environment_mode = "separate"
timeout_sec = 7
"""
    files = {
        "steps/one/instruction.md": "First.\n",
        "steps/two/instruction.md": "# canary\nThen.\n",
        "steps/two/tests/test.sh": "#!/bin/sh\n",
    }
    task = read_task(task_with(tmp_path / "steps", config, **files))
    one, two = task.steps
    assert (one.instruction, one.min_rewards, one.agent.timeout_s) == ("First.\n", {"reward": 0.5}, 5.0)
    assert (two.instruction, two.min_rewards, two.verifier.timeout_s) == ("Then.\n", {"reward": 1.0, "other": 2.0}, 7.0)
    assert task.step_reward_strategy == "mean"
    assert task.instruction == ""
    assert one.verifier_machine is None
    assert two.verifier_machine == task.machine


def test_harborignore_keeps_files_out_of_the_upload(tmp_path: Path) -> None:
    files = {
        ".harborignore": "*.log\ntests/data/\n!keep.log\nenvironment\n",
        "tests/a.log": "",
        "tests/keep.log": "",
        "tests/data/big": "",
        "tests/helper.py": "",
    }
    task = read_task(task_with(tmp_path / "ignoring", BARE["task.toml"], **files))
    assert [file.target for file in files_to_upload(task, "tests", "/t")] == [
        "/t/helper.py",
        "/t/keep.log",
        "/t/test.sh",
    ]


def test_a_digest_depends_on_file_contents_and_modes(tmp_path: Path) -> None:
    one = write_task(tmp_path / "one", BARE)
    two = write_task(tmp_path / "two", BARE)
    assert task_digest(one.directory) == task_digest(two.directory)
    (two.directory / "tests/test.sh").chmod(0o644)
    assert task_digest(one.directory) != task_digest(two.directory)


def test_tasks_are_found_below_a_directory(tmp_path: Path) -> None:
    for name in ("b/x", "a", ".hidden/y"):
        write_task(tmp_path / name, BARE)
    assert [path.relative_to(tmp_path).as_posix() for path in find_tasks(tmp_path)] == ["a", "b/x"]


def test_a_path_that_leaves_the_task_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a path inside"):
        write_task(tmp_path / "x", {**BARE, "../evil": ""})
    assert not (tmp_path / "evil").exists()


def test_writing_again_replaces(tmp_path: Path) -> None:
    write_task(tmp_path / "x", {**BARE, "tests/old": ""})
    task = write_task(tmp_path / "x", BARE)
    assert not (task.directory / "tests/old").exists()
    assert tomllib.loads((task.directory / "task.toml").read_text()) == {"schema_version": "1.4"}
