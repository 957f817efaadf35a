// The page of a task: instruction, solve rate over time, validation, and files.

import {chart} from "./charts.js";
import {fetchData, isAvailable} from "./data.js";
import {
  bytes, fixed, foldable, h, humanize, integer, isNumber, MISSING, percent, plural, seconds, setChildren,
} from "./dom.js";
import {setName} from "./lists.js";
import {breadcrumbs} from "./rollout.js";
import {plainTable, problems} from "./run.js";
import {text} from "./turns.js";

export async function taskPage(parts) {
  const name = parts.map(decodeURIComponent).join("/");
  const container = h("div");
  const update = async () => setChildren(container, page(await fetchData(`task/${name}`)));
  await update();
  const up = () => (location.hash = "#/tasks");
  const keys = {u: ["up to the tasks", up]};
  return {title: name, nodes: [container], update, ready: true, live: "rollouts", keys, escape: up};
}

function page(data) {
  return [
    breadcrumbs([["#/tasks", "Tasks"]], data.name),
    h("div.headline", h("h1", data.name), h("div.verdicts", h("span.tag", data.split || "unknown"),
      data.category ? h("span.tag", data.category) : null)),
    problems(data.problems),
    data.problem ? h("p.notice.warn", `The task cannot be read: ${data.problem}`) : null,
    h("div.columns",
      h("div", instruction(data), validation(data.validation), facts(data)),
      h("section", h("h2", "Results"), history(data))),
    data.files ? h("section", h("h2", plural(data.files.length, "file")), h("div.files", data.files.map(file))) : null,
  ];
}

function instruction(data) {
  const box = (content) => h("div.instruction", text(content));
  return h("section", h("h2", "Instruction"),
    data.instruction ? box(data.instruction) : data.steps?.length ? null : h("p.muted", "It cannot be read."),
    (data.steps ?? []).map((step) => [h("h3", step.name), box(step.instruction)]));
}

function facts(data) {
  const all = [...Object.entries(data.metadata ?? {}), ...Object.entries(data.limits ?? {}), ["network", data.network]];
  const known = all.filter(([, value]) => value !== undefined && value !== "");
  if (!known.length) return null;
  return h("section", h("h2", "Facts"),
    h("dl.costs", known.map(([key, value]) => [h("dt", humanize(key)), h("dd", String(value))])));
}

function history(data) {
  if (!data.groups.length) return h("p.muted", "Not run yet.");
  const link = (entry) => {
    const address = `group/${entry.set}/${entry.group}`;
    return isAvailable(address) ? `#/${address}` : null;
  };
  const solved = (entry) => (entry.ready ? `${entry.solved ?? 0} of ${entry.ready}` :
    entry.dropped ? "given up" : "running");
  const rows = data.groups.map((entry) => h("tr", h("th", {scope: "row"}, entry.step ?? MISSING),
    h("td", setName(entry.set)), h("td", solved(entry)), h("td", fixed(entry.reward)),
    h("td.end", link(entry) ? h("a", {href: link(entry)}, `group ${entry.group}`) : "")));
  const heads = ["Step", "Set", "Solved", "Reward", ""].map((name) => h("th", {scope: "col"}, name));
  const known = data.groups.filter((entry) => entry.ready && isNumber(entry.step));
  const rates = known.map((entry) => entry.solved / entry.ready);
  return [
    known.length > 1 ? chart({
      title: "Solve rate", caption: "Fraction of its rollouts that solved it.",
      x: {values: known.map((entry) => entry.step), label: "step", format: (value) => integer(value)},
      y: {format: (value) => percent(value), low: 0, high: 1},
      layers: [{name: "solved", kind: "line", values: rates, tone: 1, dots: 60}],
      open: (at) => link(known[at]), openHint: "click for the group",
    }) : null,
    plainTable("Groups", rows, h("tr", heads)),
  ];
}

function validation(data) {
  if (!data) {
    return h("section", h("h2", "Validation"), h("p.muted", "Not validated on this machine. ",
      h("code", "etude tasks validate"), " checks that doing nothing fails and that the solution passes."));
  }
  const name = (key) => ({noop: "doing nothing", solution: "the solution"})[key] ?? key;
  const scores = Object.entries(data.scores).map(([key, values]) => h("tr", h("th", {scope: "row"}, name(key)),
    h("td", values.map((value) => fixed(value, 1)).join(", "))));
  const changes = data.changed.length ? data.changed.join(", ") : "nothing";
  return h("section", h("h2", "Validation"),
    h("p", h("span.tag", {class: data.admitted ? "good" : "bad"}, data.admitted ? "admitted" : "not admitted"),
      ` in ${seconds(data.seconds)}; the solution changes ${changes}.`),
    plainTable("Rewards in validation", scores),
    data.reasons.map((reason) => [h("p.bad", `${reason.code}: ${reason.means}`),
      reason.evidence ? h("pre.code", reason.evidence) : null]));
}

// Short files of the agent's workspace are shown open, all others collapsed.
function file(data) {
  const name = [h("code", data.path), h("span.muted", isNumber(data.size) ? ` ${bytes(data.size)}` : "")];
  if (data.text === undefined) return h("p.file", name, h("span.muted", ` ${data.problem ?? "not shown"}`));
  const open = /^environment\/.*\//.test(data.path) && data.size > 0 && data.size < 1200;
  return foldable(name, () => h("pre.code", data.text), {class: "file", open});
}
