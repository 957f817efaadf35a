// The first picture of a run: what each stage did to the solve rate on every task set, and what it gained.

import {foldable, h, integer, isNumber, percent, plural, s, signed} from "./dom.js";

const MODEL = 66, HEIGHT = 190, LEFT = 42, TOP = 14, BOTTOM = 24;
const points = (value) => signed(100 * value, 0);

export function outcome(data) {
  const best = [...new Set(data.sets.map((set) => set.k))].filter((k) => k > 1);
  const legend = [h("i.mark.average"), "average over sessions",
    best.length ? [h("i.mark.best"), `best of K sessions (K = ${best.join(", ")})`] : null];
  return h("section.outcome", {"aria-labelledby": "outcome"},
    h("h2.unseen", {id: "outcome"}, "What each stage did"), verdicts(data),
    h("div.panels", data.sets.map((set) => h("div", h("h3", set.name, h("span.kind", about(set))), panel(set, data)))),
    h("p.fine", legend, ". Tasks solved by the model after each stage: same tasks, seeds, tools, prompt and sampling. ",
      "Bars are 95 % intervals over tasks."),
    data.rows.length > 1 ? gainTable(data.gains) : null, h("p.fine", scored(data)),
    foldable("The same as numbers", () => numbers(data), {class: "block"}));
}

function about(set) {
  const size = `${integer(set.tasks)} tasks × ${plural(set.sessions, "session")}`;
  return [set.kind, size, set.purpose].filter(Boolean).join("; ");
}

// ------------------------------------------------------------------------------------------- in words

const CLASSES = {"only format or ending": "format"};

// The gain of the last model over the best earlier one, and over the control, on every test set, as sentences.
function verdicts(data) {
  const [first] = data.gains;
  if (!first) return null;
  const own = data.gains.filter((gain) => gain.model === first.model);
  return [sentences(data, own.filter((gain) => !gain.control), "the best earlier model on validation"),
    sentences(data, own.filter((gain) => gain.control), own.find((gain) => gain.control)?.control)];
}

function sentences(data, gains, role) {
  const [first] = gains;
  if (!first) return null;
  const tests = new Set(data.sets.filter((set) => set.test).map((set) => set.name));
  const shown = gains.some((gain) => tests.has(gain.set)) ? gains.filter((gain) => tests.has(gain.set)) : gains;
  return [
    h("p.verdict", `The model after ${first.model}, against ${first.control ? "the " : ""}${first.against}, ${role}:`),
    shown.map((gain) => h("p.verdict", h("b", gain.set), " ", h("b", {class: CLASSES[gain.verdict] ?? gain.verdict},
      `${points(gain.solved.at)} points`), range(gain.solved), ": ", gain.words, ".")),
  ];
}

function range(value) {
  return isNumber(value?.low) ? ` (95 % interval ${points(value.low)} to ${points(value.high)})` : "";
}

function scored(data) {
  const counts = Object.entries(data.scored).map(([name, times]) => `${name} ${plural(times, "time")}`);
  return [h("b", "Scored in this run: "), counts.length ? counts.join(", ") : "not recorded", ". ",
    "Choices use the validation set only; the other sets are scored once for each model, after all training."];
}

// ------------------------------------------------------------------------------------------- pictures

function panel(set, data) {
  const y = (share) => TOP + (1 - Math.max(0, Math.min(1, share))) * (HEIGHT - TOP - BOTTOM);
  const width = LEFT + MODEL * Math.max(4, data.rows.length);
  const room = (width - LEFT) / data.rows.length;
  const rails = [0, 0.25, 0.5, 0.75, 1].map((share) => [
    s("line.rail", {x1: LEFT, x2: width, y1: y(share), y2: y(share)}),
    share % 0.5 ? null : s("text", {x: LEFT - 6, y: y(share) + 4, "text-anchor": "end"}, percent(share)),
  ]);
  const marks = data.rows.map((row, at) => {
    const figures = row.sets[set.name];
    const x = LEFT + room * (at + 0.5);
    const name = s("text.model", {x, y: HEIGHT - 6, "text-anchor": "middle"}, row.model);
    if (!figures) return name;
    const pair = set.k > 1;
    return [name, mark(figures.solved, "average", pair ? x - 7 : x, y, "end"),
      pair ? mark(figures.best, "best", x + 7, y, "start") : null];
  });
  const label = `${set.name}: tasks solved on average, ${data.rows.filter((row) => row.sets[set.name])
    .map((row) => `${row.model} ${percent(row.sets[set.name].solved.at)}`).join(", ")}`;
  return s("svg.panel", {viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label}, rails, marks);
}

function mark(value, kind, x, y, side) {
  if (!isNumber(value?.at)) return null;
  const interval = isNumber(value.low) ?
    s("line", {class: `within ${kind}`, x1: x, x2: x, y1: y(value.low), y2: y(value.high)}) : null;
  return [interval, s("circle", {class: kind, cx: x, cy: y(value.at), r: 4}),
    s("text", {class: `value ${kind}`, x: side === "end" ? x - 7 : x + 7, y: y(value.at) + 4, "text-anchor": side},
      `${Math.round(100 * value.at)}`)];
}

// ------------------------------------------------------------------------------------------- tables

const MEASURES = [["solved", "average"], ["best", "best of K"], ["proper_solved", "among proper sessions"],
  ["proper", "share of proper sessions"]];

function gainTable(gains) {
  if (!gains.length) return h("p.fine", "The gains are computed when every model is scored.");
  const rows = gains.map((gain, at) => {
    const first = at === 0 || gains[at - 1].model !== gain.model || gains[at - 1].against !== gain.against;
    return h("tr", {class: first ? "first" : null},
      h("th", {scope: "row"}, first ? `${gain.model} − ${gain.against}` : ""), h("td", gain.set),
      MEASURES.map(([key]) => h("td", difference(gain[key]))), h("td", gain.verdict));
  });
  return h("div.scroll", h("table.gains",
    h("caption.unseen", "Points that each stage gained over the best earlier model, and RL over its control"),
    h("thead", h("tr", ["points gained", "tasks", ...MEASURES.map(([, name]) => name), "average is"].map((name) =>
      h("th", {scope: "col"}, name)))), h("tbody", rows)),
  h("p.fine", "Differences are paired, task by task, with 95 % intervals. A proper session has valid calls and ends ",
    "with a final message: a gain that is not found among those is one of format or ending only."));
}

function difference(value) {
  if (!isNumber(value?.at)) return "–";
  return [h("b", points(value.at)), isNumber(value.low) ?
    h("span.range", ` ${points(value.low)} to ${points(value.high)}`) : null];
}

function numbers(data) {
  const rows = data.rows.flatMap((row) => data.sets.filter((set) => row.sets[set.name]).map((set, at) => {
    const figures = row.sets[set.name];
    return h("tr", {class: at ? null : "first"}, h("th", {scope: "row"}, at ? "" : row.model), h("td", set.name),
      MEASURES.map(([key]) => h("td", percent(figures[key]?.at, 1), isNumber(figures[key]?.low) ?
        h("span.range", ` ${percent(figures[key].low, 1)} to ${percent(figures[key].high, 1)}`) : null)));
  }));
  return h("div.scroll", h("table.gains", h("caption.unseen", "Solve rates of every model"),
    h("thead", h("tr", ["model", "tasks", ...MEASURES.map(([, name]) => name)].map((name) =>
      h("th", {scope: "col"}, name)))), h("tbody", rows)));
}
