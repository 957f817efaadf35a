"""Take the pictures of docs/viewer.md from a finished run: `python docs/viewer_pictures.py RUN [GROUP]`.

Writes viewer-*.png beside itself. Needs Playwright and chromium; Pillow, if installed, shrinks them.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from etude.viewer.api import RunApi
from etude.viewer.catalogue import RolloutGroup
from etude.viewer.report import write_report

HERE = Path(__file__).parent
SIZE = {"width": 1280, "height": 900}
COLOURS = 128  # palette size; the pages use few colours


def main() -> None:
    run = Path(sys.argv[1])
    group = choose_group(run, int(sys.argv[2]) if len(sys.argv) > 2 else None)
    group_path = f"training/{group.progress.id}"
    solved = next(row for row in group.rows if row.solved)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as play:
        report = Path(directory) / "report.html"
        write_report(run, report, max_bytes=1 << 30)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport=SIZE, color_scheme="light", device_scale_factor=2).new_page()
        page.goto(report.as_uri())
        picture(page, "viewer-run", "#/", above="#training", below=".grid.two")
        picture(page, "viewer-group", f"#/group/{group_path}", below=".stripkey")
        picture(page, "viewer-rollout", f"#/rollout/{group_path}/{solved.number}/{solved.attempt}", below=".turns")
        browser.close()


def choose_group(run: Path, wanted: int | None) -> RolloutGroup:
    """Return the wanted group, or the newest with about half of its rollouts solved."""
    groups = [group for group in RunApi(run).groups() if group.set == "training" and any(r.solved for r in group.rows)]
    if wanted is not None:
        return next(group for group in groups if group.progress.id == wanted)
    return min(reversed(groups), key=lambda group: abs(sum(bool(r.solved) for r in group.rows) / len(group.rows) - 0.5))


def picture(page: Any, name: str, route: str, below: str, above: str = "") -> None:
    """Save a picture of a page from its top, or slightly above `above`, to slightly below `below`."""
    page.evaluate("route => { location.hash = route; }", route)
    page.wait_for_selector(below)
    page.wait_for_timeout(500)  # charts are drawn when their width is known
    edge = "([name, side]) => document.querySelector(name).getBoundingClientRect()[side] + scrollY"
    top = page.evaluate(edge, [above, "top"]) - 24 if above else 0
    bottom = page.evaluate(edge, [below, "bottom"]) + 24
    out = HERE / f"{name}.png"
    clip = {"x": 0, "y": top, "width": SIZE["width"], "height": bottom - top}
    page.screenshot(path=str(out), clip=clip, full_page=True)
    print(f"{out.name}: {shrink(out) / 1000:.0f} kB")


def shrink(path: Path) -> int:
    """Reduce the picture to a palette; return its size in bytes."""
    try:
        from PIL import Image
    except ImportError:
        print(f"{path.name}: Pillow is not installed, the picture is not reduced")
    else:
        few = Image.open(path).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    return path.stat().st_size


if __name__ == "__main__":
    main()
