// A table of any length: only visible rows are in the page. Columns sort, rows are links, j and k move up and down.

import {appendAll, h, plural, setChildren, announce} from "./dom.js";

const ROW = 36; // height in pixels, the same as in the style sheet
const SPARE = 12; // rows drawn above and below the visible ones
const left = new Map(); // scroll positions of lists that were left

// columns: [{key, name, cell(row), sort(row), end, hint}]; link(row): an address, or null
export function list({label, columns, link, sorted, changed}) {
  const head = h("tr");
  const body = h("tbody");
  const widths = h("colgroup", columns.map((column) => h("col", {css: column.width ? {width: column.width} : {}})));
  const table = h("table.list", h("caption.unseen", label), widths, h("thead", head), body);
  const frame = h("div.frame", table);
  const state = {rows: [], shown: [], at: -1, sort: sorted, filter: null};
  const drawn = new Map();

  const order = () => {
    const kept = state.filter ? state.rows.filter(state.filter) : state.rows.slice();
    const key = state.sort.replace(/^-/, "");
    const column = columns.find((each) => each.key === key);
    const down = state.sort.startsWith("-");
    if (column) {
      const value = new Map(kept.map((row) => [row, column.sort(row)]));
      kept.sort((one, other) => compare(value.get(one), value.get(other), down));
    }
    state.shown = kept;
  };

  const headings = () => {
    setChildren(head, columns.map((column) => {
      const down = state.sort === `-${column.key}`;
      const up = state.sort === column.key;
      const act = () => {
        const falling = down ? false : up || Boolean(column.end); // numbers start with the largest
        state.sort = falling ? `-${column.key}` : column.key;
        refresh(true);
        changed?.(state.sort);
        head.querySelector(`[data-key="${column.key}"]`)?.focus();
      };
      return h("th", {scope: "col", class: column.end ? "end" : null,
        "aria-sort": down ? "descending" : up ? "ascending" : "none"},
      h("button", {type: "button", title: column.hint, "data-key": column.key, on: {click: act}},
        column.name, h("span.arrow", {"aria-hidden": "true"}, down ? "↓" : up ? "↑" : "")));
    }));
  };

  const rowOf = (index) => {
    const row = state.shown[index];
    const where = link(row);
    return h("tr", {"aria-rowindex": index + 2, class: where ? null : "absent", on: {click: (event) => {
      if (where && !event.target.closest("a, button")) location.hash = where;
    }}}, columns.map((column, at) => {
      const content = column.cell(row);
      const linked = at === 0 && where ? h("a", {href: where, "data-index": index}, content) : content;
      return h(at === 0 ? "th" : "td", {class: column.end ? "end" : column.class, scope: at === 0 ? "row" : null},
        linked);
    }));
  };

  const draw = () => {
    const height = frame.clientHeight || 600;
    const from = Math.max(0, Math.floor(frame.scrollTop / ROW) - SPARE);
    const to = Math.min(state.shown.length, Math.ceil((frame.scrollTop + height) / ROW) + SPARE);
    for (const [index, node] of drawn) {
      if (index < from || index >= to) {
        node.remove();
        drawn.delete(index);
      }
    }
    const above = body.firstChild ?? appendAll(body, [spacer()]).firstChild;
    const below = body.lastChild !== above ? body.lastChild : appendAll(body, [spacer()]).lastChild;
    let before = above;
    for (let index = from; index < to; index++) {
      let node = drawn.get(index);
      if (!node) {
        node = rowOf(index);
        drawn.set(index, node);
      }
      if (before.nextSibling !== node) before.after(node);
      before = node;
    }
    above.style.height = `${from * ROW}px`;
    below.style.height = `${(state.shown.length - to) * ROW}px`;
  };

  function refresh(toTop = false) {
    const current = state.at >= 0 && state.at < state.shown.length ? link(state.shown[state.at]) : null;
    const focused = body.contains(document.activeElement);
    order();
    state.at = current ? state.shown.findIndex((row) => link(row) === current) : -1;
    drawn.clear();
    setChildren(body);
    table.setAttribute("aria-rowcount", state.shown.length + 1);
    if (toTop) frame.scrollTop = 0;
    headings();
    draw();
    if (focused) drawn.get(state.at)?.querySelector("a")?.focus({preventScroll: true});
  }

  const go = (index) => {
    if (!state.shown.length) return;
    state.at = Math.max(0, Math.min(state.shown.length - 1, index));
    const top = state.at * ROW;
    const room = frame.clientHeight - ROW - 8;
    if (top < frame.scrollTop) frame.scrollTop = top;
    if (top + ROW > frame.scrollTop + room) frame.scrollTop = top + ROW - room;
    draw();
    const node = drawn.get(state.at);
    const target = node?.querySelector("a") ?? node;
    if (target && target === node) node.setAttribute("tabindex", "-1");
    target?.focus({preventScroll: true});
  };

  frame.addEventListener("scroll", () => {
    if (state.rows.length) left.set(label, frame.scrollTop);
    draw();
  }, {passive: true});
  body.addEventListener("focusin", (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) state.at = Number(index);
  });
  new ResizeObserver(draw).observe(frame);
  return {
    node: frame,
    set(rows, test) {
      const first = !state.rows.length;
      state.rows = rows;
      state.filter = test;
      refresh();
      if (first) frame.scrollTop = left.get(label) ?? 0;
      return state.shown.length;
    },
    filter(test) {
      state.filter = test;
      refresh(true);
      announce(`${plural(state.shown.length, "row")} of ${state.rows.length}`);
      return state.shown.length;
    },
    move: (by) => go(state.at < 0 ? (by > 0 ? 0 : state.shown.length - 1) : state.at + by),
    open() {
      const where = state.at >= 0 ? link(state.shown[state.at]) : null;
      if (where) location.hash = where;
    },
    get shown() {
      return state.shown;
    },
  };
}

function spacer() {
  return h("tr.spacer", {"aria-hidden": "true"});
}

// Rows without a value come last in either direction.
function compare(one, other, down) {
  const [none, noOther] = [one, other].map((value) => value === null || value === undefined || value === "");
  if (none || noOther) return none - noOther;
  const order = typeof one === "string" ? one.localeCompare(other, "en", {numeric: true}) : one - other;
  return down ? -order : order;
}

// ------------------------------------------------------------------------------------------- filters

// fields: [{key, name, kind: text | choice | range, choices}]; listener({key: value}) is called on every change
export function filters(fields, values, listener) {
  const now = {...values};
  const stay = (event) => event.preventDefault();
  const bar = h("form.filters", {role: "search", "aria-label": "Filter", on: {submit: stay}});
  const change = (key, value) => {
    if (value) now[key] = value;
    else delete now[key];
    listener(now);
  };
  for (const field of fields) {
    const given = {"aria-label": field.name, name: field.key};
    let input;
    if (field.kind === "choice") {
      input = h("select", {...given, on: {change: (event) => change(field.key, event.target.value)}},
        h("option", {value: ""}, field.name),
        field.choices.map(([value, text]) => h("option", {value, selected: now[field.key] === value}, text)));
    } else {
      input = h("input", {...given, type: "search", placeholder: field.hint ?? field.name, autocomplete: "off",
        spellcheck: "false", class: field.kind, on: {input: (event) => change(field.key, event.target.value.trim())}});
      input.value = now[field.key] ?? "";
    }
    appendAll(bar, [input]);
  }
  return {
    node: bar,
    focus: () => bar.querySelector("input")?.focus(),
    clear() {
      const some = Object.keys(now).length > 0;
      for (const key of Object.keys(now)) delete now[key];
      for (const input of bar.elements) input.value = "";
      if (some) listener(now);
      return some;
    },
  };
}

// Parse "3", "3-8", "-4" or "6-" into a test of a number; any other text matches nothing.
export function inRange(text) {
  const found = /^(\d*)\s*(-|–)?\s*(\d*)$/.exec(text);
  if (!found) return () => false;
  const [, from, dash, to] = found;
  if (!dash) return (value) => value === Number(from);
  const [low, high] = [from ? Number(from) : -Infinity, to ? Number(to) : Infinity];
  return (value) => value !== null && value >= low && value <= high;
}
