"""Plots as SVG text: lines with bands, points and bars, on linear or logarithmic axes. No dependencies.

A plot is data: panels of series. Colours are of medium lightness and the background is transparent, so a plot is
readable on light and dark pages; a page that shows it inline can set `color` on `.plot`. Every plot has a title and a
description for screen readers, and points show their values in a tooltip. The same data gives the same bytes.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from etude.errors import InputError

INK = "#768390"
COLOURS = ("#2f81f7", "#e5793a", "#2da44e", "#a371f7", "#d4a72c", "#db61a2", "#8b949e")
WIDTH, HEIGHT = 340, 210  # of a panel's plotting area
LEFT, RIGHT, ABOVE, BELOW = 62, 18, 26, 46  # margins for numbers and labels
HEADING, KEY = 30, 16  # height of the figure's title, and of one row of a legend
TINY = 1e-290  # smallest difference that can be divided into steps
LETTER = 6.1  # approximate width at 11 pixels
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """The label, range and number format of an axis."""

    label: str
    log: bool = False
    low: float | None = None  # first value; None: that of the data, rounded
    high: float | None = None
    percent: bool = False  # show 0.5 as 50%


@dataclass(frozen=True)
class Line:
    """Points in order. `low` and `high` draw a band; a value that is not finite leaves a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: Literal["line", "dashed", "points", "both"] = "line"
    colour: int | None = None  # index into COLOURS; None: the next


@dataclass(frozen=True)
class Bars:
    """One bar for each category of the panel, grouped with those of other series; `low` and `high` draw whiskers."""

    label: str
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int | None = None


@dataclass(frozen=True)
class Mark:
    """A thin line across a panel at a value of x or y, with a label."""

    at: float
    label: str = ""
    across: Literal["x", "y"] = "x"
    below: bool = False  # label below the line, for a value of y


@dataclass(frozen=True)
class Panel:
    """One coordinate system with its series."""

    x: Axis
    y: Axis
    series: Sequence[Line | Bars]
    title: str = ""
    marks: Sequence[Mark] = ()
    categories: Sequence[str] = ()  # labels of the groups of bars

    def __post_init__(self) -> None:
        for each in self.series:
            x = each.x if isinstance(each, Line) else self.categories
            sizes = {len(x), len(each.y), *(len(part) for part in (each.low, each.high) if len(part))}
            if len(sizes) > 1 or bool(len(each.low)) != bool(len(each.high)):
                raise InputError(f"plot: series {each.label!r} has parts of different lengths: {sorted(sizes)}")


def draw(panels: Sequence[Panel], *, title: str, description: str, columns: int = 0) -> str:
    """Return the SVG of a figure with its panels in `columns` columns; 0: up to three panels in one row."""
    if not panels:
        raise InputError("plot: a figure needs at least one panel")
    columns = columns or (len(panels) if len(panels) <= 3 else 2)
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    drawn, y = [], float(HEADING)
    for row in rows:
        key = max(len(_key_rows(panel)) for panel in row) * KEY
        for column, panel in enumerate(row):
            drawn.append(_panel(panel, column * (LEFT + WIDTH + RIGHT) + LEFT, y + ABOVE + key, key))
        y += ABOVE + key + HEIGHT + BELOW
    width = columns * (LEFT + WIDTH + RIGHT)
    name = hashlib.sha256("".join([title, *drawn]).encode()).hexdigest()[:8]  # unique on a page with several figures
    clip = f'<clipPath id="c{name}"><rect x="-3" y="-3" width="{WIDTH + 6}" height="{HEIGHT + 6}"/></clipPath>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width} {y:g}" width="{width}" '
            f'height="{y:g}" role="img" aria-labelledby="t{name} d{name}" color="{INK}" font-family="{FONT}" '
            f'font-size="11" fill="currentColor">',
            f'<title id="t{name}">{escape(title)}</title>',
            f'<desc id="d{name}">{escape(description)}</desc>',
            f"<defs>{clip}</defs>",
            _text(width / 2, 19, title, anchor="middle", extra=' font-size="14" font-weight="600"'),
            *(part.replace("CLIP", f"url(#c{name})") for part in drawn),
            "</svg>\n",
        ]
    )


# ------------------------------------------------------------------------------------------------- one panel


def _panel(panel: Panel, left: float, top: float, key: float) -> str:
    x, y = _scales(panel)
    parts = [f'<g transform="translate({left:g} {top:g})">']
    if panel.title:
        parts.append(_text(WIDTH / 2, -key - 9, panel.title, anchor="middle", extra=' font-weight="600"'))
    parts += _key(panel)
    parts += _axes(panel, x, y)
    parts.append('<g clip-path="CLIP">')
    bars = [each for each in panel.series if isinstance(each, Bars)]
    for number, each in enumerate(panel.series):
        colour = _colour(each, number)
        if isinstance(each, Line):
            parts += _line(each, colour, x, y)
        else:
            parts += _bars(each, colour, y, bars.index(each), len(bars), panel.categories)
    parts.append("</g>")
    parts += [part for mark in panel.marks for part in _mark(mark, x, y)]
    return "\n".join([*parts, "</g>"])


def _line(line: Line, colour: str, x: "Scale", y: "Scale") -> Iterator[str]:
    if len(line.low):
        for run in _runs(x, y, zip(line.x, line.low, line.high, strict=True)):
            outline = [(a, high) for a, _, high in run] + [(a, low) for a, low, _ in reversed(run)]
            yield f'<path d="M{_points(outline)}Z" fill="{colour}" fill-opacity="0.18" stroke="none"/>'
    runs = _runs(x, y, zip(line.x, line.y, strict=True))
    if line.style != "points":
        dash = ' stroke-dasharray="5 4"' if line.style == "dashed" else ""
        for run in runs:
            yield (
                f'<path d="M{_points(run)}" fill="none" stroke="{colour}" stroke-width="1.8" '
                f'stroke-linejoin="round"{dash}/>'
            )
    if line.style in ("points", "both"):
        for a, b in zip(line.x, line.y, strict=True):
            if x.shows(a) and y.shows(b):
                tooltip = f"{line.label}: {x.format(a)}, {y.format(b)}"
                yield (
                    f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="2.8" fill="{colour}">'
                    f"<title>{escape(tooltip)}</title></circle>"
                )


def _bars(bars: Bars, colour: str, y: "Scale", index: int, count: int, categories: Sequence[str]) -> Iterator[str]:
    group = WIDTH / max(1, len(categories))
    width = 0.76 * group / count
    floor = y.at(y.low if y.axis.log else min(max(0.0, y.low), y.high))
    for number, value in enumerate(bars.y):
        if not y.shows(value):
            continue
        left, top = number * group + 0.12 * group + index * width, y.at(value)
        tooltip = escape(f"{bars.label}, {categories[number]}: {y.format(value)}")
        yield (
            f'<rect x="{left + 1:.1f}" y="{min(top, floor):.1f}" width="{width - 2:.1f}" '
            f'height="{abs(floor - top):.1f}" rx="1.5" fill="{colour}" fill-opacity="0.85">'
            f"<title>{tooltip}</title></rect>"
        )
        middle = left + width / 2
        if len(bars.low) and y.shows(bars.low[number]) and y.shows(bars.high[number]):
            ends = f'y1="{y.at(bars.low[number]):.1f}" y2="{y.at(bars.high[number]):.1f}"'
            yield f'<line x1="{middle:.1f}" x2="{middle:.1f}" {ends} stroke="currentColor" stroke-width="1.4"/>'
            top = min(top, y.at(bars.high[number]))
        yield _text(middle, top - 4, y.format(value), anchor="middle", extra=' font-size="9"')


def _mark(mark: Mark, x: "Scale", y: "Scale") -> Iterator[str]:
    stroke = 'stroke="currentColor" stroke-width="1" stroke-dasharray="2 3"'
    if mark.across == "x" and x.shows(mark.at):
        at = x.at(mark.at)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT}" {stroke}/>'
        right = at < WIDTH * 0.6
        yield _text(at + (5 if right else -5), 11, mark.label, anchor="start" if right else "end")
    elif mark.across == "y" and y.shows(mark.at):
        at = y.at(mark.at)
        yield f'<line x1="0" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" {stroke}/>'
        yield _text(WIDTH - 4, at + (13 if mark.below else -4), mark.label, anchor="end")


def _axes(panel: Panel, x: "Scale", y: "Scale") -> Iterator[str]:
    grid = 'stroke="currentColor" stroke-opacity="0.18"'
    for tick in y.ticks():
        at = y.at(tick)
        yield f'<line x1="0" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" {grid}/>'
        yield _text(-7, at + 4, y.tick_label(tick), anchor="end")
    if panel.categories:
        group = WIDTH / len(panel.categories)
        for number, name in enumerate(panel.categories):
            for row, label in enumerate(name.split("\n")):
                yield _text((number + 0.5) * group, HEIGHT + 15 + 12 * row, label, anchor="middle")
    else:
        for tick in x.ticks():
            at = x.at(tick)
            yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT}" {grid}/>'
            yield _text(at, HEIGHT + 15, x.tick_label(tick), anchor="middle")
    yield f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="currentColor" stroke-opacity="0.7"/>'
    yield _text(WIDTH / 2, HEIGHT + 36, panel.x.label, anchor="middle")
    turned = f' transform="rotate(-90 {-LEFT + 14} {HEIGHT / 2:g})"'
    yield _text(-LEFT + 14, HEIGHT / 2, panel.y.label, anchor="middle", extra=turned)


# ------------------------------------------------------------------------------------------------- the legend


def _key_rows(panel: Panel) -> list[list[int]]:
    """Return the indices of the series in the legend, by row."""
    rows: list[list[int]] = []
    room = 0.0
    for number, each in enumerate(panel.series):
        if not each.label:
            continue
        needed = _key_width(each.label)
        if not rows or needed > room:
            rows.append([])
            room = float(WIDTH)
        rows[-1].append(number)
        room -= needed
    return rows


def _key_width(label: str) -> float:
    return 30 + LETTER * len(label)


def _key(panel: Panel) -> Iterator[str]:
    rows = _key_rows(panel)
    for row, numbers in enumerate(rows):
        y = (row - len(rows)) * KEY + 8.0
        left = (WIDTH - sum(_key_width(panel.series[number].label) for number in numbers)) / 2
        for number in numbers:
            each = panel.series[number]
            colour = _colour(each, number)
            if isinstance(each, Bars):
                yield f'<rect x="{left:.1f}" y="{y - 8:g}" width="14" height="9" rx="1.5" fill="{colour}"/>'
            else:
                dash = ' stroke-dasharray="4 3"' if each.style == "dashed" else ""
                ends = f'x1="{left:.1f}" x2="{left + 16:.1f}" y1="{y - 4:g}" y2="{y - 4:g}"'
                if each.style != "points":
                    yield f'<line {ends} stroke="{colour}" stroke-width="2"{dash}/>'
                if each.style in ("points", "both"):
                    yield f'<circle cx="{left + 8:.1f}" cy="{y - 4:g}" r="2.8" fill="{colour}"/>'
            yield _text(left + 20, y, each.label)
            left += _key_width(each.label)


def _colour(series: Line | Bars, number: int) -> str:
    return COLOURS[(number if series.colour is None else series.colour) % len(COLOURS)]


# ------------------------------------------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels along one axis."""

    axis: Axis
    low: float
    high: float
    start: float  # pixel of `low`
    end: float

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (not self.axis.log or value > 0)

    def at(self, value: float) -> float:
        low, high, here = (math.log10(v) if self.axis.log else v for v in (self.low, self.high, value))
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.axis.log:
            return _log_ticks(self.low, self.high)
        step = nice_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def tick_label(self, tick: float) -> str:
        """Return the label of a tick, with as few digits as the tick spacing needs."""
        if self.axis.percent:
            return f"{100 * tick:g}%" if abs(tick) > 1e-12 else "0%"
        if self.axis.log:
            if 1e-3 <= tick < 1e5:
                return f"{tick:,g}" if tick < 1e4 else f"{tick:,.0f}"
            power = math.floor(math.log10(tick) + 1e-9)
            lead = f"{tick / 10**power:.0f}"
            return ("" if lead == "1" else f"{lead}·") + "10" + str(power).translate(SUPERSCRIPTS)
        step = nice_step((self.high - self.low) / 5)
        return f"{tick + 0.0:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"

    def format(self, value: float) -> str:
        """Return a value with three significant digits."""
        return f"{100 * value:.3g}%" if self.axis.percent else f"{value:,.3g}" if abs(value) < 1e3 else f"{value:,.0f}"


def nice_step(raw: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 7))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    slack = (high / low) ** 1e-9  # relative to the length of the axis
    return [tick for tick in found if low / slack <= tick <= high * slack]


def _scales(panel: Panel) -> tuple[Scale, Scale]:
    xs = [value for each in panel.series if isinstance(each, Line) for value in each.x]
    xs += [mark.at for mark in panel.marks if mark.across == "x"]
    ys = [value for each in panel.series for part in (each.y, each.low, each.high) for value in part]
    ys += [mark.at for mark in panel.marks if mark.across == "y"]
    if any(isinstance(each, Bars) for each in panel.series) and not panel.y.log:
        ys.append(0.0)
    across = (0.0, 1.0) if panel.categories else _ends(panel.x, xs, tight=True)
    return Scale(panel.x, *across, 0.0, WIDTH), Scale(panel.y, *_ends(panel.y, ys), HEIGHT, 0.0)


def _ends(axis: Axis, values: Iterable[float], tight: bool = False) -> tuple[float, float]:
    """Return the ends of an axis: round numbers around the data, or with `tight` those of the data."""
    shown = [value for value in values if math.isfinite(value) and (not axis.log or value > 0)]
    shown += [end for end in (axis.low, axis.high) if end is not None]
    if not shown:
        raise InputError(
            f"plot: no value to show on axis {axis.label!r}" + (", which is logarithmic" if axis.log else "")
        )
    low, high = min(shown), max(shown)
    if axis.log:
        low, high = (low / 2, high * 2) if low == high else (low, high)
        if not tight:
            low, high = _round_log(low, down=True), _round_log(high, down=False)
    else:
        low, high = (low - 0.5, high + 0.5) if high - low < TINY else (low, high)
        if not tight:
            step = nice_step((high - low) / 5)
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    low, high = low if axis.low is None else axis.low, high if axis.high is None else axis.high
    if not low < high:
        raise InputError(f"plot: axis {axis.label!r} would go from {low:g} to {high:g}")
    return low, high


def _round_log(value: float, *, down: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-12)
    steps = [factor * power for factor in (1, 2, 5, 10)]
    if down:
        return max(step for step in steps if step <= value * (1 + 1e-9))
    return min(step for step in steps if step >= value * (1 - 1e-9))


# ------------------------------------------------------------------------------------------------- text and paths


def _runs(x: Scale, y: Scale, values: Iterable[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """Return points in pixels, split where a value cannot be shown."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for a, *others in values:
        if x.shows(a) and all(map(y.shows, others)):
            runs[-1].append((x.at(a), *map(y.at, others)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _points(points: Iterable[tuple[float, ...]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>' if text else ""
