// One task: what is asked, how it went over time, what proves that it can be done, and its files.

import {chart} from "./charts.js";
import {ask, has} from "./data.js";
import {bytes, fixed, fold, h, isNumber, MISSING, percent, plural, put, seconds, whole, words} from "./dom.js";
import {setName} from "./lists.js";
import {crumbs} from "./rollout.js";
import {plainTable, problems} from "./run.js";
import {text} from "./turns.js";

export async function taskPage(parts) {
  const name = parts.map(decodeURIComponent).join("/");
  const place = h("div");
  const update = async () => put(place, page(await ask(`task/${name}`)));
  await update();
  const up = () => (location.hash = "#/tasks");
  const keys = {u: ["up to the tasks", up]};
  return {title: name, nodes: [place], update, ready: true, live: "rollouts", keys, escape: up};
}

function page(told) {
  return [
    crumbs([["#/tasks", "Tasks"]], told.name),
    h("div.headline", h("h1", told.name), h("div.verdicts", h("span.tag", told.split || "unknown"),
      told.category ? h("span.tag", told.category) : null)),
    problems(told.problems),
    told.problem ? h("p.notice.warn", `The task cannot be read any more: ${told.problem}`) : null,
    h("div.columns",
      h("div", instruction(told), validation(told.validation), facts(told)),
      h("section", h("h2", "How it went"), tries(told))),
    told.files ? h("section", h("h2", plural(told.files.length, "file")), h("div.files", told.files.map(file))) : null,
  ];
}

function instruction(told) {
  const box = (content) => h("div.instruction", text(content));
  return h("section", h("h2", "Instruction"),
    told.instruction ? box(told.instruction) : told.steps?.length ? null : h("p.muted", "It cannot be read."),
    (told.steps ?? []).map((step) => [h("h3", step.name), box(step.instruction)]));
}

function facts(told) {
  const all = [...Object.entries(told.metadata ?? {}), ...Object.entries(told.limits ?? {}), ["network", told.network]];
  const known = all.filter(([, value]) => value !== undefined && value !== "");
  if (!known.length) return null;
  return h("section", h("h2", "Facts"),
    h("dl.costs", known.map(([key, value]) => [h("dt", words(key)), h("dd", String(value))])));
}

function tries(told) {
  if (!told.tries.length) return h("p.muted", "Nobody has tried it yet.");
  const link = (tried) => (has(`group/${tried.set}/${tried.group}`) ? `#/group/${tried.set}/${tried.group}` : null);
  const solved = (tried) => (tried.ready ? `${tried.solved ?? 0} of ${tried.ready}` :
    tried.dropped ? "given up" : "under way");
  const rows = told.tries.map((tried) => h("tr", h("th", {scope: "row"}, tried.step ?? MISSING),
    h("td", setName(tried.set)), h("td", solved(tried)), h("td", fixed(tried.reward)),
    h("td.end", link(tried) ? h("a", {href: link(tried)}, `group ${tried.group}`) : "")));
  const heads = ["Step", "Set", "Solved", "Reward", ""].map((name) => h("th", {scope: "col"}, name));
  const known = told.tries.filter((tried) => tried.ready && isNumber(tried.step));
  const rates = known.map((tried) => tried.solved / tried.ready);
  return [
    known.length > 1 ? chart({
      title: "Solve rate", says: "Share of its rollouts that solved it.",
      x: {values: known.map((tried) => tried.step), label: "step", format: (value) => whole(value)},
      y: {format: (value) => percent(value), low: 0, high: 1},
      layers: [{name: "solved", kind: "line", values: rates, tone: 1, dots: 60}],
      open: (at) => link(known[at]), openHint: "click for the group",
    }) : null,
    plainTable("Tries", rows, h("tr", heads)),
  ];
}

function validation(told) {
  if (!told) {
    return h("section", h("h2", "Validation"), h("p.muted", "Not done on this machine. ",
      h("code", "etude tasks validate"), " proves that doing nothing fails and that the solution passes."));
  }
  const name = (key) => ({noop: "doing nothing", solution: "the solution"})[key] ?? key;
  const scores = Object.entries(told.scores).map(([key, values]) => h("tr", h("th", {scope: "row"}, name(key)),
    h("td", values.map((value) => fixed(value, 1)).join(", "))));
  const changes = told.changed.length ? told.changed.join(", ") : "nothing";
  return h("section", h("h2", "Validation"),
    h("p", h("span.tag", {class: told.admitted ? "good" : "bad"}, told.admitted ? "admitted" : "not admitted"),
      ` in ${seconds(told.seconds)}; the solution changes ${changes}.`),
    plainTable("Rewards in validation", scores),
    told.reasons.map((reason) => [h("p.bad", `${reason.code}: ${reason.means}`),
      reason.evidence ? h("pre.code", reason.evidence) : null]));
}

// What the agent finds is shown at once, while it is short; the rest is folded.
function file(told) {
  const name = [h("code", told.path), h("span.muted", isNumber(told.size) ? ` ${bytes(told.size)}` : "")];
  if (told.text === undefined) return h("p.file", name, h("span.muted", ` ${told.problem ?? "not shown"}`));
  const open = /^environment\/.*\//.test(told.path) && told.size > 0 && told.size < 1200;
  return fold(name, () => h("pre.code", told.text), {class: "file", open});
}
