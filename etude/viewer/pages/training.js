// Training on text: loss against the logarithm of tokens, one chart for every stage.

import {chart} from "./charts.js";
import {fixed, h, isNumber, plural, seconds, short} from "./dom.js";

export function trainingSection(run) {
  if (!run.training.length) return null;
  const placed = run.training.filter((each) => each.by_position.length > 1).slice(-1);
  return h("section", {"aria-labelledby": "training"}, h("h2", {id: "training"}, "Training on text"),
    h("div.grid", run.training.map(curve), placed.map(positions)));
}

export function measureName(told) {
  return told.measure === "loss" ? "loss" : "divergence of the drafts";
}

function curve(told) {
  const {x, raw, mean} = told.curve;
  const held = new Map(told.held_out.map(([tokens, loss]) => [Math.max(tokens, x[0]), loss]));
  const values = [...new Set([...x, ...held.keys()])].sort((one, other) => one - other);
  const place = new Map(x.map((tokens, at) => [tokens, at]));
  const spread = (numbers) => joined(values.map((tokens) => (place.has(tokens) ? numbers[place.get(tokens)] : null)));
  const drafts = told.measure !== "loss";
  const layers = [
    {name: "", kind: "line", values: spread(raw), tone: 1, faint: true},
    {name: drafts ? "divergence" : "training loss", kind: "line", values: spread(mean), tone: 1},
  ];
  if (held.size) {
    const dots = values.map((tokens) => held.get(tokens) ?? null);
    layers.push({name: "held-out loss", kind: "dots", values: dots, tone: 3});
  }
  const took = told.seconds ? ` in ${seconds(told.seconds)}` : "";
  const rate = told.rate ? `, ${short(told.rate)} per second` : "";
  return chart({
    title: told.stage,
    says: `${drafts ? "Divergence of the drafting layers" : "Loss"} over ${short(told.tokens)} tokens, ` +
      `${plural(told.steps, "step")}${took}${rate}.`,
    x: {values, label: "tokens", log: true, format: short},
    y: {exact: (value) => fixed(value, 3)},
    layers,
  });
}

// Between two bins the line goes on: a held-out point must not break it.
function joined(values) {
  return values.map((value, at) => {
    if (isNumber(value)) return value;
    const before = values.slice(0, at).findLast(isNumber);
    const after = values.slice(at + 1).find(isNumber);
    return isNumber(before) && isNumber(after) ? (before + after) / 2 : null;
  });
}

function positions(told) {
  const count = told.by_position.length;
  return chart({
    title: `${told.stage}: loss by position`,
    says: "Held-out loss by place in the window, as last measured. What comes later has more to go by.",
    x: {values: told.by_position.map((_, at) => (at + 0.5) / count), label: "place in the window",
      format: (value) => fixed(value, 2)},
    y: {exact: (value) => fixed(value, 3)},
    layers: [{name: "held-out loss", kind: "line", values: told.by_position, tone: 3, dots: 40}],
  });
}
