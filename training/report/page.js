"use strict";
// Draws the report of a run from the JSON in the page. What comes from the run is only ever set as text, never as HTML.
// Shape suffixes: L MoE layers, E experts.

const run = JSON.parse(document.getElementById("run").textContent);
const DRAWING = "http://www.w3.org/2000/svg"; // the name of SVG's namespace; nothing is loaded from it

const drawings = []; // functions that draw what depends on the width and the colours of the page

// ---- Elements and numbers

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

// A slider over `count` positions, from the last one on. `choose` is called with each new position.
function slider(count, label, choose) {
  const made = element("input");
  Object.assign(made, { type: "range", min: 0, max: count - 1, value: count - 1 });
  made.setAttribute("aria-label", label);
  made.addEventListener("input", () => choose(Number(made.value)));
  return made;
}

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

function memory(megabytes) {
  return megabytes >= 10000 ? number(megabytes / 1000) + " GB" : number(megabytes) + " MB";
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

// ---- Header

function header() {
  const steps = `step ${whole(run.step)}` + (run.num_steps === null ? "" : ` of ${whole(run.num_steps)}`);
  const words = { finished: `finished at ${steps}`, running: `running, ${steps}`, stopped: `stopped at ${steps}` };
  const title = element("div", "title", element("h1", "", run.name));
  title.append(element("span", `badge ${run.state ?? ""}`, words[run.state] ?? steps));
  const made = element("header", "", title);
  if (run.model) made.append(element("p", "model quiet", run.model));
  if (run.num_steps) {
    const bar = element("div");
    bar.style.width = `${Math.min(100, (100 * run.step) / run.num_steps)}%`;
    made.append(element("div", "progress", bar));
  }
  made.append(tiles());
  return made;
}

function tiles() {
  const all = run.summary;
  const made = element("div", "tiles");
  function tile(label, value, below = "", kind = "") {
    const [above, under] = [element("span", "quiet", label), element("span", "quiet", below)];
    made.append(element("div", `card tile ${kind}`, above, element("b", "", value), under));
  }
  if (all.loss !== null) {
    const step = run.curves.loss.steps.at(-1);
    tile(run.state === "running" ? "Loss" : "Final loss", number(all.loss), `at step ${whole(step)}`);
  }
  if (all.best_eval_loss !== null) {
    tile("Best eval loss", number(all.best_eval_loss), `at step ${whole(all.best_eval_step)}`);
  }
  if (all.tokens !== null) tile("Tokens seen", large(all.tokens), "without padding");
  if (all.tokens_per_second !== null) tile("Tokens/s", large(all.tokens_per_second), "median");
  if (all.mfu !== null) tile("MFU", percent(all.mfu), "median");
  if (all.peak_memory_mb !== null) tile("Peak memory", memory(all.peak_memory_mb), "of any rank");
  if (all.wall_seconds !== null) {
    tile("Wall time", duration(all.wall_seconds), all.num_starts > 1 ? `in ${all.num_starts} starts` : "");
  }
  if (all.dropped_tokens !== null) {
    const kind = all.dropped_tokens === 0 ? "good" : "bad";
    tile("Dropped tokens", whole(all.dropped_tokens), "all logged steps", kind);
  }
  if (all.skipped_steps > 0) tile("Skipped steps", whole(all.skipped_steps), "not finite", "bad");
  return made;
}

function warnings() {
  if (run.warnings.length === 0) return null;
  const lines = run.warnings.map((warning) => element("p", "", `Step ${whole(warning.step)}: ${warning.text}`));
  return element("section", "", element("h2", "", "Warnings"), element("div", "card", ...lines));
}

// ---- Curves

const FORMATS = { number, percent, memory };

const followers = []; // charts that show the step under the pointer, wherever it is; null: the last one

function follow(step) {
  for (const follower of followers) follower(step);
}

function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function movingMean(values, radius) {
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const [from, to] = [Math.max(0, i - radius), Math.min(values.length, i + radius + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

function drawDot(parent, kind, x, y, radius) {
  drawn(parent, "circle", `dot ${kind}`, { cx: x, cy: y, r: radius });
}

// What is absent from the run is left out. `series` are curves and their labels; `include` are values that the axis must
// reach, with `reaches_all` the references and all of the band too, which else spikes may leave; `references` are dashed
// lines, drawn where the axis reaches them.
function curveChart({ title, note, series, format: formatName, include: included, reaches_all, references }) {
  const format = FORMATS[formatName];
  const include = reaches_all ? included.concat(references.map(([value]) => value)) : included;
  const lines = [];
  series.forEach(({ name, label, smooth }, place) => {
    const curve = run.curves[name];
    if (curve === undefined) return;
    const radius = smooth && curve.mean.length >= 60 ? Math.round(curve.mean.length / 50) : 0;
    const kind = place === 0 ? "first" : "second";
    lines.push({ ...curve, label, radius, kind, smoothed: movingMean(curve.mean, radius) });
  });
  const readout = element("p", "readout quiet");
  const picture = document.createElementNS(DRAWING, "svg");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", title);
  const smoothed = lines.filter((line) => line.radius > 0);
  const remarks = [note, ...smoothed.map((line) => `bold: mean of ${2 * line.radius + 1} points`)];
  const heading = element("h3", "", title);
  const remark = element("span", "quiet", remarks.filter(Boolean).join("; "));
  const card = element("div", "card", element("div", "title", heading, remark), readout, picture);

  const reached = (line) => (reaches_all && line.low ? line.mean.concat(line.low, line.high) : line.mean);
  const values = lines.flatMap(reached).concat(include);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (high === low) {
    const size = Math.abs(low) || 1;
    [low, high] = include.includes(low) ? [low, low + size] : [low - size / 2, low + size / 2];
  }
  const room = (high - low) * 0.06;
  low -= include.includes(low) ? 0 : room;
  high += room;
  const ticks = niceTicks(low, high, 5);
  const left = 14 + 6.6 * Math.max(...ticks.map((tick) => format(tick).length));
  const [top, right, bottom, height] = [6, 12, 22, 190];
  const lastStep = Math.max(run.step, 1);
  let x, toStep, cursor;
  const y = (value) => top + ((high - Math.min(Math.max(value, low), high)) / (high - low)) * (height - top - bottom);

  function draw() {
    const width = picture.clientWidth;
    picture.replaceChildren();
    x = (step) => left + (step / lastStep) * (width - left - right);
    toStep = (pixel) => ((pixel - left) / (width - left - right)) * lastStep;
    for (const tick of ticks) {
      drawn(picture, "line", "grid", { x1: left, x2: width - right, y1: y(tick), y2: y(tick) });
      drawn(picture, "text", "", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, format(tick));
    }
    for (const tick of niceTicks(0, lastStep, width > 420 ? 6 : 4).filter(Number.isInteger)) {
      const [at, anchor] = x(tick) > width - 30 ? [width - 2, "end"] : [x(tick), "middle"];
      drawn(picture, "text", "", { x: at, y: height - 5, "text-anchor": anchor }, whole(tick));
    }
    for (const [value, label] of references.filter(([value]) => value >= low && value <= high)) {
      drawn(picture, "line", "reference", { x1: left, x2: width - right, y1: y(value), y2: y(value) });
      const under = y(value) < 24;
      drawn(picture, "text", "", { x: width - right, y: y(value) + (under ? 13 : -5), "text-anchor": "end" }, label);
    }
    for (const line of lines) drawLine(line);
    cursor = drawn(picture, "g", "", {});
    show(null);
  }

  function drawLine(line) {
    const path = (heights) => heights.map((value, i) => `${x(line.steps[i]).toFixed(1)},${y(value).toFixed(1)}`);
    if (line.low) {
      const outline = [...path(line.high), ...path(line.low).reverse()];
      drawn(picture, "polygon", `band ${line.kind}`, { points: outline.join(" ") });
    }
    if (line.radius) drawn(picture, "polyline", `curve faint ${line.kind}`, { points: path(line.mean).join(" ") });
    drawn(picture, "polyline", `curve ${line.kind}`, { points: path(line.smoothed).join(" ") });
    if (line.steps.length > 40) return;
    line.steps.forEach((step, i) => drawDot(picture, line.kind, x(step), y(line.mean[i]), 2.6));
  }

  function show(step) {
    cursor.replaceChildren();
    const points = lines.map((line) => nearest(line.steps, step ?? lastStep));
    const lead = lines[0].steps[points[0]];
    if (step !== null) drawn(cursor, "line", "cursor", { x1: x(lead), x2: x(lead), y1: top, y2: height - bottom });
    const before = points[0] > 0 ? lines[0].steps[points[0] - 1] : 0;
    readout.replaceChildren(lines[0].per_point > 1 ? stepRange(before + 1, lead) : stepRange(lead, lead));
    lines.forEach((line, i) => {
      const at = points[i];
      if (step !== null) drawDot(cursor, line.kind, x(line.steps[at]), y(line.mean[at]), 4);
      const spread = line.low && line.low[at] < line.high[at];
      const range = spread ? ` (${format(line.low[at])} – ${format(line.high[at])})` : "";
      const where = line.steps[at] === lead ? "" : ` at step ${whole(line.steps[at])}`;
      const value = `${line.label} ${format(line.mean[at])}`.trim();
      readout.append(" · ", element("span", line.kind, value + range + where));
    });
  }

  picture.addEventListener("pointermove", (event) => follow(toStep(event.offsetX)));
  picture.addEventListener("pointerleave", () => follow(null));
  followers.push(show);
  drawings.push(draw);
  return card;
}

function curves() {
  const charts = run.charts.map(curveChart);
  if (charts.length === 0) return null;
  const perPoint = Math.max(...Object.values(run.curves).map((curve) => curve.per_point));
  const section = element("section", "", element("h2", "", "Curves"), element("div", "charts", ...charts));
  if (perPoint > 1) {
    const points = `A point is the mean of up to ${whole(perPoint)} logged steps; the band is their lowest to highest.`;
    section.append(element("p", "remark quiet", points));
  }
  return section;
}

// ---- Expert load

const SCALE_WIDTH = 340; // pixels, where the card has as many
const HEAD = 24; // height of a map's head, where experts or steps stand
const LABELS = 58; // width of the names of the layers
const COLUMNS = { "max/mean": 72, "no token": 136, entropy: 200 }; // right edges of a layer's figures, beside the grid

// The colours of the page as it is now, light or dark. `load` gives that of a load, relative to an even one: from blue
// over neutral (even) to orange, which the colour-blind tell apart, on a logarithmic scale from 1/bound to bound.
function mapColours(bound) {
  const style = getComputedStyle(document.documentElement);
  const names = ["text", "quiet", "bad", "low", "even", "high", "mark"];
  const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const [low, even, high] = [colours.low, colours.even, colours.high].map(channels);
  colours.load = (ratio) => {
    const place = Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(bound)));
    const end = place < 0 ? low : high;
    return `rgb(${even.map((value, i) => Math.round(value + (end[i] - value) * Math.abs(place))).join(",")})`;
  };
  return colours;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// How far the scale goes, for the whole run, so that pictures of different steps can be compared.
function scaleBound(load) {
  const cells = load.flat(2).filter((cell) => cell > 0);
  const distances = cells.map((cell) => Math.abs(Math.log(cell / 100))).sort((a, b) => a - b);
  const wide = Math.exp(distances[Math.floor(distances.length * 0.98)] ?? 0);
  return [1.5, 2, 4].find((bound) => wide <= bound) ?? 8;
}

function sized(canvas, width, height) {
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(density, 0, 0, density, 0, 0);
  pen.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  return pen;
}

function drawWithoutToken(pen, colours, left, top, width, height) {
  pen.fillStyle = colours.low;
  pen.fillRect(left, top, width, height);
  const [x, y, arm] = [left + width / 2, top + height / 2, Math.min(3.5, width / 3)];
  pen.strokeStyle = colours.mark;
  pen.lineWidth = 1.4;
  pen.beginPath();
  for (const side of [-1, 1]) {
    pen.moveTo(x - arm, y - side * arm);
    pen.lineTo(x + arm, y + side * arm);
  }
  pen.stroke();
}

function drawLayerNames(pen, colours, layers, row) {
  pen.fillStyle = colours.quiet;
  pen.textAlign = "right";
  for (let layer = 0; layer < layers; layer++) pen.fillText(`layer ${layer}`, LABELS - 8, HEAD + (layer + 0.5) * row);
}

// The load of each expert in one stretch of steps, and figures of each layer to the right of it.
function drawGrid(pen, colours, cells_LE, entropy_L, row, cell) {
  const experts = cells_LE[0].length;
  const right = LABELS + experts * cell;
  const gap = cell >= 6 ? 1 : 0;
  drawLayerNames(pen, colours, cells_LE.length, row);
  const every = Math.max(1, Math.ceil(niceTicks(0, experts, Math.max(1, (experts * cell) / 26))[1]));
  pen.textAlign = "center";
  for (let expert = 0; expert < experts; expert += every) {
    pen.fillText(expert, LABELS + (expert + 0.5) * cell, HEAD / 2);
  }
  pen.textAlign = "right";
  for (const [name, edge] of Object.entries(COLUMNS)) {
    if (name !== "entropy" || entropy_L.some((value) => value !== null)) pen.fillText(name, right + edge, HEAD / 2);
  }
  cells_LE.forEach((cells_E, layer) => {
    const top = HEAD + layer * row;
    cells_E.forEach((value, expert) => {
      const left = LABELS + expert * cell;
      if (value === 0) return drawWithoutToken(pen, colours, left, top, cell - gap, row - 1);
      pen.fillStyle = colours.load(value / 100);
      pen.fillRect(left, top, cell - gap, row - 1);
    });
    const without = cells_E.filter((value) => value === 0).length;
    const figure = (name, text, colour) => {
      pen.fillStyle = colour;
      pen.fillText(text, right + COLUMNS[name], top + row / 2);
    };
    figure("max/mean", `${(Math.max(...cells_E) / 100).toFixed(2)}×`, colours.text);
    figure("no token", without, without > 0 ? colours.bad : colours.quiet);
    if (entropy_L[layer] !== null) figure("entropy", entropy_L[layer].toFixed(2), colours.text);
  });
}

// The most loaded expert of each layer in each stretch of steps; the chosen stretch is framed.
function drawOverTime(pen, colours, load, row, column, chosen) {
  const [stretches, layers] = [load.load.length, load.load[0].length];
  drawLayerNames(pen, colours, layers, row);
  const right = LABELS + stretches * column;
  pen.textAlign = "left";
  pen.fillText(`step ${whole(load.first_steps[0])}`, LABELS, HEAD / 2);
  pen.textAlign = "right";
  if (stretches * column > 150) pen.fillText(`step ${whole(load.last_steps.at(-1))}`, right, HEAD / 2);
  load.load.forEach((cells_LE, stretch) =>
    cells_LE.forEach((cells_E, layer) => {
      pen.fillStyle = colours.load(Math.max(Math.max(...cells_E) / 100, 1));
      pen.fillRect(LABELS + stretch * column, HEAD + layer * row, column + 0.3, row - 1);
    }),
  );
  pen.strokeStyle = colours.text;
  pen.lineWidth = 1.5;
  pen.strokeRect(LABELS + chosen * column, HEAD - 1.5, column, layers * row + 0.5);
}

function drawScale(pen, colours, bound, width) {
  for (let x = 0; x < width; x++) {
    pen.fillStyle = colours.load(bound ** ((2 * x) / (width - 1) - 1));
    pen.fillRect(x, 0, 1.5, 12);
  }
  pen.fillStyle = colours.text;
  pen.fillRect(width / 2 - 1, 0, 2, 12);
}

function legend(scale, withoutKey, bound, experts) {
  const marks = [`≤ ${number(1 / bound)} ×`, `even = 1/E = ${number(100 / experts)} %`, `≥ ${bound} ×`];
  const under = element("div", "legend-labels", ...marks.map((mark) => element("span", "", mark)));
  const withoutToken = element("div", "key", withoutKey, "no token at all");
  return element("div", "legend quiet", element("div", "", scale, under), withoutToken);
}

// A button that calls `next` again and again until that says it was the last, or until it is pressed again.
function playButton(start, next, pause) {
  const button = element("button", "", "Play");
  let timer = null;
  function stop() {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  }
  button.addEventListener("click", () => {
    if (timer !== null) return stop();
    start();
    button.textContent = "Pause";
    timer = setInterval(() => next() || stop(), pause);
  });
  return button;
}

function expertLoad() {
  if (run.load === null) return null;
  const { per_stretch, first_steps, last_steps, load, entropy } = run.load;
  const [stretches, layers, experts] = [load.length, load[0].length, load[0][0].length];
  const bound = scaleBound(load);
  const row = layers <= 12 ? 24 : layers <= 40 ? 17 : 13;
  let chosen = stretches - 1;
  let cell, column;

  const [grid, time, scale, withoutKey] = Array.from({ length: 4 }, () => element("canvas"));
  const maps = element(
    "div",
    "maps",
    element("div", "", element("p", "quiet", "Layer × expert, in the steps chosen"), grid),
    element("div", "", element("p", "quiet", "Most loaded expert of each layer, over time"), time),
  );
  const when = element("span");
  const readout = element("p", "readout quiet", "Point at a cell to read it.");

  function draw() {
    const colours = mapColours(bound);
    const [width, height, figures] = [maps.clientWidth, HEAD + layers * row, COLUMNS.entropy + 6];
    const wanted = LABELS + figures + experts * Math.max(5, Math.min(44, 384 / experts));
    const beside = width - wanted - 26 >= 300;
    const [gridWidth, timeWidth] = beside ? [wanted, width - wanted - 26] : [width, width];
    cell = (gridWidth - LABELS - figures) / experts;
    column = Math.min(60, (timeWidth - LABELS - 2) / stretches);
    drawGrid(sized(grid, gridWidth, height), colours, load[chosen], entropy[chosen], row, cell);
    drawOverTime(sized(time, timeWidth, height), colours, run.load, row, column, chosen);
    const scaleWidth = Math.min(SCALE_WIDTH, width);
    drawScale(sized(scale, scaleWidth, 12), colours, bound, scaleWidth);
    drawWithoutToken(sized(withoutKey, 22, 16), colours, 0, 0, 22, 16);
    when.textContent = stepRange(first_steps[chosen], last_steps[chosen]);
  }

  function choose(stretch) {
    chosen = Math.max(0, Math.min(stretches - 1, stretch));
    position.value = chosen;
    draw();
  }

  const position = slider(stretches, "steps of the expert load", choose);
  const play = playButton(
    () => chosen === stretches - 1 && choose(0),
    () => {
      choose(chosen + 1);
      return chosen < stretches - 1;
    },
    Math.max(120, 6000 / stretches),
  );
  grid.addEventListener("pointermove", (event) => {
    const [layer, expert] = [Math.floor((event.offsetY - HEAD) / row), Math.floor((event.offsetX - LABELS) / cell)];
    const value = load[chosen][layer]?.[expert];
    if (value === undefined) return;
    const share = `${number(value / 100)} × even, ${number(value / experts)} % of the layer's routed tokens`;
    readout.textContent = `layer ${layer}, expert ${expert}: ${value === 0 ? "no token" : share}`;
  });
  time.addEventListener("pointermove", (event) => {
    const [layer, stretch] = [Math.floor((event.offsetY - HEAD) / row), Math.floor((event.offsetX - LABELS) / column)];
    const cells_E = load[stretch]?.[layer];
    if (cells_E === undefined) return;
    const largest = Math.max(...cells_E);
    const where = `${stepRange(first_steps[stretch], last_steps[stretch])}, layer ${layer}`;
    readout.textContent = `${where}: expert ${cells_E.indexOf(largest)} has most, ${number(largest / 100)} × even`;
    if (event.buttons === 1) choose(stretch);
  });
  time.addEventListener("pointerdown", (event) => choose(Math.floor((event.offsetX - LABELS) / column)));
  drawings.push(draw);

  const controls = element("div", "controls", ...(stretches > 1 ? [play, position, when] : [when]));
  const card = element("div", "card", controls, legend(scale, withoutKey, bound, experts), readout, maps);
  if (per_stretch > 1) {
    const sums = `Tokens are added up over ${whole(per_stretch)} logged steps at a time: ${stretches} pictures in all.`;
    card.append(element("p", "remark quiet", sums));
  }
  return element("section", "", element("h2", "", "Expert load"), card);
}

// ---- Profiles

const HUES = 8; // colours of parts in page.css; parts beyond them share one
const BAR = 22; // pixels of a profile's bar, and of the space below it
const SCALES = {
  "Seconds per step": { figure: "seconds", format: seconds },
  "Memory allocated per step": { figure: "allocated_bytes", format: bytes },
};

function seconds(value) {
  return value >= 1 ? number(value) + " s" : number(value * 1000) + " ms";
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const unit = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${number(value / 1000 ** unit)} ${units[unit]}`;
}

function nameOf(profile) {
  return `rank ${profile.rank}, ${stepRange(profile.steps[0], profile.steps.at(-1))}`;
}

// The names of all parts, those with the most time first, and last what is no part's.
function partNames() {
  const sums = {};
  for (const profile of run.profiles) {
    for (const [name, figures] of Object.entries(profile.parts)) sums[name] = (sums[name] ?? 0) + figures.seconds;
  }
  const names = Object.keys(sums).filter((name) => name !== run.between);
  names.sort((a, b) => sums[b] - sums[a]);
  return run.between in sums ? [...names, run.between] : names;
}

// A bar for each profile, cut into its parts. `choose` is called with the profile that is pressed.
function bars(title, { figure, format }, names, kindOf, choose) {
  const picture = document.createElementNS(DRAWING, "svg");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", title);
  picture.setAttribute("class", "bars");
  picture.style.height = `${run.profiles.length * 2 * BAR}px`;
  const value = (profile, name) => (profile.parts[name]?.[figure] ?? 0) / profile.steps.length;
  const total = (profile) => names.reduce((sum, name) => sum + value(profile, name), 0);
  const most = Math.max(...run.profiles.map(total)) || 1;

  drawings.push(() => {
    const width = picture.clientWidth;
    picture.replaceChildren();
    run.profiles.forEach((profile, row) => {
      const top = row * 2 * BAR;
      const all = total(profile);
      const bar = drawn(picture, "g", "", {});
      drawn(bar, "text", "", { x: 0, y: top + BAR - 6 }, `${nameOf(profile)}: ${format(all)}`);
      let left = 0;
      for (const name of names.filter((name) => value(profile, name) > 0)) {
        const size = (value(profile, name) / most) * width;
        const place = { x: left, y: top + BAR, width: Math.max(size - 1, 0.5), height: BAR - 6 };
        const part = drawn(bar, "rect", kindOf(name), place);
        drawn(part, "title", "", {}, `${name}: ${format(value(profile, name))}, ${percent(value(profile, name) / all)}`);
        left += size;
      }
      bar.addEventListener("click", () => choose(row));
    });
  });
  return element("div", "", element("h3", "", title), picture);
}

function profileTable(profile, names, kindOf) {
  const steps = profile.steps.length;
  const all = Object.values(profile.parts).reduce((sum, figures) => sum + figures.seconds, 0) || 1;
  const row = (kind, cells) => element("tr", "", ...cells.map((cell) => element(kind, "", cell)));
  const head = row("th", ["", "time per step", "share", "calls per step", "allocated per step"]);
  const rows = names
    .filter((name) => profile.parts[name])
    .sort((a, b) => (a === run.between) - (b === run.between) || profile.parts[b].seconds - profile.parts[a].seconds)
    .map((name) => {
      const part = profile.parts[name];
      const made = row("td", [
        name,
        seconds(part.seconds / steps),
        percent(Math.round((1000 * part.seconds) / all) / 1000),
        name === run.between ? "" : number(part.calls / steps),
        bytes(part.allocated_bytes / steps),
      ]);
      made.firstChild.prepend(element("span", `swatch ${kindOf(name)}`));
      return made;
    });
  return element("table", "figures", element("thead", "", head), element("tbody", "", ...rows));
}

function profiles() {
  if (run.profiles.length === 0) return null;
  const names = partNames();
  const kindOf = (name) => {
    const place = names.indexOf(name);
    return name === run.between ? "part-between" : place < HUES ? `part-${place}` : "part-more";
  };
  const [when, remark, table] = [element("h3"), element("p", "remark quiet"), element("div", "wide")];
  function choose(at) {
    const profile = run.profiles[at];
    position.value = at;
    when.textContent = nameOf(profile);
    table.replaceChildren(profileTable(profile, names, kindOf));
    const onCpu = "Time of operators; waiting for other ranks within one counts as its part's. Between operators: ";
    const onGpu = "Time of kernels: those that run at once count each. Between operators: time beyond that of all kernels. ";
    remark.textContent =
      (profile.device === "cpu" ? onCpu + "Python, waiting, and the profiler itself. " : onGpu) +
      "Memory: what operators allocated and did not free themselves.";
  }
  const count = run.profiles.length;
  const position = slider(count, "profile", choose);
  position.value = 0;
  const pictures = Object.entries(SCALES).map(([title, scale]) => bars(title, scale, names, kindOf, choose));
  choose(0);
  const controls = element("div", "controls", count > 1 ? position : null, when);
  const card = element("div", "card", element("div", "charts", ...pictures), controls, table, remark);
  if (run.profiles_not_shown) {
    card.append(element("p", "remark quiet", `${whole(run.profiles_not_shown)} more profiles are in the directory.`));
  }
  return element("section", "", element("h2", "", "Where time and memory went"), card);
}

// ---- Generations, settings

function generations() {
  if (run.generations.length === 0) return null;
  const samples = element("div", "samples");
  const when = element("span", "");
  function text(className, content) {
    const made = element("pre", className, content);
    made.dir = "auto";
    return made;
  }
  function choose(at) {
    const logged = run.generations[at];
    when.textContent = `after step ${whole(logged.step)}`;
    const all = (sample) => {
      const reference = sample.reference === undefined ? null : text("reference", sample.reference);
      return element("div", "sample", text("prompt", sample.prompt), text("", sample.text), reference);
    };
    samples.replaceChildren(...logged.samples.map(all));
    if (logged.not_shown) samples.append(element("p", "quiet", `${whole(logged.not_shown)} more in metrics.jsonl`));
  }
  const shown = run.generations.length;
  choose(shown - 1);
  const position = shown > 1 ? slider(shown, "step of the generations", choose) : null;
  const controls = element("div", "controls", position, when);
  if (run.num_generations > shown) {
    controls.append(element("span", "quiet", `${shown} of ${whole(run.num_generations)} times, evenly spread`));
  }
  return element("section", "", element("h2", "", "Sample generations"), element("div", "card", controls, samples));
}

function table(title, remark, facts, changed) {
  const rows = Object.entries(facts).map(([name, value]) =>
    element("tr", changed.includes(name) ? "changed" : "", element("td", "", name), element("td", "", value)),
  );
  if (rows.length === 0) return null;
  const heading = element("div", "title", element("h3", "", title), element("span", "quiet", remark));
  return element("div", "card", heading, element("table", "", element("tbody", "", ...rows)));
}

function settings() {
  const tables = [
    table("Configuration", run.not_default.length ? "bold: not the default" : "", run.config, run.not_default),
    table("Environment", "", run.environment, []),
  ].filter((made) => made !== null);
  if (tables.length === 0) return null;
  return element("section", "", element("h2", "", "Settings"), element("div", "tables", ...tables));
}

function footer() {
  const skipped = run.unreadable_lines ? ` Unreadable lines of metrics.jsonl, skipped: ${run.unreadable_lines}.` : "";
  return element("footer", "quiet", `Written ${run.written} by expertmesh.${skipped}`);
}

const nothing = Object.keys(run.curves).length === 0 ? element("p", "quiet", "No step has been logged yet.") : null;
const sections = [header(), warnings(), nothing, curves(), expertLoad(), profiles(), generations(), settings(), footer()];
document.getElementById("report").replaceChildren(...sections.filter((section) => section !== null));

function drawAll() {
  for (const draw of drawings) draw();
}
drawAll();
addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
