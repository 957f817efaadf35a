// The page of a run: overview, stages, charts, processes, facts and recipe; and the list of runs.

import {fetchData} from "./data.js";
import {ago, foldable, h, isNumber, plural, setChildren, short, signed, when, integer, humanize} from "./dom.js";
import {learningSection} from "./learning.js";
import {hero, stageList} from "./overview.js";
import {trainingSection} from "./training.js";

export async function runPage() {
  const container = h("div");
  const update = async () => {
    const run = await fetchData("run");
    const open = new Set([...container.querySelectorAll("details[data-name][open]")].map((node) => node.dataset.name));
    setChildren(container, parts(run));
    for (const node of container.querySelectorAll("details[data-name]")) {
      if (open.has(node.dataset.name)) node.open = true;
    }
  };
  const busy = () => container.querySelector(".chart:hover, .chart:focus-within"); // the user is reading a value
  return {title: "", nodes: [container], update, live: "metrics", busy};
}

function parts(run) {
  return [
    hero(run),
    problems(run.problems),
    stageList(run),
    trainingSection(run),
    run.rl ? learningSection(run.rl) : null,
    run.rl ? processesSection(run.rl, run.status) : null,
    run.stages.length ?
      withName("facts", foldable("All facts of the stages", () => factsTable(run.stages), {class: "block"})) : null,
    withName("recipe", foldable("Recipe", () => h("pre.code", run.recipe), {class: "block"})),
  ];
}

// Sections with a name stay open when the page is drawn again.
function withName(name, node) {
  node.dataset.name = name;
  return node;
}

export function problems(found) {
  if (!found?.length) return null;
  return h("div.notice.warn", {role: "note"}, h("strong", "Some files of the run could not be read."),
    h("ul", found.map((problem) => h("li", problem))));
}

export function plainTable(label, rows, head) {
  return h("div.scroll", h("table.plain", h("caption.unseen", label), head ? h("thead", head) : null,
    h("tbody", rows)));
}

// ------------------------------------------------------------------------------------------- facts

function factsTable(all) {
  const rows = all.flatMap((stage) => {
    const facts = flatten(stage.facts);
    return facts.map(([name, value], at) => h("tr",
      at === 0 ? h("th", {scope: "rowgroup", rowspan: facts.length}, stage.name) : null,
      h("td", humanize(name)), h("td.end", typeof value === "number" ? short(value) : String(value))));
  });
  return plainTable("Facts of the stages", rows);
}

function flatten(facts, prefix = "") {
  return Object.entries(facts).flatMap(([name, value]) => {
    const nested = value && typeof value === "object" && !Array.isArray(value);
    return nested ? flatten(value, `${prefix}${name} `) : [[`${prefix}${name}`, value]];
  });
}

// ------------------------------------------------------------------------------------------- processes

function processesSection(rl, status) {
  const found = [];
  const part = (title, about, table) => found.push(h("div", h("h3", title), about ? h("p.muted", about) : null, table));
  if (rl.services.length && status.state !== "finished") part("Processes", "", servicesTable(rl.services));
  if (rl.deaths.length) {
    part(plural(rl.deaths.length, "process restart"), "A process that ended unexpectedly was started again.",
      plainTable("Process restarts", rl.deaths.slice(-20).map((death) =>
        h("tr", h("th", {scope: "row"}, death.name), h("td", when(death.time)), h("td", death.why)))));
  }
  if (rl.incidents.length) {
    part("Retried rollouts", "Rollouts that failed, were lost or became stale; none of them counts as a reward of 0.",
      plainTable("Retried rollouts", rl.incidents.slice(0, 20).map((incident) =>
        h("tr", h("th", {scope: "row"}, `${integer(incident.times)} × ${incident.kind}`), h("td", incident.why)))));
  }
  if (rl.changes.length) {
    part("Changed settings", "They were changed during the run, from these policy steps on.",
      plainTable("Changed settings", rl.changes.map((entry) => h("tr", h("th", {scope: "row"}, `step ${entry.step}`),
        h("td.key", entry.key), h("td", settingText(entry.before)), h("td", settingText(entry.value)))),
      h("tr", ["Step", "Key", "Before", "After"].map((name) => h("th", {scope: "col"}, name)))));
  }
  if (!found.length) return null;
  return h("section", {"aria-labelledby": "processes"}, h("h2", {id: "processes"}, "Processes and incidents"),
    h("div.columns", found));
}

function settingText(value) {
  if (value === null || typeof value !== "object") return typeof value === "number" ? short(value) : String(value);
  return Object.entries(value).map(([name, each]) => `${humanize(name)} ${settingText(each)}`).join(", ");
}

function servicesTable(services) {
  return plainTable("Processes", services.map((service) => {
    return h("tr", h("th", {scope: "row"}, service.name), h("td", service.host), h("td", service.version),
      h("td", h("span.tag", {class: service.state === "silent" ? "bad" : null}, service.state)),
      h("td", service.load), h("td", service.waiting_for), h("td.muted.end", ago(service.heard)));
  }), h("tr", ["Service", "Host", "Version", "State", "Load", "Waits for", "Last status"].map((name, at) =>
    h("th", {scope: "col", class: at === 6 ? "end" : null}, name))));
}

// ------------------------------------------------------------------------------------------- a directory of runs

const STATES = {running: "going", finished: "good", stopped: "odd"};

export async function runsPage() {
  const container = h("div");
  const update = async () => {
    const {runs} = await fetchData("runs");
    const heads = [["Run"], ["State"], ["Stages"], ["Last model against best earlier", "end"], ["Changed", "end"]];
    setChildren(container, h("div.hero", h("h1", "Runs"), h("p.lead", plural(runs.length, "run"), ".")),
      plainTable("Runs", runs.map(runRow),
        h("tr", heads.map(([name, end]) => h("th", {scope: "col", class: end}, name)))));
  };
  const move = (by) => {
    const all = [...container.querySelectorAll("th a")];
    const at = all.indexOf(document.activeElement);
    all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + by))]?.focus();
  };
  return {title: "Runs", nodes: [container], update, keys: {
    j: ["next run", () => move(1)],
    k: ["previous run", () => move(-1)],
  }};
}

function runRow(run) {
  const done = run.stages.filter((stage) => stage.done).length;
  const gain = run.gain ? `${run.gain.set} ${signed(100 * run.gain.at, 0)} points` : "";
  const points = (share) => signed(100 * share, 0);
  const interval = isNumber(run.gain?.low) ? ` (${points(run.gain.low)} to ${points(run.gain.high)})` : "";
  return h("tr",
    h("th", {scope: "row"}, h("a", {href: `/run/${encodeURIComponent(run.directory)}/`}, run.directory),
      run.name !== run.directory ? h("span.muted", ` ${run.name}`) : null),
    h("td", h("span.tag", {class: STATES[run.status.state], title: run.status.text}, run.status.state),
      run.problems.length ? h("span.tag.bad", {title: run.problems.join("; ")}, "damaged") : null),
    h("td", h("span.beads", {role: "img", "aria-label": `${done} of ${run.stages.length} stages done`},
      run.stages.map((stage) => h("i", {class: stage.done ? "yes" : "open", title: stage.name})))),
    h("td.end", gain, interval),
    h("td.end.muted", run.changed ? when(run.changed) : ""));
}
