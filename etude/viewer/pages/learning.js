// The charts of reinforcement learning, from the metrics of its steps and evaluations. Missing metrics are not drawn.

import {chart, dumbbell, spark} from "./charts.js";
import {
  appendAll, bytes, ending, fixed, h, isNumber, percent, plural, seconds, short, integer, clampShare, humanize,
} from "./dom.js";

export function learningSection(rl) {
  const data = rl.steps;
  const section = h("section", {"aria-labelledby": "learning"}, h("h2", {id: "learning"}, "Reinforcement learning"));
  if (data.each > 1) appendAll(section, [h("p.muted", `Every point is the mean of ${data.each} steps.`)]);
  const alarm = data.alarms.at(-1);
  if (alarm) {
    const text = [].concat(alarm.messages).join("; ");
    appendAll(section, [h("p.notice.warn", `Alarm at step ${integer(alarm.step)}: ${text}.`)]);
  }
  const steps = new Steps(data.columns);
  const further = Object.entries(rl.benchmarks ?? {}).map(([name, tests]) => heldOut(tests, name));
  const heads = [heldOut(rl.evaluations), steps.known ? rewards(steps) : null, ...further].filter(Boolean);
  if (!heads.length) return appendAll(section, [h("p.muted", "No step is finished yet.")]);
  appendAll(section, [h("div.grid.two", heads)]);
  if (steps.known) {
    const charts = CHARTS.map((make) => make(steps));
    appendAll(section, [categories(steps, rl.evaluations), h("div.grid", charts), behaviours(steps)]);
  }
  return section;
}

// The metrics of the steps as columns.
class Steps {
  constructor(columns) {
    this.columns = columns;
    this.names = Object.keys(columns).filter((name) => columns[name].some(isNumber));
    this.numbers = columns.step ?? [];
    this.x = stepAxis(this.numbers);
  }

  get known() {
    return this.numbers.length > 0;
  }

  // A column, or null if no step has a value.
  get(name) {
    return this.names.includes(name) ? this.columns[name] : null;
  }

  // The columns with a prefix: "errors/" -> [["timeout", [...]], ...]. A missing value is 0.
  below(prefix) {
    const found = this.names.filter((name) => name.startsWith(prefix));
    return found.map((name) => [name.slice(prefix.length), this.columns[name].map((value) => value ?? 0)]);
  }

  last(name) {
    return this.get(name)?.findLast(isNumber);
  }
}

function stepAxis(values) {
  return {values, label: "step", format: (value) => integer(value)};
}

const toStep = (numbers, set = "training") => (at) => `#/rollouts?set=${set}&step=${numbers[at]}`;
const SHARE = {format: (value) => percent(value), exact: (value) => percent(value, 1), low: 0};
const WHOLE_SHARE = {...SHARE, high: 1};
const THREE = {exact: (value) => fixed(value, 3)};

function line(name, values, tone, more = {}) {
  return {name, kind: "line", values, tone, ...more};
}

function band(name, low, high, tone) {
  return {name, kind: "band", low, high, values: [], tone, quiet: true};
}

// Line layers of some columns, with their names and tones: {solved: ["average", 1]}.
function lines(steps, names) {
  const known = Object.entries(names).filter(([column]) => steps.get(column));
  return known.map(([column, [name, tone]]) => line(name, steps.get(column), tone));
}

// ------------------------------------------------------------------------------------------- success and reward

// The keys of an evaluation for best of K, largest K first: "best/16".
function bestKeys(test) {
  const keys = Object.keys(test).filter((key) => /^best\/\d+$/.test(key));
  return keys.sort((one, other) => Number(other.slice(5)) - Number(one.slice(5)));
}

// The curve of the validation set, or of a further set that is scored for information.
function heldOut(tests, benchmark = null) {
  if (!tests.length) return null;
  const last = tests.at(-1);
  const take = (name) => tests.map((test) => test[name] ?? null);
  const bound = (name) => take(name).map(clampShare);
  const layers = [
    band("95 % interval of the average", bound("solved_low"), bound("solved_high"), 1),
    line("average", take("solved"), 1, {dots: 60}),
  ];
  const [best, next] = bestKeys(last).filter((key) => key !== "best/1");
  if (best) {
    const name = `best of ${best.slice(5)}`;
    layers.push(band(`95 % interval of ${name}`, bound(`${best}_low`), bound(`${best}_high`), 3));
    layers.push(line(name, take(best), 3, {dots: 60}));
  }
  if (next) layers.push(line(`best of ${next.slice(5)}`, take(next), 3, {dashed: true}));
  const numbers = take("step");
  const samples = Math.round((last.samples ?? 0) / (last.tasks || 1));
  return chart({
    title: benchmark === null ? "Validation" : `Benchmark ${benchmark}`,
    caption: `${plural(last.tasks ?? 0, "task")} that were never trained on, ` +
      `${plural(samples, "session")} each; ${benchmark === null ? "for choices" : "nothing is chosen by it"}. ` +
      "Bands are 95 % intervals over tasks.",
    wide: true, x: stepAxis(numbers), y: WHOLE_SHARE, layers,
    open: toStep(numbers, "evaluation"), openHint: "click for these rollouts",
  });
}

function rewards(steps) {
  const layers = lines(steps, {reward: ["average", 1], reward_best: ["best of group", 3]});
  if (!layers.length) return null;
  if (steps.get("reward_low")) {
    layers.unshift(band("95 % interval of the average", steps.get("reward_low"), steps.get("reward_high"), 1));
  }
  return chart({
    title: "Reward",
    caption: "Mean over the rollouts that each step trained on, and over the best of each group. " +
      "The band is a 95 % interval over prompts.",
    wide: true, x: steps.x, y: THREE, layers, open: toStep(steps.numbers), openHint: "click for these rollouts",
  });
}

// ------------------------------------------------------------------------------------------- charts of the steps

// A chart over steps, or null if there are no layers.
function stepChart(steps, title, caption, layers, more = {}) {
  return layers.length ? chart({title, caption: caption, x: steps.x, y: {low: 0}, layers, ...more}) : null;
}

function colouredLayers(pairs, kind, tones) {
  return pairs.map(([name, values], at) => ({name: humanize(name), kind, values, tone: tones[name] ?? (at % 8) + 1}));
}

const PHASES = {ground: "environment", grading: "verifier"};
const ENDINGS = {final: 2, length: 3, tokens: 4, turns: 5, time: 6, context: 7, interrupted: 8};
const TOKENS = {thinking: 5, call: 1, commentary: 4, final: 2, summary: 6, output: 8};

const CHARTS = [
  (steps) => stepChart(steps, "Solved in training", "Fraction of rollouts, and of groups with at least one solved.",
    lines(steps, {solved: ["average", 1], solved_best: ["best of group", 3]}),
    {y: WHOLE_SHARE, open: toStep(steps.numbers)}),
  rewardParts,
  (steps) => stepChart(steps, "Tokens of a rollout", "By kind, on average. Output is the output of tools.",
    colouredLayers(tokenKinds(steps), "area", TOKENS), {stack: true}),
  (steps) => stepChart(steps, "Turns and calls", "Of a rollout, on average.",
    lines(steps, {turns: ["turns", 1], calls: ["calls", 2], summaries: ["summaries", 6]}).filter(hasPositive)),
  (steps) => stepChart(steps, "Endings", "How sessions ended.",
    colouredLayers(steps.below("ending/"), "bar", ENDINGS).map((layer) => ({...layer, name: ending(layer.name)})),
    {stack: true, y: WHOLE_SHARE}),
  (steps) => stepChart(steps, "Tool call errors", "Fraction of calls that failed, by class.",
    colouredLayers(steps.below("errors/"), "line", {}), {y: SHARE}),
  staleness,
  mismatch,
  trainerSeconds,
  waitingShare,
  (steps) => stepChart(steps, "Seconds of a rollout", "Environment, session and verifier.",
    colouredLayers(steps.below("seconds/"), "area", {ground: 8, session: 1, grading: 5})
      .map((layer) => ({...layer, name: PHASES[layer.name] ?? layer.name})),
    {stack: true, y: {low: 0, format: seconds}}),
  failures,
  uploads,
  (steps) => stepChart(steps, "Entropy", "Of the sampled tokens, in nats.",
    lines(steps, {entropy: ["entropy", 1]}), {y: THREE}),
  gradientNorm,
  (steps) => stepChart(steps, "Groups without signal", "All their rollouts got the same reward: nothing to train on.",
    steps.get("groups_alike") ? colouredLayers([["equal", steps.get("groups_alike")]], "bar", {equal: 8}) : [],
    {y: WHOLE_SHARE}),
];

function hasPositive(layer) {
  return layer.values.some((value) => value > 0);
}

// With a single part this would repeat the chart of the reward.
function rewardParts(steps) {
  const parts = steps.below("reward/");
  if (parts.length < 2) return null;
  return stepChart(steps, "Reward by part", "After weighting; the parts add up to the reward.",
    colouredLayers(parts, "line", {}), {y: THREE, open: toStep(steps.numbers)});
}

function tokenKinds(steps) {
  const known = new Map(steps.below("tokens/"));
  return Object.keys(TOKENS).filter((kind) => known.get(kind)?.some((value) => value > 0))
    .map((kind) => [kind, known.get(kind)]);
}

function staleness(steps) {
  const ages = steps.below("staleness/").sort(([one], [other]) => Number(one) - Number(other));
  const caption = "Policy steps between the oldest token of a rollout and the step that trained on it.";
  if (!ages.length) {
    return stepChart(steps, "Staleness", caption, lines(steps, {staleness: ["mean", 1], staleness_max: ["oldest", 3]}));
  }
  const tones = [2, 1, 3, 6, 7];
  const layers = ages.map(([age, values], at) =>
    ({name: plural(Number(age), "step"), kind: "bar", values, tone: tones[at] ?? 8}));
  return stepChart(steps, "Staleness", caption, layers, {stack: true, y: WHOLE_SHARE});
}

function mismatch(steps) {
  const layers = lines(steps, {mismatch_numerics_mean: ["same weights, mean", 1],
    mismatch_numerics_p99: ["same weights, 99th percentile", 2], mismatch_staleness_mean: ["older weights, mean", 6],
    mismatch_staleness_p99: ["older weights, 99th percentile", 3]});
  const caption = "Difference of trainer and sampler in the log-probability of a token: numerics where the same " +
    "weights sampled it, staleness where older ones did.";
  return stepChart(steps, "Mismatch", caption, layers, {y: {log: layers.some(hasPositive), exact: short}});
}

function gradientNorm(steps) {
  const clipped = steps.get("clipped") ?? [];
  const caption = `Before it is clipped${clipped.length ?
    `, which happened in ${percent(clipped.filter((value) => value > 0).length / clipped.length)} of the steps` : ""}.`;
  return stepChart(steps, "Gradient norm", caption, lines(steps, {gradient_norm: ["norm", 1]}).filter(hasPositive),
    {y: {log: true, exact: short}});
}

function trainerSeconds(steps) {
  const wall = steps.get("wall_s");
  if (!wall) return null;
  const reason = (name) => (name === "measurement" ? "evaluation" : humanize(name)); // the metric keeps its old name
  const waited = steps.below("waited/").map(([what, values]) => [`waiting for ${reason(what)}`, values]);
  if (!waited.length && steps.get("waited_s")) waited.push(["waiting", steps.get("waited_s")]);
  const pairs = [["training", steps.get("step_s") ?? wall.map(() => 0)], ...waited];
  const accounted = (at) => pairs.reduce((sum, [, values]) => sum + (values[at] ?? 0), 0);
  const rest = wall.map((value, at) => Math.max(0, value - accounted(at)));
  if (rest.some((value, at) => value > 0.02 * wall[at])) pairs.push(["other", rest]);
  const tones = {training: 2, "waiting for rollouts": 3, waiting: 3, "waiting for slow groups": 6,
    "waiting for evaluation": 5, other: 8};
  return stepChart(steps, "Trainer time", "Seconds of each step.", colouredLayers(pairs, "bar", tones),
    {stack: true, y: {low: 0, format: seconds}});
}

function waitingShare(steps) {
  const layers = lines(steps, {waited_share: ["trainer", 3]});
  const [idle, seen] = [steps.get("samplers_idle_s"), steps.get("samplers_seen_s")];
  if (idle && seen) layers.push(line("samplers", idle.map((value, at) => (seen[at] ? value / seen[at] : null)), 1));
  return stepChart(steps, "Idle time", "Fraction of the time in which trainer and samplers had nothing to do.", layers,
    {y: WHOLE_SHARE});
}

function failures(steps) {
  const tones = {failed: 7, lost: 3, stale: 5, dropped: 8};
  const known = steps.below("infrastructure/").filter(([kind, values]) => kind in tones && values.some(Boolean));
  return stepChart(steps, "Retried rollouts", "Failed, lost or stale rollouts, and groups given up; not in any mean.",
    known.map(([kind, values]) => ({name: humanize(kind), kind: "bar", values, tone: tones[kind], alone: true})),
    {stack: true});
}

function uploads(steps) {
  const changed = steps.last("changed");
  const caption = `Bytes of each weight version sent to the samplers${isNumber(changed) ?
    `; in the last one, ${percent(changed, 1)} of the values changed` : ""}.`;
  const layers = lines(steps, {upload_bytes: ["bytes", 1]}).map((layer) => ({...layer, dots: 60}));
  return stepChart(steps, "Weights sent", caption, layers, {y: {log: true, format: bytes}});
}

// ------------------------------------------------------------------------------------------- tables

function categories(steps, tests) {
  const named = (columns) => columns.map((name) => /^category\/(.*)\/solved$/.exec(name)?.[1]).filter(Boolean);
  const [first, last] = [tests[0] ?? {}, tests.at(-1) ?? {}];
  const names = [...new Set([...named(steps.names), ...named(Object.keys(last))])].sort();
  if (!names.length) return null;
  const rows = names.map((name) => {
    const [early, late] = halves(steps, name);
    const [before, after] = [first, last].map((test) => test[`category/${name}/solved`]);
    const tasks = last[`category/${name}/tasks`];
    return h("tr",
      h("th", {scope: "row"}, h("a", {href: `#/rollouts?category=${encodeURIComponent(name)}`}, name)),
      changeCell(early.solved, late.solved),
      h("td.end.muted", early.count + late.count ? integer(early.count + late.count) : ""),
      changeCell(tests.length > 1 ? before : null, after), h("td.end.muted", isNumber(tasks) ? integer(tasks) : ""));
  });
  const heads = [["Category"], ["Solved in training: first half of the steps → second"], ["rollouts", "end"],
    ["Validation tasks solved: first → last"], ["tasks", "end"]];
  return h("div.block", h("h3", "By category"), h("div.scroll", h("table.plain.categories",
    h("caption.unseen", "By category"),
    h("thead", h("tr", heads.map(([name, end]) => h("th", {scope: "col", class: end}, name)))),
    h("tbody", rows))));
}

// The fraction of a category's rollouts that solved their task, in the first and second half of the steps: a single
// step has only a group or two of a category.
function halves(steps, name) {
  const take = (what) => steps.get(`category/${name}/${what}`) ?? [];
  const [solved, counts] = [take("solved"), take("rollouts")];
  const middle = Math.ceil(steps.numbers.length / 2);
  return [[0, middle], [middle, steps.numbers.length]].map(([from, to]) => {
    let [sum, count] = [0, 0];
    for (let at = from; at < to; at++) {
      if (!isNumber(solved[at]) || !isNumber(counts[at])) continue;
      sum += solved[at] * counts[at];
      count += counts[at];
    }
    return {solved: count ? sum / count : null, count};
  });
}

function changeCell(before, after) {
  if (!isNumber(before) && !isNumber(after)) return h("td");
  const both = isNumber(before) && isNumber(after);
  return h("td", dumbbell(before, after, {label: `from ${percent(before)} to ${percent(after)}`}),
    both ? `${percent(before)} → ${percent(after)}` : percent(after ?? before));
}

function behaviours(steps) {
  const known = steps.names.filter((name) => name.startsWith("habit/"));
  if (!known.length) return null;
  const rows = known.map((column) => {
    const name = humanize(column.slice(6));
    return h("li", h("span", name), spark(steps.get(column), {width: 90, tone: 5, label: `${name} by step`}),
      h("b", percent(steps.last(column))));
  });
  return h("div.block", h("h3", "Behaviour rates"),
    h("p.muted", "Watched by the monitors over the last sessions. None of them changes a reward by itself."),
    h("ul.habits", rows));
}
