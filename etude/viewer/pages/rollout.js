// The page of a rollout: reward and its evidence, timeline, siblings, and the turns (turns.js).

import {fetchData, isAvailable} from "./data.js";
import {
  ending, fixed, foldable, h, humanize, integer, isNumber, MISSING, percent, plural, seconds, setChildren, short,
  signed,
} from "./dom.js";
import {signedBar, rolloutLink, setName} from "./lists.js";
import {tokensView} from "./tokens.js";
import {conversation, firstLine, goTurn, moveTurn, strip} from "./turns.js";

export async function rolloutPage(parts, query) {
  const [set, group] = parts;
  const address = parts.join("/");
  const data = await fetchData(`rollout/${address}`, {remember: true});
  const turns = h("div.turns", conversation(data));
  const tokens = h("div", {hidden: true});
  const views = tabs(turns, tokens, () => tokensView(`tokens/${address}`, data));
  if (query.get("view") === "tokens") views.toggle();
  const title = `Rollout ${data.number + 1} of group ${group}`;
  const [previous, next] = neighbours(data);
  const up = isAvailable(`group/${set}/${group}`) ? `#/group/${set}/${group}` : "#/rollouts";
  const go = (where) => where && (location.hash = where);
  return {
    title: `${title}, ${data.task}`,
    nodes: [
      breadcrumbs([["#/groups", "Groups"], [up === "#/rollouts" ? null : up, `Group ${group}`]], title),
      headline(data, title, previous, next),
      h("article.rollout", h("div.side", rewardCard(data), timeline(data.session), turnIndex(data.session)),
        h("div.body", views.node, turns, tokens)),
    ],
    keys: {
      j: ["next turn", () => moveTurn(turns, 1)],
      k: ["previous turn", () => moveTurn(turns, -1)],
      n: ["next rollout of the group", () => go(next)],
      p: ["previous rollout of the group", () => go(previous)],
      t: ["conversation or tokens", views.toggle],
      o: ["expand or collapse everything", () => unfoldAll(turns)],
      u: ["up to the group", () => go(up)],
    },
    escape: () => go(up),
  };
}

function unfoldAll(turns) {
  const all = [...turns.querySelectorAll("details")];
  const open = all.some((node) => !node.open);
  for (const node of all) node.open = open;
}

// ------------------------------------------------------------------------------------------- head

// Breadcrumbs: [[address, text], ...] and the name of this page.
export function breadcrumbs(way, here) {
  return h("nav.crumbs", {"aria-label": "Breadcrumbs"}, h("ol", h("li", h("a", {href: "#/"}, "Run")),
    way.map(([where, text]) => h("li", where ? h("a", {href: where}, text) : text)),
    h("li", {"aria-current": "page"}, here)));
}

export function taskTitle(name) {
  const where = `#/task/${name.split("/").map(encodeURIComponent).join("/")}`;
  return h("h1", isAvailable(`task/${name}`) ? h("a", {href: where}, name) : name);
}

function headline(data, title, previous, next) {
  const solved = data.reward?.solved;
  const page = (where, text) => (where ? h("a", {href: where}, text) : h("span.muted", text));
  return h("div.headline",
    h("div", taskTitle(data.task), h("p.lead", data.instruction ? firstLine(data.instruction) : title)),
    h("div.verdicts",
      solved === true ? h("span.tag.good", "solved") : solved === false ? h("span.tag.bad", "not solved") : null,
      data.counts ? null : h("span.tag.odd", "sampled again: not trained on"),
      data.reward?.hack ? h("span.tag.bad", data.reward.hack) : null,
      h("span.tag", {class: data.session.ending === "final" ? null : "odd"}, ending(data.session.ending)),
      h("span.tag", `${setName(data.set)}${isNumber(data.step) ? `, step ${data.step}` : ""}`),
      h("span.pager", page(previous, "← previous"), page(next, "next →"))));
}

function neighbours(data) {
  const rows = data.siblings.map(([number, attempt]) => ({set: data.set, group: data.group, number, attempt}));
  const at = rows.findIndex((row) => row.number === data.number);
  return [rows[at - 1], rows[at + 1]].map((row) => (row && at >= 0 ? rolloutLink(row) : null));
}

function tabs(turns, tokens, make) {
  let drawn = false;
  const choose = (asTokens) => {
    if (asTokens && !drawn) {
      drawn = true;
      setChildren(tokens, make());
    }
    turns.hidden = asTokens;
    tokens.hidden = !asTokens;
    buttons.forEach((button, at) => button.setAttribute("aria-selected", String((at === 1) === asTokens)));
  };
  const buttons = ["Conversation", "Tokens"].map((name, at) => h("button", {type: "button", role: "tab",
    "aria-selected": String(at === 0), on: {click: () => choose(at === 1)}}, name));
  const node = h("div.tabs", {role: "tablist", "aria-label": "How to show the session"}, buttons);
  return {node, toggle: () => choose(tokens.hidden)};
}

// ------------------------------------------------------------------------------------------- reward

function rewardCard(data) {
  const {reward} = data;
  if (!reward) return h("section.card", h("h2", "Reward"), h("p.muted", "No reward."), costs(data));
  const parts = Object.entries(reward.parts ?? {});
  const most = Math.max(0.01, ...parts.map(([, value]) => Math.abs(value)));
  const value = (number, label) => h("div.figure", h("div.value", number), h("div.label", label));
  return h("section.card", h("h2", "Reward"),
    h("div.paid", value(fixed(reward.total), "reward"),
      isNumber(data.advantage) ? value(signed(data.advantage), "advantage") : null),
    parts.length ? h("table.parts", h("caption.unseen", "Parts of the reward"), h("tbody", parts.map(([name, part]) =>
      h("tr", h("th", {scope: "row"}, humanize(name)), h("td", signedBar(part, most)))))) : null,
    siblings(data),
    evidence(Object.entries(reward.evidence ?? {})),
    costs(data));
}

function evidence(seen) {
  if (!seen.length) return null;
  const data = (value) => (typeof value === "number" ? short(value) :
    typeof value === "string" ? value : JSON.stringify(value));
  const entry = ([name, value]) => h("div", h("span.muted", `${humanize(name)} `), data(value));
  const row = ([name, what]) => h("tr", {class: what?.value ? null : "muted"}, h("th", {scope: "row"}, humanize(name)),
    h("td", Object.entries(what ?? {}).map(entry)));
  return foldable("Evidence", () => h("table.evidence", h("caption.unseen", "Evidence"), h("tbody", seen.map(row))));
}

function siblings(data) {
  if (data.siblings.length < 2) return null;
  return h("div.siblings", {role: "group", "aria-label": "The rollouts of this group"},
    data.siblings.map(([number, attempt, total, solved]) => {
      const where = rolloutLink({set: data.set, group: data.group, number, attempt});
      const here = number === data.number;
      const text = `rollout ${number + 1}: reward ${fixed(total)}${solved ? ", solved" : ""}`;
      const given = {class: `${solved ? "yes" : "no"}${here ? " here" : ""}`, title: text, "aria-label": text,
        "aria-current": here ? "true" : null};
      return where ? h("a", {href: where, ...given}, fixed(total, 1)) : h("span", given, fixed(total, 1));
    }));
}

function costs(data) {
  const {cost, versions, model, dialect} = data.session;
  const kinds = ["thinking", "call", "commentary", "final", "summary"].filter((kind) => cost[kind] > 0);
  const each = kinds.length > 1 ? ` (${kinds.map((kind) => `${kind} ${integer(cost[kind])}`).join(", ")})` : "";
  const cached = cost.cached ? `, ${percent(cost.cached / cost.prompt)} from the cache` : "";
  const [oldest, newest] = versions;
  const rows = [
    ["turns", integer(cost.turns)],
    ["calls", integer(cost.calls)],
    ["sampled tokens", `${integer(cost.made)}${each}`],
    cost.output ? ["tool output tokens", integer(cost.output)] : null,
    ["prompt tokens", `${integer(cost.prompt)}${cached}`],
    ["time", `${seconds(cost.wall_s)}: model ${seconds(cost.model_s)}, pod ${seconds(cost.pod_s)}`],
    ["weights", oldest < 0 ? MISSING : `version ${oldest === newest ? oldest : `${oldest} to ${newest}`}`],
    ["model", `${model}, ${dialect}`],
  ];
  return h("dl.costs", rows.filter(Boolean).map(([name, value]) => [h("dt", name), h("dd", value)]));
}

// ------------------------------------------------------------------------------------------- timeline

function timeline(story) {
  const turns = story.steps.filter((step) => step.kind === "turn" || step.kind === "summary");
  if (!turns.length) return null;
  const end = Math.max(...turns.map((step) => step.time));
  // A session without times is drawn with turns of equal length.
  const timed = end > 0.001;
  const length = timed ? end : turns.length;
  const percentOf = (value) => `${(100 * value) / length}%`;
  const position = (start, size) => ({left: percentOf(start), width: `max(2px, ${percentOf(size)})`});
  let at = 0;
  const pieces = turns.flatMap((step, turnIndex) => {
    const [model, tools] = timed ? [step.model_s, step.tools_s] : [1, 0];
    const from = timed ? Math.max(at, step.time - model - tools) : turnIndex;
    at = from + model + tools;
    const name = step.kind === "summary" ? "summary" : `turn ${step.turn}`;
    return [
      h("i", {class: step.kind === "summary" ? "sums" : "model", css: position(from, model),
        title: `${name}: model ${seconds(model)}`}),
      tools > 0 ? h("i.tools", {css: position(from + model, tools), title: `${name}: tools ${seconds(tools)}`}) : null,
    ];
  });
  return h("section.card", h("h2", "Timeline"),
    h("div.timeline", {role: "img", "aria-label": `${plural(turns.length, "turn")} in ${seconds(end)}`}, pieces),
    h("div.ends", h("span", "0 s"), h("span.keys", h("i.model"), "model", h("i.tools"), "tools"),
      h("span", timed ? seconds(end) : "")));
}

function turnIndex(story) {
  const marks = Map.groupBy(story.strip, (mark) => mark.turn);
  const turns = story.steps.filter((step) => step.kind === "turn");
  const summaryOf = (step) => {
    const call = step.calls?.[0];
    return call ? `${call.name} ${call.headline}` : firstLine(step.text || step.thinking || "", 60);
  };
  return h("nav.card.index", {"aria-label": "Turns"}, h("h2", "Turns"), h("ol", turns.map((step) => h("li",
    h("button", {type: "button", on: {click: () => goTurn(document.getElementById(`turn-${step.turn}`))}},
      h("span.n", step.turn), strip(marks.get(step.turn) ?? []), h("span.says", summaryOf(step)))))));
}
