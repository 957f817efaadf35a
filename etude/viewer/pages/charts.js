// SVG charts in one style: few lines, no frame, the same colours for the same things. Each chart has a title, a
// description and a table of its values, and can be read point by point with the pointer or the arrow keys.

import {appendAll, foldable, h, isNumber, setChildren, s, short} from "./dom.js";

const MARGIN = {left: 46, right: 14, labelled: 50, top: 10, bottom: 30};
const TICKS = 5;

// spec: {title, caption, x: {values, label, log, format}, y: {format, log, low, high}, layers, stack, height, open}
// layer: {name, values, kind: line | dots | band | area | bar, low, high, tone, dashed, faint, labelled}
// A layer without a name has no legend or table entry; a `labelled` one shows its first and last value.
export function chart(spec) {
  const figure = h("figure.chart", {class: spec.wide ? "wide" : null});
  const canvas = h("div.canvas");
  const note = h("div.tip", {hidden: true, role: "status"});
  appendAll(figure, [
    h("figcaption", h("h3", spec.title), spec.caption ? h("p", spec.caption) : null, legend(spec.layers)),
    h("div.plot", canvas, note),
    foldable("Table", () => table(spec), {class: "as-table"}),
  ]);
  let drawnWidth = 0;
  const draw = () => {
    const width = Math.round(canvas.clientWidth || 520);
    if (width === drawnWidth) return;
    drawnWidth = width;
    setChildren(canvas, picture(spec, width, note));
  };
  new ResizeObserver(draw).observe(canvas);
  return figure;
}

function legend(layers) {
  const named = layers.filter((layer) => layer.name && !layer.quiet);
  if (named.length < 2 && !named.some((layer) => layer.alone)) return null;
  return h(
    "ul.legend",
    named.map((layer) =>
      h("li", h("span.key", {class: `tone${layer.tone} ${layer.kind}${layer.dashed ? " dashed" : ""}`}), layer.name)),
  );
}

// ------------------------------------------------------------------------------------------- scales

export function scale(from, to, start, end, log) {
  const at = log ? (value) => Math.log10(Math.max(value, 1e-12)) : (value) => value;
  const [low, high] = [at(from), at(to)];
  const span = high - low || 1;
  return (value) => start + ((at(value) - low) / span) * (end - start);
}

export function niceTicks(low, high, count = TICKS) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * size).find((each) => each >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : Number(at.toPrecision(12)));
  }
  return found;
}

export function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low);
  const inside = decades <= 1.2 ? [1, 2, 3, 5] : decades <= 2.5 ? [1, 3] : [1];
  const each = Math.max(1, Math.ceil(decades / 6));
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += each) {
    for (const digit of inside) {
      const value = Number((digit * 10 ** power).toPrecision(3));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found;
}

// ------------------------------------------------------------------------------------------- drawing

function picture(spec, width, note) {
  const height = spec.height ?? (spec.wide ? 260 : 190);
  const right = spec.layers.some((layer) => layer.labelled) ? MARGIN.labelled : MARGIN.right;
  const box = {left: MARGIN.left, right: width - right, top: MARGIN.top, bottom: height - MARGIN.bottom};
  const layers = spec.stack ? stacked(spec.layers) : spec.layers;
  const [x, y] = axes(spec, layers, box);
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "img",
    "aria-label": `${spec.title}. ${describe(spec)} Arrow keys go from point to point.`,
  });
  appendAll(svg, [s("title", spec.title), s("desc", describe(spec))]);
  const shapes = layers.map((layer) => drawLayer(layer, spec, x, y, box, layers));
  appendAll(svg, [grid(spec, x, y, box), shapes, axisLine(box)]);
  trackPointer(svg, spec, layers, x, y, box, note);
  return svg;
}

function axes(spec, layers, box) {
  const xs = spec.x.values.filter(isNumber);
  const bars = layers.some((layer) => layer.kind === "bar");
  const pad = bars ? gap(xs) / 2 : 0;
  let [from, to] = [Math.min(...xs), Math.max(...xs)];
  if (spec.x.log) from = Math.max(from, 1e-9);
  if (from === to && !bars) [from, to] = spec.x.log ? [from / 2, to * 2] : [from - 1, to + 1];
  const x = scale(from - pad, to + pad, box.left, box.right, spec.x.log);
  const values = layers.flatMap((layer) => [layer.values, layer.low, layer.high].filter(Boolean).flat());
  const seen = values.filter((value) => isNumber(value) && (!spec.y.log || value > 0));
  let low = spec.y.low ?? Math.min(...seen);
  let high = spec.y.high ?? Math.max(...seen);
  if (!seen.length) [low, high] = spec.y.log ? [0.1, 1] : [0, 1];
  if (spec.y.log) {
    [low, high] = [low / 1.3, high * 1.3];
  } else {
    if (low === high) [low, high] = [Math.min(0, low), high || 1];
    const room = (high - low) * 0.06;
    if (spec.y.low === undefined) low = low >= 0 && low < (high - low) * 0.6 ? 0 : low - room;
    if (spec.y.high === undefined) high += room;
  }
  const y = scale(low, high, box.bottom, box.top, spec.y.log);
  y.domain = [low, high];
  x.domain = [from - pad, to + pad];
  return [x, y];
}

function gap(xs) {
  let smallest = Infinity;
  for (let at = 1; at < xs.length; at++) smallest = Math.min(smallest, xs[at] - xs[at - 1] || Infinity);
  return Number.isFinite(smallest) ? smallest : 1;
}

function grid(spec, x, y, box) {
  const group = s("g.grid", {"aria-hidden": "true"});
  const rows = spec.y.log ? logTicks(...y.domain) : niceTicks(...y.domain, spec.y.high === 1 ? 4 : TICKS);
  for (const value of rows) {
    const at = Math.round(y(value)) + 0.5;
    appendAll(group, [
      s("line", {x1: box.left, x2: box.right, y1: at, y2: at, class: value === 0 ? "zero" : null}),
      s("text.tick", {x: box.left - 7, y: at + 3.5, "text-anchor": "end"}, (spec.y.format ?? short)(value)),
    ]);
  }
  const room = Math.max(2, Math.floor((box.right - box.left) / 70));
  const [low, high] = x.domain;
  let columns = spec.x.log ? logTicks(low, high) : niceTicks(low, high, room);
  if (!spec.x.log) columns = columns.filter((value) => Number.isInteger(value) || high - low < 2);
  for (const value of columns) {
    const at = x(value);
    if (at < box.left - 1 || at > box.right + 1) continue;
    const text = (spec.x.format ?? short)(value);
    appendAll(group, [s("text.tick", {x: at, y: box.bottom + 15, "text-anchor": "middle"}, text)]);
  }
  if (spec.x.label) {
    appendAll(group, [s("text.label", {x: box.right, y: box.bottom + 27, "text-anchor": "end"}, spec.x.label)]);
  }
  return group;
}

function axisLine(box) {
  return s("line.axis", {x1: box.left, x2: box.right, y1: box.bottom + 0.5, y2: box.bottom + 0.5});
}

function drawLayer(layer, spec, x, y, box, layers) {
  const xs = spec.x.values;
  const tone = `tone${layer.tone}`;
  const ok = (value) => isNumber(value) && (!spec.y.log || value > 0);
  if (layer.kind === "band" || layer.kind === "area") {
    return segments(xs, (at) => ok(layer.low[at]) && ok(layer.high[at])).map((indices) => {
      const upper = indices.map((at) => `${round(x(xs[at]))} ${round(y(layer.high[at]))}`);
      const lower = indices.map((at) => `${round(x(xs[at]))} ${round(y(layer.low[at]))}`).reverse();
      return s("path", {class: `${layer.kind} ${tone}`, d: `M${[...upper, ...lower].join("L")}Z`});
    });
  }
  if (layer.kind === "bar") return bars(layer, xs, x, y, box, tone, layers);
  const found = [];
  if (layer.kind === "line") {
    for (const indices of segments(xs, (at) => ok(layer.values[at]))) {
      const path = indices.map((at) => `${round(x(xs[at]))} ${round(y(layer.values[at]))}`).join("L");
      const manner = layer.dashed ? "dashed" : layer.faint ? "faint" : "";
      found.push(s("path", {class: `line ${tone} ${manner}`, d: `M${path}`}));
    }
  }
  const few = layer.kind === "dots" || xs.filter((_, at) => ok(layer.values[at])).length <= (layer.dots ?? 2);
  if (few) {
    xs.forEach((value, at) => {
      if (ok(layer.values[at])) {
        found.push(s("circle", {class: `dot ${tone}`, cx: round(x(value)), cy: round(y(layer.values[at])), r: 3}));
      }
    });
  }
  return layer.labelled ? [...found, endLabels(layer, spec, x, y)] : found;
}

function bars(layer, xs, x, y, box, tone, layers) {
  const room = Math.abs(x(xs[0] + gap(xs.filter(isNumber))) - x(xs[0]));
  const width = Math.max(1, Math.min(28, room * 0.76));
  const low = layer.low ?? layers[0].values.map(() => 0);
  return xs.map((value, at) => {
    const top = layer.high ? layer.high[at] : layer.values[at];
    if (!isNumber(top) || top === low[at]) return null;
    const [from, to] = [y(Math.max(low[at], y.domain[0])), y(top)];
    const size = Math.max(0.75, Math.abs(from - to));
    return s("rect", {class: `bar ${tone}`, x: round(x(value) - width / 2), y: round(Math.min(from, to)),
      width: round(width), height: round(size)});
  });
}

// Labels with the values at both ends: the first above its point, the last beside it.
function endLabels(layer, spec, x, y) {
  const known = spec.x.values.map((_, at) => at).filter((at) => isNumber(layer.values[at]));
  const format = spec.y.exact ?? spec.y.format ?? short;
  return [...new Set([known[0], known.at(-1)])].filter(isNumber).map((at) => {
    const [left, top] = [x(spec.x.values[at]), y(layer.values[at])];
    const [right, down] = at === known.at(-1) ? [7, 4] : [3, -8];
    return s("text", {class: `end-label tone${layer.tone}`, x: round(left + right), y: round(top + down)},
      format(layer.values[at]));
  });
}

function round(value) {
  return Math.round(value * 10) / 10;
}

function segments(xs, holds) {
  const found = [];
  let current = null;
  xs.forEach((_, at) => {
    if (!holds(at)) {
      current = null;
    } else if (current) {
      current.push(at);
    } else {
      found.push((current = [at]));
    }
  });
  return found;
}

// Stack the layers: each gets the sum of those below it as its low.
function stacked(layers) {
  const sums = [];
  return layers.map((layer) => {
    const low = layer.values.map((_, at) => sums[at] ?? 0);
    const high = layer.values.map((value, at) => (sums[at] = (sums[at] ?? 0) + (isNumber(value) ? value : 0)));
    return {...layer, low, high};
  });
}

// ------------------------------------------------------------------------------------------- pointer and keyboard

function trackPointer(svg, spec, layers, x, y, box, note) {
  const cursor = s("g.cursor", {"aria-hidden": "true"});
  appendAll(svg, [cursor]);
  const xs = spec.x.values;
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(xs.length - 1, index));
    const position = x(xs[at]);
    setChildren(cursor, s("line", {x1: position, x2: position, y1: box.top, y2: box.bottom}));
    for (const layer of layers) {
      const value = layer.kind === "bar" || layer.kind === "area" || !layer.name ? null : layer.values?.[at];
      if (isNumber(value) && (!spec.y.log || value > 0)) {
        appendAll(cursor, [s("circle", {class: `dot tone${layer.tone}`, cx: position, cy: y(value), r: 3.5})]);
      }
    }
    setChildren(note, tooltip(spec, at));
    note.hidden = false;
    const left = position > (box.left + box.right) / 2 ? position - note.offsetWidth - 10 : position + 10;
    note.style.left = `${Math.max(0, left)}px`;
  };
  const hide = () => {
    setChildren(cursor);
    note.hidden = true;
    at = -1;
  };
  const nearest = (event) => {
    const position = event.clientX - svg.getBoundingClientRect().left;
    let best = 0;
    xs.forEach((value, index) => {
      if (Math.abs(x(value) - position) < Math.abs(x(xs[best]) - position)) best = index;
    });
    return best;
  };
  const open = (index) => {
    const where = spec.open?.(index);
    if (where) location.hash = where;
  };
  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  if (spec.open) {
    svg.classList.add("opens");
    svg.addEventListener("click", (event) => open(nearest(event)));
  }
  svg.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1};
    if (event.key in moves) {
      event.preventDefault();
      show(at < 0 && event.key === "ArrowLeft" ? xs.length - 1 : moves[event.key]);
    } else if (event.key === "Enter" && at >= 0) {
      open(at);
    } else if (event.key === "Escape" && at >= 0) {
      event.stopPropagation();
      hide();
    }
  });
}

function tooltip(spec, at) {
  const xWord = (spec.x.exact ?? spec.x.format ?? short)(spec.x.values[at]);
  const rows = spec.layers.filter((layer) => layer.name).map((layer) => [layer, formatValue(layer, spec, at)]);
  return [
    h("div.at", `${spec.x.label ?? ""} ${xWord}`),
    rows.filter(([, text]) => text).map(([layer, text]) =>
      h("div.row", h("span.key", {class: `tone${layer.tone} ${layer.kind}`}), h("span", layer.name), h("b", text))),
    spec.open ? h("div.hint", spec.openHint ?? "click to open") : null,
  ];
}

function formatValue(layer, spec, at) {
  const format = spec.y.exact ?? spec.y.format ?? short;
  if (layer.kind === "band") {
    const [low, high] = [layer.low[at], layer.high[at]];
    return isNumber(low) && isNumber(high) ? `${format(low)} to ${format(high)}` : "";
  }
  return isNumber(layer.values[at]) ? format(layer.values[at]) : "";
}

function describe(spec) {
  const format = spec.y.exact ?? spec.y.format ?? short;
  const about = spec.layers.filter((layer) => layer.name && layer.kind !== "band").map((layer) => {
    const known = layer.values.filter(isNumber);
    if (!known.length) return `${layer.name}: no values.`;
    return `${layer.name}: first ${format(known[0])}, last ${format(known.at(-1))}, ` +
      `lowest ${format(Math.min(...known))}, highest ${format(Math.max(...known))}.`;
  });
  return [spec.caption, ...about].filter(Boolean).join(" ");
}

function table(spec) {
  const layers = spec.layers.filter((layer) => layer.name);
  const head = h("tr", h("th", {scope: "col"}, spec.x.label ?? ""),
    layers.map((layer) => h("th", {scope: "col"}, layer.name)));
  const rows = spec.x.values.map((value, at) => h("tr",
    h("th", {scope: "row"}, (spec.x.exact ?? spec.x.format ?? short)(value)),
    layers.map((layer) => h("td", formatValue(layer, spec, at)))));
  return h("div.scroll", h("table", h("caption.unseen", spec.title), h("thead", head), h("tbody", rows)));
}

// ------------------------------------------------------------------------------------------- small charts

// A sparkline as high as a line of text.
export function spark(values, {low = 0, high = 1, width = 120, height = 26, tone = 1, label = ""} = {}) {
  const x = scale(0, Math.max(1, values.length - 1), 3, width - 3);
  const y = scale(low, high === low ? low + 1 : high, height - 3, 3);
  const position = (at) => `${round(x(at))} ${round(y(values[at]))}`;
  const parts = segments(values, (at) => isNumber(values[at])).map((indices) =>
    s("path", {class: `line tone${tone}`, d: `M${indices.map(position).join("L")}`}));
  const last = values.findLastIndex(isNumber);
  if (last >= 0) parts.push(s("circle", {class: `dot tone${tone}`, cx: x(last), cy: y(values[last]), r: 2.5}));
  return s("svg.spark", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label}, parts);
}

// Two values on a common scale, connected.
export function dumbbell(before, after, {low = 0, high = 1, width = 150, height = 22, label = ""} = {}) {
  const x = scale(low, high, 6, width - 6);
  const y = height / 2;
  const parts = [s("line.rail", {x1: 6, x2: width - 6, y1: y, y2: y})];
  if (isNumber(before) && isNumber(after)) {
    const way = after >= before ? "up" : "down";
    parts.push(s("line", {class: `reach ${way}`, x1: x(before), x2: x(after), y1: y, y2: y}));
  }
  if (isNumber(before)) parts.push(s("circle.before", {cx: x(before), cy: y, r: 3.5}));
  if (isNumber(after)) parts.push(s("circle.after", {cx: x(after), cy: y, r: 4.5}));
  return s("svg.dumbbell", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label}, parts);
}
