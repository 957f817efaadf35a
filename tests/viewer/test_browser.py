"""The pages in a real browser: Debian's chromium, driven by Playwright. Pictures go to $ETUDE_PICTURES if it is set."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SERVE = (
    "import sys; from pathlib import Path; from etude.viewer.cli import view; view(Path(sys.argv[1]), 0, '127.0.0.1')"
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="Playwright is missing: pip install 'etude[test-slow]'")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with driver.sync_playwright() as play:
        found = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def serving(path: Path) -> Iterator[str]:
    """Run `etude view` in its own process; yield its URL."""
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()
        assert address, "the server did not start"
        yield address[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(timeout=10) == 0, "being stopped is not a failure"


@contextmanager
def opened(browser: Any, address: str, **given: Any) -> Iterator[Any]:
    """Open a page; check at the end that the console has no errors."""
    context = browser.new_context(viewport={"width": 1360, "height": 900}, **given)
    page, console_errors = context.new_page(), []
    page.on(
        "console", lambda message: console_errors.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: console_errors.append(str(error)))
    page.goto(address)
    page.wait_for_selector("main h1")
    yield page
    context.close()
    assert console_errors == []


def go(page: Any, route: str) -> None:
    page.evaluate("route => { location.hash = route; }", route)
    page.wait_for_function("() => !document.querySelector('main').hasAttribute('aria-busy')")
    page.wait_for_timeout(150)


def picture(page: Any, name: str, tmp_path: Path) -> None:
    kept = Path(os.environ.get("ETUDE_PICTURES", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(kept / f"{name}.png"))
    assert (kept / f"{name}.png").stat().st_size > 10_000


def step(number: int, **more: float) -> str:
    return (
        json.dumps({"time": time.time(), "stage": "rl", "step": number, "reward": 0.5, "reward_best": 1.0, **more})
        + "\n"
    )


ROUTES = {
    "run": "#/",
    "groups": "#/groups",
    "rollouts": "#/rollouts",
    "tasks": "#/tasks",
    "group": "#/group/training/1",
    "rollout": "#/rollout/training/1/1/1",
    "tokens": "#/rollout/training/1/0/1?view=tokens",
    "task": "#/task/validation/nano-unseen-000000",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_loads_without_errors_and_is_accessible(browser: Any, run: Path, tmp_path: Path, theme: str) -> None:
    with serving(run) as address, opened(browser, address, color_scheme=theme) as page:
        for name, route in ROUTES.items():
            go(page, route)
            picture(page, f"{name}-{theme}", tmp_path)
            faults = page.evaluate(FAULTS)
            assert faults == [], f"{name}: {faults}"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(21, 23, 26)") == (theme == "dark")
        page.keyboard.press("d")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


# Accessibility faults of a page.
FAULTS = """() => {
  const faults = [];
  const named = (node) => node.textContent.trim() || node.getAttribute("aria-label") || node.title;
  if (document.querySelectorAll("h1").length !== 1) faults.push("there is not one h1");
  for (const part of ["header", "nav", "main", "footer"]) {
    if (!document.querySelector(part)) faults.push(`no ${part}`);
  }
  for (const node of document.querySelectorAll("a, button, summary")) {
    if (!named(node)) faults.push(`nameless ${node.outerHTML}`);
  }
  for (const node of document.querySelectorAll("input, select")) {
    if (!node.getAttribute("aria-label")) faults.push(`nameless ${node.name}`);
  }
  for (const node of document.querySelectorAll("svg:not([aria-hidden]), [role=img]")) {
    if (!node.getAttribute("aria-label")) faults.push(`nameless picture ${node.outerHTML.slice(0, 80)}`);
  }
  for (const node of document.querySelectorAll(".chart svg")) {
    if (!node.querySelector("title") || !node.querySelector("desc")) faults.push("a chart without title and desc");
  }
  for (const node of document.querySelectorAll("table")) if (!node.caption) faults.push("a table without caption");
  for (const node of document.querySelectorAll("[id]")) {
    if (document.querySelectorAll(`#${CSS.escape(node.id)}`).length > 1) faults.push(`two of ${node.id}`);
  }
  const levels = [...document.querySelectorAll("h1, h2, h3, h4")].map((node) => Number(node.tagName[1]));
  levels.forEach((level, at) => {
    if (at && level > levels[at - 1] + 1) faults.push(`h${levels[at - 1]} then h${level}`);
  });
  if (document.documentElement.scrollWidth > innerWidth) faults.push("wider than the window");
  return faults;
}"""


def test_the_first_screen_shows_model_outcome_and_times(browser: Any, run: Path) -> None:
    with serving(run) as address, opened(browser, address) as page:
        lead = page.inner_text(".lead")
        assert "787k parameters (qwen3, 6 layers), trained in 8 stages in" in lead
        outcome = page.locator(".outcome")
        text = outcome.inner_text()
        assert "The model after rl, against sft, the best earlier model on validation:" in text
        assert "Scored in this run: validation 2 times, new 2 times, unseen 2 times." in text
        assert outcome.locator(".panel").count() == 3
        labels = [each.get_attribute("aria-label") for each in outcome.locator(".panel").all()]
        assert [label.split(",")[0] for label in labels] == [
            f"{name}: tasks solved on average" for name in ("validation", "new", "unseen")
        ]
        assert outcome.locator(".panel .within").count() == 3 * 2 * 2, "an interval of average and best for each model"
        assert outcome.locator(".gains tbody tr").count() == 3
        assert page.locator(".stages li").count() == 8
        assert page.locator(".stages .took").all_inner_texts()[-1].endswith("s")
        bottom = page.evaluate("document.querySelector('.panels').getBoundingClientRect().bottom")
        assert bottom < 900, "the picture is on the first screen"
        titles = page.locator("figure.chart h3").all_inner_texts()
        assert titles[:5] == ["pretrain", "mtp", "extend", "sft", "extend: loss by position"]
        assert "Validation" in titles
        empty = page.evaluate("""() => [...document.querySelectorAll(".chart")].filter((chart) =>
          !chart.querySelector("path, rect, circle")).map((chart) => chart.textContent)""")
        assert empty == []


def test_filtering_opening_and_going_back_with_the_keyboard(browser: Any, run: Path) -> None:
    with serving(run) as address, opened(browser, address) as page:
        page.keyboard.press("g")
        page.keyboard.press("l")
        page.wait_for_selector("tbody a")
        assert page.inner_text(".count") == "42 rollouts"
        page.keyboard.press("/")
        page.keyboard.type("unseen-000001")
        assert page.inner_text(".count") == "6 of 42 rollouts"
        assert "q=unseen-000001" in page.url, "a view can be shared"
        page.keyboard.press("Enter")  # into the list
        page.keyboard.press("j")
        page.keyboard.press("k")
        focused = page.evaluate("document.activeElement.getAttribute('href')")
        assert focused.startswith("#/rollout/evaluation/")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn")
        assert page.url.endswith(focused)
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.className").startswith("turn")
        page.keyboard.press("t")
        page.wait_for_selector(".tok.made")
        assert not page.is_visible(".turns")
        page.keyboard.press("n")
        page.wait_for_function("() => location.hash.endsWith('/1/1')")
        page.keyboard.press("Escape")
        page.wait_for_selector(".cards")
        page.keyboard.press("?")
        assert page.is_visible("dialog")
        page.keyboard.press("Escape")
        page.wait_for_function("() => !document.querySelector('dialog')")
        for _ in range(3):
            page.go_back()
            page.wait_for_timeout(200)
        assert page.inner_text(".count") == "6 of 42 rollouts", "back to the list as it was left"
        page.keyboard.press("Escape")
        assert page.inner_text(".count") == "42 rollouts"


def test_filters_and_columns_narrow_and_sort(browser: Any, run: Path) -> None:
    with serving(run) as address, opened(browser, f"{address}#/rollouts") as page:
        page.wait_for_selector("tbody a")
        page.select_option("select[name=solved]", "yes")
        some = page.inner_text(".count")
        assert page.locator("tbody .verdict.no").count() == 0
        page.select_option("select[name=set]", "evaluation")
        assert page.inner_text(".count") != some
        page.fill("input[name=step]", "2-3")
        assert {text for text in page.locator("tbody td:nth-child(4)").all_inner_texts() if text} <= {"2", "3"}
        page.keyboard.press("Escape")
        page.click("[data-key=total]")
        values = [float(text.replace("−", "-")) for text in page.locator("tbody td:nth-child(7)").all_inner_texts()]
        assert values == sorted(values, reverse=True)
        assert page.get_attribute("th:has([data-key=total])", "aria-sort") == "descending"
        go(page, "#/groups?kind=some")
        assert "of" in page.inner_text(".count")
        go(page, "#/tasks?split=held-out")
        assert page.inner_text(".count") == "3 of 11 tasks"


def test_a_chart_can_be_read_with_the_arrow_keys_and_as_a_table(browser: Any, run: Path) -> None:
    with serving(run) as address, opened(browser, address) as page:
        chart = page.locator("figure.chart", has_text="Validation").first
        chart.locator("svg").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("End")
        assert "step 3" in chart.locator(".tip").inner_text()
        chart.locator("summary").click()
        chart.locator("tbody tr").first.wait_for()  # filled when it opens
        assert chart.locator("tbody tr").count() == 3
        chart.locator("svg").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        page.wait_for_selector("tbody a")
        assert "set=evaluation&step=3" in page.url


def test_the_report_works_from_a_file_without_network(browser: Any, run: Path, tmp_path: Path) -> None:
    from etude.viewer.report import write_report

    out = tmp_path / "report.html"
    write_report(run, out)
    requested: list[str] = []
    with opened(browser, out.as_uri(), offline=True) as page:
        page.on("request", lambda request: requested.append(request.url))
        for name, route in ROUTES.items():
            go(page, route)
            assert page.inner_text("h1") != "Not found", name
        page.wait_for_selector("h1")
        go(page, "#/rollouts")
        page.fill("input[name=q]", "unseen")
        assert page.inner_text(".count") == "18 of 42 rollouts"
        picture(page, "report", tmp_path)
    assert requested == []


def test_text_written_by_a_model_is_never_executed(browser: Any, run: Path, tmp_path: Path) -> None:
    hostile = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
    from dataclasses import replace

    from etude.harness.trace_store import load_trace, save_trace
    from etude.viewer.report import write_report

    copy = Path(shutil.copytree(run, tmp_path / "run"))
    path = copy / "rl/traces/000001/00-1.trace"
    trace = load_trace(path)
    steps = [replace(each, message=replace(each.message, content=hostile)) for each in trace.steps]
    save_trace(replace(trace, steps=tuple(steps)), path)
    write_report(copy, tmp_path / "report.html")
    with serving(copy) as address:
        for route in (
            f"{address}#/rollout/training/1/0/1",
            f"{(tmp_path / 'report.html').as_uri()}#/rollout/training/1/0/1",
        ):
            with opened(browser, route) as page:
                assert hostile in page.inner_text(".turns")
                assert page.evaluate("window.pwned") is None
                assert page.locator("main img").count() == 0


def test_a_running_run_is_updated_live(browser: Any, run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    state = json.loads((copy / "state.json").read_text())
    state["stages"]["rl"]["done"] = False
    (copy / "state.json").write_text(json.dumps(state))
    (copy / "lock").write_text(f"pid {os.getpid()} on {socket.gethostname()} since 2026-01-01T00:00:00+00:00\n")
    with serving(copy) as address, opened(browser, address) as page:
        page.wait_for_selector(".pill.running")
        with (copy / "metrics.jsonl").open("a") as file:
            file.write(step(4) + step(5))
        page.locator(".stages .running .did", has_text="running at step 5 of 3").wait_for(timeout=10_000)
        (copy / "lock").write_text("")
        page.wait_for_selector(".pill.stopped", timeout=10_000)
        page.evaluate("document.querySelector('.pill').textContent")
        assert page.inner_text(".pill") == "stopped"


def test_ten_thousand_rollouts_are_filtered_as_one_types(browser: Any, large: Path) -> None:
    with serving(large) as address, opened(browser, address) as page:
        page.wait_for_selector(".chart svg")
        print(f"10,000 rollouts: the run's page is there after {page.evaluate('performance.now()') / 1000:.2f} s")
        data = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
        assert len([name for name in data if name.endswith("/api/run")]) == 1, "it is requested once"
        page.goto(f"{address}#/rollouts")
        page.reload()
        page.wait_for_selector("tbody a")
        assert page.inner_text(".count") == "10 000 rollouts"
        assert page.locator("tbody tr").count() < 80, "only visible rows are in the page"
        took = [page.evaluate(KEYSTROKE, "debugging"[:size]) for size in range(1, 10)]
        print(f"10,000 rollouts: a keystroke takes {max(took):.0f} ms at most")
        assert page.inner_text(".count") == "1 104 of 10 000 rollouts"
        page.evaluate("document.querySelector('.frame').scrollTop = 1e6")
        page.wait_for_timeout(100)
        last = int(page.locator("tbody tr[aria-rowindex]").last.get_attribute("aria-rowindex"))
        assert last == 1105


KEYSTROKE = """(text) => {
  const input = document.querySelector("input[name=q]");
  input.value = text;
  const started = performance.now();
  input.dispatchEvent(new Event("input", {bubbles: true}));
  document.querySelector(".frame").offsetHeight; // laid out
  return performance.now() - started;
}"""


def test_small_windows_and_print(browser: Any, run: Path, tmp_path: Path) -> None:
    with serving(run) as address, opened(browser, address) as page:
        page.set_viewport_size({"width": 390, "height": 800})
        for name, route in ROUTES.items():
            go(page, route)
            picture(page, f"{name}-small", tmp_path)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.set_viewport_size({"width": 1360, "height": 900})
        go(page, "#/")
        page.emulate_media(media="print")
        assert not page.is_visible("header.top")
        picture(page, "run-paper", tmp_path)
