// The three long lists of a run: its rollouts, the groups they belong to, and its tasks.

import {about, fetchData, isAvailable} from "./data.js";
import {
  ending, fixed, h, humanize, integer, isNumber, MISSING, percent, plural, seconds, setChildren, signed,
} from "./dom.js";
import {filters, inRange, list} from "./list.js";
import {spark} from "./charts.js";

// ------------------------------------------------------------------------------------------- data

export async function rollouts() {
  const data = await fetchData("rollouts");
  const {count, columns} = data.rollouts;
  const names = Object.keys(columns);
  const get = Object.fromEntries(names.map((name) => {
    const column = columns[name];
    return [name, Array.isArray(column) ? (at) => column[at] : (at) => column.words[column.at[at]]];
  }));
  const rows = Array.from({length: count}, (_, at) => {
    const row = {};
    for (const name of names) row[name] = get[name](at);
    row.text = `${row.task} ${row.category} ${row.ending} ${row.errors} group ${row.group}${row.hack ? " hack" : ""}`
      .toLowerCase();
    return row;
  });
  const groups = data.groups.map(([set, id, task, step, size, ready, failures, dropped]) => (
    {set, id, task, step, size, ready, failures, dropped: dropped ?? "", rows: []}));
  const byId = new Map(groups.map((group) => [`${group.set}/${group.id}`, group]));
  for (const row of rows) byId.get(`${row.set}/${row.group}`)?.rows.push(row);
  return {rows, groups, problems: data.problems};
}

export function rolloutLink(row) {
  const address = `rollout/${row.set}/${row.group}/${row.number}/${row.attempt}`;
  return isAvailable(address) ? `#/${address}` : null;
}

export function setName(set) {
  return set === "evaluation" ? "held-out" : set;
}

// ------------------------------------------------------------------------------------------- small parts

export function solvedMark(solved) {
  if (solved === null || solved === undefined) return h("span.muted", MISSING);
  return h("span.verdict", {class: solved ? "yes" : "no"},
    h("span", {"aria-hidden": "true"}, solved ? "●" : "○"), h("span.unseen", solved ? "solved" : "not solved"));
}

// A signed value as a bar from the middle; `most` is the largest magnitude.
export function signedBar(value, most = 1) {
  if (!isNumber(value)) return h("span.muted", MISSING);
  const share = Math.min(1, Math.abs(value) / (most || 1)) * 50;
  const position = {width: `${share}%`, left: `${value >= 0 ? 50 : 50 - share}%`};
  return h("span.leaning", h("span.value", signed(value)),
    h("span.track", {"aria-hidden": "true"}, h("span.bar", {class: value >= 0 ? "up" : "down", css: position})));
}

export function dots(rows, size) {
  const marks = Array.from({length: size}, (_, at) => rows.find((row) => row.number === at));
  const solved = rows.filter((row) => row.solved).length;
  return h("span.dots", {title: `${solved} of ${rows.length} solved`, role: "img",
    "aria-label": `${solved} of ${rows.length} solved`}, marks.slice(0, 32).map((row) =>
    h("i", {class: !row ? "open" : row.solved ? "yes" : "no"})));
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const totals = (group) => group.rows.map((row) => row.total).filter(isNumber);
const choices = (values) => [...new Set(values)].filter(Boolean).sort().map((value) => [value, value]);
const SETS = [["training", "training"], ["evaluation", "held-out"]];
const SOLVED = [["yes", "solved"], ["no", "not solved"]];

function remember(page, values, sort) {
  const query = new URLSearchParams({...values, ...(sort ? {sort} : {})}).toString();
  history.replaceState(null, "", `#/${page}${query ? `?${query}` : ""}`);
}

// A list as a page: filters, a count, and the table.
function listPage({page, title, counted, fields, columns, link, sorted, test, query, load}) {
  const {sort = sorted, ...values} = Object.fromEntries(query);
  let now = values;
  let order = sort;
  const count = h("p.count", {"aria-live": "off"});
  const table = list({label: title, columns, link, sorted: sort, changed: (key) => {
    order = key;
    remember(page, now, order === sorted ? "" : order);
  }});
  let all = [];
  let search = null;
  const holder = h("div");
  const wanted = () => (Object.keys(now).length ? test(now) : null);
  const showCount = (shown) => {
    const of = Object.keys(now).length ? ` of ${integer(all.length)}` : "";
    setChildren(count, `${integer(shown)}${of} ${counted[all.length === 1 ? 0 : 1]}`);
  };
  const listener = (changed) => {
    now = {...changed};
    remember(page, now, order === sorted ? "" : order);
    showCount(table.filter(wanted()));
  };
  const update = async () => {
    all = await load();
    if (!holder.contains(document.activeElement)) { // otherwise the user is editing a filter
      search = filters(fields(all), now, listener);
      setChildren(holder, search.node);
    }
    showCount(table.set(all, wanted()));
  };
  return {
    title,
    nodes: [h("div.listbar", h("h1", title), count, holder, about && link === rolloutLink ? h("p.muted", about) : null),
      table.node],
    update,
    keys: {
      j: ["next row", () => table.move(1)],
      k: ["previous row", () => table.move(-1)],
      Enter: ["open the row", () => table.open()],
      "/": ["filter", () => search?.focus()],
    },
    escape: () => search?.clear(),
    live: "rollouts",
    full: true,
  };
}

// ------------------------------------------------------------------------------------------- rollouts

export async function rolloutsPage(_, query) {
  const most = {advantage: 1};
  const columns = [
    {key: "task", name: "Task", cell: (row) => row.task, sort: (row) => row.task},
    {key: "group", name: "Rollout", width: "68px", class: "muted", cell: (row) => `${row.group}.${row.number + 1}`,
      sort: (row) => row.group * 1000 + row.number, hint: "group and number"},
    {key: "set", name: "Set", width: "76px", class: "muted", cell: (row) => setName(row.set), sort: (row) => row.set},
    {key: "step", name: "Step", width: "54px", end: true, cell: (row) => row.step ?? MISSING, sort: (row) => row.step,
      hint: "step that trained on it, or at which it was evaluated"},
    {key: "category", name: "Category", width: "98px", cell: (row) => row.category || MISSING,
      sort: (row) => row.category},
    {key: "solved", name: "Solved", width: "64px", cell: (row) => solvedMark(row.solved),
      sort: (row) => (row.solved === null ? null : Number(row.solved))},
    {key: "total", name: "Reward", width: "70px", end: true, cell: (row) => fixed(row.total), sort: (row) => row.total},
    {key: "advantage", name: "Advantage", width: "142px", cell: (row) => signedBar(row.advantage, most.advantage),
      sort: (row) => row.advantage, hint: "reward minus the mean of its group"},
    {key: "turns", name: "Turns", width: "58px", end: true, cell: (row) => integer(row.turns),
      sort: (row) => row.turns},
    {key: "made", name: "Tokens", width: "70px", end: true, cell: (row) => integer(row.made), sort: (row) => row.made,
      hint: "sampled by the model"},
    {key: "seconds", name: "Time", width: "78px", end: true, cell: (row) => seconds(row.seconds),
      sort: (row) => row.seconds},
    {key: "ending", name: "Ending", width: "104px", sort: (row) => row.ending,
      cell: (row) => (row.ending === "final" ? h("span.muted", "final") :
        row.ending ? h("span.tag.odd", ending(row.ending)) : MISSING)},
    {key: "errors", name: "Errors", width: "134px", sort: errorCount,
      cell: (row) => (row.hack ? h("span.tag.bad", "hack") : row.errors ? h("span.bad", humanize(row.errors)) : "")},
  ];
  const load = async () => {
    const {rows} = await rollouts();
    most.advantage = rows.reduce((high, row) => Math.max(high, Math.abs(row.advantage ?? 0)), 0.01);
    return rows;
  };
  const fields = (rows) => [
    {key: "q", name: "Search", kind: "text", hint: "task, category, error …   ( / )"},
    {key: "solved", name: "Solved or not", kind: "choice", choices: SOLVED},
    {key: "set", name: "Any set", kind: "choice", choices: SETS},
    {key: "category", name: "Any category", kind: "choice", choices: choices(rows.map((row) => row.category))},
    {key: "ending", name: "Any ending", kind: "choice",
      choices: choices(rows.map((row) => row.ending)).map(([key]) => [key, ending(key)])},
    {key: "errors", name: "With or without errors", kind: "choice", choices: [["some", "some error"],
      ["none", "no errors"], ["hack", "hacks"],
      ...choices(rows.flatMap((row) => row.errors.split(", ").map((each) => each.split(" ")[0])))]},
    {key: "step", name: "Step", kind: "range", hint: "step, 3-8"},
  ];
  return listPage({page: "rollouts", title: "Rollouts", counted: ["rollout", "rollouts"], sorted: "",
    fields, columns, link: rolloutLink, test: rolloutTest, query, load});
}

function errorCount(row) {
  return row.errors ? row.errors.split(", ").reduce((sum, each) => sum + Number(each.split(" ").at(-1)), 0) : 0;
}

export function rolloutTest({q, solved, set, category, ending, errors, step}) {
  const terms = (q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const range = step ? inRange(step) : null;
  return (row) =>
    terms.every((term) => row.text.includes(term)) &&
    (!solved || row.solved === (solved === "yes")) &&
    (!set || row.set === set) &&
    (!category || row.category === category) &&
    (!ending || row.ending === ending) &&
    (!range || range(row.step)) &&
    (!errors || (errors === "some" ? row.errors !== "" : errors === "none" ? row.errors === "" :
      errors === "hack" ? row.hack : row.errors.includes(errors)));
}

// ------------------------------------------------------------------------------------------- groups

export async function groupsPage(_, query) {
  const columns = [
    {key: "task", name: "Task", cell: (group) => group.task, sort: (group) => group.task},
    {key: "id", name: "Group", width: "80px", class: "muted", cell: (group) => group.id, sort: (group) => group.id},
    {key: "set", name: "Set", width: "100px", class: "muted", cell: (group) => setName(group.set),
      sort: (group) => group.set},
    {key: "step", name: "Step", width: "72px", end: true, cell: (group) => group.step ?? MISSING,
      sort: (group) => group.step},
    {key: "category", name: "Category", width: "130px", cell: (group) => categoryOf(group) || MISSING,
      sort: categoryOf},
    {key: "solved", name: "Solved", width: "210px", cell: (group) => dots(group.rows, group.size), sort: solveRate},
    {key: "mean", name: "Mean reward", width: "124px", end: true, cell: (group) => fixed(mean(totals(group))),
      sort: (group) => mean(totals(group))},
    {key: "best", name: "Best", width: "80px", end: true, cell: (group) => fixed(best(group)), sort: best},
    {key: "spread", name: "Spread", width: "90px", end: true, cell: (group) => fixed(spread(group)), sort: spread,
      hint: "best minus worst; 0: nothing to train on"},
    {key: "state", name: "State", width: "110px", cell: stateOf, sort: (group) => group.ready / group.size},
    {key: "failures", name: "Retried", width: "90px", end: true, cell: (group) => group.failures || "",
      sort: (group) => group.failures, hint: "infrastructure failures"},
  ];
  const fields = (groups) => [
    {key: "q", name: "Search", kind: "text", hint: "task, category …   ( / )"},
    {key: "set", name: "Any set", kind: "choice", choices: SETS},
    {key: "category", name: "Any category", kind: "choice", choices: choices(groups.map(categoryOf))},
    {key: "kind", name: "Any outcome", kind: "choice", choices: [["all", "all solved"], ["some", "some solved"],
      ["none", "none solved"], ["alike", "equal rewards"], ["open", "running"], ["dropped", "given up"]]},
    {key: "step", name: "Step", kind: "range", hint: "step, 3-8"},
  ];
  const counted = ["group, one prompt", "groups, one prompt each"];
  return listPage({page: "groups", title: "Groups", counted, sorted: "", fields,
    columns, link: groupLink, test: groupTest, query, load: async () => (await rollouts()).groups});
}

export function groupLink(group) {
  const address = `group/${group.set}/${group.id}`;
  return isAvailable(address) ? `#/${address}` : null;
}

const categoryOf = (group) => group.rows[0]?.category ?? "";
const solveRate = (group) => mean(group.rows.map((row) => Number(row.solved)));
const best = (group) => (totals(group).length ? Math.max(...totals(group)) : null);
const spread = (group) => (totals(group).length ? best(group) - Math.min(...totals(group)) : null);

function stateOf(group) {
  if (group.dropped) return h("span.tag.bad", {title: group.dropped}, "given up");
  if (group.ready < group.size) return h("span.tag.going", `${group.ready} of ${group.size}`);
  return h("span.muted", group.set === "evaluation" ? "evaluated" : group.step === null ? "ready" : "trained");
}

function groupTest({q, set, category, kind, step}) {
  const terms = (q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const range = step ? inRange(step) : null;
  const kinds = {
    all: (group) => group.rows.length > 0 && group.rows.every((row) => row.solved),
    some: (group) => group.rows.some((row) => row.solved) && !group.rows.every((row) => row.solved),
    none: (group) => group.rows.length > 0 && !group.rows.some((row) => row.solved),
    alike: (group) => group.rows.length > 0 && spread(group) === 0,
    open: (group) => group.ready < group.size && !group.dropped,
    dropped: (group) => group.dropped !== "",
  };
  return (group) => {
    const text = `${group.task} ${categoryOf(group)}`.toLowerCase();
    return terms.every((term) => text.includes(term)) && (!set || group.set === set) &&
      (!category || categoryOf(group) === category) && (!kind || kinds[kind]?.(group)) &&
      (!range || range(group.step));
  };
}

// ------------------------------------------------------------------------------------------- tasks

function taskLink({name}) {
  return isAvailable(`task/${name}`) ? `#/task/${name.split("/").map(encodeURIComponent).join("/")}` : null;
}

export async function tasksPage(_, query) {
  const rate = (tried) => (tried.ready && isNumber(tried.solved) ? tried.solved / tried.ready : null);
  const rates = (task) => task.groups.map(rate).filter(isNumber);
  const columns = [
    {key: "name", name: "Task", cell: (task) => task.name, sort: (task) => task.name},
    {key: "split", name: "Set", width: "120px", class: "muted", cell: (task) => task.split || MISSING,
      sort: (task) => task.split},
    {key: "category", name: "Category", width: "150px", cell: (task) => task.category || MISSING,
      sort: (task) => task.category},
    {key: "tries", name: "Groups", width: "110px", end: true, sort: (task) => task.groups.length,
      cell: (task) => (task.groups.length ? plural(task.groups.length, "group") : MISSING)},
    {key: "first", name: "First", width: "100px", end: true, cell: (task) => percent(rates(task)[0]),
      sort: (task) => rates(task)[0]},
    {key: "last", name: "Last", width: "100px", end: true, cell: (task) => percent(rates(task).at(-1)),
      sort: (task) => rates(task).at(-1)},
    {key: "rise", name: "Solve rate", hint: "over time; sorted by its increase",
      cell: (task) => (rates(task).length > 1 ? spark(rates(task), {label: "solve rate over time"}) : ""),
      sort: (task) => (rates(task).length > 1 ? rates(task).at(-1) - rates(task)[0] : null)},
  ];
  const fields = (tasks) => [
    {key: "q", name: "Search", kind: "text", hint: "task, category …   ( / )"},
    {key: "split", name: "Any set", kind: "choice", choices: [["training", "training"], ["held-out", "held-out"]]},
    {key: "category", name: "Any category", kind: "choice", choices: choices(tasks.map((task) => task.category))},
    {key: "tried", name: "Run or not", kind: "choice", choices: [["yes", "run"], ["no", "not yet"]]},
  ];
  const test = ({q, split, category, tried}) => {
    const terms = (q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    return (task) => {
      const text = `${task.name} ${task.category}`.toLowerCase();
      return terms.every((term) => text.includes(term)) && (!split || task.split === split) &&
        (!category || task.category === category) && (!tried || (task.groups.length > 0) === (tried === "yes"));
    };
  };
  return listPage({page: "tasks", title: "Tasks", counted: ["task", "tasks"], sorted: "-tries",
    fields, columns, link: taskLink, test, query, load: async () => (await fetchData("tasks")).tasks});
}
