// Builds DOM nodes. Nothing here, or anywhere else in these files, turns text into markup: text written by a model
// becomes text nodes and attributes.

const SVG = "http://www.w3.org/2000/svg";

// h("p.note", {hidden: true, on: {click}}, "text", node, [more]) -> an element. Nothing, null and false are left out.
export function h(name, ...parts) {
  return build(document.createElement(tagName(name)), name, parts);
}

export function s(name, ...parts) {
  return build(document.createElementNS(SVG, tagName(name)), name, parts);
}

function tagName(name) {
  return name.split(".")[0];
}

function build(node, name, parts) {
  const classes = name.split(".").slice(1);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  let rest = parts;
  const first = parts[0];
  if (first && typeof first === "object" && !(first instanceof Node) && !Array.isArray(first)) {
    setAttributes(node, first);
    rest = parts.slice(1);
  }
  appendAll(node, rest);
  return node;
}

function setAttributes(node, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") {
      for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    } else if (key === "class") {
      node.setAttribute("class", [node.getAttribute("class"), value].filter(Boolean).join(" "));
    } else if (key === "css") {
      for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
    } else {
      // refuses a run's JSON that was passed by mistake as attributes
      const ours = !/^on|^style$/i.test(key) && (key !== "href" || /^[#/]/.test(value));
      if (!ours) throw new Error(`not an attribute: ${key}`);
      node.setAttribute(key, value === true ? "" : String(value));
    }
  }
}

export function appendAll(node, parts) {
  for (const part of [parts].flat(Infinity)) {
    if (part === undefined || part === null || part === false || part === "") continue;
    node.append(part instanceof Node ? part : String(part));
  }
  return node;
}

export function setChildren(node, ...parts) {
  node.replaceChildren();
  return appendAll(node, parts);
}

// Announce a change to screen readers.
export function announce(text) {
  const node = document.getElementById("say");
  if (node) node.textContent = text;
}

// A collapsed section; its content is built when it is opened for the first time.
export function foldable(summary, content, options = {}) {
  const node = h("details", {class: options.class}, h("summary", summary));
  let made = false;
  const make = () => {
    if (!made && node.open) {
      made = true;
      appendAll(node, [content()]);
    }
  };
  node.addEventListener("toggle", make);
  if (options.open) {
    node.open = true;
    make();
  }
  return node;
}

// ------------------------------------------------------------------------------------------- formatting

export const MISSING = "–";

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function fixed(value, digits = 2) {
  if (!isNumber(value)) return MISSING;
  const text = value.toFixed(digits).replace("-", "−");
  return /^−0\.?0*$/.test(text) ? text.slice(1) : text;
}

export function signed(value, digits = 2) {
  return isNumber(value) && value > 0 ? `+${fixed(value, digits)}` : fixed(value, digits);
}

export function percent(value, digits = 0) {
  return isNumber(value) ? `${fixed(100 * value, digits)} %` : MISSING;
}

// Clamp the bound of an interval to 0..1: with few tasks it may lie outside.
export function clampShare(value) {
  return isNumber(value) ? Math.max(0, Math.min(1, value)) : null;
}

export function integer(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US").replaceAll(",", " ") : MISSING;
}

// Format with three digits at any size: 0.00123, 4.56, 1.2k, 3.4M.
export function short(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size >= 100 || value === 0) return trim(value);
  if (size >= 1e-3) return String(Number(value.toPrecision(3))).replace("-", "−");
  return value.toExponential(1).replace(".0e", "e").replace("-", "−").replace("e−", "e-");
}

function trim(value) {
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

export function seconds(value) {
  if (!isNumber(value)) return MISSING;
  if (value === 0) return "0 s";
  if (value < 0.001) return "< 1 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${fixed(value, 1)} s`;
  if (value < 100) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 20) return `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
  if (minutes < 100) return `${minutes} min`;
  return `${fixed(value / 3600, 1)} h`;
}

export function bytes(value) {
  if (!isNumber(value)) return MISSING;
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  return `${trim(value / 1000 ** power)} ${["B", "kB", "MB", "GB"][power]}`;
}

export function ago(then, now = Date.now() / 1000) {
  const since = now - then;
  return since < 2 ? "now" : `${seconds(Math.round(since))} ago`;
}

export function plural(count, one, many = `${one}s`) {
  return `${integer(count)} ${count === 1 ? one : many}`;
}

export function when(time) {
  if (!isNumber(time) || !time) return MISSING;
  return new Date(time * 1000).toLocaleString("en-GB", {dateStyle: "medium", timeStyle: "short"});
}

// Describe the ending of a session.
export function ending(name) {
  const known = {final: "final message", length: "cut off in an answer", interrupted: "interrupted"};
  const out = ["turns", "tokens", "time", "context"];
  return known[name] ?? (out.includes(name) ? `out of ${name}` : humanize(name));
}

// "malformed_calls" -> "malformed calls".
export function humanize(name) {
  return String(name).replaceAll("_", " ");
}
