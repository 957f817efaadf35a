// The first page: what the run is, how far, what came of it, and how it went on the way.

import {about, ask} from "./data.js";
import {
  ago, fixed, fold, h, isNumber, percent, plural, put, seconds, short, signed, whole, when, within, words,
} from "./dom.js";
import {bestKey, learningSection} from "./learning.js";
import {measureName, trainingSection} from "./training.js";

export async function runPage() {
  const place = h("div");
  const update = async () => {
    const run = await ask("run");
    const open = new Set([...place.querySelectorAll("details[data-name][open]")].map((node) => node.dataset.name));
    put(place, parts(run));
    for (const node of place.querySelectorAll("details[data-name]")) {
      if (open.has(node.dataset.name)) node.open = true;
    }
  };
  const busy = () => place.querySelector(".chart:hover, .chart:focus-within"); // somebody is reading a number
  return {title: "", nodes: [place], update, live: "metrics", busy};
}

function parts(run) {
  return [
    h("div.hero", h("h1", run.name), h("p.lead", lead(run)), figures(run)),
    problems(run.problems),
    about ? h("p.notice", about) : null,
    stages(run),
    trainingSection(run),
    run.rl ? learningSection(run.rl) : null,
    run.rl ? machinery(run.rl, run.life) : null,
    named("recipe", fold("The recipe", () => h("pre.code", run.recipe), {class: "block"})),
  ];
}

// Folds with a name stay as they are when the page is drawn again.
function named(name, node) {
  node.dataset.name = name;
  return node;
}

export function problems(found) {
  if (!found?.length) return null;
  return h("div.notice.warn", {role: "note"}, h("strong", "Some of this could not be read."),
    h("ul", found.map((problem) => h("li", problem))));
}

export function plainTable(label, rows, head) {
  return h("div.scroll", h("table.plain", h("caption.unseen", label), head ? h("thead", head) : null,
    h("tbody", rows)));
}

// ------------------------------------------------------------------------------------------- in a few words

function lead(run) {
  const done = run.stages.filter((stage) => stage.done).length;
  const state = {running: "Running", finished: "Finished", stopped: "Not running"}[run.life.state];
  const all = plural(run.stages.length, "stage");
  const heard = run.newest ? `, last heard of on ${when(run.newest)}.` : ".";
  return [`${state}: ${done === run.stages.length ? "all stages" : `${done} of ${all}`} done${heard}`,
    run.life.state === "stopped" ? h("span.bad", ` It stopped ${run.life.words}.`) : null];
}

function figure(value, label, note, kind) {
  return h("div.figure", {class: kind}, h("div.value", value), h("div.label", label),
    note ? h("div.note", note) : null);
}

function change(before, after, format) {
  return [format(before), h("span.to", {"aria-label": "to"}, "→"), format(after)];
}

function figures(run) {
  const shown = [...measured(run), ...learned(run)];
  for (const told of run.training.slice(0, shown.length ? 1 : 4)) {
    const values = told.curve.mean;
    const rate = told.rate ? `, ${short(told.rate)} per second` : "";
    shown.push(figure(change(values[0], values.at(-1), fixed), `${measureName(told)} in ${told.stage}`,
      `${short(told.tokens)} tokens${rate}`));
  }
  for (const line of run.measures.filter((each) => isNumber(each.bits_per_byte))) {
    shown.push(figure(fixed(line.bits_per_byte, 3), "bits per byte", `of ${plural(line.files, "file")} of code`));
  }
  return shown.length ? h("div.figures", shown) : null;
}

function measured(run) {
  const tests = run.rl?.evaluations ?? [];
  if (!tests.length) return [];
  const [first, last] = [tests[0], tests.at(-1)];
  const show = (key) => (tests.length > 1 ? change(first[key], last[key], percent) : percent(last[key]));
  const bounds = (key) => `95 %: ${percent(within(last[`${key}_low`]))} to ${percent(within(last[`${key}_high`]))}`;
  const rise = run.stages.find((stage) => stage.name === "rl")?.facts.rise;
  const points = (value) => signed(100 * value, 0);
  const proof = isNumber(rise?.solved_low) ?
    `${points(rise.solved)} points (95 %: ${points(rise.solved_low)} to ${points(rise.solved_high)}) ` +
    `over ${plural(rise.tasks, "task")}` : bounds("solved");
  const best = bestKey(last);
  return [
    figure(show("solved"), "held-out tasks solved, on average", proof, "main"),
    best ? figure(show(best), `solved in the best of ${best.slice(5)}`, bounds(best)) : null,
  ];
}

function learned(run) {
  const steps = run.rl?.steps.columns;
  if (!steps?.reward?.some(isNumber)) return [];
  const ends = [steps.reward.find(isNumber), steps.reward.findLast(isNumber)];
  const {plan, rollouts} = run.rl;
  return [
    figure(change(...ends, fixed), "mean reward of a step",
      `best of group ${fixed(steps.reward_best?.findLast(isNumber))}`),
    figure([whole(steps.step.at(-1)), plan.steps ? h("span.of", ` of ${whole(plan.steps)}`) : null], "steps",
      `${plural(rollouts.training, "rollout")}${plan.group_size ? `, groups of ${plan.group_size}` : ""}`),
  ];
}

// ------------------------------------------------------------------------------------------- stages

function stages(run) {
  if (!run.stages.length) return null;
  const current = run.stages.find((stage) => !stage.done);
  const stateOf = (stage) => {
    if (stage.done) return "done";
    if (stage === current && run.life.state === "running") return "running";
    return stage.step !== null ? "stopped" : "waiting";
  };
  return h("section", {"aria-labelledby": "stages"}, h("h2", {id: "stages"}, "Stages"),
    h("ol.stages", run.stages.map((stage) => h("li", {class: stateOf(stage)}, h("span.dot", {"aria-hidden": "true"}),
      h("div", h("strong", stage.name), h("span.state", stateWords(stateOf(stage), stage)),
        h("span.gist", gist(stage, run)))))),
    named("facts", fold("Everything the stages told", () => factsTable(run.stages), {class: "block"})));
}

function stateWords(state, stage) {
  const of = stage.steps ? ` of ${whole(stage.steps)}` : "";
  const at = isNumber(stage.step) && !stage.done ? ` at step ${whole(stage.step)}${of}` : "";
  const took = stage.done && isNumber(stage.seconds) ? `, ${seconds(stage.seconds)}` : "";
  return `${state}${at}${took}`;
}

function gist(stage, run) {
  const {facts} = stage;
  const told = run.training.find((each) => each.stage === stage.name);
  if (stage.name === "rl" && facts.before && facts.after) {
    return `${percent(facts.before.solved)} → ${percent(facts.after.solved)} solved`;
  }
  if (told) return `${fixed(told.curve.mean[0])} → ${fixed(told.curve.mean.at(-1))}`;
  if (isNumber(facts.parameters)) return `${short(facts.parameters)} parameters`;
  if (isNumber(facts.vocab_size)) return `${whole(facts.vocab_size)} words`;
  if (isNumber(facts.bits_per_byte)) return `${fixed(facts.bits_per_byte, 3)} bits per byte`;
  const inside = Object.values(facts).filter((value) => value && typeof value === "object");
  const sum = (key) => inside.reduce((all, value) => all + (isNumber(value[key]) ? value[key] : 0), 0);
  if (sum("train")) return `${short(sum("train"))} tokens`;
  return sum("tasks") ? plural(sum("tasks"), "task") : "";
}

function factsTable(all) {
  const rows = all.flatMap((stage) => {
    const facts = flat(stage.facts);
    return facts.map(([name, value], at) => h("tr",
      at === 0 ? h("th", {scope: "rowgroup", rowspan: facts.length}, stage.name) : null,
      h("td", words(name)), h("td.end", typeof value === "number" ? short(value) : String(value))));
  });
  return plainTable("Facts of the stages", rows);
}

function flat(facts, prefix = "") {
  return Object.entries(facts).flatMap(([name, value]) => {
    const nested = value && typeof value === "object" && !Array.isArray(value);
    return nested ? flat(value, `${prefix}${name} `) : [[`${prefix}${name}`, value]];
  });
}

// ------------------------------------------------------------------------------------------- the machinery

function machinery(rl, life) {
  const found = [];
  const part = (title, about, table) => found.push(h("div", h("h3", title), about ? h("p.muted", about) : null, table));
  if (rl.services.length && life.state !== "finished") part("Processes", "", servicesTable(rl.services));
  if (rl.deaths.length) {
    part(plural(rl.deaths.length, "death"), "A process that died was started again.",
      plainTable("Deaths", rl.deaths.slice(-20).map((death) =>
        h("tr", h("th", {scope: "row"}, death.name), h("td", when(death.time)), h("td", death.why)))));
  }
  if (rl.troubles.length) {
    part("What had to be done again", "Failures of the infrastructure; none of them is a reward of 0.",
      plainTable("Troubles", rl.troubles.slice(0, 20).map((trouble) =>
        h("tr", h("td.end", `${trouble.times} ×`), h("td", h("span.tag", trouble.kind)), h("td", trouble.why)))));
  }
  if (rl.weights.length > 1) {
    part("Weights of the reward", "They were changed on the way.", plainTable("Weights", rl.weights.map((entry) => {
      const says = Object.entries(entry.weights ?? {}).map(([name, value]) => `${words(name)} ${short(value)}`);
      return h("tr", h("th", {scope: "row"}, `from version ${entry.step}`), h("td", says.join(", ")));
    })));
  }
  if (!found.length) return null;
  return h("section", {"aria-labelledby": "machinery"}, h("h2", {id: "machinery"}, "Machinery"),
    h("div.columns", found));
}

function servicesTable(services) {
  return plainTable("Processes", services.map((service) => {
    const figures = Object.entries(service.figures).map(([name, value]) => `${words(name)} ${short(value)}`);
    return h("tr", h("th", {scope: "row"}, service.name),
      h("td", h("span.tag", {class: service.state === "silent" ? "bad" : null}, service.state)),
      h("td", service.waiting_for || figures.join(", ")), h("td.muted.end", ago(service.heard)));
  }));
}

// ------------------------------------------------------------------------------------------- a directory of runs

const STATES = {running: "going", finished: "good", stopped: "odd"};

export async function runsPage() {
  const place = h("div");
  const update = async () => {
    const {runs} = await ask("runs");
    const heads = [["Run"], ["State"], ["Stages"], ["Held-out", "end"], ["Changed", "end"]];
    put(place, h("div.hero", h("h1", "Runs"), h("p.lead", plural(runs.length, "run"), ".")),
      plainTable("Runs", runs.map(runRow),
        h("tr", heads.map(([name, end]) => h("th", {scope: "col", class: end}, name)))));
  };
  const move = (by) => {
    const all = [...place.querySelectorAll("th a")];
    const at = all.indexOf(document.activeElement);
    all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + by))]?.focus();
  };
  return {title: "Runs", nodes: [place], update, keys: {
    j: ["next run", () => move(1)],
    k: ["previous run", () => move(-1)],
  }};
}

function runRow(run) {
  const done = run.stages.filter((stage) => stage.done).length;
  const both = run.before && run.after;
  return h("tr",
    h("th", {scope: "row"}, h("a", {href: `/run/${encodeURIComponent(run.directory)}/`}, run.directory),
      run.name !== run.directory ? h("span.muted", ` ${run.name}`) : null),
    h("td", h("span.tag", {class: STATES[run.life.state], title: run.life.words}, run.life.state),
      run.problems.length ? h("span.tag.bad", {title: run.problems.join("; ")}, "damaged") : null),
    h("td", h("span.beads", {role: "img", "aria-label": `${done} of ${run.stages.length} stages done`},
      run.stages.map((stage) => h("i", {class: stage.done ? "yes" : "open", title: stage.name})))),
    h("td.end", both ? `${percent(run.before.solved)} → ${percent(run.after.solved)}` : ""),
    h("td.end.muted", run.changed ? when(run.changed) : ""));
}
