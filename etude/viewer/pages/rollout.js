// One session: what it was paid and why, when it did what, and which rollouts it stands beside. The turns: turns.js.

import {ask, has} from "./data.js";
import {
  ending, fixed, fold, h, isNumber, MISSING, percent, plural, put, seconds, short, signed, whole, words,
} from "./dom.js";
import {leaning, rolloutLink, setName} from "./lists.js";
import {tokensView} from "./tokens.js";
import {conversation, firstLine, goTurn, moveTurn, strip} from "./turns.js";

export async function rolloutPage(parts, query) {
  const [set, group] = parts;
  const address = parts.join("/");
  const told = await ask(`rollout/${address}`, {remember: true});
  const turns = h("div.turns", conversation(told));
  const tokens = h("div", {hidden: true});
  const views = tabs(turns, tokens, () => tokensView(`tokens/${address}`, told));
  if (query.get("view") === "tokens") views.toggle();
  const title = `Rollout ${told.number + 1} of group ${group}`;
  const [back, forth] = neighbours(told);
  const up = has(`group/${set}/${group}`) ? `#/group/${set}/${group}` : "#/rollouts";
  const go = (where) => where && (location.hash = where);
  return {
    title: `${title}, ${told.task}`,
    nodes: [
      crumbs([["#/groups", "Groups"], [has(`group/${set}/${group}`) ? up : null, `Group ${group}`]], title),
      headline(told, title, back, forth),
      h("article.rollout", h("div.side", paid(told), timeline(told.story), index(told.story)),
        h("div.body", views.node, turns, tokens)),
    ],
    keys: {
      j: ["next turn", () => moveTurn(turns, 1)],
      k: ["previous turn", () => moveTurn(turns, -1)],
      n: ["next rollout of the group", () => go(forth)],
      p: ["previous rollout of the group", () => go(back)],
      t: ["conversation or tokens", views.toggle],
      o: ["unfold or fold everything", () => unfoldAll(turns)],
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

// ------------------------------------------------------------------------------------------- the head

// The way here: [[address, words], ...] and what this is.
export function crumbs(way, here) {
  return h("nav.crumbs", {"aria-label": "Where this is"}, h("ol", h("li", h("a", {href: "#/"}, "Run")),
    way.map(([where, text]) => h("li", where ? h("a", {href: where}, text) : text)),
    h("li", {"aria-current": "page"}, here)));
}

export function taskTitle(name) {
  const where = `#/task/${name.split("/").map(encodeURIComponent).join("/")}`;
  return h("h1", has(`task/${name}`) ? h("a", {href: where}, name) : name);
}

function headline(told, title, back, forth) {
  const solved = told.reward?.solved;
  const page = (where, text) => (where ? h("a", {href: where}, text) : h("span.muted", text));
  return h("div.headline",
    h("div", taskTitle(told.task), h("p.lead", told.instruction ? firstLine(told.instruction) : title)),
    h("div.verdicts",
      solved === true ? h("span.tag.good", "solved") : solved === false ? h("span.tag.bad", "not solved") : null,
      told.counts ? null : h("span.tag.odd", "sampled again: nobody learned from it"),
      told.reward?.hack ? h("span.tag.bad", told.reward.hack) : null,
      h("span.tag", {class: told.story.ending === "final" ? null : "odd"}, ending(told.story.ending)),
      h("span.tag", `${setName(told.set)}${isNumber(told.step) ? `, step ${told.step}` : ""}`),
      h("span.pager", page(back, "← previous"), page(forth, "next →"))));
}

function neighbours(told) {
  const rows = told.siblings.map(([number, attempt]) => ({set: told.set, group: told.group, number, attempt}));
  const at = rows.findIndex((row) => row.number === told.number);
  return [rows[at - 1], rows[at + 1]].map((row) => (row && at >= 0 ? rolloutLink(row) : null));
}

function tabs(turns, tokens, make) {
  let made = false;
  const choose = (asTokens) => {
    if (asTokens && !made) {
      made = true;
      put(tokens, make());
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

// ------------------------------------------------------------------------------------------- what it was paid

function paid(told) {
  const {reward} = told;
  if (!reward) return h("section.card", h("h2", "Reward"), h("p.muted", "It has none."), costs(told));
  const parts = Object.entries(reward.parts ?? {});
  const most = Math.max(0.01, ...parts.map(([, value]) => Math.abs(value)));
  const value = (number, label) => h("div.figure", h("div.value", number), h("div.label", label));
  return h("section.card", h("h2", "Reward"),
    h("div.paid", value(fixed(reward.total), "reward"),
      isNumber(told.advantage) ? value(signed(told.advantage), "advantage") : null),
    parts.length ? h("table.parts", h("caption.unseen", "Parts of the reward"), h("tbody", parts.map(([name, part]) =>
      h("tr", h("th", {scope: "row"}, words(name)), h("td", leaning(part, most)))))) : null,
    siblings(told),
    evidence(Object.entries(reward.evidence ?? {})),
    costs(told));
}

function evidence(seen) {
  if (!seen.length) return null;
  const told = (value) => (typeof value === "number" ? short(value) :
    typeof value === "string" ? value : JSON.stringify(value));
  const entry = ([name, value]) => h("div", h("span.muted", `${words(name)} `), told(value));
  const row = ([name, what]) => h("tr", {class: what?.value ? null : "muted"}, h("th", {scope: "row"}, words(name)),
    h("td", Object.entries(what ?? {}).map(entry)));
  return fold("Evidence", () => h("table.evidence", h("caption.unseen", "Evidence"), h("tbody", seen.map(row))));
}

function siblings(told) {
  if (told.siblings.length < 2) return null;
  return h("div.siblings", {role: "group", "aria-label": "The rollouts of this group"},
    told.siblings.map(([number, attempt, total, solved]) => {
      const where = rolloutLink({set: told.set, group: told.group, number, attempt});
      const here = number === told.number;
      const text = `rollout ${number + 1}: reward ${fixed(total)}${solved ? ", solved" : ""}`;
      const given = {class: `${solved ? "yes" : "no"}${here ? " here" : ""}`, title: text, "aria-label": text,
        "aria-current": here ? "true" : null};
      return where ? h("a", {href: where, ...given}, fixed(total, 1)) : h("span", given, fixed(total, 1));
    }));
}

function costs(told) {
  const {cost, versions, model, dialect} = told.story;
  const kinds = ["thinking", "call", "commentary", "final", "summary"].filter((kind) => cost[kind] > 0);
  const each = kinds.length > 1 ? ` (${kinds.map((kind) => `${kind} ${whole(cost[kind])}`).join(", ")})` : "";
  const cached = cost.cached ? `, ${percent(cost.cached / cost.prompt)} from the cache` : "";
  const [oldest, newest] = versions;
  const rows = [
    ["turns", whole(cost.turns)],
    ["calls", whole(cost.calls)],
    ["tokens made", `${whole(cost.made)}${each}`],
    cost.output ? ["tokens of tools", whole(cost.output)] : null,
    ["tokens read", `${whole(cost.prompt)}${cached}`],
    ["time", `${seconds(cost.wall_s)}: model ${seconds(cost.model_s)}, pod ${seconds(cost.pod_s)}`],
    ["weights", oldest < 0 ? MISSING : `version ${oldest === newest ? oldest : `${oldest} to ${newest}`}`],
    ["model", `${model}, ${dialect}`],
  ];
  return h("dl.costs", rows.filter(Boolean).map(([name, value]) => [h("dt", name), h("dd", value)]));
}

// ------------------------------------------------------------------------------------------- when it did what

function timeline(story) {
  const turns = story.steps.filter((step) => step.kind === "turn" || step.kind === "summary");
  if (!turns.length) return null;
  const end = Math.max(...turns.map((step) => step.time));
  // A session that took no time worth telling is drawn turn by turn, each as long as the others.
  const timed = end > 0.001;
  const length = timed ? end : turns.length;
  const place = (start, size) => ({left: `${(100 * start) / length}%`, width: `max(2px, ${(100 * size) / length}%)`});
  let at = 0;
  const pieces = turns.flatMap((step, index) => {
    const [model, tools] = timed ? [step.model_s, step.tools_s] : [1, 0];
    const from = timed ? Math.max(at, step.time - model - tools) : index;
    at = from + model + tools;
    const name = step.kind === "summary" ? "summary" : `turn ${step.turn}`;
    return [
      h("i", {class: step.kind === "summary" ? "sums" : "model", css: place(from, model),
        title: `${name}: model ${seconds(model)}`}),
      tools > 0 ? h("i.tools", {css: place(from + model, tools), title: `${name}: tools ${seconds(tools)}`}) : null,
    ];
  });
  return h("section.card", h("h2", "Timeline"),
    h("div.timeline", {role: "img", "aria-label": `${plural(turns.length, "turn")} in ${seconds(end)}`}, pieces),
    h("div.ends", h("span", "0 s"), h("span.keys", h("i.model"), "model", h("i.tools"), "tools"),
      h("span", timed ? seconds(end) : "")));
}

function index(story) {
  const marks = Map.groupBy(story.strip, (mark) => mark.turn);
  const turns = story.steps.filter((step) => step.kind === "turn");
  const gist = (step) => {
    const call = step.calls?.[0];
    return call ? `${call.name} ${call.headline}` : firstLine(step.text || step.thinking || "", 60);
  };
  return h("nav.card.index", {"aria-label": "Turns"}, h("h2", "Turns"), h("ol", turns.map((step) => h("li",
    h("button", {type: "button", on: {click: () => goTurn(document.getElementById(`turn-${step.turn}`))}},
      h("span.n", step.turn), strip(marks.get(step.turn) ?? []), h("span.says", gist(step)))))));
}
