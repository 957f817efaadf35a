// A session token by token: how likely each was, which of them training counts, and which weights made them.

import {ask} from "./data.js";
import {add, fixed, h, percent, plural, put, whole} from "./dom.js";

const LEVELS = 8; // of colour: from certain to a surprise
const WORST = -6; // log-probability from which on all are alike
const BLOCK = 400; // tokens that are laid out together
const SHOWN = {tokens: 24, characters: 160}; // at most at either end of a long stretch that the model only read

export function tokensView(address, told) {
  const {segments} = told.story;
  const about = h("p.tokeninfo", {role: "status"}, "Point at a token, or use the arrow keys.");
  const place = h("div.tokens", {tabindex: 0, role: "group", "aria-label": "Tokens"},
    segments.map((segment, number) => segmentView(`${address}/${number}`, segment, number, segments.length, about)));
  point(place, about);
  return h("div.tokenview", key(told), about, place);
}

function key(told) {
  const trained = told.counts && told.set === "training" && isFinite(told.step ?? NaN) && told.advantage;
  const says = trained ? `Every coloured token was trained with the advantage ${fixed(told.advantage)}.` :
    told.set === "evaluation" ? "A measurement: none of it is trained on." :
      told.counts && told.advantage === 0 ? "None of it was trained on: its group was all alike." :
        "None of it was trained on.";
  const ramp = Array.from({length: LEVELS}, (_, at) => h("i", {class: `p${at}`}));
  return h("div.tokenkey", h("span", "likely"), ramp, h("span", "a surprise"), h("span.tok", "grey"),
    h("span", "only read by the model, and never trained on"), h("span.muted", says));
}

function segmentView(address, segment, number, count, about) {
  const body = h("div.segment");
  let version = null;
  const more = async (start) => {
    body.querySelector("button.more")?.remove();
    try {
      const page = await ask(`${address}/${start}`, {remember: true});
      if (page.problem) about.textContent = page.problem;
      version = draw(body, page, version);
      const next = page.start + page.texts.length;
      const left = page.total - next;
      if (left > 0) {
        add(body, [h("button.more", {type: "button", on: {click: () => more(next)}}, plural(left, "more token"))]);
      }
    } catch (error) {
      add(body, [h("p.muted", error.message)]);
    }
  };
  more(0);
  if (count === 1) return body;
  const size = `${plural(segment.tokens, "token")}, ${whole(segment.made)} made`;
  return h("section", h("h3", `Segment ${number + 1} of ${count} (${segment.kind}), ${size}`), body);
}

// ------------------------------------------------------------------------------------------- drawing

function unroll(pairs) {
  return pairs.flatMap(([value, times]) => Array(times).fill(value));
}

// What is not in sight is not laid out, and long stretches that the model only read are folded away but for their ends.
function draw(body, page, version) {
  const versions = unroll(page.versions);
  let at = 0;
  for (const [made, count] of page.made) {
    const end = at + count;
    for (; at < end; at = Math.min(end, at + BLOCK)) {
      const stop = Math.min(end, at + BLOCK);
      const block = h("div.block");
      if (made) version = drawMade(block, page, at, stop, versions, version);
      else drawRead(block, page, at, stop, versions);
      body.append(block);
    }
  }
  return version;
}

function drawMade(block, page, from, stop, versions, version) {
  for (let at = from; at < stop; ) {
    let to = at;
    while (to < stop && versions[to] === versions[at]) to += 1;
    if (versions[at] !== version) {
      version = versions[at];
      add(block, [h("span.version", {title: `from here on version ${version} of the weights`}, `v${version}`)]);
    }
    add(block, spans(page, at, to, 1, versions));
    at = to;
  }
  return version;
}

function drawRead(block, page, from, stop, versions) {
  const start = from + few(page.texts.slice(from, stop));
  const end = stop - few(page.texts.slice(start, stop).reverse());
  const hidden = page.texts.slice(start, end);
  if (hidden.length <= SHOWN.tokens && hidden.join("").length <= 2 * SHOWN.characters) {
    add(block, spans(page, from, stop, 0, versions));
    return;
  }
  const unfold = () => button.replaceWith(...spans(page, start, end, 0, versions));
  const says = `${plural(end - start, "token")} that it read`;
  const button = h("button.skipped", {type: "button", on: {click: unfold}}, says);
  add(block, [spans(page, from, start, 0, versions), button, spans(page, end, stop, 0, versions)]);
}

// How many of the first tokens are shown: a token of a small vocabulary may be a whole line.
function few(texts) {
  let characters = 0;
  const at = texts.findIndex((text) => (characters += text.length) > SHOWN.characters);
  return Math.min(SHOWN.tokens, at < 0 ? texts.length : at);
}

function spans(page, from, to, made, versions) {
  const found = [];
  for (let at = from; at < to; at++) {
    const token = document.createElement("span");
    token.className = made ? `tok made p${level(page.logprobs[at])}` : "tok";
    token.dataset.about = `${page.start + at} ${page.ids[at]} ${made} ${page.logprobs[at]} ${versions[at]}`;
    token.textContent = page.texts[at].replaceAll("\n", "↵").replaceAll("\t", "⇥");
    found.push(token);
    if (page.texts[at].includes("\n")) found.push(document.createElement("br"));
  }
  return found;
}

function level(logprob) {
  if (logprob === null) return LEVELS - 1;
  // the root: what a trained model is unsure of is near 0, and would all look certain
  return Math.min(LEVELS - 1, Math.floor(Math.sqrt(Math.max(0, logprob / WORST)) * LEVELS));
}

// ------------------------------------------------------------------------------------------- pointing

function point(place, about) {
  let current = null;
  const tell = (token) => {
    current?.classList.remove("here");
    current = token;
    token.classList.add("here");
    const [at, id, made, logprob, version] = token.dataset.about.split(" ").map(Number);
    const chance = `log-probability ${fixed(logprob, 3)} (${percent(Math.exp(logprob), 1)}), version ${version}`;
    put(about, h("b", JSON.stringify(token.textContent)), ` token ${id} at ${at}, `, made ? chance : "only read");
  };
  place.addEventListener("pointerover", (event) => {
    if (event.target.dataset?.about) tell(event.target);
  });
  place.addEventListener("keydown", (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20}[event.key];
    if (!by) return;
    event.preventDefault();
    const all = [...place.querySelectorAll(".tok")];
    const token = all[Math.max(0, Math.min(all.length - 1, current ? all.indexOf(current) + by : 0))];
    if (token) {
      tell(token);
      token.scrollIntoView({block: "nearest"});
    }
  });
}
