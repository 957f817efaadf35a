// Training on text: loss against the logarithm of tokens, one chart for every stage.

import {chart} from "./charts.js";
import {fixed, h, isNumber, percent, plural, seconds, short, whole} from "./dom.js";

const ORDINALS = {4: "quarter", 8: "eighth", 16: "sixteenth"};

export function trainingSection(run) {
  if (!run.training.length) return null;
  const placed = run.training.filter((each) => each.by_position[0]?.length > 1).slice(-1);
  return h("section", {"aria-labelledby": "training"}, h("h2", {id: "training"}, "Training on text"),
    h("p.muted.under", "Loss is in nats per token, over the logarithm of tokens. Held-out text is never trained on."),
    h("div.grid", run.training.map(curve), placed.map(positions)));
}

// What a curve shows: its name, what to say of it, and how its numbers are written.
function measure(told) {
  if (told.measure === "loss") return ["loss", "Loss", {exact: (value) => fixed(value)}];
  if (told.measure.endsWith("overlap")) {
    const share = {low: 0, format: (value) => percent(value), exact: (value) => percent(value)};
    return ["drafts accepted", "Share of drafted tokens that the model would accept,", share];
  }
  return ["divergence", "Divergence of the layers that draft,", {exact: (value) => fixed(value)}];
}

function curve(told) {
  const {x, raw, mean} = told.curve;
  const held = new Map(told.held_out.map(([tokens, loss]) => [Math.max(tokens, x[0]), loss]));
  const values = [...new Set([...x, ...held.keys()])].sort((one, other) => one - other);
  const place = new Map(x.map((tokens, at) => [tokens, at]));
  const spread = (numbers) => joined(values.map((tokens) => (place.has(tokens) ? numbers[place.get(tokens)] : null)));
  const [name, says, y] = measure(told);
  const layers = [
    {name: "", kind: "line", values: spread(raw), tone: 1, faint: true},
    {name: "in training", kind: "line", values: spread(mean), tone: 1, told: !held.size},
  ];
  if (held.size) {
    const dots = values.map((tokens) => held.get(tokens) ?? null);
    layers.push({name: `held-out ${name}`, kind: "dots", values: dots, tone: 3, told: true});
  }
  const took = told.seconds ? ` in ${seconds(told.seconds)}` : "";
  const rate = told.rate ? `, ${short(told.rate)} per second` : "";
  return chart({
    title: told.stage,
    says: `${says} over ${short(told.tokens)} tokens, ${plural(told.steps, "step")}${took}${rate}.`,
    x: {values, label: "tokens", log: true, format: short},
    y,
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
  const [first, last] = told.by_position;
  const count = first.length;
  const layers = [{name: last ? "before" : "held-out loss", kind: "line", values: first, tone: last ? 8 : 3, dots: 40}];
  if (last) layers.push({name: "after", kind: "line", values: last, tone: 3, dots: 40});
  return chart({
    title: `${told.stage}: loss by position`,
    says: `Held-out loss in every ${ORDINALS[count] ?? "part"} of the window: what is read later has more to go by.`,
    x: {values: first.map((_, at) => at + 1), label: "place in the window",
      format: (value) => `${whole(value)}/${count}`},
    y: {exact: (value) => fixed(value)},
    layers,
  });
}
