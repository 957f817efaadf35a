// One prompt and its rollouts side by side.

import {ask} from "./data.js";
import {ending, fixed, h, isNumber, MISSING, plural, put, seconds, whole} from "./dom.js";
import {leaning, rolloutLink, setName, solvedMark} from "./lists.js";
import {crumbs, taskTitle} from "./rollout.js";
import {firstLine, strip, stripKey} from "./turns.js";

export async function groupPage([set, id]) {
  const place = h("div");
  let told = null;
  const update = async () => {
    told = await ask(`group/${set}/${id}`);
    put(place, head(told), figures(told), cards(told), stripKey());
  };
  await update();
  const move = (by) => {
    const all = [...place.querySelectorAll(".cards h2 a")];
    const at = all.indexOf(document.activeElement);
    const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by;
    all[Math.max(0, Math.min(all.length - 1, next))]?.focus();
  };
  const up = () => (location.hash = "#/groups");
  return {
    title: `Group ${id}, ${told.task}`,
    nodes: [place],
    update,
    ready: true,
    live: told.slots.some((slot) => slot.reward === null) ? "rollouts" : null,
    keys: {
      j: ["next rollout", () => move(1)],
      k: ["previous rollout", () => move(-1)],
      u: ["up to the groups", up],
    },
    escape: up,
  };
}

function head(told) {
  return [
    crumbs([["#/groups", "Groups"]], `Group ${told.id}`),
    h("div.headline", h("div", taskTitle(told.task), h("p.lead", firstLine(told.instruction, 400))),
      h("div.verdicts", h("span.tag", setName(told.set)),
        isNumber(told.step) ? h("span.tag", `step ${told.step}`) : h("span.tag.going", "not trained yet"),
        told.dropped ? h("span.tag.bad", "given up") : null,
        told.failures ? h("span.tag.odd", `${plural(told.failures, "failure")} of the infrastructure`) : null)),
    told.dropped ? h("p.notice.warn", `This group was given up: ${told.dropped}`) : null,
  ];
}

function figures(told) {
  const rewards = told.slots.map((slot) => slot.reward?.total).filter(isNumber);
  const solved = told.slots.filter((slot) => slot.reward?.solved).length;
  const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const alike = rewards.length === told.slots.length && low === high;
  const figure = (value, label, note) =>
    h("div.figure", h("div.value", value), h("div.label", label), note ? h("div.note", note) : null);
  return h("div.figures",
    figure(`${solved} of ${told.slots.length}`, "solved"),
    figure(fixed(mean), "mean reward"),
    figure(rewards.length ? `${fixed(low)} to ${fixed(high)}` : MISSING, "rewards",
      alike ? "all alike: it teaches nothing" : ""));
}

function cards(told) {
  const most = Math.max(0.01, ...told.slots.map((slot) => Math.abs(slot.advantage ?? 0)));
  return h("ol.cards", told.slots.map((slot) => card(slot, told, most)));
}

function card(slot, told, most) {
  const {reward} = slot;
  const link = (attempt) => rolloutLink({set: told.set, group: told.id, number: slot.number, attempt});
  const where = reward ? link(slot.attempt) : null;
  const title = `Rollout ${slot.number + 1}`;
  const facts = reward ? [plural(reward.cost?.turns ?? 0, "turn"), `${whole(reward.made)} tokens`,
    seconds(reward.seconds?.session)] : [];
  const over = reward?.ending && reward.ending !== "final" ? `${ending(reward.ending)}: no final message` : "";
  return h("li.card", {class: reward ? (reward.solved ? "yes" : "no") : "open"},
    h("h2", where ? h("a", {href: where}, title) : title,
      reward ? solvedMark(reward.solved) : h("span.tag.going", slot.state)),
    reward ? h("div.score", h("span.big", fixed(reward.total)), h("span.muted", " reward")) : null,
    isNumber(slot.advantage) ?
      h("div.advantage", h("span.muted", "advantage"), leaning(slot.advantage, most)) : null,
    slot.strip ? strip(slot.strip) : null,
    facts.length ? h("p.facts", facts.join(" · ")) : null,
    reward?.hack ? h("p.bad", reward.hack) : null,
    slot.problem ? h("p.bad", slot.problem) : null,
    slot.final ? h("blockquote", slot.final) : reward ? h("p.odd", over || "No final message.") : null,
    slot.note ? h("p.muted", slot.note) : null,
    slot.others.filter(link).map((attempt) =>
      h("p", h("a", {href: link(attempt)}, `attempt ${attempt}, sampled again`))));
}
