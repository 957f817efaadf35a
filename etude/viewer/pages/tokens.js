// A session token by token: log-probabilities, which tokens are trained on, and the weight versions.

import {fetchData} from "./data.js";
import {appendAll, fixed, h, percent, plural, setChildren, integer} from "./dom.js";

const LEVELS = 8; // of colour, from likely to unlikely
const WORST = -6; // log-probability of the last level
const BLOCK = 400; // tokens that are laid out together
const SHOWN = {tokens: 24, characters: 160}; // at most, at either end of a long stretch of prompt tokens

export function tokensView(address, data) {
  const {segments} = data.session;
  const about = h("p.tokeninfo", {role: "status"}, "Point at a token, or use the arrow keys.");
  const container = h("div.tokens", {tabindex: 0, role: "group", "aria-label": "Tokens"},
    segments.map((segment, number) => segmentView(`${address}/${number}`, segment, number, segments.length, about)));
  trackPointer(container, about);
  return h("div.tokenview", legend(data), about, container);
}

function legend(data) {
  const trained = data.counts && data.set === "training" && isFinite(data.step ?? NaN) && data.advantage;
  const note = trained ? `Every coloured token was trained on with the advantage ${fixed(data.advantage)}.` :
    data.set === "evaluation" ? "Held-out evaluation: not trained on." :
      data.counts && data.advantage === 0 ? "Not trained on: all rewards of its group are equal." :
        "Not trained on.";
  const ramp = Array.from({length: LEVELS}, (_, at) => h("i", {class: `p${at}`}));
  return h("div.tokenkey", h("span", "likely"), ramp, h("span", "unlikely"), h("span.tok", "grey"),
    h("span", "prompt tokens, never trained on"), h("span.muted", note));
}

function segmentView(address, segment, number, count, about) {
  const body = h("div.segment");
  let version = null;
  const more = async (start) => {
    body.querySelector("button.more")?.remove();
    try {
      const page = await fetchData(`${address}/${start}`, {remember: true});
      if (page.problem) about.textContent = page.problem;
      version = draw(body, page, version);
      const next = page.start + page.texts.length;
      const left = page.total - next;
      if (left > 0) {
        const load = {click: () => more(next)};
        appendAll(body, [h("button.more", {type: "button", on: load}, plural(left, "more token"))]);
      }
    } catch (error) {
      appendAll(body, [h("p.muted", error.message)]);
    }
  };
  more(0);
  if (count === 1) return body;
  const size = `${plural(segment.tokens, "token")}, ${integer(segment.made)} sampled`;
  return h("section", h("h3", `Segment ${number + 1} of ${count} (${segment.kind}), ${size}`), body);
}

// ------------------------------------------------------------------------------------------- drawing

function expandRuns(pairs) {
  return pairs.flatMap(([value, times]) => Array(times).fill(value));
}

// Blocks outside the viewport are not laid out; long stretches of prompt tokens are collapsed except for their ends.
function draw(body, page, version) {
  const versions = expandRuns(page.versions);
  let at = 0;
  for (const [sampled, count] of page.made) {
    const end = at + count;
    for (; at < end; at = Math.min(end, at + BLOCK)) {
      const stop = Math.min(end, at + BLOCK);
      const block = h("div.block");
      if (sampled) version = drawSampled(block, page, at, stop, versions, version);
      else drawPrompt(block, page, at, stop, versions);
      body.append(block);
    }
  }
  return version;
}

function drawSampled(block, page, from, stop, versions, version) {
  for (let at = from; at < stop; ) {
    let to = at;
    while (to < stop && versions[to] === versions[at]) to += 1;
    if (versions[at] !== version) {
      version = versions[at];
      appendAll(block, [h("span.version", {title: `weight version ${version} from here on`}, `v${version}`)]);
    }
    appendAll(block, spans(page, at, to, 1, versions));
    at = to;
  }
  return version;
}

function drawPrompt(block, page, from, stop, versions) {
  const start = from + visibleCount(page.texts.slice(from, stop));
  const end = stop - visibleCount(page.texts.slice(start, stop).reverse());
  const hidden = page.texts.slice(start, end);
  if (hidden.length <= SHOWN.tokens && hidden.join("").length <= 2 * SHOWN.characters) {
    appendAll(block, spans(page, from, stop, 0, versions));
    return;
  }
  const unfold = () => button.replaceWith(...spans(page, start, end, 0, versions));
  const note = plural(end - start, "more prompt token");
  const button = h("button.skipped", {type: "button", on: {click: unfold}}, note);
  appendAll(block, [spans(page, from, start, 0, versions), button, spans(page, end, stop, 0, versions)]);
}

// How many of the first tokens to show: a single token may be a whole line.
function visibleCount(texts) {
  let characters = 0;
  const at = texts.findIndex((text) => (characters += text.length) > SHOWN.characters);
  return Math.min(SHOWN.tokens, at < 0 ? texts.length : at);
}

function spans(page, from, to, sampled, versions) {
  const found = [];
  for (let at = from; at < to; at++) {
    const token = document.createElement("span");
    token.className = sampled ? `tok made p${colourLevel(page.logprobs[at])}` : "tok";
    token.dataset.about = `${page.start + at} ${page.ids[at]} ${sampled} ${page.logprobs[at]} ${versions[at]}`;
    token.textContent = page.texts[at].replaceAll("\n", "↵").replaceAll("\t", "⇥");
    found.push(token);
    if (page.texts[at].includes("\n")) found.push(document.createElement("br"));
  }
  return found;
}

function colourLevel(logprob) {
  if (logprob === null) return LEVELS - 1;
  // square root: most log-probabilities of a trained model are near 0 and would otherwise look the same
  return Math.min(LEVELS - 1, Math.floor(Math.sqrt(Math.max(0, logprob / WORST)) * LEVELS));
}

// ------------------------------------------------------------------------------------------- pointer and keyboard

function trackPointer(container, about) {
  let current = null;
  const showToken = (token) => {
    current?.classList.remove("here");
    current = token;
    token.classList.add("here");
    const [at, id, sampled, logprob, version] = token.dataset.about.split(" ").map(Number);
    const chance = `log-probability ${fixed(logprob, 3)} (${percent(Math.exp(logprob), 1)}), version ${version}`;
    const text = JSON.stringify(token.textContent);
    setChildren(about, h("b", text), ` token ${id} at ${at}, `, sampled ? chance : "prompt");
  };
  container.addEventListener("pointerover", (event) => {
    if (event.target.dataset?.about) showToken(event.target);
  });
  container.addEventListener("keydown", (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20}[event.key];
    if (!by) return;
    event.preventDefault();
    const all = [...container.querySelectorAll(".tok")];
    const token = all[Math.max(0, Math.min(all.length - 1, current ? all.indexOf(current) + by : 0))];
    if (token) {
      showToken(token);
      token.scrollIntoView({block: "nearest"});
    }
  });
}
