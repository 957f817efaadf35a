// A session turn by turn: text, tool calls, diffs and results. Calls are collapsed, except failed ones.

import {fixed, foldable, h, isNumber, plural, seconds, integer, humanize} from "./dom.js";

const SHORT = 12; // lines of output shown at first
const TONES = {look: 1, edit: 2, run: 5, plan: 4, other: 8, final: 2, summary: 6, message: 8};
const MARKS = 120; // maximum marks of a strip

export function firstLine(content, most = 200) {
  const line = content.trim().split("\n")[0];
  return line.length > most ? `${line.slice(0, most)} …` : line;
}

export function text(content) {
  return h("div.text", content);
}

// A session or a turn as a row of marks.
export function strip(marks) {
  const names = marks.map((mark) => `${mark.kind}${mark.bad ? ` ${mark.bad}` : ""}`);
  return h("span.strip", {role: "img", "aria-label": names.join(", ")}, marks.slice(0, MARKS).map((mark) => {
    const state = mark.bad ? "bad" : mark.code ? "exit" : mark.kind === "final" ? "final" : "";
    const parts = [mark.text ?? mark.kind, mark.bad, mark.code ? `exit ${mark.code}` : ""];
    return h("i", {class: `tone${TONES[mark.kind] ?? 8} ${state}`, title: parts.filter(Boolean).join(" · ")});
  }), marks.length > MARKS ? h("span.muted", ` +${marks.length - MARKS}`) : null);
}

// Legend of the marks.
export function stripKey() {
  const names = {look: "read or search", edit: "edit", run: "run", summary: "summary", final: "final message"};
  const marks = Object.entries(names).map(([kind, name]) =>
    h("span", h("i", {class: `tone${TONES[kind]} ${kind === "final" ? "final" : ""}`}), name));
  return h("p.strip.stripkey", marks, h("span", h("i.tone5.exit"), "exit code not 0"),
    h("span", h("i.bad"), "failed call"));
}

// ------------------------------------------------------------------------------------------- conversation

export function conversation(data) {
  const {session: story} = data;
  const opening = story.steps.filter((step) => step.kind === "prompt" && step.segment === 0);
  const found = [request(opening, story)];
  let segment = 0;
  for (const step of story.steps) {
    if (opening.includes(step)) continue;
    if (step.segment > segment) {
      segment = step.segment;
      found.push(boundary(story, segment));
    }
    found.push(part(step, story));
  }
  return found;
}

function part(step, story) {
  switch (step.kind) {
    case "turn":
      return turn(step, story);
    case "summary":
      return h("section.turn.summary", h("header", h("h3", "Summary"), meta(step)), thinking(step), text(step.text));
    case "summary-request":
      return h("p.boundary.ask", h("span", "asked for a summary"));
    case "prompt": {
      const name = step.role === "user" ? "Prompt after the summary" : `${step.role} message`;
      return foldable(name, () => text(step.text), {class: "aside"});
    }
    default:
      return h("section.turn.said", h("header", h("h3", step.role)), text(step.text));
  }
}

function request(steps, story) {
  const task = steps.findLast((step) => step.role === "user");
  const others = steps.filter((step) => step !== task);
  const tools = `${plural(story.tools.length, "tool")}: ${story.tools.join(", ")}`;
  return h("section.turn.prompt", h("header", h("h3", "Request"), h("span.meta", tools)),
    task ? text(task.text) : null,
    others.map((step) => foldable(`${step.role} message`, () => text(step.text), {class: "aside"})));
}

function boundary(story, segment) {
  const {kind, tokens} = story.segments[segment] ?? {};
  const how = {summary: "continues from the summary", compaction: "writes a summary"}[kind] ?? "starts";
  return h("p.boundary", {role: "separator"},
    h("span", `segment ${segment + 1} of ${story.segments.length} ${how}, ${integer(tokens)} tokens`));
}

// ------------------------------------------------------------------------------------------- a turn

function turn(step, story) {
  const calls = step.calls ?? [];
  const final = !calls.length && story.ending !== "interrupted";
  const state = calls.some((each) => each.status) ? "broken" :
    calls.some((each) => each.error) || (final && step.unclosed) ? "failed" : final ? "final" : "";
  const name = !final ? `Turn ${step.turn}` : step.unclosed ? "Final message, cut off" : "Final message";
  return h("section.turn", {id: `turn-${step.turn}`, tabindex: "-1", class: state},
    h("header", h("h3", name), step.unclosed && !final ? h("span.tag.odd", "cut off") : null, meta(step)),
    thinking(step),
    step.text ? text(step.text) : calls.length ? null : h("p.muted", "No text."),
    calls.map(call));
}

function meta(step) {
  const swapped = step.versions && step.versions[0] !== step.versions[1];
  const bits = [
    isNumber(step.tokens) ? plural(step.tokens, "token") : "",
    isNumber(step.logprob) ? `mean log-probability ${fixed(step.logprob)}` : "",
    swapped ? `weights ${step.versions[0]} to ${step.versions[1]}` : "",
    step.model_s > 0 ? seconds(step.model_s) : "",
  ];
  return h("span.meta", bits.filter(Boolean).join(" · "));
}

function thinking(step) {
  if (!step.thinking) return null;
  return foldable("Thinking", () => text(step.thinking), {class: "thinking", open: step.thinking.length < 400});
}

// ------------------------------------------------------------------------------------------- a call

function call(data) {
  const malformed = Boolean(data.status);
  const code = data.exit_code;
  const badges = [
    malformed ? h("span.tag.bad", `malformed: ${humanize(data.status)}`) : null,
    data.error && !malformed ? h("span.tag.bad", humanize(data.error)) : null,
    isNumber(code) ? h("span.tag", {class: code === 0 ? "good" : "odd"}, `exit ${code}`) : null,
    data.timed_out ? h("span.tag.bad", "timed out") : null,
    data.diff ? h("span.counts", h("b.plus", `+${data.diff.added}`), h("b.minus", `−${data.diff.removed}`)) : null,
    data.seconds > 0.05 ? h("span.muted", seconds(data.seconds)) : null,
  ];
  const gist = data.headline || (malformed ? firstLine(data.raw ?? "", 120) : "");
  const open = malformed || Boolean(data.error) || Boolean(data.diff) || (isNumber(code) && code !== 0);
  return foldable([h("span.tool", data.name || "?"), h("code.gist", gist), h("span.badges", badges)],
    () => callBody(data, malformed), {class: `call${malformed ? " malformed" : data.error ? " failed" : ""}`, open});
}

function callBody(data, malformed) {
  const given = data.arguments ?? [];
  const redundant = given.length === 1 && given[0][1] === data.headline; // already in the heading
  return [
    malformed ? [h("p.problem", data.problem || "It could not be parsed."), h("pre.code.raw", data.raw)] : null,
    data.diff ? diff(data.diff) : given.length && !redundant ? args(given) : null,
    data.output === undefined ? null : output(data.output),
    data.diff ? foldable("Arguments", () => args(given), {class: "aside"}) : null,
  ];
}

function output(content) {
  const lines = content.split("\n");
  if (lines.length <= SHORT + 4) return h("pre.code.output", content);
  const shown = h("pre.code.output", lines.slice(0, SHORT).join("\n"));
  const more = h("button.more", {type: "button", on: {click: () => {
    shown.textContent = content;
    more.remove();
  }}}, plural(lines.length - SHORT, "more line"));
  return h("div", shown, more);
}

function args(pairs) {
  return h("dl.args", pairs.map(([name, value]) => [h("dt", name), h("dd", h("pre.code", value))]));
}

function diff(data) {
  const row = ([mark, line]) => {
    if (mark === "@") return line ? h("div.where", line) : null;
    const kind = {"+": "plus", "-": "minus"}[mark] ?? "same";
    const prefix = {"+": "added: ", "-": "removed: "}[mark];
    return h("div", {class: kind}, h("span.mark", {"aria-hidden": "true"}, mark === "-" ? "−" : mark),
      prefix ? h("span.unseen", prefix) : null, h("span", line));
  };
  const unsure = data.known ? null : h("span.muted", " (surrounding lines are not known)");
  return h("figure.diff", h("figcaption", data.path, unsure), h("div.code", data.lines.map(row)));
}

// ------------------------------------------------------------------------------------------- navigation

export function goTurn(node) {
  node?.scrollIntoView({block: "start", behavior: "instant"});
  node?.focus({preventScroll: true});
}

export function moveTurn(turns, by) {
  const all = [...turns.querySelectorAll(".turn[id]")];
  const at = all.indexOf(document.activeElement?.closest?.(".turn[id]"));
  const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by;
  goTurn(all[Math.max(0, Math.min(all.length - 1, next))]);
}
