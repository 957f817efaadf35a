// The frame around the pages: routes, keyboard shortcuts, light and dark theme, and live updates.

import {about, fetchData, onUpdate, mode, startPolling} from "./data.js";
import {h, setChildren, s, announce} from "./dom.js";
import {groupPage} from "./group.js";
import {groupsPage, rolloutsPage, tasksPage} from "./lists.js";
import {rolloutPage} from "./rollout.js";
import {runPage, runsPage} from "./run.js";
import {taskPage} from "./task.js";

const PAGES = {
  "": runPage, rollouts: rolloutsPage, groups: groupsPage, tasks: tasksPage,
  group: groupPage, rollout: rolloutPage, task: taskPage,
};
const NAV = [["", "Run", "r"], ["groups", "Groups", "g"], ["rollouts", "Rollouts", "l"], ["tasks", "Tasks", "t"]];
const main = document.getElementById("main");

let page = null; // the current page
let shown = 0; // counts navigations, so that a page that arrives too late is dropped
let name = "";

// ------------------------------------------------------------------------------------------- routes

function currentRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [what, ...parts] = path.split("/");
  return {what, parts, query: new URLSearchParams(query)};
}

async function show() {
  const ticket = ++shown;
  const {what, parts, query} = currentRoute();
  const make = mode === "runs" ? runsPage : Object.hasOwn(PAGES, what) ? PAGES[what] : null;
  main.setAttribute("aria-busy", "true");
  try {
    if (!make) throw new Error("No such page.");
    const next = await make(parts, query);
    if (ticket !== shown) return;
    page = next;
    document.body.classList.toggle("full", Boolean(next.full));
    setChildren(main, next.nodes);
    if (next.update && !next.ready) await next.update();
    if (ticket !== shown) return;
    document.title = [next.title, name, "etude"].filter(Boolean).join(" · ");
  } catch (error) {
    if (ticket !== shown) return;
    page = null;
    document.body.classList.remove("full");
    const back = h("p", h("a", {href: "#/"}, "Back to the run"));
    setChildren(main, h("div.hero", h("h1", "Not found"), h("p.lead", error.message), back));
  }
  main.removeAttribute("aria-busy");
  drawFrame(what);
  if (!query.toString() || what === "rollout") scrollTo(0, 0);
  const heading = main.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  if (ticket > 1) heading?.focus({preventScroll: true});
  announce(document.title);
}

// ------------------------------------------------------------------------------------------- frame

const statusPill = h("span.pill", {role: "status"});

function drawFrame(what) {
  const owner = {group: "groups", rollout: "rollouts", task: "tasks"}[what] ?? what;
  const known = mode === "runs" ? [] : NAV.filter(([key]) => key === "" || hasLearning);
  const links = known.map(([key, text]) =>
    h("a", {href: `#/${key}`, "aria-current": key === owner ? "page" : null}, text));
  const tool = (sign, title, act) => h("button", {type: "button", title, "aria-label": title, on: {click: act}}, sign);
  const home = mode === "run-of-many" ? {href: "/", title: "all runs"} : {href: "#/", title: "etude"};
  setChildren(document.getElementById("top"), h("a.brand", home, logo(), "etude"), name ? h("span.name", name) : null,
    h("nav", {"aria-label": "Pages"}, links),
    h("div.tools", mode === "runs" ? null : statusPill, tool("◐", "light or dark theme (d)", toggleTheme),
      tool("?", "keyboard shortcuts (?)", help)));
}

function logo() {
  return s("svg", {viewBox: "0 0 32 32", width: 20, height: 20, "aria-hidden": "true"},
    s("path", {d: "M3 24c5 0 6-4 9-9s5-8 8-4 4 8 9-6"}));
}

let hasLearning = true;

function showStatus(status, connected = true) {
  const labels = {running: mode === "file" ? "was running" : "live", finished: "finished", stopped: "stopped"};
  statusPill.className = `pill ${connected ? status.state : "lost"}`;
  statusPill.title = connected ? status.text : "the server does not answer";
  setChildren(statusPill, h("i", {"aria-hidden": "true"}), connected ? labels[status.state] : "no connection");
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("etude-theme", root.dataset.theme);
  } catch {
    // no local storage: the choice lasts as long as the page
  }
}

// ------------------------------------------------------------------------------------------- keys

function help() {
  document.querySelector("dialog")?.remove();
  const rows = [
    ...Object.entries(page?.keys ?? {}).map(([key, [text]]) => [key, text]),
    ...NAV.map(([, text, key]) => [`g ${key}`, `go to ${text.toLowerCase()}`]),
    ["Esc", "clear the filter, or go up"], ["d", "light or dark theme"], ["?", "this list"],
  ];
  const box = h("dialog", {"aria-labelledby": "keys"}, h("h2", {id: "keys"}, "Keys"),
    h("dl.keys", rows.map(([key, text]) => [h("dt", key.split(" ").map((each) => h("kbd", each))), h("dd", text)])),
    h("p.muted", "In a chart: arrow keys from point to point, Enter opens."),
    h("form", {method: "dialog"}, h("button", {type: "submit"}, "Close")));
  document.body.append(box);
  box.addEventListener("close", () => box.remove());
  box.addEventListener("click", (event) => event.target === box && box.close());
  box.showModal();
}

let prefix = 0; // time at which g was pressed

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape") {
    if (typing) typing.blur();
    if (page?.escape?.() !== undefined) event.preventDefault();
    return;
  }
  if (typing) {
    if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      page?.keys?.j?.[1]();
    }
    return;
  }
  if (Date.now() - prefix < 1500) {
    const target = NAV.find(([, , key]) => key === event.key);
    prefix = 0;
    if (target) {
      event.preventDefault();
      location.hash = `#/${target[0]}`;
      return;
    }
  }
  const pageKey = page?.keys?.[event.key];
  const interactive = event.target.closest?.("a, button, summary, svg");
  if (pageKey && !(event.key === "Enter" && interactive)) {
    event.preventDefault();
    pageKey[1]();
  } else if (event.key === "g") {
    prefix = Date.now();
  } else if (event.key === "?") {
    event.preventDefault();
    help();
  } else if (event.key === "d") {
    toggleTheme();
  }
}

// ------------------------------------------------------------------------------------------- start

// Load what the frame shows of the run, whichever page is in it.
async function loadRunName() {
  if (mode === "runs") return;
  try {
    const run = await fetchData("run");
    name = run.name;
    hasLearning = Boolean(run.rl);
    showStatus(run.status);
    drawFrame(currentRoute().what);
    document.title = [page?.title, name, "etude"].filter(Boolean).join(" · ");
  } catch {
    // the page itself shows the error
  }
}

async function start() {
  try {
    const chosen = localStorage.getItem("etude-theme");
    if (chosen) document.documentElement.dataset.theme = chosen;
  } catch {
    // no local storage
  }
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", show);
  const foot = about ? `Report written by etude. ${about}` : "Read only: nothing here changes the run.";
  setChildren(document.getElementById("foot"), h("p", foot));
  await Promise.all([loadRunName(), show()]);
  let stale = {metrics: false, rollouts: false};
  onUpdate(async (now, changed) => {
    showStatus(now?.status ?? {state: "stopped", text: ""}, Boolean(now));
    stale = {metrics: stale.metrics || changed.metrics, rollouts: stale.rollouts || changed.rollouts};
    if (page?.live && stale[page.live] && !page.busy?.()) {
      stale = {metrics: false, rollouts: false};
      const ticket = shown;
      await page.update().catch((error) => ticket === shown && announce(error.message));
    }
  });
  startPolling();
}

start();
