"""The report: one self-contained file that never executes text written by a model."""

import base64
import hashlib
import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from etude.chat.messages import Message
from etude.errors import InputError
from etude.harness.trace_store import load_trace, save_trace
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.viewer.api import RunApi
from etude.viewer.catalogue import all_rows
from etude.viewer.cli import report
from etude.viewer.report import MODULES, by_interest, script, write_report
from etude.viewer.server import assets

HOSTILE = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><!-- ]]> \u2028 \ud800"


class Page(HTMLParser):
    """Collects the elements of a file and the contents of its script and style blocks."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = f"{tag} {dict(attrs).get('type') or ''}".strip()
            self.blocks[self._inside] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.blocks[self._inside] += data


def parse(path: Path) -> tuple[Page, dict[str, Any]]:
    page = Page(path.read_text(encoding="utf-8"))
    return page, json.loads(page.blocks["script application/json"])


def make_hostile(run: Path) -> Path:
    """Fill a run with text that tries to execute."""
    layout = RunLayout(run)
    for path in (layout.traces / "000001").iterdir():
        trace = load_trace(path)
        steps = [
            replace(step, message=replace(step.message, content=HOSTILE, thinking=HOSTILE)) for step in trace.steps
        ]
        steps[-1] = replace(steps[-1], message=Message("assistant", HOSTILE))
        save_trace(replace(trace, steps=tuple(steps), model=HOSTILE), path)
    with closing(RolloutQueue.open_read_only(layout.slots)) as slots:
        size = slots.settings.group_size
    with closing(RolloutQueue(layout.slots, slots.settings)) as table:
        assert size == 4
        while (slot := table.claim("w", 0.0)) is not None:
            reward = {
                "total": 0.0,
                "category": HOSTILE[:60],
                "ending": HOSTILE[:60],
                "hack": "x",
                "parts": {"<b>": 1.0},
            }
            table.finish(slot, reward, "traces/000001/00-1.trace", (0, 0))
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        line = {"stage": "rl", "step": 4, "reward": 0.0, "reward/<img src=x>": 1.0, "alarms": [HOSTILE[:60]]}
        file.write(json.dumps(line) + "\n")
    (run / "recipe.toml").write_text(f'name = "{HOSTILE[:25]}"\nstages = ["rl"]\n')
    return run


def test_a_report_contains_the_run_and_links_to_nothing_outside(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.html"
    written = write_report(run, out)
    assert written.rollouts == written.of == 42
    page, data = parse(out)
    assert {"run", "rollouts", "tasks", "group/training/1", "rollout/training/1/0/1"} <= data["answers"].keys()
    assert data["answers"]["run"]["name"] == "nano"
    assert "all rollouts" in data["about"]
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "img", "base"), tag
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("data:", "#")), f"{tag} {name}={value[:60]}"
    for kind in ("style", "script module"):
        assert not re.search(
            r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)|import\(|\bfrom \"", page.blocks[kind]
        ), kind


def test_the_policy_allows_only_our_own_script(run: Path, tmp_path: Path) -> None:
    write_report(run, tmp_path / "report.html")
    page, _ = parse(tmp_path / "report.html")
    (meta,) = [attributes for tag, attributes in page.elements if "http-equiv" in attributes]
    policy = dict(rule.split(" ", 1) for rule in (meta["content"] or "").split("; "))
    assert policy["default-src"] == "'none'"
    for kind, rule in (("script module", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(page.blocks[kind].encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"


def test_all_text_of_a_run_stays_data(run: Path, tmp_path: Path) -> None:
    hostile = make_hostile(Path(shutil.copytree(run, tmp_path / "hostile")))
    write_report(hostile, tmp_path / "report.html")
    page, data = parse(tmp_path / "report.html")
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert [each.get("type") for each in scripts] == ["module", "application/json"]
    assert not [tag for tag, _ in page.elements if tag == "img"]
    text = (tmp_path / "report.html").read_text()
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert data["answers"]["rollout/training/1/0/1"]["session"]["final"].startswith("</script><script>")


def test_a_small_report_has_the_most_interesting_rollouts_and_states_how_many(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    whole = write_report(run, out)
    small = write_report(run, out, max_bytes=whole.size // 2)
    assert 0 < small.rollouts < small.of
    assert small.size <= whole.size // 2
    assert small.size == out.stat().st_size
    _, data = parse(out)
    assert f"{small.rollouts} of 42 rollouts" in data["about"]
    assert data["answers"]["rollouts"]["rollouts"]["count"] == 42, "all are listed"
    for address in data["answers"]:
        if address.startswith("rollout/"):
            _, table, group, *_ = address.split("/")
            assert f"group/{table}/{group}" in data["answers"], "no page of the file has a broken link"


def test_the_order_covers_everything_once_and_starts_with_the_ends(run: Path) -> None:
    groups = RunApi(run).groups()
    rows = list(by_interest(groups))
    assert len(rows) == len(set(rows)) == len(all_rows(groups))
    training = [group for group in groups if group.set == "training" and group.rows]
    assert rows[: len(training[0].rows)] == list(training[0].rows)
    assert training[-1].rows[0] in rows[:8]


def test_the_front_end_is_bundled_into_one_script() -> None:
    assert sorted(f"{name}.js" for name in MODULES) == [name for name in assets() if name.endswith(".js")]
    text = script()
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    assert "</script" not in text
    assert "<!--" not in text


def test_modules_import_only_what_stands_before_them() -> None:
    for at, name in enumerate(MODULES):
        text = Path(f"etude/viewer/pages/{name}.js").read_text()
        for line in re.findall(r'from "\./(\w+)\.js"', text):
            assert line in MODULES[:at], f"{name} imports {line}"


def test_the_command_writes_the_file_and_prints_its_size(run: Path, tmp_path: Path) -> None:
    verbs = typer.Typer()
    verbs.command()(report)
    out = tmp_path / "report.html"
    done = CliRunner().invoke(verbs, [str(run), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "42 of 42 rollouts in full" in done.output
    assert out.stat().st_size > 100_000


def test_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recipe\.toml"):
        write_report(tmp_path, tmp_path / "report.html")
