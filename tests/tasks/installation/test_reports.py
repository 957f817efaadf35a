"""Reports of runners, masked failures, target commands, and what an index had at a date."""

import json
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from local_index import LocalIndex, serving_index, small_wheel

from etude.errors import InputError
from etude.tasks.installation.agents import wrong_output
from etude.tasks.installation.package_index import IndexSettings, open_package_index, parse_time
from etude.tasks.installation.reports import read_statuses
from etude.tasks.installation.script import compose_script, masked_failure, masked_test_command, redact
from etude.tasks.installation.targets import TargetCommand, choose_targets, read_targets
from etude.tasks.installation.test_run import TestCommand, TestRun
from etude.tasks.installation.verification import merge_runs, why_unacceptable


def test_reports_of_all_runners() -> None:
    tap = (
        "TAP version 13\n# Subtest: outer\n    # Subtest: inner\n    ok 1 - inner\n    not ok 2 - bad\n    1..2\n"
        "not ok 1 - outer\nok 2 - later # SKIP\nok 3 - alone\n"
    )
    assert read_statuses("node", tap) == {
        "outer > inner": "passed",
        "outer > bad": "failed",
        "later": "skipped",
        "alone": "passed",
    }
    go = '{"Action":"run","Test":"T"}\n{"Action":"pass","Package":"p","Test":"T"}\nnoise\n'
    go += '{"Action":"fail","Package":"q","FailedBuild":"q"}'
    assert read_statuses("go", go) == {"p::T": "passed", "q": "error"}
    cargo = "     Running unittests src/lib.rs (x)\ntest a::b ... ok\n"
    cargo += "test c - should panic ... FAILED\ntest d ... ignored\n"
    assert read_statuses("cargo", cargo) == {
        "src/lib.rs::a::b": "passed",
        "src/lib.rs::c": "failed",
        "src/lib.rs::d": "skipped",
    }
    row = {"name": "/work/a.test.js", "status": "passed", "assertionResults": [{"fullName": "a b", "status": "passed"}]}
    assert read_statuses("jest", f"> jest\n{json.dumps({'testResults': [row]})}\n") == {
        "/work/a.test.js::a b": "passed"
    }
    mocha = json.dumps({"stats": {}, "passes": [{"fullTitle": "x"}], "failures": [{"fullTitle": "y"}], "pending": []})
    assert read_statuses("mocha", mocha) == {"x": "passed", "y": "failed"}
    unittest = "test_a (m.C.test_a) ... ok\ntest_b (m.C.test_b) ... FAIL\n"
    assert read_statuses("unittest", unittest) == {"test_a (m.C.test_a)": "passed", "test_b (m.C.test_b)": "failed"}
    assert read_statuses("pytest", "3 passed", '{"id": "a", "status": "passed"}\n{"id": "b", "sta') == {"a": "passed"}
    for framework in ("node", "go", "cargo", "jest", "mocha", "unittest", "pytest"):
        assert read_statuses(framework, "all 12 tests passed\n[1, 2\n{", "12 passed") == {}


@pytest.mark.parametrize(
    "script",
    ["a || true\nb", "a||:\n", "set +e\na", "a\ntrue", "trap 'exit 0' ERR\n", "a || echo failed", "x\nexit 0\n"],
)
def test_scripts_that_hide_failures(script: str) -> None:
    assert masked_failure(script)


@pytest.mark.parametrize(
    "command", ["echo 5 passed", "pytest; true", "pytest | tee log", "pytest || exit 0", "cat log"]
)
def test_test_commands_that_hide_failures(command: str) -> None:
    assert masked_test_command(command)


def test_honest_scripts_hide_nothing_and_secrets_are_not_logged() -> None:
    script = compose_script(
        "Installs a.\n|| true", "sub", {"A": "x y"}, ["python -m pip install -e .", "test -d a || mkdir a"], ["b==1"]
    )
    assert masked_failure(script) == ""
    assert "cd /work/sub\nexport A='x y'\n" in script
    assert "b==1\nPINS\npython -m pip install -c /srv/install/constraints.txt -e .\n" in script
    assert masked_test_command("python -m pytest -q -k 'a or b'") == ""
    assert redact("url https://me:hunter2@host", {"TOKEN": "hunter2", "EMPTY": ""}) == "url https://me:<TOKEN>@host"


def test_targets_are_read_filtered_and_chosen() -> None:
    rows = [
        {"command": "python -m pytest -q", "kind": "test", "description": "all pass"},
        {"command": "python -m pytest -q", "kind": "test", "description": "again"},
        {"command": "echo 5 passed", "kind": "test", "description": "x", "framework": "pytest"},
        {"command": "ls", "kind": "run", "description": "x", "pattern": "a"},
        {"command": "python --version", "kind": "run", "description": "x", "pattern": "P"},
        {"command": "python -c 'import a'", "kind": "import", "description": "x", "pattern": ""},
        {"command": "tool run", "kind": "run", "description": "prints ok", "pattern": "^ok$"},
        {"command": "python -m a", "kind": "import", "description": "prints a", "pattern": "a.+"},
        {"command": "make || true", "kind": "build", "description": "x", "pattern": "x"},
        "no object",
        {"command": "eleventh", "kind": "run", "description": "x", "pattern": "y"},
    ]
    found, dropped = read_targets(f"Here they are:\n{json.dumps(rows)}\nDone.")
    assert [each.command for each in found] == ["python -m pytest -q", "tool run", "python -m a"]
    assert len(dropped) == 7
    assert [each.kind for each in choose_targets(found, {})] == ["test", "run", "import"]
    assert choose_targets(found, {"python -m pytest -q": True}) == []
    assert len(choose_targets(found, {"tool run": True})) == 2
    assert read_targets("nothing") == ([], [])
    target = TargetCommand("tool run", "run", "prints ok", "^ok$")
    assert wrong_output(target, 0, "a\nok\n") == ""
    assert "does not match" in wrong_output(target, 0, "not ok")
    assert "exit code 1" in wrong_output(target, 1, "ok")


def test_flaky_tests_and_unacceptable_runs() -> None:
    def run(statuses: dict[str, str], output: str = "", complete: bool = True) -> TestRun:
        return TestRun(statuses, 0, output, 1.0, complete)

    merged = merge_runs([run({"a": "passed", "b": "passed"}), run({"a": "failed", "b": "passed", "c": "passed"})])
    assert merged.tests == {"a": "flaky", "b": "passed", "c": "flaky"}
    assert merged.flaky == ("a", "c")
    passing = {str(number): "passed" for number in range(8)}
    reasons = {
        None: run({**passing, "x": "failed", "y": "failed", "z": "skipped"}),
        "tests-fail": run({**passing, **dict.fromkeys("uvw", "failed")}),
        "network": run({"x": "failed", "a": "failed"}, "socket.gaierror: Temporary failure in name resolution"),
        "no-report": run({}, "12 passed", complete=False),
        "missing-module": run({}, "ModuleNotFoundError: No module named 'nox'", complete=False),
        "timeout": replace(run(passing, complete=False), timed_out=True),
        "no-tests": run({"a": "skipped"}),
    }
    for reason, each in reasons.items():
        found = why_unacceptable(each, 0.8)
        assert (found[0] if found else None) == reason


@pytest.mark.parametrize("as_json", [True, False])
def test_an_index_has_only_what_existed_at_a_date(tmp_path: Path, as_json: bool) -> None:
    index = LocalIndex(json=as_json)
    for version, uploaded in (("1.0", "2020-01-01T00:00:00Z"), ("2.0", "2023-01-01T00:00:00Z"), ("3.0", "")):
        index.add(small_wheel("thing", version, ""), uploaded)
    index.add(small_wheel("pytest", "9.0", ""), "2025-01-01T00:00:00.123456Z")

    def get(url: str) -> bytes:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url) as response:
            found: bytes = response.read()
            return found

    def names(url: str) -> list[str]:
        return [each["filename"].split("-")[1] for each in json.loads(get(url))["files"]]

    with serving_index(index):
        secret_url = index.url.replace("http://", "http://me:hunter2@")
        with open_package_index(IndexSettings(secret_url, "2021-06-01", cache=tmp_path)) as served:
            assert names(served.url("dated") + "thing/") == ["1.0", "3.0"]  # the index does not say when 3.0 came
            assert names(served.url("all") + "Thing/") == ["1.0", "2.0", "3.0"]
            assert names(served.url("dated") + "pytest/") == []
            assert names(served.url("tools") + "pytest/") == ["9.0"]
            assert served.undated == {"thing"}
            assert "hunter2" not in str(served.environment("dated"))
            file = f"http://{served.rule}{json.loads(get(served.url('all') + 'thing/'))['files'][0]['url']}"
            assert get(file) == get(file) == index.files["thing"][0][1]
            assert served.bytes_fetched == len(index.files["thing"][0][1])  # once; then it came from the cache
            assert len(list(tmp_path.iterdir())) == 1
    sent = [headers.get("Authorization") for _, headers in index.requests]
    assert sent
    assert set(sent) == {"Basic bWU6aHVudGVyMg=="}


def test_dates() -> None:
    assert parse_time("2024-05-31").isoformat() == "2024-05-31T23:59:59+00:00"
    assert parse_time("2024-05-31T10:00:00+02:00").utcoffset() is not None
    with pytest.raises(InputError, match="--as-of tomorrow: expected a date"):
        parse_time("tomorrow")


@pytest.mark.parametrize(
    ("framework", "command", "given", "line"),
    [
        (
            "node",
            "node --import=tsx/esm --test test/*.ts",
            "test/a.ts test-d/b.test-d.ts",
            "node --import=tsx/esm --test test/a.ts",
        ),
        ("node", "node --test", "test/fixtures/data.js test/a.test.js", "node --test test/a.test.js"),
        (
            "mocha",
            "npx mocha --reporter json './{test,spec}/**/*.js'",
            "lib/x.js spec/u/a.js",
            "npx mocha --reporter json spec/u/a.js",
        ),
        ("jest", "npx jest --json", "src/__tests__/a.js src/a.js", "npx jest --json src/__tests__/a.js"),
        ("tap", "npx ava --tap", "test.js", "npx ava --tap test.js"),
        ("go", "go test -json ./...", "a_test.go", "go test -json ./..."),
    ],
)
def test_runners_of_javascript_are_given_the_test_files_that_they_run(
    framework: str, command: str, given: str, line: str
) -> None:
    found = TestCommand(command, framework, "/work")
    assert found.line(found.own_files(given.split())) == line
