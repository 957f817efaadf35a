"""Properties of the style sheets: contrast in light and dark, and the size of the files."""

import re
from pathlib import Path

PAGES = Path("etude/viewer/pages")
PAIRS = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", (PAGES / "style.css").read_text())
COLOURS = {name: (light, dark) for name, light, dark in PAIRS}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_has_enough_contrast_in_both_themes() -> None:
    grounds = dict.fromkeys(("ink", "soft", "faint", "accent"), ("paper", "sheet", "sunk"))
    grounds |= {name: ("paper", "sheet", f"{name}-bg") for name in ("good", "bad", "odd")}
    for name, below in grounds.items():
        for ground in below:
            for theme in (0, 1):
                found = contrast(COLOURS[name][theme], COLOURS[ground][theme])
                assert found >= 4.5, f"{name} on {ground}, {('light', 'dark')[theme]}: {found:.2f}"


def test_chart_lines_have_enough_contrast() -> None:
    for number in range(1, 9):
        for theme in (0, 1):
            found = contrast(COLOURS[f"tone{number}"][theme], COLOURS["paper"][theme])
            assert found >= 3.0, f"tone{number}, {('light', 'dark')[theme]}: {found:.2f}"


def test_front_end_files_are_short_and_start_with_a_comment() -> None:
    for path in PAGES.iterdir():
        if path.suffix in (".js", ".css"):
            lines = path.read_text().splitlines()
            assert len(lines) < 600, path.name
            assert max(map(len, lines)) <= 120, path.name
            assert lines[0].startswith(("//", "/*")), f"{path.name} starts with a comment"
