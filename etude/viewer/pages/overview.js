// The first screen of a run: the model, held-out success before and after RL, and the result of every stage.

import {ranges} from "./charts.js";
import {fixed, h, isNumber, percent, plural, seconds, short, signed, integer, when, clampShare} from "./dom.js";

export function hero(run) {
  return h("div.hero", h("h1", run.name), h("p.lead", lead(run)), run.outcome ? outcome(run) : figures(run));
}

// ------------------------------------------------------------------------------------------- lead sentence

function lead(run) {
  const {model, stages, status} = run;
  const kind = stages.some((stage) => stage.name === "rl") ? "A coding agent" : "A model";
  const about = [model?.family, isNumber(model?.layers) ? plural(model.layers, "layer") : ""].filter(Boolean);
  const what = model ? `${kind} of ${short(model.parameters)} parameters (${about.join(", ")})` : kind;
  const done = stages.filter((stage) => stage.done).length;
  const all = plural(stages.length, "stage");
  const spent = activeSeconds(stages);
  const time = spent > 0 ? seconds(spent) : "";
  const at = run.newest ? ` ${when(run.newest)}` : "";
  if (status.state === "finished") return `${what}, trained in ${all}${time ? ` in ${time}` : ""}; finished${at}.`;
  const progress = `${what}: ${done} of ${all} done${time ? ` in ${time}` : ""}`;
  if (status.state === "running") return `${progress}, and running.`;
  return [`${progress}${at ? `, last active${at}` : ""}.`, h("span.bad", ` It stopped ${status.text}.`)];
}

function figure(value, label, note, kind) {
  return h("div.figure", {class: kind}, h("div.value", value), h("div.label", label),
    note ? h("div.note", note) : null);
}

function change(before, after, format) {
  return isNumber(before) ? [format(before), h("span.to", {"aria-label": "to"}, "→"), format(after)] : format(after);
}

function format(stage) {
  return stage.share ? (value) => percent(value) : (value) => fixed(value);
}

// The metrics that the stages changed, for a run without held-out evaluation.
function figures(run) {
  const shown = run.stages.filter((stage) => isNumber(stage.after)).slice(0, 4)
    .map((stage) => figure(change(stage.before, stage.after, format(stage)), `${stage.measure}, ${stage.name}`));
  for (const line of run.measures.filter((each) => isNumber(each.bits_per_byte))) {
    shown.push(figure(fixed(line.bits_per_byte, 3), "bits per byte", `of ${plural(line.files, "file")} of code`));
  }
  const rewards = run.rl?.steps.columns.reward?.filter(isNumber) ?? [];
  if (rewards.length) {
    shown.push(figure(change(rewards[0], rewards.at(-1), (value) => fixed(value)), "reward, first step and last"));
  }
  return shown.length ? h("div.figures", shown) : null;
}

// ------------------------------------------------------------------------------------------- held-out success

const points = (value) => signed(100 * value, 0);
const bounds = (range, word) => `${word(range.low)} to ${word(range.high)}`;

// Names of the first and last evaluation. The first is of the checkpoint that RL started from, not of the base model.
function evaluationNames(run) {
  const [first, last] = run.outcome.steps;
  const before = run.stages.slice(0, run.stages.findIndex((stage) => stage.name === "rl"));
  const start = before.filter((stage) => isNumber(stage.after)).at(-1)?.name;
  const finished = run.stages.some((stage) => stage.name === "rl" && stage.done);
  return [first === 0 ? (start ? `after ${start}, before RL` : "before RL") : `RL step ${first}`,
    finished ? "after RL" : `RL step ${last}`];
}

function outcome(run) {
  const data = run.outcome;
  const [all] = data.rows;
  const twice = data.steps.length > 1;
  const gain = all.change && isNumber(all.change.low) ? all.change : null;
  const note = gain ? `${points(gain.at)} points; 95 % interval ${bounds(gain, points)}` : interval(all.after);
  const [first, last] = evaluationNames(run);
  const when = twice ? [`${first} → `, h("b", last)] : `evaluated at RL step ${data.steps[0]}`;
  const size = `${plural(data.tasks, "held-out task")}, ${plural(data.sessions, "session")} each.`;
  const note95 = gain ? " Intervals are over tasks: they show how much the figure would vary with other such tasks." :
    " Intervals are 95 %, over tasks.";
  return h("section.outcome", {"aria-labelledby": "outcome"},
    h("div", h("h2.unseen", {id: "outcome"}, "Outcome"),
      figure(change(all.before?.at, all.after.at, (value) => percent(value)),
        ["of held-out tasks solved,", h("br"), when], note, "main"),
      h("p.fine", h("b", size), note95, first.startsWith("after ") ? " The base model is not evaluated here." : "")),
    table(data, first.split(", ").at(-1), last));
}

function interval(range) {
  return isNumber(range.low) ? `95 % interval ${bounds(range, (value) => percent(clampShare(value)))}` : "";
}

function rowLabel(row) {
  if (row.name === "all") return ["all tasks", `${integer(row.tasks)}, mean over sessions`];
  if (row.name === "best") return [`best of ${row.of}`, `solved by at least one of ${row.of} sessions`];
  return [row.name, `${integer(row.tasks)} ${row.kind || "tasks"}`];
}

function table(data, first, last) {
  const shares = [0, 0.5, 1];
  const short = (name) => name.replace(/ RL$/, "");
  const rows = data.rows.map((row) => {
    const [name, kind] = rowLabel(row);
    const {before, after, change: gain} = row;
    const values = change(before?.at, after.at, (value) => percent(value));
    const sure = gain && isNumber(gain.low) && gain.low > 0;
    const text = gain ? [h("b", points(gain.at)), isNumber(gain.low) ? ` (${bounds(gain, points)})` : "",
      isNumber(gain.low) && !sure && gain.high > 0 ? h("span.chance", "may be chance") : null] : interval(after);
    return h("tr", {class: row.name === "best" ? "apart" : null},
      h("th", {scope: "row"}, name, h("span.kind", kind)),
      h("td.picture", ranges(before, after, {label: `${name}, ${first} and ${last}`})),
      h("td.values", values), h("td.gain", {class: sure ? "sure" : null}, text));
  });
  const axis = h("span.shares", {"aria-hidden": "true"}, shares.map((share) => h("i", percent(share))));
  return h("div.scroll", h("table.ranges", h("caption.unseen", `Held-out tasks solved, ${first} and ${last}`),
    h("thead", h("tr", h("th", {scope: "col"}, h("span.unseen", "Tasks")), h("th.picture", {scope: "col"}, axis,
      h("span.unseen", "picture")), h("th", {scope: "col"}, 
      data.steps.length > 1 ? [h("i.mark.before"), `${short(first)} → `, h("i.mark.after"), short(last)] : "solved"),
    h("th", {scope: "col"}, data.rows.some((row) => row.change) ? "points gained (95 %)" : ""))),
    h("tbody", rows)));
}

// ------------------------------------------------------------------------------------------- stages

export function stageList(run) {
  if (!run.stages.length) return null;
  const current = run.stages.find((stage) => !stage.done);
  const stateOf = (stage) => {
    if (stage.done) return "done";
    if (stage === current && run.status.state === "running") return "running";
    return stage.step !== null ? "stopped" : "waiting";
  };
  const span = activeSeconds(run.stages);
  return h("section", {"aria-labelledby": "stages"}, h("h2", {id: "stages"}, "Stages"),
    h("ol.stages", run.stages.map((stage) => stageRow(stage, stateOf(stage), span))));
}

// Active seconds of all stages together.
function activeSeconds(stages) {
  return Math.max(0, ...stages.map((stage) => (stage.start ?? 0) + (stage.seconds ?? 0)));
}

function stageRow(stage, state, span) {
  const {measure, before, after, start, seconds: took} = stage;
  const result = isNumber(after) ?
    [h("span.measure", measure), h("span.numbers", change(before, after, format(stage)))] : null;
  const position = isNumber(took) && span > 0 ?
    {left: `${(100 * start) / span}%`, width: `max(2px, ${(100 * took) / span}%)`} : null;
  return h("li", {class: state}, h("span.dot", {title: state}),
    h("strong", stage.name, state === "done" ? h("span.unseen", " done") : null),
    h("span.did", stage.did, state === "done" ? null : h("span.tag", {class: TAGS[state]}, progressText(stage, state))),
    h("span.came", result),
    h("span.lane", {"aria-hidden": "true"}, position ? h("i", {css: position}) : null),
    h("span.took", took > 0 ? seconds(took) : ""));
}

const TAGS = {running: "going", stopped: "bad"};

function progressText(stage, state) {
  if (!isNumber(stage.step)) return state;
  return `${state} at step ${integer(stage.step)}${stage.steps ? ` of ${integer(stage.steps)}` : ""}`;
}
