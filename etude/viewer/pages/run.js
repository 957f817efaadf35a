// The first page: what the run is, how far, what came of it, and how it went on the way.

import {ask} from "./data.js";
import {ago, fold, h, percent, plural, put, short, when, whole, words} from "./dom.js";
import {learningSection} from "./learning.js";
import {hero, stageList} from "./overview.js";
import {trainingSection} from "./training.js";

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
    hero(run),
    problems(run.problems),
    stageList(run),
    trainingSection(run),
    run.rl ? learningSection(run.rl) : null,
    run.rl ? machinery(run.rl, run.life) : null,
    run.stages.length ?
      named("facts", fold("Everything the stages told", () => factsTable(run.stages), {class: "block"})) : null,
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

// ------------------------------------------------------------------------------------------- what they told

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
    part("What had to be done again", "Rollouts that were lost or had become too old; none of them is a reward of 0.",
      plainTable("Troubles", rl.troubles.slice(0, 20).map((trouble) =>
        h("tr", h("th", {scope: "row"}, `${whole(trouble.times)} × ${trouble.kind}`), h("td", trouble.why)))));
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
