// Where the pages get what they show: from the server, or from this very file. Nobody else here knows which.

import {say} from "./dom.js";

const inlined = document.getElementById("data");
const kept = inlined ? JSON.parse(inlined.textContent) : null;
const remembered = new Map(); // answers that do not change while one looks at them
const asked = new Map(); // questions that are under way: who asks the same meanwhile waits for the same answer

export const mode = document.documentElement.dataset.mode; // run, run-of-many, runs, file
export const about = kept ? kept.about : null; // what the file holds, and what it leaves out

export async function ask(address, {remember = false} = {}) {
  if (kept) {
    if (Object.hasOwn(kept.answers, address)) return kept.answers[address];
    throw new Error("This is not in the file; it was left out to keep the file small. `etude view` shows everything.");
  }
  if (remember && remembered.has(address)) return remembered.get(address);
  if (!asked.has(address)) asked.set(address, fetched(address).finally(() => asked.delete(address)));
  const found = await asked.get(address);
  if (remember) remembered.set(address, found);
  return found;
}

async function fetched(address) {
  const place = `api/${address.split("/").map(encodeURIComponent).join("/")}`;
  let answer;
  try {
    answer = await fetch(place, {headers: {accept: "application/json"}});
  } catch {
    throw new Error("The server does not answer. Is `etude view` still running?");
  }
  const found = await answer.json().catch(() => null);
  if (!answer.ok || found === null) throw new Error(found?.error ?? `The server said ${answer.status}.`);
  return found;
}

// Whether an answer can be had at all: a link to what is not in the file would be a dead end.
export function has(address) {
  return !kept || Object.hasOwn(kept.answers, address);
}

// ------------------------------------------------------------------------------------------- live

const POLL_MS = 2000;
let last = null;
const listeners = new Set();

export function listen(hear) {
  listeners.add(hear);
}

// Look every two seconds whether something has changed; stop when the run is over and nothing does.
export function watch() {
  if (kept || mode === "runs") return;
  let failures = 0;
  const look = async () => {
    if (!document.hidden) {
      try {
        const now = await ask("changes");
        const changed = {
          metrics: Boolean(last) && String(now.metrics) !== String(last.metrics),
          rollouts: Boolean(last) && String(now.rollouts) !== String(last.rollouts),
        };
        if (last && now.life.state !== last.life.state) say(`The run is ${now.life.state}.`);
        last = now;
        failures = 0;
        for (const hear of listeners) hear(now, changed);
      } catch {
        failures += 1;
        for (const hear of listeners) hear(null, {});
      }
    }
    const idle = last && last.life.state !== "running";
    setTimeout(look, POLL_MS * (failures ? Math.min(8, 2 ** failures) : idle ? 4 : 1));
  };
  look();
}
