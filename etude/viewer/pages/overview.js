// The first screen of a run: the model, what each stage did to its solve rate, and the result of every stage.

import {fixed, h, isNumber, percent, plural, seconds, short, integer, when} from "./dom.js";
import {outcome} from "./outcome.js";

export function hero(run) {
  return h("div.hero", h("h1", run.name), h("p.lead", lead(run)), run.outcome ? outcome(run.outcome) : figures(run));
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
