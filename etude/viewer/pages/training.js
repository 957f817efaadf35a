// Training on text: loss against the logarithm of tokens, one chart per stage.

import {chart} from "./charts.js";
import {fixed, h, isNumber, percent, plural, seconds, short, integer} from "./dom.js";

const ORDINALS = {4: "quarter", 8: "eighth", 16: "sixteenth"};

export function trainingSection(run) {
  if (!run.training.length) return null;
  const placed = run.training.filter((each) => each.by_position[0]?.length > 1).slice(-1);
  return h("section", {"aria-labelledby": "training"}, h("h2", {id: "training"}, "Training on text"),
    h("p.muted.under", "Loss in nats per token, against the logarithm of tokens. Held-out text is never trained on."),
    h("div.grid", run.training.map(curve), placed.map(positions)));
}

// Name, caption and number format of a curve.
function measure(data) {
  if (data.measure === "loss") return ["loss", "Loss", {exact: (value) => fixed(value)}];
  if (data.measure.endsWith("overlap")) {
    const share = {low: 0, format: (value) => percent(value), exact: (value) => percent(value)};
    return ["drafts accepted", "Fraction of drafted tokens that the model would accept,", share];
  }
  return ["divergence", "Divergence of the MTP layers,", {exact: (value) => fixed(value)}];
}

function curve(data) {
  const {x, raw, mean} = data.curve;
  const heldOut = new Map(data.held_out.map(([tokens, loss]) => [Math.max(tokens, x[0]), loss]));
  const values = [...new Set([...x, ...heldOut.keys()])].sort((one, other) => one - other);
  const index = new Map(x.map((tokens, at) => [tokens, at]));
  const spread = (numbers) =>
    interpolated(values.map((tokens) => (index.has(tokens) ? numbers[index.get(tokens)] : null)));
  const [name, prefix, y] = measure(data);
  const layers = [
    {name: "", kind: "line", values: spread(raw), tone: 1, faint: true},
    {name: "in training", kind: "line", values: spread(mean), tone: 1, labelled: !heldOut.size},
  ];
  if (heldOut.size) {
    const dots = values.map((tokens) => heldOut.get(tokens) ?? null);
    layers.push({name: `held-out ${name}`, kind: "dots", values: dots, tone: 3, labelled: true});
  }
  const duration = data.seconds ? ` in ${seconds(data.seconds)}` : "";
  const rate = data.rate ? `, ${short(data.rate)} per second` : "";
  return chart({
    title: data.stage,
    caption: `${prefix} over ${short(data.tokens)} tokens, ${plural(data.steps, "step")}${duration}${rate}.`,
    x: {values, label: "tokens", log: true, format: short},
    y,
    layers,
  });
}

// Interpolate between two bins, so that a held-out point does not interrupt the line.
function interpolated(values) {
  return values.map((value, at) => {
    if (isNumber(value)) return value;
    const before = values.slice(0, at).findLast(isNumber);
    const after = values.slice(at + 1).find(isNumber);
    return isNumber(before) && isNumber(after) ? (before + after) / 2 : null;
  });
}

function positions(data) {
  const [first, last] = data.by_position;
  const count = first.length;
  const name = last ? "first evaluation" : "held-out loss";
  const layers = [{name, kind: "line", values: first, tone: last ? 8 : 3, dots: 40}];
  if (last) layers.push({name: "last evaluation", kind: "line", values: last, tone: 3, dots: 40});
  return chart({
    title: `${data.stage}: loss by position`,
    caption: `Held-out loss in every ${ORDINALS[count] ?? "part"} of the window; later tokens have more context.`,
    x: {values: first.map((_, at) => at + 1), label: "position in the window",
      format: (value) => `${integer(value)}/${count}`},
    y: {exact: (value) => fixed(value)},
    layers,
  });
}
