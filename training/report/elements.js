"use strict";
// Elements of the page, numbers as people read them, and what the reader has chosen. What comes from a run is only ever
// set as text, never as HTML.
// Shape suffixes: L MoE layers, E experts.

const page = JSON.parse(document.getElementById("run").textContent);
const runs = page.runs;
const DRAWING = "http://www.w3.org/2000/svg"; // the name of SVG's namespace; nothing is loaded from it

// ---- Elements

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null));
  return made;
}

function drawn(parent, tag, className, attributes, text) {
  const made = document.createElementNS(DRAWING, tag);
  if (className) made.setAttribute("class", className);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function picture(className, title) {
  const made = document.createElementNS(DRAWING, "svg");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", title);
  made.setAttribute("class", className);
  return made;
}

// A table of text or elements; the first row is its head.
function table(className, [head, ...rows]) {
  const row = (kind, cells) => element("tr", "", ...cells.map((cell) => element(kind, "", cell)));
  const body = element("tbody", "", ...rows.map((cells) => row("td", cells)));
  return element("table", className, element("thead", "", row("th", head)), body);
}

function section(title, ...children) {
  return element("section", "", element("h2", "", title), ...children);
}

// A slider over `count` positions. `choose` is called with each new position.
function slider(count, label, choose) {
  const made = element("input");
  Object.assign(made, { type: "range", min: 0, max: count - 1, value: count - 1 });
  made.setAttribute("aria-label", label);
  made.addEventListener("input", () => choose(Number(made.value)));
  return made;
}

// Functions that draw what depends on the width and the colours of the page, each with the picture it draws.
let drawings = [];

function drawing(shown, draw) {
  drawings.push({ shown, draw });
}

function drawAll() {
  drawings = drawings.filter(({ shown }) => shown.isConnected); // others were of a run that is no longer shown
  for (const { draw } of drawings) draw();
}

// ---- Numbers

function whole(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

function number(value) {
  const size = Math.abs(value);
  if (size >= 10000) return whole(value);
  if (size > 0 && size < 0.001) return value.toExponential(2).replace(/\.?0+e/, "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

function percent(value) {
  return number(value * 100) + " %";
}

function large(value) {
  if (value < 1e5) return whole(value);
  return value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 });
}

function duration(seconds) {
  if (seconds < 60) return number(Math.round(seconds * 10) / 10) + " s";
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${whole(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

function seconds(value) {
  return value >= 1 || value === 0 ? number(value) + " s" : number(value * 1000) + " ms";
}

function memory(megabytes) {
  return megabytes >= 10000 ? number(megabytes / 1000) + " GB" : number(megabytes) + " MB";
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const unit = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${number(value / 1000 ** unit)} ${units[unit]}`;
}

function stepRange(first, last) {
  return first >= last ? `step ${whole(last)}` : `steps ${whole(first)} – ${whole(last)}`;
}

function niceTicks(low, high, atMost) {
  const rough = (high - low) / atMost;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * (1 - 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) ticks.push(i * size || 0); // no -0
  return ticks;
}

// Of a logarithmic axis, by powers of ten or the 1, 2 and 5 between them, whichever fit.
function logTicks(low, high, atMost) {
  for (const factors of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      ticks.push(...factors.map((factor) => factor * 10 ** power).filter((tick) => tick >= low && tick <= high));
    }
    if (ticks.length < 3) return niceTicks(low, high, atMost).filter((tick) => tick > 0);
    if (ticks.length <= atMost) return ticks;
  }
  return [low, high];
}

// The place in a sorted array of what is nearest to a value.
function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

// ---- What the reader has chosen, kept in the page's address: a page that is loaded again, or sent, is as it was

const chosen = new URLSearchParams(location.hash.slice(1));
const watchers = []; // functions that are called when something else is chosen

// Unless `tells` is false, all that draws what was chosen is told.
function choose(name, value, tells = true) {
  if (value === null) chosen.delete(name);
  else chosen.set(name, value);
  try {
    history.replaceState(history.state, "", `#${chosen}`);
  } catch {
    // a browser that limits how often this is done loses no more than the latest choice
  }
  if (tells) for (const watcher of watchers) watcher();
}

// A number that was chosen, or null.
function chosenNumber(name) {
  const value = chosen.has(name) ? Number(chosen.get(name)) : NaN;
  return Number.isFinite(value) ? value : null;
}

// While the run goes on, it writes this file again and again, and the page loads it anew: not while a hand is on it.
function refresh() {
  if (page.refresh_seconds === null) return;
  let isHeld = false;
  addEventListener("pointerdown", () => (isHeld = true));
  addEventListener("pointerup", () => (isHeld = false));
  addEventListener("pointercancel", () => (isHeld = false));
  const again = () => {
    if (!isHeld && !document.hidden && chosen.get("live") !== "no") location.reload();
    else setTimeout(again, 1000);
  };
  setTimeout(again, 1000 * page.refresh_seconds);
}
