// Access to the run's data: from the server, or inlined in a report file. Only this module knows which.

import {announce} from "./dom.js";

const dataBlock = document.getElementById("data");
const inlinedData = dataBlock ? JSON.parse(dataBlock.textContent) : null;
const cache = new Map(); // answers that do not change while the page is open
const pending = new Map(); // requests in flight, shared by equal requests

export const mode = document.documentElement.dataset.mode; // run, run-of-many, runs, file
export const about = inlinedData ? inlinedData.about : null; // note about the contents of a report file

export async function fetchData(address, {remember = false} = {}) {
  if (inlinedData) {
    if (Object.hasOwn(inlinedData.answers, address)) return inlinedData.answers[address];
    throw new Error("This was left out of the file to keep it small. `etude view` shows everything.");
  }
  if (remember && cache.has(address)) return cache.get(address);
  if (!pending.has(address)) pending.set(address, request(address).finally(() => pending.delete(address)));
  const found = await pending.get(address);
  if (remember) cache.set(address, found);
  return found;
}

async function request(address) {
  const url = `api/${address.split("/").map(encodeURIComponent).join("/")}`;
  let answer;
  try {
    answer = await fetch(url, {headers: {accept: "application/json"}});
  } catch {
    throw new Error("The server does not answer. Is `etude view` still running?");
  }
  const found = await answer.json().catch(() => null);
  if (!answer.ok || found === null) throw new Error(found?.error ?? `The server answered ${answer.status}.`);
  return found;
}

// Whether an address can be fetched: a report file does not contain all of them.
export function isAvailable(address) {
  return !inlinedData || Object.hasOwn(inlinedData.answers, address);
}

// ------------------------------------------------------------------------------------------- live updates

const POLL_MS = 2000;
let last = null;
const listeners = new Set();

export function onUpdate(listener) {
  listeners.add(listener);
}

// Poll for changes every two seconds, less often if the run is not running or the server does not answer.
export function startPolling() {
  if (inlinedData || mode === "runs") return;
  let failures = 0;
  const poll = async () => {
    if (!document.hidden) {
      try {
        const now = await fetchData("changes");
        const changed = {
          metrics: Boolean(last) && String(now.metrics) !== String(last.metrics),
          rollouts: Boolean(last) && String(now.rollouts) !== String(last.rollouts),
        };
        if (last && now.status.state !== last.status.state) announce(`The run is ${now.status.state}.`);
        last = now;
        failures = 0;
        for (const listener of listeners) listener(now, changed);
      } catch {
        failures += 1;
        for (const listener of listeners) listener(null, {});
      }
    }
    const idle = last && last.status.state !== "running";
    setTimeout(poll, POLL_MS * (failures ? Math.min(8, 2 ** failures) : idle ? 4 : 1));
  };
  poll();
}
