// The first screen of a run: what it is, what came of it on tasks nobody trained on, and what every stage did.

import {ranges} from "./charts.js";
import {fixed, h, isNumber, percent, plural, seconds, short, signed, whole, when, within} from "./dom.js";

export function hero(run) {
  return h("div.hero", h("h1", run.name), h("p.lead", lead(run)), run.outcome ? outcome(run.outcome) : figures(run));
}

// ------------------------------------------------------------------------------------------- in a sentence

function lead(run) {
  const {model, stages, life} = run;
  const kind = stages.some((stage) => stage.name === "rl") ? "A coding agent" : "A model";
  const about = [model?.family, isNumber(model?.layers) ? plural(model.layers, "layer") : ""].filter(Boolean);
  const what = model ? `${kind} of ${short(model.parameters)} parameters (${about.join(", ")})` : kind;
  const done = stages.filter((stage) => stage.done).length;
  const all = plural(stages.length, "stage");
  const spent = worked(stages);
  const time = spent > 0 ? seconds(spent) : "";
  const at = run.newest ? ` ${when(run.newest)}` : "";
  if (life.state === "finished") return `${what}, trained in ${all}${time ? ` in ${time}` : ""}; finished${at}.`;
  const far = `${what}: ${done} of ${all} done${time ? ` in ${time}` : ""}`;
  if (life.state === "running") return `${far}, and running.`;
  return [`${far}${at ? `, last heard of${at}` : ""}.`, h("span.bad", ` It stopped ${life.words}.`)];
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

// Of a run that has not met a held-out task: what its stages changed.
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

function outcome(told) {
  const [all] = told.rows;
  const twice = told.steps.length > 1;
  const gain = all.change && isNumber(all.change.low) ? all.change : null;
  const note = gain ? `${points(gain.at)} points; 95 % interval ${bounds(gain, points)}` : interval(all.after);
  const when = twice ? ["before and after ", h("b", "reinforcement learning")] : `measured at step ${told.steps[0]}`;
  const size = `${plural(told.tasks, "held-out task")}, ${plural(told.sessions, "session")} each.`;
  const says = gain ? " Intervals are over tasks: how far the figure would move with other tasks like these." :
    " Intervals are 95 %, over tasks.";
  return h("section.outcome", {"aria-labelledby": "outcome"},
    h("div", h("h2.unseen", {id: "outcome"}, "Outcome"),
      figure(change(all.before?.at, all.after.at, (value) => percent(value)),
        ["of held-out tasks solved,", h("br"), when], note, "main"),
      h("p.fine", h("b", size), says)),
    table(told));
}

function interval(range) {
  return isNumber(range.low) ? `95 % interval ${bounds(range, (value) => percent(within(value)))}` : "";
}

function named(row) {
  if (row.name === "all") return ["all tasks", `${whole(row.tasks)}, on average over sessions`];
  if (row.name === "best") return [`best of ${row.of}`, `solved by one of ${row.of} sessions at least`];
  return [row.name, `${whole(row.tasks)} ${row.kind || "tasks"}`];
}

function table(told) {
  const shares = [0, 0.5, 1];
  const rows = told.rows.map((row) => {
    const [name, kind] = named(row);
    const {before, after, change: gain} = row;
    const values = change(before?.at, after.at, (value) => percent(value));
    const sure = gain && isNumber(gain.low) && gain.low > 0;
    const text = gain ? [h("b", points(gain.at)), isNumber(gain.low) ? ` (${bounds(gain, points)})` : "",
      isNumber(gain.low) && !sure && gain.high > 0 ? h("span.chance", "may be chance") : null] : interval(after);
    return h("tr", {class: row.name === "best" ? "apart" : null},
      h("th", {scope: "row"}, name, h("span.kind", kind)),
      h("td.picture", ranges(before, after, {label: `${name}, before and after`})),
      h("td.values", values), h("td.gain", {class: sure ? "sure" : null}, text));
  });
  const axis = h("span.shares", {"aria-hidden": "true"}, shares.map((share) => h("i", percent(share))));
  return h("div.scroll", h("table.ranges", h("caption.unseen", "Held-out tasks solved, before and after"),
    h("thead", h("tr", h("th", {scope: "col"}, h("span.unseen", "Tasks")), h("th.picture", {scope: "col"}, axis,
      h("span.unseen", "picture")), h("th", {scope: "col"}, 
      told.steps.length > 1 ? [h("i.mark.before"), "before → ", h("i.mark.after"), "after"] : "solved"),
    h("th", {scope: "col"}, told.rows.some((row) => row.change) ? "points gained (95 %)" : ""))),
    h("tbody", rows)));
}

// ------------------------------------------------------------------------------------------- stages

export function stageList(run) {
  if (!run.stages.length) return null;
  const current = run.stages.find((stage) => !stage.done);
  const stateOf = (stage) => {
    if (stage.done) return "done";
    if (stage === current && run.life.state === "running") return "running";
    return stage.step !== null ? "stopped" : "waiting";
  };
  const span = worked(run.stages);
  return h("section", {"aria-labelledby": "stages"}, h("h2", {id: "stages"}, "Stages"),
    h("ol.stages", run.stages.map((stage) => stageRow(stage, stateOf(stage), span))));
}

// Seconds of work in all of them; each says where in it it began.
function worked(stages) {
  return Math.max(0, ...stages.map((stage) => (stage.start ?? 0) + (stage.seconds ?? 0)));
}

function stageRow(stage, state, span) {
  const {measure, before, after, start, seconds: took} = stage;
  const came = isNumber(after) ?
    [h("span.measure", measure), h("span.numbers", change(before, after, format(stage)))] : null;
  const place = isNumber(took) && span > 0 ?
    {left: `${(100 * start) / span}%`, width: `max(2px, ${(100 * took) / span}%)`} : null;
  return h("li", {class: state}, h("span.dot", {title: state}),
    h("strong", stage.name, state === "done" ? h("span.unseen", " done") : null),
    h("span.did", stage.did, state === "done" ? null : h("span.tag", {class: TAGS[state]}, far(stage, state))),
    h("span.came", came),
    h("span.lane", {"aria-hidden": "true"}, place ? h("i", {css: place}) : null),
    h("span.took", took > 0 ? seconds(took) : ""));
}

const TAGS = {running: "going", stopped: "bad"};

function far(stage, state) {
  if (!isNumber(stage.step)) return state;
  return `${state} at step ${whole(stage.step)}${stage.steps ? ` of ${whole(stage.steps)}` : ""}`;
}
