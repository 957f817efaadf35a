// The page of a group: one prompt with its rollouts side by side.

import {fetchData} from "./data.js";
import {ending, fixed, h, isNumber, MISSING, plural, setChildren, seconds, integer} from "./dom.js";
import {signedBar, rolloutLink, setName, solvedMark} from "./lists.js";
import {breadcrumbs, taskTitle} from "./rollout.js";
import {firstLine, strip, stripKey} from "./turns.js";

export async function groupPage([set, id]) {
  const container = h("div");
  let data = null;
  const update = async () => {
    data = await fetchData(`group/${set}/${id}`);
    setChildren(container, head(data), figures(data), cards(data), stripKey());
  };
  await update();
  const move = (by) => {
    const all = [...container.querySelectorAll(".cards h2 a")];
    const at = all.indexOf(document.activeElement);
    const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by;
    all[Math.max(0, Math.min(all.length - 1, next))]?.focus();
  };
  const up = () => (location.hash = "#/groups");
  return {
    title: `Group ${id}, ${data.task}`,
    nodes: [container],
    update,
    ready: true,
    live: data.slots.some((slot) => slot.reward === null) ? "rollouts" : null,
    keys: {
      j: ["next rollout", () => move(1)],
      k: ["previous rollout", () => move(-1)],
      u: ["up to the groups", up],
    },
    escape: up,
  };
}

function head(data) {
  return [
    breadcrumbs([["#/groups", "Groups"]], `Group ${data.id}`),
    h("div.headline", h("div", taskTitle(data.task), h("p.lead", firstLine(data.instruction, 400))),
      h("div.verdicts", h("span.tag", setName(data.set)),
        isNumber(data.step) ? h("span.tag", `step ${data.step}`) : h("span.tag.going", "not trained yet"),
        data.dropped ? h("span.tag.bad", "given up") : null,
        data.failures ? h("span.tag.odd", plural(data.failures, "infrastructure failure")) : null)),
    data.dropped ? h("p.notice.warn", `This group was given up: ${data.dropped}`) : null,
  ];
}

function figures(data) {
  const rewards = data.slots.map((slot) => slot.reward?.total).filter(isNumber);
  const solved = data.slots.filter((slot) => slot.reward?.solved).length;
  const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const alike = rewards.length === data.slots.length && low === high;
  const figure = (value, label, note) =>
    h("div.figure", h("div.value", value), h("div.label", label), note ? h("div.note", note) : null);
  return h("div.figures",
    figure(`${solved} of ${data.slots.length}`, "solved"),
    figure(fixed(mean), "mean reward"),
    figure(rewards.length ? `${fixed(low)} to ${fixed(high)}` : MISSING, "rewards",
      alike ? "all equal: no training signal" : ""));
}

function cards(data) {
  const most = Math.max(0.01, ...data.slots.map((slot) => Math.abs(slot.advantage ?? 0)));
  return h("ol.cards", data.slots.map((slot) => card(slot, data, most)));
}

function card(slot, data, most) {
  const {reward} = slot;
  const link = (attempt) => rolloutLink({set: data.set, group: data.id, number: slot.number, attempt});
  const where = reward ? link(slot.attempt) : null;
  const title = `Rollout ${slot.number + 1}`;
  const facts = reward ? [plural(reward.cost?.turns ?? 0, "turn"), `${integer(reward.made)} tokens`,
    seconds(reward.seconds?.session)] : [];
  const over = reward?.ending && reward.ending !== "final" ? `${ending(reward.ending)}: no final message` : "";
  return h("li.card", {class: reward ? (reward.solved ? "yes" : "no") : "open"},
    h("h2", where ? h("a", {href: where}, title) : title,
      reward ? solvedMark(reward.solved) : h("span.tag.going", slot.state)),
    reward ? h("div.score", h("span.big", fixed(reward.total)), h("span.muted", " reward")) : null,
    isNumber(slot.advantage) ?
      h("div.advantage", h("span.muted", "advantage"), signedBar(slot.advantage, most)) : null,
    slot.strip ? strip(slot.strip) : null,
    facts.length ? h("p.facts", facts.join(" · ")) : null,
    reward?.hack ? h("p.bad", reward.hack) : null,
    slot.problem ? h("p.bad", slot.problem) : null,
    slot.final ? h("blockquote", slot.final) : reward ? h("p.odd", over || "No final message.") : null,
    slot.note ? h("p.muted", slot.note) : null,
    slot.others.filter(link).map((attempt) =>
      h("p", h("a", {href: link(attempt)}, `attempt ${attempt}, discarded and sampled again`))));
}
